"""The norm of a gradient that lies on several workers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from headway.parallel.blocks import local_part

#: Exponents of fp32 numbers as `frexp` gives them, denormal ones included.
_LEAST, _MOST = -148, 128
_UNITS = 2.0**24


def norm_parts(parameters: Iterable[nn.Parameter], exact: bool) -> list[float]:
    """What one worker's gradients add to the norm of all: numbers for `total_norm`, equally many on every worker.

    Args:
        parameters: Those whose gradient, or part of it, this worker counts; no other worker counts it.
        exact: The norm must not depend on how gradients are cut, as long as rows are whole. Then the sum over rows is
            exact; see `_exact_parts`.
    """
    return norm_parts_of([local_part(p.grad) for p in parameters if p.grad is not None], exact)


def norm_parts_of(gradients: Sequence[torch.Tensor], exact: bool = False) -> list[float]:
    """The same of gradients, or parts of them, that do not lie with their parameters."""
    gradients = [gradient for gradient in gradients if gradient.numel()]
    if exact:
        return _exact_parts(gradients)
    return [float(torch.nn.utils.get_total_norm(gradients)) ** 2 if gradients else 0.0]


def total_norm(workers: Sequence[Sequence[float]]) -> float:
    """The 2-norm of what all workers have; NaN when a gradient is not finite."""
    if not all(math.isfinite(part) for parts in workers for part in parts):
        return math.nan
    if len(workers[0]) == 1:
        return math.sqrt(math.fsum(part for (part,) in workers))
    # Whole numbers of 2^(exponent - 24): Python adds them without rounding.
    units = sum(int(count) << index for parts in workers for index, count in enumerate(parts))
    return math.sqrt(math.ldexp(float(units), _LEAST - 24)) if units < 2**900 else math.inf


@torch.no_grad()
def _exact_parts(gradients: Sequence[torch.Tensor]) -> list[float]:
    """The squared norm of every row, added up per exponent.

    A row's own norm is a kernel's business and depends on the row alone. Over rows the order would matter, and how they
    are dealt to workers. But fp32 numbers of one exponent are whole multiples of one unit below 2^24 of them, and fp64
    adds those without rounding; so does `total_norm` with the sums. What comes out is the same for every cut.
    """
    numbers = _MOST - _LEAST + 1
    # All rows together: a device is waited for once, and not for every parameter.
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
