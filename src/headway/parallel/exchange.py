"""Ways in which a bucket of gradients is summed over workers.

`start` is called while the backward pass goes on, in the same order on every worker; `finish` after it, in that order
too. Some ways need more than one exchange; what comes after the first waits for `finish`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from headway.core.heartbeat import exchanging
from headway.core.random import derive_seed
from headway.parallel.buckets import Bucket
from headway.parallel.collectives import all_gather, reduce_scatter
from headway.parallel.replicas import Replicas
from headway.parallel.world import World

if TYPE_CHECKING:
    from headway.config import Config

#: Ends what was started: when it returns, the bucket holds the sum.
Finish = Callable[[], None]


class Exchange(Protocol):
    """Sums buckets over workers."""

    def start(self, bucket: Bucket) -> Finish:
        """Begin; the bucket must not be touched before what this returns has been called."""
        ...


def make_exchange(config: Config, world: World, replicas: Replicas) -> Exchange:
    """What `parallel` asks for, by `reduce_precision`, `compression` and `replicate`, between some workers."""
    parallel, group = config.parallel, replicas.group
    if replicas.size == 1:
        return Alone()
    if parallel.compression == "powersgd":
        return PowerSGD(replicas.size, parallel.powersgd_rank, config.seed, group)
    if 1 < world.mesh.dp_replicate < world.mesh.replicas and group is world.replica_group:
        inner, outer = world.weights_axis("dp_shard"), world.device_mesh["dp_replicate"]
        return TwoLevels(inner.get_group(), outer.get_group())
    if parallel.reduce_precision != "fp32":
        items = float(config.train.tokens_per_step)
        if parallel.reduce_precision == "fp16" and config.train.precision != "fp16":  # nothing has scaled the loss
            items /= _UP
        return Rounded(getattr(torch, _DTYPES[parallel.reduce_precision]), items, group)
    return Plain(group)


_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
#: Gradients of large models are around 1e-6 as means, where fp16 has steps of 6e-8; a thousand times as large they are
#: still far from its largest number, 65,504. One above it is not finite, and the step is left out.
_UP = 2.0**10


class Alone:
    """There is nobody who would have anything to add."""

    def start(self, bucket: Bucket) -> Finish:
        """Nothing to do, then or later."""
        return lambda: None


class Plain:
    """One all-reduce in the gradients' own type.

    Args:
        group: Workers that share the sum, here and below; None for all.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def start(self, bucket: Bucket) -> Finish:
        """Begin the all-reduce."""
        return _started(dist.all_reduce(bucket.flat, group=self._group, async_op=True))


class Rounded:
    """Gradients travel and are summed in half precision: half the traffic.

    Args:
        dtype: Of what travels.
        items: Gradients are sums over items; they travel divided by a power of two near this number.
    """

    def __init__(self, dtype: torch.dtype, items: float, group: dist.ProcessGroup | None = None) -> None:
        self._group, self._dtype, self._scale = group, dtype, 2.0 ** -round(math.log2(items))

    def start(self, bucket: Bucket) -> Finish:
        """Round, and begin the all-reduce."""
        rounded = (bucket.flat * self._scale).to(self._dtype)
        wait = _started(dist.all_reduce(rounded, group=self._group, async_op=True))

        def finish() -> None:
            wait()
            bucket.flat.copy_(rounded).div_(self._scale)

        return finish


class TwoLevels:
    """Sums within a group first, then between groups, where links within are faster: between groups travels only what
    one of a group's workers has, a part of the whole.

    Args:
        inner: Of this worker and its neighbours.
        outer: Of the workers with this one's place in the other groups.
    """

    def __init__(self, inner: dist.ProcessGroup, outer: dist.ProcessGroup) -> None:
        self._inner, self._outer = inner, outer

    def start(self, bucket: Bucket) -> Finish:
        """Begin to sum within the group."""
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
    """Matrices travel as two thin factors (Vogels et al. 2019, algorithms 1 and 2); the rest as it is.

    What the factors miss is added to the next step's gradient. That remainder, and the factor that the next step starts
    from, are state that no checkpoint has, so only `determinism: off` may use it. Of a step that is left out they are
    to be forgotten, else its gradient would come back with the next one.

    Args:
        workers: How many share a gradient.
        rank: Columns of a factor.
        seed: Of the first factors, the same on every worker.
    """

    def __init__(self, workers: int, rank: int, seed: int, group: dist.ProcessGroup | None = None) -> None:
        self._group, self._workers, self._rank, self._seed = group, workers, rank, seed
        self._missed: dict[torch.Tensor, torch.Tensor] = {}
        self._q: dict[torch.Tensor, torch.Tensor] = {}

    def start(self, bucket: Bucket) -> Finish:
        """Begin with the first factor of every matrix, and with all that is none."""
        matrices = [p for p in bucket.parameters if self._pays(p)]
        others = [_gradient(p) for p in bucket.parameters if not self._pays(p)]
        wanted = [self._with_missed(p) for p in matrices]
        ps = [m @ self._factor(p, m) for p, m in zip(matrices, wanted, strict=True)]
        wait = _sum_all([*ps, *others], self._group)

        def finish() -> None:
            wait()
            bases = [torch.linalg.qr(factor).Q for factor in ps]
            qs = [m.t() @ basis for m, basis in zip(wanted, bases, strict=True)]
            _sum_all(qs, self._group)()
            for p, m, basis, q in zip(matrices, wanted, bases, qs, strict=True):
                total = basis @ q.t()
                # What this worker's share of the result misses of its own gradient.
                self._missed[p] = m.sub_(total / self._workers)
                self._q[p] = q
                _gradient(p).copy_(total.view(p.shape))

        return finish

    def forget(self) -> None:
        """Begin anew, as in the first step."""
        self._missed, self._q = {}, {}

    def _pays(self, p: torch.Tensor) -> bool:
        """Whether two factors are smaller than the matrix."""
        rows, columns = p.shape[0] if p.ndim else 1, p.numel() // max(1, p.shape[0]) if p.ndim else 1
        return p.ndim >= 2 and (rows + columns) * self._rank < rows * columns

    def _with_missed(self, p: torch.Tensor) -> torch.Tensor:
        gradient = _gradient(p).reshape(p.shape[0], -1)
        return gradient + self._missed[p] if p in self._missed else gradient.clone()

    def _factor(self, p: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        if p not in self._q:
            generator = torch.Generator().manual_seed(derive_seed(self._seed, "powersgd", *matrix.shape))
            self._q[p] = torch.randn(matrix.shape[1], self._rank, generator=generator).to(matrix)
        return self._q[p]


def _gradient(p: torch.Tensor) -> torch.Tensor:
    assert p.grad is not None, "buckets hold a gradient for every parameter"
    return p.grad


def _sum_all(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> Finish:
    """Begin one all-reduce of several tensors."""
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
