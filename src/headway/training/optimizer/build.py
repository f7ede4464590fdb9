"""From a config to an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from headway.core.dtensors import is_dtensor
from headway.core.errors import ConfigError
from headway.training.optimizer.adafactor import ShardedAdafactor
from headway.training.optimizer.combined import Combined
from headway.training.optimizer.eager import eager, keep_compiler_out
from headway.training.optimizer.eight_bit import eight_bit_adamw
from headway.training.optimizer.lion import Lion
from headway.training.optimizer.muon import ShardedMuon
from headway.training.optimizer.offload import HostOffload
from headway.training.optimizer.whole_vectors import WholeVectorAdamW

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from headway.config import OptimizerConfig

_HOST = torch.device("cpu")


def build_optimizer(
    config: OptimizerConfig,
    model: nn.Module,
    device: torch.device,
    updates: Callable[[torch.Tensor], bool] = lambda p: True,
    elastic: bool = False,
    products: torch.dtype = torch.bfloat16,
) -> Optimizer:
    """The optimizer of `optimizer.name`.

    Decay is decoupled and for matrices only; norms, biases and other vectors are not decayed.

    Args:
        updates: Whether a parameter is this worker's to update.
        elastic: The bits must not depend on where a matrix is cut, as those of AdamW's fused kernel for the CPU do
            (`training.optimizer.whole_vectors`, and `training.cut_proof`, which tries it).
        products: The type of Muon's own matrix products.

    Raises:
        ConfigError: the optimizer cannot work on parts of matrices, or its library is missing; or moments are to leave
            a device that is the host itself.
    """
    trainable = [p for p in model.parameters() if p.requires_grad and updates(p)]
    _check_shards(config, trainable)
    keep_compiler_out()
    hidden = {id(p) for p in hidden_matrices(model)}
    order = OptimizerSpec(config, device, elastic, products, trainable, [id(p) in hidden for p in trainable])
    if not config.offload:
        return _BUILDERS[config.name](order)
    check_offload(device)
    build = _BUILDERS[config.name]
    return HostOffload(trainable, lambda copies: build(replace(order, parameters=copies, device=_HOST)), _HOST)


def check_offload(device: torch.device) -> None:
    """Moments can leave a GPU for the host, and nothing else."""
    if device.type != "cuda":
        raise ConfigError(
            f"moments are in host memory already when training on {device.type}",
            where="optimizer.offload",
            fix="optimizer.offload=false",
        )


@dataclass(frozen=True)
class OptimizerSpec:
    """What is to be built."""

    config: OptimizerConfig
    device: torch.device
    elastic: bool
    products: torch.dtype
    parameters: Sequence[nn.Parameter]
    is_hidden: Sequence[bool]
    """For each parameter, whether it is one of `hidden_matrices`."""

    def groups(self) -> list[dict[str, Any]]:
        """Parameters that are decayed, and those that are not; kernels take those of one mesh of workers at a time."""
        groups: dict[tuple[bool, Any], dict[str, Any]] = {}
        for p in sorted(self.parameters, key=lambda p: p.ndim < 2):
            decay = 0.0 if p.ndim < 2 else self.config.weight_decay
            group = groups.setdefault(
                (p.ndim < 2, getattr(p, "device_mesh", None)), {"params": [], "weight_decay": decay}
            )
            group["params"].append(p)
        return list(groups.values())

    def only(self, hidden: bool) -> OptimizerSpec:
        """The same for the parameters that are hidden matrices, or for those that are not."""
        kept = [p for p, yes in zip(self.parameters, self.is_hidden, strict=True) if yes == hidden]
        return replace(self, parameters=kept, is_hidden=[hidden] * len(kept))


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Trainable matrices that map activations to activations: neither embeddings nor the output projection.

    A model names its output projection by an attribute `projection`; without one, the last matrix is taken for it.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim == 2 and id(p) not in embeddings]
    declared = hasattr(model, "projection") or hasattr(type(model), "projection")  # a pipeline stage may lack it
    output = getattr(model, "projection", None) if declared or not matrices else matrices[-1]
    return [p for p in matrices if p is not output]


def _check_shards(config: OptimizerConfig, parameters: Sequence[nn.Parameter]) -> None:
    """The same as `config.mesh` refuses, for whoever shards a model in another way."""
    from headway.config.mesh import needs_whole_rows

    reason = needs_whole_rows(config)
    if reason is not None and any(is_dtensor(p) and _cuts_rows(p) for p in parameters):
        raise ConfigError(reason, where="optimizer, parallel", fix="optimizer.name=lion, or parallel.strategy=zero2")


def _cuts_rows(p: DTensor) -> bool:
    return any(getattr(placement, "dim", 0) != 0 for placement in p.placements)


def _adamw(order: OptimizerSpec) -> Optimizer:
    config = order.config
    if order.device.type == "cpu" and order.elastic:
        return WholeVectorAdamW(order.groups(), config.learning_rate, config.betas, config.eps)
    fused = order.device.type in ("cuda", "cpu")
    return eager(torch.optim.AdamW)(
        order.groups(),
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        fused=fused,
        foreach=False if order.elastic and not fused else None,
    )


def _muon(order: OptimizerSpec) -> Optimizer:
    config, hidden, rest = order.config, order.only(hidden=True), order.only(hidden=False)
    parts = [_adamw(rest)] if rest.parameters else []
    if hidden.parameters:
        sharded = any(is_dtensor(p) for p in hidden.parameters)
        # Scaled so that updates are about as large as AdamW's, one learning rate serves both (Liu et al. 2025, 2.2).
        options: dict[str, Any] = {
            "lr": config.learning_rate,
            "weight_decay": config.weight_decay,
            "momentum": config.momentum,
            "adjust_lr_fn": "match_rms_adamw",
        }
        if sharded or order.products != torch.bfloat16:
            parts.append(ShardedMuon(hidden.parameters, order.products, **options))
        else:
            parts.append(eager(torch.optim.Muon)(hidden.parameters, **options))
    return parts[0] if len(parts) == 1 else Combined(parts)


def _lion(order: OptimizerSpec) -> Optimizer:
    return Lion(order.groups(), lr=order.config.learning_rate, betas=order.config.betas)


def _adafactor(order: OptimizerSpec) -> Optimizer:
    # Second moments of matrices by row and column, no first moment; steps relative to a parameter's own size
    # (Shazeer & Stern 2018, algorithm 4).
    cut = any(is_dtensor(p) for p in order.parameters)
    return (ShardedAdafactor if cut else eager(torch.optim.Adafactor))(order.groups(), lr=order.config.learning_rate)


def _adamw8bit(order: OptimizerSpec) -> Optimizer:
    return eight_bit_adamw(order.config, order.groups(), order.device)


_BUILDERS: dict[str, Callable[[OptimizerSpec], Optimizer]] = {
    "adamw": _adamw,
    "muon": _muon,
    "lion": _lion,
    "adafactor": _adafactor,
    "adamw8bit": _adamw8bit,
}
