"""Flat buffers of DeepSpeed's ZeRO stages, and gradients in its bucket (DeepSpeed 0.19.8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from headway.config.optimizers import FP32_BYTES

#: Flat buffers are padded to a multiple of this many elements per worker (`nccl_start_alignment_factor`).
_ALIGNED = 2
#: Bytes of a norm's fp64 copy per byte of a gradient (`runtime/zero/utils.py`, `get_norm_dtype`).
FP64 = 2


@dataclass(frozen=True)
class FlatGroup:
    """A flat buffer with the weights of one optimizer group."""

    places: Mapping[str, tuple[int, int]]
    """Begin and end of each parameter, in bytes."""
    total: int
    """Size in bytes, padding included."""
    share: int
    """Bytes of one worker."""

    def owners(self, name: str) -> range:
        """Return the workers that have a part of a parameter."""
        begin, end = self.places[name]
        return range(begin // self.share, (end - 1) // self.share + 1)

    def part(self, name: str, rank: int) -> int:
        """Return the bytes of a parameter on a worker."""
        begin, end = self.places[name]
        return max(0, min(end, (rank + 1) * self.share) - max(begin, rank * self.share))

    def largest_part(self, rank: int) -> int:
        """Return the bytes of the largest part of a parameter on a worker."""
        return max(self.part(name, rank) for name in self.places)


def flat_groups(shapes: Mapping[str, tuple[int, ...]], workers: int) -> list[FlatGroup]:
    """Split parameters into matrices, which are decayed, and vectors (`training/optimizer/build.py`)."""
    groups = []
    for decayed in (True, False):
        begin = 0
        places = {}
        for name, size in shapes.items():
            if (len(size) > 1) == decayed:
                places[name] = (begin, begin := begin + FP32_BYTES * prod(size))
        aligned = _ALIGNED * FP32_BYTES * workers
        total = -(-begin // aligned) * aligned
        if places:
            groups.append(FlatGroup(places, total, total // workers))
    return groups


def backwards(sizes: Mapping[str, int]) -> dict[str, int]:
    """Reverse parameters into the order of the backward pass."""
    return dict(reversed([*sizes.items()]))


def owned(groups: Sequence[FlatGroup], workers: int) -> list[int]:
    """Return, for every worker, the bytes of all parameters of which it has a part."""
    found = [0] * workers
    for group in groups:
        for name, (begin, end) in group.places.items():
            for rank in group.owners(name):
                found[rank] += end - begin
    return found


class Bucket:
    """Simulates gradients in the bucket (`reduce_independent_p_g_buckets_and_remove_grads`, `reduce_ipg_grads`).

    A gradient larger than the bucket is sent alone. For stage 3 (no groups) see `reduce_scatter_coalesced` in
    `runtime/comm/coalesced_collectives.py`.

    Args:
        sizes: Bytes of each gradient, in the order of the backward pass.
        groups: Flat buffers; empty in stage 3, where every worker has a part of each gradient.
        rank: Rank of the worker.
        size: Size of the bucket, in elements.
        offloads: Move owned gradients to host memory after they are summed and their norm is computed. Otherwise they
            are stored on the device.
        all_there: Whether all gradients are computed before the first is sent.
        gloo: Whether collectives need their own buffer.
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
        self.rank = rank
        self.limit = FP32_BYTES * size
        self.gloo = gloo
        #: Bytes of all parameters of which the worker has a part.
        self.own = sum(sizes[name] for name, owners in self.owners.items() if rank in owners)
        self.own = 0 if offloads else self.own
        self.inside: list[str] = []
        self.waiting = 0
        self.aside = 0
        #: Bytes of gradients outside the bucket.
        self.outside = sum(sizes.values()) if all_there else 0
        #: Peak besides the bucket, by parameter, until the next gradient is computed.
        self.extra: dict[str, int] = {}
        for name, count in sizes.items():
            most = self._send() if self.inside and self.waiting + count > self.limit else 0
            self.outside += 0 if all_there else count
            most = max(most, self.aside + self.outside)
            self.inside.append(name)
            self.waiting += count
            self.outside -= count if count <= self.limit else 0
            self.extra[name] = most
        #: Peak while the last bucket is sent.
        self.last = self._send()
        self.most = max(*self.extra.values(), self.last)

    def _send(self) -> int:
        """Empty the bucket and return the peak meanwhile."""
        owners = {owner for name in self.inside for owner in self.owners.get(name, ())}
        # A bucket for one worker is sent in place; a bucket for several is copied first.
        several = len(owners) > 1 if self.owners else len(self.inside) > 1
        most = self.aside + self.outside + self.waiting * (several + self.gloo)
        if self.rank in owners:
            self.aside = self.own
        norm = max((self.norms.get(name, 0) for name in self.inside), default=0)
        most = max(most, self.aside + self.outside + norm)
        alone = self.waiting if self.waiting > self.limit else 0
        # Stage 1 frees the gradients of other workers only at the end.
        self.outside -= alone
        self.inside.clear()
        self.waiting = 0
        return most
