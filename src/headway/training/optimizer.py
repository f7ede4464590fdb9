"""The optimizer, and its state as named tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from headway.core.types import StateTensors

if TYPE_CHECKING:
    from headway.config import OptimizerConfig


def build_optimizer(
    config: OptimizerConfig,
    model: nn.Module,
    device: torch.device,
    updates: Callable[[torch.Tensor], bool] = lambda p: True,
    elastic: bool = False,
) -> Optimizer:
    """AdamW for all parameters, or Muon for the matrices between layers and AdamW for the rest.

    Decay is decoupled and for matrices only; norms, biases and other vectors are not decayed.

    Args:
        updates: Whether a parameter is this worker's to update.
        elastic: The bits must not depend on where a matrix is cut. The fused kernel for the CPU rounds the last
            elements of a buffer otherwise than the rest; one operation after the other does not (`training.cut_proof`).
    """
    trainable = [p for p in model.parameters() if p.requires_grad and updates(p)]
    hidden = [p for p in hidden_matrices(model) if updates(p)] if config.name == "muon" else []
    in_hidden = {id(p) for p in hidden}
    rest = [p for p in trainable if id(p) not in in_hidden]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    parts: list[Optimizer] = []
    if groups:
        fused = device.type == "cuda" or (device.type == "cpu" and not elastic)
        parts.append(
            torch.optim.AdamW(
                groups,
                lr=config.learning_rate,
                betas=config.betas,
                eps=config.eps,
                fused=fused,
                foreach=False if elastic and not fused else None,
            )
        )
    if hidden:
        # Scaled so that updates are about as large as AdamW's, one learning rate serves both (Liu et al. 2025, 2.2).
        parts.append(
            torch.optim.Muon(
                hidden,
                lr=config.learning_rate,
                weight_decay=config.weight_decay,
                momentum=config.momentum,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    return parts[0] if len(parts) == 1 else Combined(parts)


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Trainable matrices that map activations to activations: neither embeddings nor the output projection.

    A model names its output projection by an attribute `projection`; without one, the last matrix is taken for it.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim == 2 and id(p) not in embeddings]
    declared = hasattr(model, "projection") or hasattr(type(model), "projection")  # a pipeline stage may lack it
    output = getattr(model, "projection", None) if declared or not matrices else matrices[-1]
    return [p for p in matrices if p is not output]


class Combined(Optimizer):
    """Several optimizers of one model, seen as one."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = parts
        # The groups are the parts' own dictionaries, so a learning rate set here is set there.
        super().__init__([group for part in parts for group in part.param_groups], {})
        for part in parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of every part."""
        for part in self.parts:
            part.step()


def materialize(optimizer: Optimizer) -> None:
    """Create the state that an optimizer otherwise creates in its first step, so that it can be loaded into.

    A step with zero gradients and a zero learning rate leaves the weights as they are. Its traces in the state do not
    matter: every tensor of it is overwritten by the checkpoint.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    saved_gradients = [p.grad for p in parameters]
    saved_rates = [(group["lr"], group.get("weight_decay")) for group in optimizer.param_groups]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        if "weight_decay" in group:
            group["weight_decay"] = 0.0
    optimizer.step()
    for p, gradient in zip(parameters, saved_gradients, strict=True):
        p.grad = gradient
    for group, (rate, decay) in zip(optimizer.param_groups, saved_rates, strict=True):
        group["lr"] = rate
        if decay is not None:
            group["weight_decay"] = decay


def optimizer_tensors(optimizer: Optimizer, names: Mapping[torch.Tensor, str]) -> StateTensors:
    """Live tensors of the optimizer's state as `optimizer.<moment>.<parameter>`.

    Raises:
        TypeError: the state holds something other than tensors, which a checkpoint could not carry.
    """
    tensors: StateTensors = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                kind = type(value).__name__
                raise TypeError(
                    f"{type(optimizer).__name__} keeps '{key}' as {kind}; only tensors can be resumed exactly"
                )
            tensors[f"optimizer.{key}.{names[parameter]}"] = value
    return tensors


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Give every parameter group this learning rate, times its own `lr_scale` where it has one."""
    group: dict[str, Any]
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
