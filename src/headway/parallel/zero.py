"""ZeRO stages 1 and 2: weights are replicated; moments, and in stage 2 gradients, are divided between workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from headway.config import Config
from headway.parallel.blocks import cut_like, is_first_of_equals, local_part
from headway.parallel.buckets import BUCKET_BYTES, InFlight
from headway.parallel.buffers import BufferWatch
from headway.parallel.ddp import DataParallel, ElasticDataParallel
from headway.parallel.ownership import Ownership
from headway.parallel.replicas import Replicas, replicas_of
from headway.parallel.world import World


class _OwnedUpdate:
    """The update: each worker updates the parameters that it owns and sends them to the others."""

    _module: nn.Module
    _world: World
    _ownership: Ownership

    def owns_for_update(self, p: torch.Tensor) -> bool:
        return self._ownership.is_mine(p)

    def owns_for_norm(self, p: torch.Tensor) -> bool:
        return self._ownership.is_mine(p) and is_first_of_equals(p, self._world)

    def after_update(self) -> None:
        trainable = (p for p in self._module.parameters() if p.requires_grad)
        self._ownership.share(trainable, BUCKET_BYTES)


class Zero1(_OwnedUpdate, DataParallel):
    """Sums gradients on every worker, as `ddp` does; each worker updates its part of the weights."""

    def __init__(self, module: nn.Module, world: World, config: Config) -> None:
        super().__init__(module, world, config)
        self._module, self._ownership = module, _ownership(module, world)

    def after_update(self) -> None:
        DataParallel.after_update(self)
        super().after_update()


class ElasticZero(_OwnedUpdate, ElasticDataParallel):
    """Stages 1 and 2 under `elastic`: gradients stay whole until all lanes are summed, so only moments are divided."""

    def __init__(self, module: nn.Module, world: World, config: Config) -> None:
        super().__init__(module, world, config)
        self._module, self._ownership = module, _ownership(module, world)


class Zero2(_OwnedUpdate):
    """Sums each gradient on its owner as soon as the backward pass has computed it, and frees it elsewhere.

    Memory holds the open bucket of every owner, the buckets in flight, and this worker's own sums. This happens in
    every micro-batch: accumulation costs communication instead of memory.
    """

    def __init__(self, module: nn.Module, world: World, config: Config) -> None:
        self._module = module
        self._world = world
        self._ownership = _ownership(module, world)
        self._buckets = _buckets_by_owner(module, self._ownership)
        self._bucket_of = {p: index for index, bucket in enumerate(self._buckets) for p in bucket}
        self._buffers = BufferWatch(module)
        self._training = False
        for p in self._bucket_of:
            p.register_post_accumulate_grad_hook(self._filled)
        self._missing: list[set[torch.Tensor]] = []
        self._sent = 0
        self._in_flight = InFlight()
        self._sums: dict[torch.Tensor, torch.Tensor] = {}

    def begin(self) -> None:
        for p in self._bucket_of:
            p.grad = None
        self._sums = {}
        self._buffers.begin()

    @contextmanager
    def micro_batch(self, last_of_lane: bool, last: bool) -> Iterator[None]:
        self._missing = [set(bucket) for bucket in self._buckets]
        self._sent = 0
        self._training = True
        yield
        self._training = False
        while self._sent < len(self._buckets):  # a parameter without a gradient keeps its bucket open
            self._send()
        self._in_flight.finish()

    def end_lane(self) -> None:
        pass

    def reduce(self) -> None:
        self._buffers.check()
        for p in self._bucket_of:
            p.grad = cut_like(p, self._sums[p]) if self._ownership.is_mine(p) else None

    def _filled(self, p: Any) -> None:
        if not self._training:
            return
        self._missing[self._bucket_of[p]].discard(p)
        while self._sent < len(self._buckets) and not self._missing[self._sent]:
            self._send()

    def _send(self) -> None:
        """Send the next bucket to its owner, in the same order on every worker."""
        self._in_flight.wait_for_capacity()
        bucket = self._buckets[self._sent]
        flat = self._pack(bucket)
        for p in bucket:
            p.grad = None
        replicas = self._ownership.replicas_of(bucket[0])
        if replicas.size == 1:
            self._add(flat, bucket)
        else:
            to = replicas.global_rank(self._ownership.owner(bucket[0]))
            work = dist.reduce(flat, dst=to, group=replicas.group, async_op=True)
            self._in_flight.add(work, partial(self._add, flat, bucket))
        self._sent += 1

    def _pack(self, bucket: Sequence[nn.Parameter]) -> torch.Tensor:
        """Concatenate the gradients of a bucket; a missing one is zero."""
        return torch.cat([local_part(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket])

    def _add(self, flat: torch.Tensor, bucket: Sequence[nn.Parameter]) -> None:
        if not self._ownership.is_mine(bucket[0]):
            return
        for p, part in zip(bucket, flat.split([local_part(p).numel() for p in bucket]), strict=True):
            self._keep(p, part.view(local_part(p).shape))

    def _keep(self, p: nn.Parameter, gradient: torch.Tensor) -> None:
        """Add the gradient of one micro-batch, summed over workers, to this worker's sum."""
        own = local_part(p)
        if p in self._sums:
            self._sums[p].add_(gradient)
        elif own.is_contiguous():
            self._sums[p] = gradient
        else:  # fused optimizers need weight and gradient in the same memory layout
            self._sums[p] = torch.empty_like(own).copy_(gradient)


def _ownership(module: nn.Module, world: World) -> Ownership:
    """Divide the parameters among the workers that have the same weights."""
    return Ownership(module, partial(replicas_of, world=world))


def _buckets_by_owner(module: nn.Module, ownership: Ownership) -> list[list[nn.Parameter]]:
    """Group parameters into buckets of one owner and dtype, roughly in the order of the backward pass."""
    buckets: list[list[nn.Parameter]] = []
    open_buckets: dict[tuple[Replicas, int, torch.dtype], list[nn.Parameter]] = {}
    for p in reversed([p for p in module.parameters() if p.requires_grad]):
        kind = (ownership.replicas_of(p), ownership.owner(p), p.dtype)
        bucket = open_buckets.get(kind)
        if bucket is None or sum(local_part(q).nbytes for q in (*bucket, p)) > BUCKET_BYTES:
            bucket = open_buckets[kind] = []
            buckets.append(bucket)
        bucket.append(p)
    return buckets
