"""An optimizer's state as named tensors, and the few changes made to it from outside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from headway.core.types import StateTensors
from headway.parallel.blocks import local_part
from headway.training.optimizer.eight_bit import quantised_parts


def materialize(optimizer: Optimizer) -> None:
    """Create the state that an optimizer otherwise creates in its first step, to save it or to load into it.

    Existing state does not change. A step with zero gradients and a zero learning rate leaves weights unchanged and
    moments zero, but it counts, so the count is reset. Existing gradients are zeroed, since a second set would be as
    large as the weights; a training step clears them before it begins, too.
    """
    if optimizer.state:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    without_gradient = [p for p in parameters if p.grad is None]
    saved_rates = [(float(group["lr"]), group.get("weight_decay")) for group in optimizer.param_groups]
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        else:
            p.grad.zero_()
    for group in optimizer.param_groups:
        _set_rate(group, 0.0)
        if "weight_decay" in group:
            group["weight_decay"] = 0.0
    optimizer.step()
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].zero_()
    for p in without_gradient:
        p.grad = None
    for group, (rate, decay) in zip(optimizer.param_groups, saved_rates, strict=True):
        _set_rate(group, rate)
        if decay is not None:
            group["weight_decay"] = decay


def optimizer_tensors(optimizer: Optimizer, names: Mapping[torch.Tensor, str]) -> StateTensors:
    """Return live tensors of the optimizer's state as `optimizer.<moment>.<parameter>`.

    A quantised moment appears as its plain tensors: `optimizer.<moment>.<part>.<parameter>`.

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
            for part, tensor in _plain(key, value):
                tensors[f"optimizer.{part}.{names[parameter]}"] = tensor
    return tensors


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group, times its own `lr_scale` if it has one."""
    for group in optimizer.param_groups:
        _set_rate(group, rate * group.get("lr_scale", 1.0))


def scales_while_updating(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's kernel applies the factor of `update`, without an extra pass over gradients.

    The fused kernels of AdamW multiply the gradients that they read, and write them back.
    """
    return isinstance(optimizer, torch.optim.AdamW) and bool(optimizer.defaults.get("fused"))


def update(optimizer: Optimizer, factor: float) -> None:
    """Step the optimizer with the gradients times `factor`, which overwrites them."""
    groups = optimizer.param_groups
    gradients = [local_part(p.grad) for group in groups for p in group["params"] if p.grad is not None]
    if not gradients:
        return
    if scales_while_updating(optimizer):
        # Filled on the device: a copy from the host would wait for the device. The kernels divide by it.
        divisor = torch.full((), 1 / factor, dtype=torch.float32, device=gradients[0].device)
        optimizer.grad_scale = divisor  # type: ignore[attr-defined]
    else:
        torch._foreach_mul_(gradients, factor)
    optimizer.step()


def update_unless(optimizer: Optimizer, left_out: torch.Tensor, factor: torch.Tensor) -> None:
    """Step an optimizer for which `scales_while_updating` holds, with device scalars that the host has not read.

    Where `left_out`, (), is true, the kernel changes nothing, and the step does not count.
    """
    optimizer.grad_scale, optimizer.found_inf = (1 / factor).float(), left_out.float()  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        optimizer.found_inf = None  # type: ignore[attr-defined]


def _plain(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the plain tensors of a tensor; a sharded one stays one, since it is a block of a whole."""
    local = local_part(tensor)
    if not local.numel():
        return  # a worker without rows of a matrix has nothing to save or load
    if hasattr(local, "codes"):
        for part, plain in quantised_parts(tensor):
            yield f"{name}.{part}", plain
    elif is_traceable_wrapper_subclass(local):
        raise TypeError(
            f"'{name}' is a {type(local).__name__}; only plain and quantised tensors can be resumed exactly"
        )
    else:
        yield name, tensor


def _set_rate(group: dict[str, Any], rate: float) -> None:
    """Set the rate of a group. Some optimizers keep it as a tensor that compiled kernels read; that tensor must
    stay."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
