"""Sums whose bits do not depend on the number of workers.

Floating-point addition is commutative but not associative, so a sum is defined by its tree. Lanes are the leaves of one
fixed binary tree over lane numbers: neighbours first, then pairs of neighbours, and so on. A worker owns a contiguous,
aligned block of lanes and so a whole subtree, which it sums alone. Workers then combine at distance 1, 2, 4, ..., which
are the upper levels of the same tree.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from headway.core.coordination.heartbeat import exchanging


class LaneAccumulator:
    """Sums the subtree of one worker: adds its lanes in order, like a binary counter.

    Holds at most log2(lanes of this worker) + 1 buffers.
    """

    def __init__(self) -> None:
        self._levels: list[torch.Tensor | None] = []

    def add(self, lane: torch.Tensor) -> None:
        """Add the next lane's buffer; copy its content if it must be kept."""
        carry = lane
        owned = False
        for level, waiting in enumerate(self._levels):
            if waiting is None:
                self._levels[level] = carry if owned else carry.clone()
                return
            carry = waiting.add_(carry)
            owned = True
            self._levels[level] = None
        self._levels.append(carry if owned else carry.clone())

    def take(self) -> torch.Tensor:
        """Return the sum of a power-of-two number of lanes and empty the accumulator."""
        *lower, top = self._levels
        if top is None or any(level is not None for level in lower):
            raise RuntimeError("the number of lanes added is not a power of two")
        self._levels[-1] = None
        return top


def tree_all_reduce_(flat: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sum `flat` in place over a power-of-two number of workers, in the order of the tree.

    Recursive halving, then doubling (Thakur, Rabenseifner & Gropp 2005, section 4.4) with the nearest partner first:
    every element is summed at distance 1, 2, 4, ... and travels about twice. Both partners of an exchange own disjoint
    halves, so each sum is computed once and copied, never recomputed.
    """
    rank, size = _place(group)
    if size == 1:
        return
    padded = flat
    if flat.numel() % size:
        padded = torch.zeros(flat.numel() + -flat.numel() % size, dtype=flat.dtype, device=flat.device)
        padded[: flat.numel()] = flat
    start, length = _halve_(padded, group)
    distance = size
    while distance > 1:
        distance //= 2
        partner_start = start - length if rank & distance else start + length
        mine = padded[start : start + length]
        theirs = padded[partner_start : partner_start + length]
        _exchange(mine, theirs, rank ^ distance, group)
        start = min(start, partner_start)
        length = length * 2
    if padded is not flat:
        flat.copy_(padded[: flat.numel()])


def tree_reduce_scatter(mine: torch.Tensor, flat: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sum `flat` over workers as `tree_all_reduce_` does, and leave each worker its part in `mine`.

    Args:
        mine: Part number `rank` of the sum, (n,); overwritten.
        flat: (size * n,).
    """
    _, size = _place(group)
    if size == 1:
        mine.copy_(flat)
        return
    # Halving with the nearest partner first leaves a worker the part whose number is its rank with reversed bits.
    own = flat.view(size, -1)
    # Indexing with a tensor would wait for the device.
    parts = torch.cat([own[_reversed_bits(position, size)] for position in range(size)])
    start, length = _halve_(parts, group)
    mine.copy_(parts[start : start + length])


def _halve_(padded: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Run the halving phase in place; return the start and the length of this worker's part of the sum."""
    rank, size = _place(group)
    start = 0
    length = padded.numel()
    received = torch.empty(length // 2, dtype=padded.dtype, device=padded.device)
    distance = 1
    while distance < size:
        length //= 2
        upper = bool(rank & distance)
        keep = start + length if upper else start
        give = start if upper else start + length
        mine = padded[keep : keep + length]
        _exchange(padded[give : give + length], received[:length], rank ^ distance, group)
        mine.add_(received[:length])
        start = keep
        distance = distance * 2
    return start, length


def _exchange(send: torch.Tensor, receive: torch.Tensor, partner: int, group: dist.ProcessGroup | None) -> None:
    peer = partner if group is None else dist.get_global_rank(group, partner)
    operations = [dist.P2POp(dist.isend, send, peer, group), dist.P2POp(dist.irecv, receive, peer, group)]
    requests = dist.batch_isend_irecv(operations)
    with exchanging("sum of gradients in the tree"):
        for request in requests:
            request.wait()


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return rank and size; a single process needs no group."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def _reversed_bits(number: int, size: int) -> int:
    """Reverse the bits of `number` within the width of numbers below `size`."""
    bits = size.bit_length() - 1
    return int(f"{number:0{bits}b}"[::-1], 2) if bits else 0
