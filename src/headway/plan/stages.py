"""Weights, gradients and moments of the part of a model that one worker computes, in bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from headway.core.eight_bit import block_size
from headway.models.facts import parameter_shapes, part_costs
from headway.parallel.stages import plan_stages
from headway.plan.moments import FP32_BYTES, moment_bytes

if TYPE_CHECKING:
    from headway.config import Config, ModelConfig
    from headway.plan.layout import Layout

#: Gradients and weights travel in pieces of at most this many bytes, or one parameter, so many at a time
#: (`parallel/buckets.py`).
BUCKET_BYTES = 25 * 2**20
BUCKETS_IN_FLIGHT = 2


def pipeline_stages(config: Config, model: ModelConfig, layout: Layout) -> list[Stage]:
    """The whole model, or what each worker of a pipeline has of it.

    Args:
        config: Of the run; `train.sequence_length` and the pipeline's settings are read.
        model: Complete.
        layout: How the step is spread.
    """
    workers = layout.mesh.pp
    whole = {name: _cut(name, size, layout) for name, size in parameter_shapes(model).items()}
    if workers == 1:
        return [Stage(whole, tied=model.tie_embeddings, sharers=_sharers(layout))]
    costs = part_costs(model, config.train.sequence_length)
    stages = plan_stages(config, costs.layers, costs.embedding, costs.head)
    each = len(stages) // workers
    return [_stage(config, layout, whole, place, each, stages[place::workers]) for place in range(workers)]


def _stage(
    config: Config, layout: Layout, whole: dict[str, tuple[int, ...]], place: int, each: int, mine: Sequence[range]
) -> Stage:
    """What the worker at one place of a pipeline has, under the names of the first layers."""
    workers, micro_batches = layout.mesh.pp, layout.micro_batches // layout.lanes
    first, last = place == 0, place == workers - 1
    layers = sum(len(stage) for stage in mine)
    table = whole["embedding.weight"]
    shapes = {"embedding.weight": table} if first else {}
    shapes |= {name: size for name, size in whole.items() if name.startswith("layers.") and _index(name) < layers}
    if last:
        shapes |= {"norm.weight": whole["norm.weight"], "head.weight": table}
    # Forward passes before the first backward pass (Narayanan et al. 2021, section 2.2; interleaved as PyTorch does).
    passes = {
        "gpipe": micro_batches,
        "1f1b": workers - place,
        "interleaved": (each - 1) * workers + 2 * (workers - place) - 1,
    }[config.parallel.pipeline_schedule]
    ahead = -(-min(passes, micro_batches * each) // each) - 1
    # Into which activations come, and gradients: of every micro-batch, for as long as the run lasts.
    received = micro_batches * (2 * each - first - last)
    return Stage(shapes, ahead=ahead, received=received, sharers=_sharers(layout))


def _sharers(layout: Layout) -> tuple[int, int]:
    """How many more workers share the shards of an expert than those of any other weight, as a fraction.

    Those with the same experts are among all that have tokens of their own (`MeshShape.expert_replicas`): of `ep` times
    fewer of them, and of those that tensor parallelism cuts other weights between.
    """
    return layout.mesh.tp, layout.mesh.ep


def _cut(name: str, size: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """Tensor-parallel workers share every matrix, expert-parallel ones the experts; vectors are whole."""
    workers = layout.mesh.ep if ".experts." in name else layout.mesh.tp
    return size if len(size) == 1 else (size[0] // workers, *size[1:])


def _index(name: str) -> int:
    return int(name.split(".")[1])


@dataclass(frozen=True)
class Stage:
    """Consecutive layers, and what belongs to them of embedding and projection. All sizes are in bytes, in fp32."""

    shapes: dict[str, tuple[int, ...]]
    """Of its parameters, in the order of the model."""
    ahead: int = 0
    """Micro-batches whose activations are kept besides those of the one under way."""
    received: int = 0
    """Buffers for what other stages send, each for the residual stream of one micro-batch."""
    tied: bool = False
    """The embedding table is the projection too."""
    sharers: tuple[int, int] = (1, 1)
    """Of shards of experts, for each worker that shares other shards (`_sharers`)."""

    @cached_property
    def bytes(self) -> dict[str, int]:
        """By parameter."""
        return {name: FP32_BYTES * prod(size) for name, size in self.shapes.items()}

    @cached_property
    def layers(self) -> int:
        """How many."""
        return len(self._layer_bytes)

    @cached_property
    def mixtures(self) -> int:
        """How many of them have experts; they are the last ones."""
        return sum(name.endswith("router.weight") for name in self.shapes)

    @cached_property
    def all(self) -> int:
        """All parameters."""
        return sum(self.bytes.values())

    @cached_property
    def _layer_bytes(self) -> list[int]:
        sizes: dict[int, int] = {}
        for name, count in self.bytes.items():
            if name.startswith("layers."):
                sizes[_index(name)] = sizes.get(_index(name), 0) + count
        return list(sizes.values())

    @property
    def layer(self) -> int:
        """The largest layer."""
        return max(self._layer_bytes)

    @property
    def in_layers(self) -> int:
        """All layers."""
        return sum(self._layer_bytes)

    @cached_property
    def norms(self) -> int:
        """What in layers is used in fp32 whatever the precision of products (`Decoder.product_parameters`)."""
        return sum(
            count
            for name, count in self.bytes.items()
            if name.startswith("layers.") and (len(self.shapes[name]) == 1 or name.endswith("router.weight"))
        )

    @property
    def root(self) -> int:
        """What is outside of layers."""
        return self.all - self.in_layers

    @property
    def table(self) -> int:
        """The embedding table, 0 where there is none."""
        return self.bytes.get("embedding.weight", 0)

    @property
    def own_table(self) -> int:
        """The embedding table unless it is the projection too."""
        return 0 if self.tied else self.table

    @property
    def projection(self) -> int:
        """The projection to the vocabulary, 0 where there is none."""
        return self.table if self.tied else self.bytes.get("head.weight", 0)

    @property
    def down(self) -> int:
        """The second matrix of a feed-forward layer, the largest there is."""
        return self._largest_of("feed_forward.down.weight", "experts.down")

    @property
    def gate_up(self) -> int:
        """The first one."""
        return self._largest_of("gate_up_groups.weight", "experts.gate_up")

    def _largest_of(self, *endings: str) -> int:
        return max(count for name, count in self.bytes.items() if name.endswith(endings))

    @property
    def largest(self) -> int:
        """The largest parameter."""
        return max(self.bytes.values())

    @property
    def largest_hidden(self) -> int:
        """The largest matrix between layers."""
        return max(count for name, count in self.bytes.items() if name.startswith("layers."))

    @property
    def largest_in_8_bits(self) -> int:
        """The largest parameter whose moments `adamw8bit` keeps in 8 bits; 0 without one."""
        return max((self.bytes[name] for name, size in self.shapes.items() if block_size(size)), default=0)

    def owners(self, workers: int) -> list[list[str]]:
        """The parameters of each worker, as `parallel/ownership.py` deals them out."""
        load = [0] * workers
        names: list[list[str]] = [[] for _ in range(workers)]
        for name in sorted(self.bytes, key=lambda name: -self.bytes[name]):
            least = min(range(workers), key=lambda rank: (load[rank], rank))
            names[least].append(name)
            load[least] += self.bytes[name]
        return names

    def largest_share(self, workers: int) -> int:
        """Parameters of the worker that owns most."""
        return max(sum(self.bytes[name] for name in names) for names in self.owners(workers))

    def largest_moments(self, workers: int, optimizer: str) -> int:
        """Moments of the worker that has most."""
        return max(sum(self._moments(name, optimizer) for name in names) for names in self.owners(workers))

    def _moments(self, name: str, optimizer: str) -> int:
        return moment_bytes(optimizer, name, self.shapes[name])

    def handed_over(self, workers: int, *, sums: bool) -> dict[str, int]:
        """Gradients where each goes to its owner as soon as a bucket is full (`parallel/zero.py`), on the worker that
        owns most: those that wait, those on their way, those that have been summed here.

        Args:
            sums: Whether earlier micro-batches have left sums of all that is owned.

        Returns:
            By parameter, in the order of the backward pass, the most there is until the next one has its gradient.
        """
        dealt = self.owners(workers)
        owner = {name: rank for rank, names in enumerate(dealt) for name in names}
        most_owned = max(range(workers), key=lambda rank: sum(self.bytes[name] for name in dealt[rank]))
        order = list(reversed(self.bytes))
        buckets = self._buckets_by_owner(order, owner)
        waiting, arrived, sent = 0, sum(self.bytes[name] for name in dealt[most_owned]) if sums else 0, 0
        on_the_way: deque[tuple[int, bool]] = deque()
        done: set[str] = set()
        found: dict[str, int] = {}
        for name in order:
            done.add(name)
            waiting += self.bytes[name]
            most = waiting + arrived + sum(size for size, _ in on_the_way)
            while sent < len(buckets) and done.issuperset(buckets[sent]):
                if len(on_the_way) == BUCKETS_IN_FLIGHT:
                    size, mine = on_the_way.popleft()
                    arrived += size if mine and not sums else 0
                size = sum(self.bytes[member] for member in buckets[sent])
                on_the_way.append((size, owner[buckets[sent][0]] == most_owned))
                most = max(most, waiting + arrived + sum(size for size, _ in on_the_way))
                waiting -= size
                sent += 1
            found[name] = most
        return found

    def _buckets_by_owner(self, order: list[str], owner: dict[str, int]) -> list[list[str]]:
        buckets: list[list[str]] = []
        open_buckets: dict[int, list[str]] = {}
        for name in order:
            bucket = open_buckets.get(owner[name])
            if bucket is None or sum(self.bytes[member] for member in (*bucket, name)) > BUCKET_BYTES:
                bucket = open_buckets[owner[name]] = []
                buckets.append(bucket)
            bucket.append(name)
        return buckets

    def shard(self, shards: int) -> int:
        """The first worker's part of everything, each parameter being cut along its first dimension."""
        return sum(self._shard(name, shards) for name in self.bytes)

    def shard_of_moments(self, shards: int, optimizer: str) -> int:
        """The first worker's part of the moments."""
        return sum(
            moment_bytes(optimizer, name, (self._rows(name, shards), *rest)) for name, (_, *rest) in self.shapes.items()
        )

    def shard_of_layers(self, shards: int) -> int:
        """The first worker's part of all layers."""
        return sum(self._shard(name, shards) for name in self.bytes if name.startswith("layers."))

    def shard_of_root(self, shards: int) -> int:
        """The first worker's part of what is outside of layers."""
        return self.shard(shards) - self.shard_of_layers(shards)

    def _shard(self, name: str, shards: int) -> int:
        return FP32_BYTES * self._rows(name, shards) * prod(self.shapes[name][1:])

    def _rows(self, name: str, shards: int) -> int:
        """Of a parameter that is cut along its first dimension."""
        more, fewer = self.sharers if ".experts." in name else (1, 1)
        return -(-self.shapes[name][0] // max(1, shards * more // fewer))
