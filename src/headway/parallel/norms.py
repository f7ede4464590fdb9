"""The norm of a gradient that is distributed over workers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from headway.parallel.blocks import local_part

#: Exponents of fp32 numbers as `frexp` returns them, subnormal numbers included.
_LEAST = -148
_MOST = 128
_UNITS = 2.0**24


def norm_parts(parameters: Iterable[nn.Parameter], exact: bool) -> list[float]:
    """Compute one worker's part of the norm: numbers for `total_norm`, equally many on every worker.

    Args:
        parameters: Parameters whose gradient, or part of it, only this worker counts.
        exact: Make the norm independent of how gradients are sharded, as long as rows are whole: the sum over rows is
            then exact (`_exact_parts`).
    """
    return norm_parts_of([local_part(p.grad) for p in parameters if p.grad is not None], exact)


def norm_parts_of(gradients: Sequence[torch.Tensor], exact: bool = False) -> list[float]:
    """Compute `norm_parts` of gradients, or parts of them, that are not stored with their parameters."""
    gradients = [gradient for gradient in gradients if gradient.numel()]
    if exact:
        return _exact_parts(gradients)
    return [float(torch.nn.utils.get_total_norm(gradients)) ** 2 if gradients else 0.0]


def total_norm(workers: Sequence[Sequence[float]]) -> float:
    """Compute the 2-norm over all workers; NaN if a gradient is not finite."""
    if not all(math.isfinite(part) for parts in workers for part in parts):
        return math.nan
    if len(workers[0]) == 1:
        return math.sqrt(math.fsum(part for (part,) in workers))
    # Integer multiples of 2^(exponent - 24): Python adds them without rounding.
    units = sum(int(count) << index for parts in workers for index, count in enumerate(parts))
    return math.sqrt(math.ldexp(float(units), _LEAST - 24)) if units < 2**900 else math.inf


@torch.no_grad()
def _exact_parts(gradients: Sequence[torch.Tensor]) -> list[float]:
    """Sum the squared norms of rows per exponent.

    The norm of one row depends on its kernel and the row alone. A sum over rows would depend on their order and on how
    they are divided between workers. But fp32 numbers of one exponent are integer multiples of one unit, at most 2^24
    of it. fp64 sums those without rounding, and `total_norm` adds the sums exactly. The result is the same for every
    way of sharding.
    """
    numbers = _MOST - _LEAST + 1
    # All rows at once: wait for the device once instead of once per parameter.
    squares = torch.cat([_squared_rows(gradient) for gradient in gradients]).cpu() if gradients else torch.zeros(0)
    if not bool(squares.isfinite().all()):
        return [math.nan] * numbers
    mantissa, exponent = torch.frexp(squares)
    index = (exponent.clamp(_LEAST, _MOST) - _LEAST).long()
    counts: list[float] = torch.bincount(index, mantissa.double() * _UNITS, numbers).tolist()
    return counts


def _squared_rows(gradient: torch.Tensor) -> torch.Tensor:
    rows = gradient.float().reshape(gradient.shape[0], -1) if gradient.ndim else gradient.float().reshape(1, 1)
    return torch.linalg.vector_norm(rows, dim=1).square_() if rows.shape[1] > 1 else rows.flatten().square()
