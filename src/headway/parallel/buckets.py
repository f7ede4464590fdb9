"""Gradients in a few flat buffers, so that they travel and add up in a few large pieces.

Every parameter's `.grad` is a view into a bucket. The layout is a function of the model alone: parameters in reverse
order of registration, which is about the order in which the backward pass finishes them. `DistributedDataParallel`
re-orders its buckets before the second step of a process (`Reducer._rebuild_buckets`). Where a value lies decides in
which order three or more workers add it up, so a resumed run would not repeat the bits of an uninterrupted one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable

import torch
import torch.distributed as dist
from torch import nn

from headway.core.heartbeat import exchanging
from headway.parallel.blocks import cut_like, local_part

BUCKET_BYTES = 25 * 2**20
#: Flat copies that may be on their way at a time: one travels while the next is made.
BUCKETS_IN_FLIGHT = 2


class InFlight:
    """Flat copies on their way, the oldest first; each is let go of as soon as it has arrived and was made use of."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[dist.Work, Callable[[], None]]] = deque()

    def make_room(self) -> None:
        """Before another copy is made: wait until there are few enough."""
        while len(self._waiting) >= BUCKETS_IN_FLIGHT:
            self._finish_oldest()

    def add(self, work: dist.Work | None, arrived: Callable[[], None]) -> None:
        """One more; `arrived` holds the copy, and is called and forgotten when the exchange has ended."""
        assert work is not None, "asynchronous"
        self._waiting.append((work, arrived))

    def finish(self) -> None:
        """Wait for all of them."""
        while self._waiting:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        work, arrived = self._waiting.popleft()
        with exchanging("sum or gather of a bucket"):
            work.wait()
        arrived()


class Bucket:
    """One flat buffer and the parameters whose gradients live in it."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        first = parameters[0]
        size = sum(local_part(p).numel() for p in parameters)
        self.flat = torch.zeros(size, dtype=first.dtype, device=first.device)
        start = 0
        for p in parameters:
            local = local_part(p.detach())
            p.grad = cut_like(p, _view(self.flat[start : start + local.numel()], local))
            start += local.numel()


def _view(flat: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """A gradient with its parameter's memory layout (such as channels-last): fused optimizers walk both alike."""
    memory_order = sorted(range(p.ndim), key=p.stride, reverse=True)
    dense = flat.view([p.shape[dim] for dim in memory_order])
    return dense.permute([memory_order.index(dim) for dim in range(p.ndim)])


def make_buckets(
    module: nn.Module,
    bucket_bytes: int = BUCKET_BYTES,
    kind_of: Callable[[torch.Tensor], Hashable] = lambda p: None,
) -> list[Bucket]:
    """Buckets for all trainable parameters, each of one dtype and kind, of at most `bucket_bytes` or one parameter.

    Buckets come in the order in which they are first needed; those of several kinds fill at the same time.
    """
    groups: list[list[nn.Parameter]] = []
    filling: dict[Hashable, tuple[list[nn.Parameter], int]] = {}
    for p in reversed([p for p in module.parameters() if p.requires_grad]):
        kind, nbytes = kind_of(p), local_part(p).nbytes
        group, size = filling.get(kind, ([], 0))
        if not group or group[0].dtype != p.dtype or size + nbytes > bucket_bytes:
            group, size = [], 0
            groups.append(group)
        group.append(p)
        filling[kind] = group, size + nbytes
    return [Bucket(group) for group in groups]
