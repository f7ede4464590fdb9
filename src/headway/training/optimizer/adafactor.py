"""Adafactor by projection, and for matrices whose rows are distributed over workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from headway.core.startup.dtensors import is_dtensor
from headway.core.types import Fusion
from headway.parallel.blocks import block_of, cut_like, local_part


class ProjectionAdafactor(Optimizer):
    """`torch.optim.Adafactor` by projection: the same update up to the order of sums (Shazeer & Stern 2018, alg. 4).

    A matrix that holds those of several projections is updated as they would be apart: each has its own means, and its
    own root mean squares of weights and update.

    On shards, means over a row are local; means over a column, and norms, are summed over the workers that share a
    matrix. State by row is cut as the rows are; every worker has the state by column.

    Args:
        groups: Parameters with their `weight_decay`; cut along the first dimension if at all.
        lr: The largest step, relative to a parameter's root mean square.
        fusions: The matrices that hold those of several projections.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], lr: float, fusions: Mapping[nn.Parameter, Fusion] | None = None
    ) -> None:
        # As in torch.optim.Adafactor: exponent of the second moments' decay, the smallest root mean square of a
        # parameter that steps are relative to, and the largest of an update.
        super().__init__(groups, {"lr": lr, "beta2_decay": -0.8, "eps2": 1e-3, "d": 1.0, "weight_decay": 0.0})
        self._fusions = fusions or {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters; all workers that share them must call it."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)

    def _update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        assert p.grad is not None
        state = self.state[p]
        fusion = self._fusions.get(p)
        if not state:
            state.update(_new_state(p, fusion))
        state["step"] += 1
        moments = {key: local_part(value) for key, value in state.items() if key != "step"}
        whole = _Part(p, p.shape, local_part(p), local_part(p.grad), moments)
        count = float(state["step"])
        if fusion is None:
            whole.update(group, count)
            return
        for number in range(len(fusion.sizes)):
            part, place = _projection(whole, fusion, number)
            part.update(group, count)
            whole.weight.index_copy_(place.dim, place.index, part.weight)
            along = _state_along(p, fusion)
            moments[along].index_copy_(place.dim, place.index, part.moments[along])


@dataclass(frozen=True)
class _Part:
    """What this worker has of one matrix that is updated by itself."""

    p: torch.Tensor
    """The parameter, whose workers share the matrix."""
    shape: Sequence[int]
    """Of the whole matrix."""
    weight: torch.Tensor
    gradient: torch.Tensor
    moments: Mapping[str, torch.Tensor]

    def update(self, group: dict[str, Any], count: float) -> None:
        """Update weight and moments in place, in step number `count`."""
        rate = float(group["lr"])
        size = torch.Size(self.shape).numel() ** 0.5
        step = max(group["eps2"], self._norm(self.weight) / size) * min(rate, count**-0.5)
        self.weight.mul_(1 - rate * group["weight_decay"])
        eps = torch.finfo(self.p.dtype).eps
        update = self._second_moment(count ** group["beta2_decay"], eps)
        update.clamp_(min=eps * eps).rsqrt_().mul_(self.gradient)
        self.weight.add_(update, alpha=-step / max(1.0, self._norm(update) / (size * group["d"])))

    def _second_moment(self, share: float, eps: float) -> torch.Tensor:
        """Update the estimate; the newest gradient contributes `share`."""
        gradient = self.gradient
        shape = self.shape
        if len(shape) == 1:
            return self.moments["variance"].lerp_(gradient.square(), share).clone()
        rows = self.moments["row_var"]
        columns = self.moments["col_var"]
        rows.lerp_(torch.norm(gradient, dim=-1, keepdim=True).square_().div_(shape[-1]), share)
        by_column = torch.norm(gradient, dim=-2, keepdim=True).square_()
        mean = rows.sum(dim=-2, keepdim=True)
        if len(shape) == 2:  # stacks are cut between whole matrices
            _add_up(by_column, self.p)
            _add_up(mean, self.p)
        columns.lerp_(by_column.div_(shape[-2]), share)
        return (rows @ columns).div_(mean.div_(shape[-2]).clamp_(min=eps))

    def _norm(self, part: torch.Tensor) -> float:
        """Return the norm of a whole matrix, given this worker's part."""
        total = part.square().sum()
        _add_up(total, self.p)
        return float(total.sqrt())


@dataclass(frozen=True)
class _Place:
    """The rows or columns of a projection in this worker's part of a matrix."""

    dim: int
    index: torch.Tensor


def _projection(whole: _Part, fusion: Fusion, number: int) -> tuple[_Part, _Place]:
    """Return a copy of one projection's part, with views of the moments that no other projection has."""
    size = fusion.sizes[number]
    start = sum(fusion.sizes[:number])
    dim = 1 if fusion.by_columns else 0
    begin = block_of(whole.p).offset[dim]
    lines = torch.arange(begin, begin + whole.weight.shape[dim], device=whole.weight.device) % sum(fusion.sizes)
    index = ((lines >= start) & (lines < start + size)).nonzero().flatten()
    along = _state_along(whole.p, fusion)
    across = "row_var" if fusion.by_columns else "col_var"
    moments = {along: whole.moments[along].index_select(dim, index)}
    if across in whole.moments:
        moments[across] = whole.moments[across].narrow(dim, number, 1)
    shape = list(whole.shape)
    shape[dim] = fusion.groups * size
    weight, gradient = (tensor.index_select(dim, index) for tensor in (whole.weight, whole.gradient))
    return _Part(whole.p, shape, weight, gradient, moments), _Place(dim, index)


def _state_along(p: torch.Tensor, fusion: Fusion) -> str:
    """Return the name of the state that projections have each a part of."""
    if p.ndim == 1:
        return "variance"
    return "col_var" if fusion.by_columns else "row_var"


def _new_state(p: torch.Tensor, fusion: Fusion | None) -> dict[str, torch.Tensor]:
    """Return zeros; what several projections have each has a row, or a column, for every one of them."""
    step = torch.tensor(0.0)
    if p.ndim == 1:
        return {"step": step, "variance": torch.zeros_like(p)}
    by_rows = 1
    by_columns = 1
    if fusion is not None and fusion.by_columns:
        by_rows = len(fusion.sizes)
    elif fusion is not None:
        by_columns = len(fusion.sizes)
    rows = (*p.shape[:-1], by_rows)
    columns = (*p.shape[:-2], by_columns, p.shape[-1])
    by_column = _zeros(p, columns) if p.ndim > 2 else local_part(p).new_zeros(columns)
    return {"step": step, "row_var": _zeros(p, rows), "col_var": by_column}


def _zeros(p: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return zeros of a shape that is cut along its first dimension as the parameter is."""
    local = local_part(p)
    return cut_like(p, local.new_zeros((local.shape[0], *shape[1:])), shape)


def _add_up(value: torch.Tensor, p: torch.Tensor) -> None:
    """Sum a value in place over the workers that share a parameter."""
    if is_dtensor(p):
        for dimension, placement in enumerate(p.placements):
            if not placement.is_replicate():
                dist.all_reduce(value, group=p.device_mesh.get_group(dimension))
