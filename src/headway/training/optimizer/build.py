"""Construction of an optimizer from a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from headway.config import OptimizerConfig
from headway.config.optimizers import LIGHT_OPTIMIZER, find_optimizer
from headway.config.strategies import simplest_strategy
from headway.core.errors import ConfigError
from headway.core.functions import load_function
from headway.core.model_protocol import FusesProjections, HasOutputProjection, ScalesRates
from headway.core.startup.dtensors import is_dtensor
from headway.core.types import Fusion
from headway.training.optimizer.adafactor import ProjectionAdafactor
from headway.training.optimizer.combined import Combined
from headway.training.optimizer.eager import eager, keep_compiler_out
from headway.training.optimizer.eight_bit import eight_bit_adamw
from headway.training.optimizer.groups import OwnGroup
from headway.training.optimizer.lion import Lion
from headway.training.optimizer.muon import ProjectionMuon
from headway.training.optimizer.offload import HostOffload
from headway.training.optimizer.whole_vectors import WholeVectorAdamW

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_NO_GROUP = OwnGroup(0)
_HOST = torch.device("cpu")


def build_optimizer(
    config: OptimizerConfig,
    model: nn.Module,
    device: torch.device,
    updates: Callable[[torch.Tensor], bool] = lambda p: True,
    *,
    elastic: bool = False,
    products: torch.dtype = torch.bfloat16,
    own: Mapping[str, OwnGroup] = MappingProxyType({}),
) -> Optimizer:
    """Build the optimizer of `optimizer.name`.

    Decay is decoupled and for matrices only; norms, biases and other vectors are not decayed.

    Args:
        updates: Whether this worker updates a parameter.
        elastic: The bits must not depend on where a matrix is cut, as those of AdamW's fused kernel for the CPU do
            (`training.optimizer.whole_vectors`, checked by `training.setup.shard_invariance`).
        products: The type of Muon's own matrix products.
        own: By name, the groups of parameters of a task of the user's own.

    Raises:
        ConfigError: the optimizer cannot work on parts of matrices, or its library is missing; or moments are to be
            offloaded from a device that is the host itself.
    """
    trainable = [p for p in model.parameters() if p.requires_grad and updates(p)]
    _check_shards(config, trainable)
    keep_compiler_out()
    hidden = {id(p) for p in hidden_matrices(model)}
    scales = model.rate_scales() if isinstance(model, ScalesRates) else {}
    fusions = model.fusions() if isinstance(model, FusesProjections) else {}
    chosen = [name for name, p in model.named_parameters() if p.requires_grad and updates(p)]
    groups = [own.get(name, _NO_GROUP) for name in chosen] if own else []
    inputs = OptimizerInputs(
        config,
        device,
        elastic,
        products,
        trainable,
        [id(p) in hidden for p in trainable],
        [scales.get(p, 1.0) for p in trainable],
        [fusions.get(p) for p in trainable],
        groups,
    )
    build = partial(_build_all, sorted({group.optimizer for group in own.values() if group.optimizer is not None}))
    if not config.offload:
        built: Optimizer = build(inputs)
        return built
    check_offload(device)
    return HostOffload(trainable, lambda copies: build(replace(inputs, parameters=copies, device=_HOST)), _HOST)


def _build_all(others: Sequence[str], inputs: OptimizerInputs) -> Optimizer:
    """Build the optimizer of the config, and those that groups of parameters have of their own."""
    apart = [inputs.of_optimizer(name) for name in (None, *others)] if others else [inputs]
    parts: list[Optimizer] = []
    for mine in [one for one in apart if one.parameters] or [inputs]:
        _, build = load_function(find_optimizer(mine.config.name).build, "optimizer.name")
        parts.append(build(mine))
    return parts[0] if len(parts) == 1 else Combined(parts)


def check_offload(device: torch.device) -> None:
    """Check that moments can be offloaded: only from a GPU to the host.

    Raises:
        ConfigError: the device is not a GPU.
    """
    if device.type != "cuda":
        raise ConfigError(
            f"moments are in host memory already when training on {device.type}",
            where="optimizer.offload",
            fix="optimizer.offload=false",
        )


@dataclass(frozen=True)
class OptimizerInputs:
    """What a builder needs to build an optimizer."""

    config: OptimizerConfig
    device: torch.device
    elastic: bool
    products: torch.dtype
    parameters: Sequence[nn.Parameter]
    is_hidden: Sequence[bool]
    """For each parameter, whether it is one of `hidden_matrices`."""
    rates: Sequence[float] = ()
    """For each parameter, its learning rate as a multiple of that of the run; empty if all have that."""
    fusions: Sequence[Fusion | None] = ()
    """For each parameter, how it holds the matrices of several projections; empty if none does."""
    own: Sequence[OwnGroup] = ()
    """For each parameter, its group in a task of the user's own; empty if there are no groups."""

    def groups(self) -> list[dict[str, Any]]:
        """Return the parameters with and without decay, by mesh of workers: a kernel takes those of one mesh at a
        time."""
        groups: dict[tuple[bool, Any, float, int], dict[str, Any]] = {}
        rates = self.rates or [1.0] * len(self.parameters)
        own = self.own or [_NO_GROUP] * len(self.parameters)
        for p, rate, of in sorted(zip(self.parameters, rates, own, strict=True), key=lambda one: one[0].ndim < 2):
            decay = 0.0 if p.ndim < 2 else self.config.weight_decay
            scale = rate * of.lr_scale
            group = groups.setdefault(
                (p.ndim < 2, getattr(p, "device_mesh", None), scale, of.number),
                {
                    "params": [],
                    "weight_decay": decay if of.weight_decay is None else of.weight_decay,
                    **({} if scale == 1.0 else {"lr_scale": scale}),
                    **({"own": of.number} if of.number else {}),
                },
            )
            group["params"].append(p)
        return list(groups.values())

    def known_fusions(self) -> dict[nn.Parameter, Fusion]:
        """Return the parameters that hold several projections, unless these are to be updated as one matrix."""
        if self.config.projections != "apart" or not self.fusions:
            return {}
        known = zip(self.parameters, self.fusions, strict=True)
        return {p: fusion for p, fusion in known if fusion is not None}

    def only(self, hidden: bool) -> OptimizerInputs:
        """Return a copy for the parameters that are hidden matrices, or for the others."""
        return self._chosen([index for index, yes in enumerate(self.is_hidden) if yes == hidden])

    def of_optimizer(self, name: str | None) -> OptimizerInputs:
        """Return a copy for the parameters whose group names an optimizer, with its config; None: for the others."""
        config = self.config
        if name is not None:
            given = {key: getattr(config, key) for key in config.model_fields_set}
            config = type(config).model_validate({**given, "name": name}).completed()
        return replace(self._chosen([n for n, of in enumerate(self.own) if of.optimizer == name]), config=config)

    def _chosen(self, chosen: Sequence[int]) -> OptimizerInputs:
        return replace(
            self,
            parameters=[self.parameters[index] for index in chosen],
            is_hidden=[self.is_hidden[index] for index in chosen],
            own=[self.own[index] for index in chosen] if self.own else (),
            rates=[self.rates[index] for index in chosen] if self.rates else (),
            fusions=[self.fusions[index] for index in chosen] if self.fusions else (),
        )


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable matrices that map activations to activations.

    These are neither embeddings nor the output projection. Where a model does not name it (`HasOutputProjection`), the
    last matrix is taken for it.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim == 2 and id(p) not in embeddings]
    if isinstance(model, HasOutputProjection):
        output = model.output_projection()
        return [p for p in matrices if p is not output]
    return matrices[:-1]


def _check_shards(config: OptimizerConfig, parameters: Sequence[nn.Parameter]) -> None:
    """Check that the optimizer can update the shards, for models that are sharded without `config.mesh`.

    Raises:
        ConfigError: it needs whole rows, and a row is cut.
    """
    reason = find_optimizer(config.name).needs_whole_rows
    if reason is not None and any(is_dtensor(p) and _cuts_rows(p) for p in parameters):
        whole = simplest_strategy(lambda spec: spec.shards_gradients)
        fix = f"optimizer.name={LIGHT_OPTIMIZER}, or parallel.strategy={whole}"
        raise ConfigError(reason, where="optimizer, parallel", fix=fix)


def _cuts_rows(p: DTensor) -> bool:
    return any(getattr(placement, "dim", 0) != 0 for placement in p.placements)


def build_adamw(inputs: OptimizerInputs) -> Optimizer:
    config = inputs.config
    if inputs.device.type == "cpu" and inputs.elastic:
        return WholeVectorAdamW(inputs.groups(), config.learning_rate, config.betas, config.eps)
    fused = inputs.device.type in ("cuda", "cpu")
    return eager(torch.optim.AdamW)(
        inputs.groups(),
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        fused=fused,
        foreach=False if inputs.elastic and not fused else None,
    )


def build_muon(inputs: OptimizerInputs) -> Optimizer:
    config = inputs.config
    hidden = inputs.only(hidden=True)
    rest = inputs.only(hidden=False)
    parts = [build_adamw(rest)] if rest.parameters else []
    if hidden.parameters:
        # Updates scaled to about the size of AdamW's, so one learning rate serves both (Liu et al. 2025, 2.2).
        options: dict[str, Any] = {
            "lr": config.learning_rate,
            "weight_decay": config.weight_decay,
            "momentum": config.momentum,
            "adjust_lr_fn": "match_rms_adamw",
        }
        chosen = hidden.groups() if hidden.own else hidden.parameters
        fusions = hidden.known_fusions()
        parts.append(ProjectionMuon(chosen, inputs.products, fusions, batches=not inputs.elastic, **options))
    return parts[0] if len(parts) == 1 else Combined(parts)


def build_lion(inputs: OptimizerInputs) -> Optimizer:
    return Lion(inputs.groups(), lr=inputs.config.learning_rate, betas=inputs.config.betas)


def build_adafactor(inputs: OptimizerInputs) -> Optimizer:
    # Second moments of matrices by row and column, no first moment; steps relative to a parameter's own size
    # (Shazeer & Stern 2018, algorithm 4).
    apart = inputs.config.projections == "apart"
    rate = inputs.config.learning_rate
    # Not by the parameters alone: a worker that owns no fused one must round as the others do.
    if apart or any(is_dtensor(p) for p in inputs.parameters):
        return ProjectionAdafactor(inputs.groups(), rate, inputs.known_fusions())
    return eager(torch.optim.Adafactor)(inputs.groups(), lr=rate)


def build_adamw8bit(inputs: OptimizerInputs) -> Optimizer:
    return eight_bit_adamw(inputs.config, inputs.groups(), inputs.device)
