"""Data parallelism with replicated weights: every worker has all weights, and gradients are summed over workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from headway.config import Config
from headway.parallel.blocks import is_first_of_equals
from headway.parallel.buckets import Bucket, make_buckets
from headway.parallel.buffers import BufferWatch
from headway.parallel.exchange import Finish, PowerSGD, make_exchange
from headway.parallel.replicas import replicas_of
from headway.parallel.tree import LaneAccumulator, tree_all_reduce_
from headway.parallel.world import World


class DataParallel:
    """Sums each bucket as soon as the last backward pass has filled it, overlapping the rest of that pass."""

    def __init__(self, module: nn.Module, world: World, config: Config) -> None:
        self._world = world
        self._replicas_of = partial(replicas_of, world=world)
        self._buckets = make_buckets(module, kind_of=self._replicas_of)
        kinds = dict.fromkeys(self._replicas_of(bucket.parameters[0]) for bucket in self._buckets)
        settings = (config.parallel, config.train, config.seed, world)
        self._exchanges = {replicas: make_exchange(*settings, replicas) for replicas in kinds}
        self._missing: list[set[torch.Tensor]] = []
        self._pending: list[Finish] = []
        self._last = False
        self._updated = True
        self._buffers = BufferWatch(module)
        for index, bucket in enumerate(self._buckets):
            for p in bucket.parameters:
                p.register_post_accumulate_grad_hook(self._hook(index))

    def begin(self) -> None:
        for bucket in self._buckets:
            bucket.flat.zero_()
        self._missing = [set(bucket.parameters) for bucket in self._buckets]
        self._pending = []
        self._buffers.begin()
        if not self._updated:  # the last step was skipped
            for exchange in self._exchanges.values():
                if isinstance(exchange, PowerSGD):
                    exchange.reset()
        self._updated = False

    def owns_for_update(self, p: torch.Tensor) -> bool:
        return True

    def owns_for_norm(self, p: torch.Tensor) -> bool:
        return self._replicas_of(p).rank == 0 and is_first_of_equals(p, self._world)

    @contextmanager
    def micro_batch(self, last_of_lane: bool, last: bool) -> Iterator[None]:
        self._last = last
        yield

    def end_lane(self) -> None:
        pass

    def reduce(self) -> None:
        # Buckets are sent in index order on every worker. A parameter without a gradient keeps its bucket open; that
        # bucket and all later ones are sent here.
        self._buffers.check()
        for bucket in self._buckets[len(self._pending) :]:
            self._send(bucket)
        for finish in self._pending:
            finish()
        self._last = False  # the hooks outlive this strategy: another run may train the parameters later

    def after_update(self) -> None:
        self._updated = True

    def _hook(self, index: int) -> Any:
        def filled(p: torch.Tensor) -> None:
            if not self._last:
                return
            if index < len(self._pending):
                raise RuntimeError(
                    "a parameter got a second gradient in one backward pass, after the first was sent to the other"
                    " workers; use checkpoint(..., use_reentrant=False)"
                )
            self._missing[index].discard(p)
            while len(self._pending) < len(self._buckets) and not self._missing[len(self._pending)]:
                self._send(self._buckets[len(self._pending)])

        return filled

    def _send(self, bucket: Bucket) -> None:
        self._pending.append(self._exchanges[self._replicas_of(bucket.parameters[0])].start(bucket))


class ElasticDataParallel:
    """Sums lanes and workers in one fixed tree, so that the bits are the same for any number of workers.

    The price: log2(lanes per worker) + 1 partial sums are kept, and nothing overlaps with the backward pass.
    """

    def __init__(self, module: nn.Module, world: World, config: Config) -> None:
        self._world = world
        self._buckets = make_buckets(module)
        self._lanes = [LaneAccumulator() for _ in self._buckets]
        self._buffers = BufferWatch(module)
        self._lanes_before = self._in_buckets = False

    def begin(self) -> None:
        self._lanes_before = self._in_buckets = False
        self._clear()
        self._buffers.begin()

    def owns_for_update(self, p: torch.Tensor) -> bool:
        return True

    def owns_for_norm(self, p: torch.Tensor) -> bool:
        return self._world.is_first

    @contextmanager
    def micro_batch(self, last_of_lane: bool, last: bool) -> Iterator[None]:
        if self._in_buckets:  # add the previous lane, which was not the last one
            self._add_lane()
            self._clear()
        yield

    def end_lane(self) -> None:
        self._in_buckets = True

    def reduce(self) -> None:
        self._buffers.check()
        if self._lanes_before:
            self._add_lane()
            for bucket, lanes in zip(self._buckets, self._lanes, strict=True):
                bucket.flat.copy_(lanes.take())
        # With one lane per worker the sum is already in the buckets.
        for bucket in self._buckets:
            tree_all_reduce_(bucket.flat)

    def after_update(self) -> None:
        pass

    def _add_lane(self) -> None:
        for bucket, lanes in zip(self._buckets, self._lanes, strict=True):
            lanes.add(bucket.flat)
        self._lanes_before = True
        self._in_buckets = False

    def _clear(self) -> None:
        for bucket in self._buckets:
            bucket.flat.zero_()
