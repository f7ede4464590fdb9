"""Adafactor for matrices whose rows are distributed over workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from headway.core.startup.dtensors import is_dtensor
from headway.parallel.blocks import cut_like, local_part


class ShardedAdafactor(Optimizer):
    """`torch.optim.Adafactor` on shards: the same update up to the order of sums (Shazeer & Stern 2018, algorithm 4).

    Means over a row are local; means over a column, and norms, are summed over the workers that share a matrix. State
    by row is cut as the rows are; every worker has the state by column. Parameters that are not cut are accepted, too.

    Args:
        groups: Parameters with their `weight_decay`; cut along the first dimension if at all.
        lr: The largest step, relative to a parameter's root mean square.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], lr: float) -> None:
        # As in torch.optim.Adafactor: exponent of the second moments' decay, the smallest root mean square of a
        # parameter that steps are relative to, and the largest of an update.
        super().__init__(groups, {"lr": lr, "beta2_decay": -0.8, "eps2": 1e-3, "d": 1.0, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters; all workers that share them must call it."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)

    def _update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        assert p.grad is not None
        gradient, weight = local_part(p.grad), local_part(p)
        state = self.state[p]
        if not state:
            state.update(_new_state(p))
        state["step"] += 1
        count, rate = float(state["step"]), float(group["lr"])
        size = p.numel() ** 0.5
        step = max(group["eps2"], _norm(weight, p) / size) * min(rate, count**-0.5)
        weight.mul_(1 - rate * group["weight_decay"])
        eps = torch.finfo(p.dtype).eps
        update = self._second_moment(p, gradient, count ** group["beta2_decay"], eps)
        update.clamp_(min=eps * eps).rsqrt_().mul_(gradient)
        weight.add_(update, alpha=-step / max(1.0, _norm(update, p) / (size * group["d"])))

    def _second_moment(self, p: torch.Tensor, gradient: torch.Tensor, share: float, eps: float) -> torch.Tensor:
        """Update this worker's part of the estimate; the newest gradient contributes `share`."""
        state = self.state[p]
        if p.ndim == 1:
            return local_part(state["variance"]).lerp_(gradient.square(), share).clone()
        rows, columns = local_part(state["row_var"]), local_part(state["col_var"])
        rows.lerp_(torch.norm(gradient, dim=-1, keepdim=True).square_().div_(p.shape[-1]), share)
        by_column = torch.norm(gradient, dim=-2, keepdim=True).square_()
        mean = rows.sum(dim=-2, keepdim=True)
        if p.ndim == 2:  # stacks are cut between whole matrices
            _add_up(by_column, p)
            _add_up(mean, p)
        columns.lerp_(by_column.div_(p.shape[-2]), share)
        return (rows @ columns).div_(mean.div_(p.shape[-2]).clamp_(min=eps))


def _new_state(p: torch.Tensor) -> dict[str, torch.Tensor]:
    step = torch.tensor(0.0)
    if p.ndim == 1:
        return {"step": step, "variance": torch.zeros_like(p)}
    rows, columns = (*p.shape[:-1], 1), (*p.shape[:-2], 1, p.shape[-1])
    by_column = _zeros(p, columns) if p.ndim > 2 else local_part(p).new_zeros(columns)
    return {"step": step, "row_var": _zeros(p, rows), "col_var": by_column}


def _zeros(p: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return zeros of a shape that is cut along its first dimension as the parameter is."""
    local = local_part(p)
    return cut_like(p, local.new_zeros((local.shape[0], *shape[1:])), shape)


def _norm(part: torch.Tensor, p: torch.Tensor) -> float:
    """Return the norm of a tensor that is cut as a parameter is, given this worker's part."""
    total = part.square().sum()
    _add_up(total, p)
    return float(total.sqrt())


def _add_up(value: torch.Tensor, p: torch.Tensor) -> None:
    """Sum a value in place over the workers that share a parameter."""
    if is_dtensor(p):
        for dimension, placement in enumerate(p.placements):
            if not placement.is_replicate():
                dist.all_reduce(value, group=p.device_mesh.get_group(dimension))
