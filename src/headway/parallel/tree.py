"""Sums whose bits do not depend on the number of workers.

Floating-point addition is commutative but not associative, so a sum is defined by its tree. Lanes are the leaves of one
fixed binary tree over lane numbers: neighbours first, then pairs of neighbours, and so on. A worker owns a contiguous,
aligned block of lanes and so a whole subtree, which it sums alone; workers then combine at distance 1, 2, 4, ..., which
are the upper levels of the same tree.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


class LaneAccumulator:
    """The part of the tree below one worker: takes its lanes in order, like a binary counter takes ones.

    Holds at most log2(lanes of this worker) + 1 buffers.
    """

    def __init__(self) -> None:
        self._levels: list[torch.Tensor | None] = []

    def add(self, lane: torch.Tensor) -> None:
        """Add the next lane's buffer; the content is copied where it must be kept."""
        carry, owned = lane, False
        for level, waiting in enumerate(self._levels):
            if waiting is None:
                self._levels[level] = carry if owned else carry.clone()
                return
            carry, owned = waiting.add_(carry), True
            self._levels[level] = None
        self._levels.append(carry if owned else carry.clone())

    def take(self) -> torch.Tensor:
        """The sum of a power-of-two number of lanes; the accumulator is empty afterwards."""
        *lower, top = self._levels
        if top is None or any(level is not None for level in lower):
            raise RuntimeError("the number of lanes added is not a power of two")
        self._levels[-1] = None
        return top


def tree_all_reduce_(flat: torch.Tensor, rank: int, size: int) -> None:
    """Sum `flat` over all workers in place, in the order of the tree; `size` must be a power of two.

    Recursive halving, then doubling (Thakur, Rabenseifner & Gropp 2005, section 4.4) with the nearest partner first:
    every element is summed at distance 1, 2, 4, ... and travels about twice. Both partners of an exchange own
    disjoint halves, so each sum is computed once and copied, never recomputed.
    """
    if size == 1:
        return
    padded = flat
    if flat.numel() % size:
        padded = torch.zeros(flat.numel() + -flat.numel() % size, dtype=flat.dtype, device=flat.device)
        padded[: flat.numel()] = flat
    start, length = 0, padded.numel()
    received = torch.empty(length // 2, dtype=flat.dtype, device=flat.device)
    distance = 1
    while distance < size:
        length //= 2
        upper = bool(rank & distance)
        keep = start + length if upper else start
        give = start if upper else start + length
        mine = padded[keep : keep + length]
        _exchange(padded[give : give + length], received[:length], rank ^ distance)
        mine.add_(received[:length])
        start, distance = keep, distance * 2
    while distance > 1:
        distance //= 2
        partner_start = start - length if rank & distance else start + length
        _exchange(padded[start : start + length], padded[partner_start : partner_start + length], rank ^ distance)
        start, length = min(start, partner_start), length * 2
    if padded is not flat:
        flat.copy_(padded[: flat.numel()])


def _exchange(send: torch.Tensor, receive: torch.Tensor, partner: int) -> None:
    operations = [dist.P2POp(dist.isend, send, partner), dist.P2POp(dist.irecv, receive, partner)]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
