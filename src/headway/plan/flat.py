"""Flat buffers of DeepSpeed's ZeRO stages, and gradients on their way through its bucket (DeepSpeed 0.19.8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from headway.plan.moments import FP32_BYTES

#: Elements to which flat buffers are filled up, for each worker (`nccl_start_alignment_factor`).
_ALIGNED = 2
#: Bytes of norms' arithmetic for each byte of a gradient (`runtime/zero/utils.py`, `get_norm_dtype`).
FP64 = 2


@dataclass(frozen=True)
class FlatGroup:
    """A flat buffer of weights: those of one group of the optimizer."""

    places: Mapping[str, tuple[int, int]]
    """Of each parameter, its begin and end in bytes."""
    total: int
    """In bytes, with what fills it up."""
    share: int
    """Of one worker."""

    def owners(self, name: str) -> range:
        """The workers that have a part of a parameter."""
        begin, end = self.places[name]
        return range(begin // self.share, (end - 1) // self.share + 1)

    def part(self, name: str, rank: int) -> int:
        """What a worker has of a parameter."""
        begin, end = self.places[name]
        return max(0, min(end, (rank + 1) * self.share) - max(begin, rank * self.share))

    def largest_part(self, rank: int) -> int:
        """What a worker has of the parameter of which it has most."""
        return max(self.part(name, rank) for name in self.places)


def flat_groups(shapes: Mapping[str, tuple[int, ...]], workers: int) -> list[FlatGroup]:
    """Matrices, which are decayed, and vectors, which are not (`training/optimizer/build.py`)."""
    groups = []
    for decayed in (True, False):
        begin, places = 0, {}
        for name, size in shapes.items():
            if (len(size) > 1) == decayed:
                places[name] = (begin, begin := begin + FP32_BYTES * prod(size))
        aligned = _ALIGNED * FP32_BYTES * workers
        total = -(-begin // aligned) * aligned
        if places:
            groups.append(FlatGroup(places, total, total // workers))
    return groups


def backwards(sizes: Mapping[str, int]) -> dict[str, int]:
    """As backward passes come by parameters."""
    return dict(reversed([*sizes.items()]))


def owned(groups: Sequence[FlatGroup], workers: int) -> list[int]:
    """Of every worker: the parameters of which it has any, whole, in bytes."""
    found = [0] * workers
    for group in groups:
        for name, (begin, end) in group.places.items():
            for rank in group.owners(name):
                found[rank] += end - begin
    return found


class Bucket:
    """Gradients as they go through the bucket (`reduce_independent_p_g_buckets_and_remove_grads`, `reduce_ipg_grads`).

    One that is larger than the bucket is sent by itself. Stage 3 (no groups): `reduce_scatter_coalesced` in
    `runtime/comm/coalesced_collectives.py`.

    Args:
        order: In which they come, of which group of the optimizer.
        groups: Flat buffers; empty in stage 3, where every worker has a part of each gradient.
        rank: Worker.
        size: Of the bucket, in elements.
        offloads: What is owned leaves for host memory when it has been summed, and its norm is taken before. It is put
            aside on the device otherwise.
        all_there: Whether they are all computed before the first of them is sent.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        groups: Sequence[FlatGroup],
        rank: int,
        size: int,
        *,
        offloads: bool = False,
        all_there: bool = False,
        gloo: bool = False,
    ) -> None:
        parts = {name: group.part(name, rank) for group in groups for name in group.places}
        self.norms = {name: FP64 * part for name, part in parts.items()} if offloads else {}
        self.owners = {name: group.owners(name) for group in groups for name in group.places}
        self.rank, self.limit, self.gloo = rank, FP32_BYTES * size, gloo
        #: Parameters of which the worker has any, whole.
        self.own = sum(sizes[name] for name, owners in self.owners.items() if rank in owners)
        self.own = 0 if offloads else self.own
        self.inside: list[str] = []
        self.waiting, self.aside = 0, 0
        #: Gradients that are not in the bucket.
        self.outside = sum(sizes.values()) if all_there else 0
        #: Besides the bucket, by parameter: the most until the next one comes.
        self.extra: dict[str, int] = {}
        for name, count in sizes.items():
            most = self._send() if self.inside and self.waiting + count > self.limit else 0
            self.outside += 0 if all_there else count
            most = max(most, self.aside + self.outside)
            self.inside.append(name)
            self.waiting += count
            self.outside -= count if count <= self.limit else 0
            self.extra[name] = most
        #: When the last ones are sent.
        self.last = self._send()
        self.most = max(*self.extra.values(), self.last)

    def _send(self) -> int:
        """Empty the bucket; returns the most there is meanwhile."""
        owners = {owner for name in self.inside for owner in self.owners.get(name, ())}
        # What is for one worker is sent as it lies there; what is for several is put together first.
        several = len(owners) > 1 if self.owners else len(self.inside) > 1
        most = self.aside + self.outside + self.waiting * (several + self.gloo)
        if self.rank in owners:
            self.aside = self.own
        norm = max((self.norms.get(name, 0) for name in self.inside), default=0)
        most = max(most, self.aside + self.outside + norm)
        alone = self.waiting if self.waiting > self.limit else 0
        # Stage 1 lets go of what is others' at the end only.
        self.outside -= alone
        self.inside.clear()
        self.waiting = 0
        return most
