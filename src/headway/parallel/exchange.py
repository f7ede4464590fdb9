"""Ways to sum a bucket of gradients over workers.

`start` is called during the backward pass, in the same order on every worker; `finish` is called after it, in that
order too. Some ways need several exchanges; all but the first wait until `finish`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from headway.config import ParallelConfig, TrainConfig
from headway.core.coordination.heartbeat import exchanging
from headway.core.random import derive_seed
from headway.parallel.buckets import Bucket
from headway.parallel.collectives import all_gather, reduce_scatter
from headway.parallel.replicas import Replicas
from headway.parallel.world import World

#: Completes an exchange: when it returns, the bucket holds the sum.
Finish = Callable[[], None]


class Exchange(Protocol):
    """Sums buckets over workers."""

    def start(self, bucket: Bucket) -> Finish:
        """Start the sum; the bucket must not be touched before the returned function has been called."""
        ...


def make_exchange(
    parallel: ParallelConfig, train: TrainConfig, seed: int, world: World, replicas: Replicas
) -> Exchange:
    """Create the configured exchange between replicas, by `reduce_precision`, `compression` and `replicate`.

    Args:
        train: Of a resolved config.
        seed: Of the run.
    """
    group = replicas.group
    if replicas.size == 1:
        return Alone()
    if parallel.compression == "powersgd":
        return PowerSGD(replicas.size, parallel.powersgd_rank, seed, group)
    if 1 < world.mesh.dp_replicate < world.mesh.replicas and group is world.replica_group:
        inner = world.weights_axis("dp_shard")
        outer = world.device_mesh["dp_replicate"]
        return TwoLevels(inner.get_group(), outer.get_group())
    if parallel.reduce_precision != "fp32":
        items = float(train.tokens_per_step)
        if parallel.reduce_precision == "fp16" and train.precision != "fp16":  # no loss scale
            items /= _FP16_SCALE
        return Rounded(getattr(torch, _DTYPES[parallel.reduce_precision]), items, group)
    return Plain(group)


_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
#: Mean gradients of large models are around 1e-6, where fp16 has steps of 6e-8. Scaled by a thousand they are still far
#: from its maximum, 65,504. A larger value becomes infinite, and the step is skipped.
_FP16_SCALE = 2.0**10


class Alone:
    """No other worker has gradients to add."""

    def start(self, bucket: Bucket) -> Finish:
        """Do nothing."""
        return lambda: None


class Plain:
    """One all-reduce in the dtype of the gradients.

    Args:
        group: Workers that share the sum, in all classes here; None for all.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def start(self, bucket: Bucket) -> Finish:
        """Start the all-reduce."""
        return _started(dist.all_reduce(bucket.flat, group=self._group, async_op=True))


class Rounded:
    """Gradients travel and are summed in half precision: half the traffic.

    Args:
        dtype: Dtype of the exchange.
        items: Gradients are sums over items; for the exchange they are divided by a power of two near this number.
    """

    def __init__(self, dtype: torch.dtype, items: float, group: dist.ProcessGroup | None = None) -> None:
        self._group, self._dtype, self._scale = group, dtype, 2.0 ** -round(math.log2(items))

    def start(self, bucket: Bucket) -> Finish:
        """Round the bucket and start the all-reduce."""
        rounded = (bucket.flat * self._scale).to(self._dtype)
        wait = _started(dist.all_reduce(rounded, group=self._group, async_op=True))

        def finish() -> None:
            wait()
            bucket.flat.copy_(rounded).div_(self._scale)

        return finish


class TwoLevels:
    """Sums within a group first, then between groups, for links that are faster within a group.

    Between groups each worker sends only its part of the bucket.

    Args:
        inner: Group of this worker and its neighbours.
        outer: Group of the workers at the same position in the other groups.
    """

    def __init__(self, inner: dist.ProcessGroup, outer: dist.ProcessGroup) -> None:
        self._inner = inner
        self._outer = outer

    def start(self, bucket: Bucket) -> Finish:
        """Start the sum within the group."""
        size = dist.get_world_size(self._inner)
        padded = torch.nn.functional.pad(bucket.flat, (0, -bucket.flat.numel() % size))
        part = padded.new_empty(padded.numel() // size)
        wait = _started(reduce_scatter(part, padded, group=self._inner, async_op=True))

        def finish() -> None:
            wait()
            dist.all_reduce(part, group=self._outer)
            all_gather(padded, part, group=self._inner)
            bucket.flat.copy_(padded[: bucket.flat.numel()])

        return finish


class PowerSGD:
    """Matrices travel as two thin factors (Vogels et al. 2019, algorithms 1 and 2); other tensors travel unchanged.

    The error of the approximation is added to the next step's gradient. That error and the starting factor of the next
    step are state that no checkpoint contains, so only `determinism: off` allows it. After a skipped step `reset` must
    drop this state, or the skipped gradient would return in the next step.

    Args:
        workers: Number of workers that share a gradient.
        rank: Columns of a factor.
        seed: Seed of the initial factors, the same on every worker.
    """

    def __init__(self, workers: int, rank: int, seed: int, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._workers = workers
        self._rank = rank
        self._seed = seed
        self._errors: dict[torch.Tensor, torch.Tensor] = {}
        self._q: dict[torch.Tensor, torch.Tensor] = {}

    def start(self, bucket: Bucket) -> Finish:
        """Start to sum the first factor of every matrix, and all other tensors."""
        matrices = [p for p in bucket.parameters if self._pays(p)]
        others = [_gradient(p) for p in bucket.parameters if not self._pays(p)]
        wanted = [self._with_error(p) for p in matrices]
        ps = [m @ self._factor(p, m) for p, m in zip(matrices, wanted, strict=True)]
        wait = _sum_all([*ps, *others], self._group)

        def finish() -> None:
            wait()
            bases = [torch.linalg.qr(factor).Q for factor in ps]
            qs = [m.t() @ basis for m, basis in zip(wanted, bases, strict=True)]
            _sum_all(qs, self._group)()
            for p, m, basis, q in zip(matrices, wanted, bases, qs, strict=True):
                total = basis @ q.t()
                # Error feedback: this worker's gradient minus its share of the result.
                self._errors[p] = m.sub_(total / self._workers)
                self._q[p] = q
                _gradient(p).copy_(total.view(p.shape))

        return finish

    def reset(self) -> None:
        """Return to the state before the first step."""
        self._errors = {}
        self._q = {}

    def _pays(self, p: torch.Tensor) -> bool:
        """Return whether two factors are smaller than the matrix."""
        rows = p.shape[0] if p.ndim else 1
        columns = p.numel() // max(1, p.shape[0]) if p.ndim else 1
        return p.ndim >= 2 and (rows + columns) * self._rank < rows * columns

    def _with_error(self, p: torch.Tensor) -> torch.Tensor:
        gradient = _gradient(p).reshape(p.shape[0], -1)
        return gradient + self._errors[p] if p in self._errors else gradient.clone()

    def _factor(self, p: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        if p not in self._q:
            generator = torch.Generator().manual_seed(derive_seed(self._seed, "powersgd", *matrix.shape))
            self._q[p] = torch.randn(matrix.shape[1], self._rank, generator=generator).to(matrix)
        return self._q[p]


def _gradient(p: torch.Tensor) -> torch.Tensor:
    assert p.grad is not None, "buckets hold a gradient for every parameter"
    return p.grad


def _sum_all(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> Finish:
    """Start one all-reduce of several tensors."""
    if not tensors:
        return lambda: None
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    wait = _started(dist.all_reduce(flat, group=group, async_op=True))

    def finish() -> None:
        wait()
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))

    return finish


def _started(work: dist.Work | None) -> Finish:
    assert work is not None, "asynchronous"

    def finish() -> None:
        with exchanging("sum of gradients"):
            work.wait()

    return finish
