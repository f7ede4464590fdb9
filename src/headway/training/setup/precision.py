"""The arithmetic of `train.precision`, on hardware that supports it, and the loss scale of fp16.

The loss scale is a part of the cursor: the next one follows from the current one. Gradients of fp16 activations would
vanish below 2^-24. So the loss is multiplied by a scale, and gradients are divided by it in fp32. A scale that makes
gradients overflow is halved, one that has not done so for long is doubled (Micikevicius et al. 2018, "Mixed precision
training", section 3.2). Scales are powers of two: no bit of a gradient that is in range depends on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn

from headway.config import TrainConfig
from headway.core.errors import ConfigError
from headway.core.model_protocol import HasOutputProjection
from headway.telemetry.arithmetic import set_fp32_products
from headway.training.setup.torchao_import import importing_torchao

if TYPE_CHECKING:
    from headway.training.state import Cursor

#: Precision -> (compute capability that a GPU needs, nearest precision to take instead).
_NEEDS = {"tf32": ((8, 0), "fp32"), "fp8": ((8, 9), "bf16")}

#: The hardware multiplies 8-bit matrices in tiles of this many rows and columns.
_TILE = 16

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}

#: Losses are sums over the items of a micro-batch, not means, so scales are smaller than elsewhere.
FIRST_SCALE = 2**10
LEAST_SCALE = 1
MOST_SCALE = 2**15
GROWTH_INTERVAL = 2000
"""Steps without an overflow after which the scale is doubled."""


def autocast(precision: str, device: torch.device, *, keeps_casts: bool = False) -> AbstractContextManager[object]:
    """Return the context of a forward pass: matrix products in bf16 or fp16; with fp8, the remaining ones in bf16.

    Args:
        keeps_casts: Weights keep their copies of 16 bits until a block of `casts_kept` ends. No bit changes if each
            weight is used once in a pass, and in none without gradient.
    """
    dtype = _AUTOCAST.get(precision)
    # The cache would keep a copy of every weight until the forward pass ends, for weights that are used twice.
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype, cache_enabled=keeps_casts)


@contextmanager
def casts_kept(precision: str, device: torch.device) -> Iterator[None]:
    """Let weights keep their casts from one forward pass to the next, while they do not change, if `autocast` casts.

    The gradient of each pass is still cast and added in fp32: the cast has no tensors to free after a backward pass.
    """
    if precision not in _AUTOCAST:
        yield
        return
    try:
        # PyTorch empties the cache where the outermost of its contexts ends.
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.clear_autocast_cache()  # also if a caller's own context goes on


def muon_products(precision: str) -> torch.dtype:
    """Return the type in which Muon orthogonalises: bf16 if products are in 8 or 16 bits, fp32 otherwise.

    It follows from the config alone, not from the machine, so that a run has the same bits wherever it is resumed.
    """
    return torch.bfloat16 if precision in _AUTOCAST else torch.float32


def apply_precision(train: TrainConfig, model: nn.Module, device: torch.device) -> None:
    """Set up the process and the model for a precision that the device supports (`training.setup.available`).

    Call it before a strategy cuts the model's weights.

    Raises:
        ConfigError: the model has no layer that could use it.
    """
    precision = train.precision
    assert precision != "auto", "it was chosen when the run began"
    # A setting of the process, so set it in either case: another run may have changed it.
    if precision == "tf32":
        torch.set_float32_matmul_precision("high")
    else:
        set_fp32_products(device)
    torch.backends.cudnn.allow_tf32 = precision == "tf32"  # for convolutions PyTorch enables it by default
    if precision == "fp8":
        convert_to_fp8(model, train.sequence_length)


def check_present(precision: str, device: torch.device, capability: tuple[int, int] | None) -> None:
    """Check that the device supports a precision.

    Args:
        capability: The compute capability of a CUDA device.

    Raises:
        ConfigError: it does not.
    """
    needed, nearest = _NEEDS.get(precision, (None, precision))
    if needed is None or (capability is not None and capability >= needed):
        return
    wanted = f"{needed[0]}.{needed[1]}"
    here = f"this one has {capability[0]}.{capability[1]}" if capability else f"this run is on {device.type}"
    raise ConfigError(
        f"precision '{precision}' needs a CUDA GPU of compute capability {wanted} or more; {here}",
        where="train.precision, train.device",
        fix=f"train.precision={nearest}",
    )


def convert_to_fp8(model: nn.Module, sequence_length: int, *, emulate: bool = False) -> list[str]:
    """Let linear layers multiply in 8 bits, each operand scaled by its own largest value.

    This is torchao's float8 training (Micikevicius et al. 2022, "FP8 formats for deep learning"). Weights, their names
    and their gradients stay fp32. The output projection does not change, nor do layers that do not fill tiles.

    Args:
        emulate: Round to 8 bits and multiply in the available precision, on any device.

    Returns:
        Names of the converted layers.

    Raises:
        ConfigError: torchao is not installed, rows do not fill tiles, or no layer does.
    """
    with importing_torchao("precision 'fp8'", "train.precision", "bf16"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    if sequence_length % _TILE:
        raise ConfigError(
            f"rows of {sequence_length} tokens do not fill the tiles of {_TILE} that 8-bit products are made of",
            where="train.sequence_length, train.precision",
            fix=f"train.sequence_length={-(-sequence_length // _TILE) * _TILE}, or train.precision=bf16",
        )
    output = model.output_projection() if isinstance(model, HasOutputProjection) else None
    chosen: list[str] = []

    def fits(module: nn.Module, name: str) -> bool:
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight is output or any(size % _TILE for size in weight.shape):
            return False
        chosen.append(name)
        return True

    convert_to_float8_training(model, module_filter_fn=fits, config=Float8LinearConfig(emulate=emulate))
    if not chosen:
        raise ConfigError(
            f"no linear layer has both sizes divisible by {_TILE}, as 8-bit products need",
            where="model, train.precision",
            fix="train.precision=bf16",
        )
    return chosen


def begin_scaling(cursor: Cursor, precision: str) -> None:
    """Give a cursor the initial scale if the precision needs one and it has none; remove it if not needed."""
    if precision != "fp16":
        cursor.loss_scale = None
        cursor.steps_at_scale = 0
    elif cursor.loss_scale is None:
        cursor.loss_scale = FIRST_SCALE
        cursor.steps_at_scale = 0


def update_scale(cursor: Cursor, overflow: bool) -> bool:
    """Update the scale after a step.

    Args:
        overflow: The loss was finite and its gradient was not.

    Returns:
        Whether the scale explains the overflow, so that it says nothing about the run: a smaller scale was possible.
    """
    if cursor.loss_scale is None:
        return False
    explained = overflow and cursor.loss_scale > LEAST_SCALE
    cursor.steps_at_scale += 1
    if overflow:
        cursor.loss_scale = max(LEAST_SCALE, cursor.loss_scale // 2)
        cursor.steps_at_scale = 0
    elif cursor.steps_at_scale >= GROWTH_INTERVAL:
        cursor.loss_scale = min(MOST_SCALE, cursor.loss_scale * 2)
        cursor.steps_at_scale = 0
    return explained
