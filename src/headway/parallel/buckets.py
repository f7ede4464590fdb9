"""Gradients in a few flat buffers, so that they travel and are summed in a few large pieces.

Every parameter's `.grad` is a view into a bucket. The layout is a function of the model alone: parameters in reverse
order of registration, which is about the order in which the backward pass finishes them. `DistributedDataParallel`
re-orders its buckets before the second step of a process (`Reducer._rebuild_buckets`). The position of a value decides
in which order three or more workers sum it, so with such buckets a resumed run would not repeat the bits of an
uninterrupted one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable

import torch
import torch.distributed as dist
from torch import nn

from headway.core.coordination.heartbeat import exchanging
from headway.parallel.blocks import cut_like, local_part

BUCKET_BYTES = 25 * 2**20
#: Most flat copies in flight: one travels while the next is packed.
BUCKETS_IN_FLIGHT = 2


class InFlight:
    """Flat copies in flight, the oldest first; each is released as soon as it has arrived and been used."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[dist.Work, Callable[[], None]]] = deque()

    def wait_for_capacity(self) -> None:
        """Wait until few enough copies are in flight to create another one."""
        while len(self._waiting) >= BUCKETS_IN_FLIGHT:
            self._finish_oldest()

    def add(self, work: dist.Work | None, arrived: Callable[[], None]) -> None:
        """Add an exchange; `arrived` holds the copy, and is called and released when the exchange has ended."""
        assert work is not None, "asynchronous"
        self._waiting.append((work, arrived))

    def finish(self) -> None:
        """Wait for all exchanges."""
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
    """View a gradient in its parameter's memory layout (such as channels-last), as fused optimizers require."""
    memory_order = sorted(range(p.ndim), key=p.stride, reverse=True)
    dense = flat.view([p.shape[dim] for dim in memory_order])
    return dense.permute([memory_order.index(dim) for dim in range(p.ndim)])


def make_buckets(
    module: nn.Module,
    bucket_bytes: int = BUCKET_BYTES,
    kind_of: Callable[[torch.Tensor], Hashable] = lambda p: None,
) -> list[Bucket]:
    """Create buckets for all trainable parameters, each of one dtype and kind.

    A bucket has at most `bucket_bytes`, or one parameter. Buckets are ordered by first use; buckets of several kinds
    fill at the same time.
    """
    groups: list[list[nn.Parameter]] = []
    filling: dict[Hashable, tuple[list[nn.Parameter], int]] = {}
    for p in reversed([p for p in module.parameters() if p.requires_grad]):
        kind = kind_of(p)
        nbytes = local_part(p).nbytes
        group, size = filling.get(kind, ([], 0))
        if not group or group[0].dtype != p.dtype or size + nbytes > bucket_bytes:
            group = []
            size = 0
            groups.append(group)
        group.append(p)
        filling[kind] = group, size + nbytes
    return [Bucket(group) for group in groups]
