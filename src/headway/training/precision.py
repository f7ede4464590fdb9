"""The arithmetic of `train.precision`, on hardware that supports it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn

from headway.core.errors import ConfigError
from headway.core.model_protocol import HasOutputProjection
from headway.telemetry.arithmetic import set_fp32_products
from headway.training.torchao_import import importing_torchao

if TYPE_CHECKING:
    from headway.config import Config

#: Precision -> (compute capability that a GPU needs, nearest precision to take instead).
_NEEDS = {"tf32": ((8, 0), "fp32"), "fp8": ((8, 9), "bf16")}

#: The hardware multiplies 8-bit matrices in tiles of this many rows and columns.
_TILE = 16

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of a forward pass: matrix products in bf16 or fp16; with fp8, the remaining ones in bf16."""
    dtype = _AUTOCAST.get(precision)
    # The cache would keep a copy of every weight until the forward pass ends, for weights that are used twice.
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype, cache_enabled=False)


def muon_products(precision: str) -> torch.dtype:
    """Return the type in which Muon orthogonalises: bf16 if products are in 8 or 16 bits, fp32 otherwise.

    It follows from the config alone, not from the machine, so that a run has the same bits wherever it is resumed.
    """
    return torch.bfloat16 if precision in _AUTOCAST else torch.float32


def apply_precision(config: Config, model: nn.Module, device: torch.device) -> None:
    """Set up the process and the model for a precision that the device supports (`training.available`).

    Call it before a strategy cuts the model's weights.

    Raises:
        ConfigError: the model has no layer that could use it.
    """
    precision = config.train.precision
    # A setting of the process, so set it in either case: another run may have changed it.
    if precision == "tf32":
        torch.set_float32_matmul_precision("high")
    else:
        set_fp32_products(device)
    torch.backends.cudnn.allow_tf32 = precision == "tf32"  # for convolutions PyTorch enables it by default
    if precision == "fp8":
        convert_to_fp8(model, config.train.sequence_length)


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
