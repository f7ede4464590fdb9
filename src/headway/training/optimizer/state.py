"""An optimizer's state as named tensors, and the little that must be done to it from outside."""

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
    """Create the state that an optimizer otherwise creates in its first step, as it is before that step, so that it can
    be saved or loaded into. State that is there already stays as it is.

    A step with zero gradients and a zero learning rate leaves the weights as they are, and moments zero; but it counts.
    Gradients that are there are zeroed, since a second set would be as large as the weights; a step of training clears
    them before it begins, too.
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
    """Live tensors of the optimizer's state as `optimizer.<moment>.<parameter>`.

    A quantised moment is the plain tensors it is made of: `optimizer.<moment>.<part>.<parameter>`.

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
    """Give every parameter group this learning rate, times its own `lr_scale` where it has one."""
    for group in optimizer.param_groups:
        _set_rate(group, rate * group.get("lr_scale", 1.0))


def scales_while_updating(optimizer: Optimizer) -> bool:
    """Whether `update` leaves the factor to the optimizer's kernel, without a pass over all gradients before: the fused
    ones of AdamW multiply what they read, and write it back."""
    return isinstance(optimizer, torch.optim.AdamW) and bool(optimizer.defaults.get("fused"))


def update(optimizer: Optimizer, factor: float) -> None:
    """One step of the optimizer by its parameters' gradients times `factor`, which overwrites them."""
    groups = optimizer.param_groups
    gradients = [local_part(p.grad) for group in groups for p in group["params"] if p.grad is not None]
    if not gradients:
        return
    if scales_while_updating(optimizer):
        # Filled where it is wanted: a copy from the host would wait for the device. The kernels divide by it.
        divisor = torch.full((), 1 / factor, dtype=torch.float32, device=gradients[0].device)
        optimizer.grad_scale = divisor  # type: ignore[attr-defined]
    else:
        torch._foreach_mul_(gradients, factor)
    optimizer.step()


def update_unless(optimizer: Optimizer, left_out: torch.Tensor, factor: torch.Tensor) -> None:
    """The same of an optimizer for which `scales_while_updating` holds, with numbers that are on the device and that
    nobody has read yet; where `left_out` is true, (), the kernel changes nothing, and the step does not count."""
    optimizer.grad_scale, optimizer.found_inf = (1 / factor).float(), left_out.float()  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        optimizer.found_inf = None  # type: ignore[attr-defined]


def _plain(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that one is made of; a sharded one stays one, since it is a box of a whole."""
    local = local_part(tensor)
    if not local.numel():
        return  # a worker without any row of a matrix has nothing to save or load of it
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
    """Some optimizers keep the rate as a tensor that compiled kernels read, and ask that it stay the same one."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
