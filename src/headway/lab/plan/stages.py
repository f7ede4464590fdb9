"""Weights, gradients and moments of the part of a model that one worker computes, in bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from headway.config import Config, ModelConfig
from headway.config.optimizers import FP32_BYTES, find_optimizer
from headway.core.eight_bit import block_size
from headway.lab.plan.layout import Layout
from headway.models.facts import parameter_shapes, part_costs
from headway.parallel.stages import plan_stages

#: Size of a bucket of gradients or weights, unless one parameter is larger, and buckets in flight
#: (`parallel/buckets.py`).
BUCKET_BYTES = 25 * 2**20
BUCKETS_IN_FLIGHT = 2


def pipeline_stages(config: Config, model: ModelConfig, layout: Layout) -> list[Stage]:
    """Return the whole model as one stage, or the part of each worker of a pipeline.

    Args:
        config: Config of the run; `train.sequence_length` and the pipeline settings matter.
        model: A complete config.
        layout: How the step is split over workers.
    """
    workers = layout.mesh.pp
    whole = dict(parameter_shapes(model))
    for name, size in whole.items():
        # Tensor-parallel workers share matrices, expert-parallel workers share experts; vectors are whole.
        sharers = layout.mesh.ep if ".experts." in name else layout.mesh.tp
        whole[name] = size if len(size) == 1 else (size[0] // sharers, *size[1:])
    if workers == 1:
        return [Stage(whole, tied=model.tie_embeddings, sharers=(layout.mesh.tp, layout.mesh.ep))]
    costs = part_costs(model, config.train.sequence_length)
    stages = plan_stages(config.parallel, config.train, costs.layers, costs.embedding, costs.head)
    each = len(stages) // workers
    return [
        _stage(config, layout, whole, place=place, each=each, mine=stages[place::workers]) for place in range(workers)
    ]


def _stage(
    config: Config, layout: Layout, whole: dict[str, tuple[int, ...]], *, place: int, each: int, mine: Sequence[range]
) -> Stage:
    """Build the part of the worker at one place of a pipeline; layers that are alike get the names of the first."""
    workers = layout.mesh.pp
    micro_batches = layout.micro_batches // layout.lanes
    first = place == 0
    last = place == workers - 1
    layers = sum(len(stage) for stage in mine)
    # Those of a pattern differ, so that their own ones count.
    chosen = {layer for stage in mine for layer in stage} if config.model.layer_pattern else set(range(layers))
    table = whole["embedding.weight"]
    shapes = {"embedding.weight": table} if first else {}
    shapes |= {name: size for name, size in whole.items() if name.startswith("layers.") and _index(name) in chosen}
    if last:
        shapes |= {name: size for name, size in whole.items() if name.startswith("norm.")} | {"head.weight": table}
    # Forward passes before the first backward pass (Narayanan et al. 2021, section 2.2; interleaved as PyTorch does).
    passes = {
        "gpipe": micro_batches,
        "1f1b": workers - place,
        "interleaved": (each - 1) * workers + 2 * (workers - place) - 1,
    }[config.parallel.pipeline_schedule]
    ahead = -(-min(passes, micro_batches * each) // each) - 1
    # Buffers for the next activation and the next gradient; those of micro-batches under way are inputs of their stage.
    received = 2 * each - first - last
    return Stage(shapes, ahead=ahead, received=received, sharers=(layout.mesh.tp, layout.mesh.ep))


def _index(name: str) -> int:
    return int(name.split(".")[1])


class Weight(NamedTuple):
    """A parameter as a worker stores it, trained or not."""

    name: str
    elements: int
    element_bytes: int = FP32_BYTES
    trained: bool = True


@dataclass(frozen=True)
class Stage:
    """Consecutive layers with their part of embedding and projection, all sizes in bytes, in the type of weights."""

    shapes: dict[str, tuple[int, ...]]
    """Shapes of its parameters, in the order of the model."""
    ahead: int = 0
    """Micro-batches whose activations are kept in addition to those of the current one."""
    received: int = 0
    """Receive buffers, each for the residual stream of one micro-batch."""
    tied: bool = False
    """Whether the embedding table is also the projection."""
    sharers: tuple[int, int] = (1, 1)
    """As a fraction, how many more workers shard an expert than any other weight: `tp / ep`. The workers with the same
    experts are among all that have different tokens (`MeshShape.expert_replicas`): `ep` times fewer, but including the
    tensor-parallel workers, which share other weights."""
    frozen_root: int = 0
    """Bytes of weights outside of layers that are not trained, as they are stored."""
    frozen_layers: tuple[int, ...] = ()
    """Bytes of each layer's weights that are not trained; empty if all are."""
    gathers_half: bool = True
    """Whether sharded matrices are gathered in half precision where products are (`HasProductParameters`)."""
    element_bytes: int = FP32_BYTES
    """Bytes of an element of trained weights on the device (`train.weights`)."""

    @cached_property
    def bytes(self) -> dict[str, int]:
        """Bytes of each parameter."""
        return {name: self.element_bytes * prod(size) for name, size in self.shapes.items()}

    @property
    def weights(self) -> tuple[Weight, ...]:
        """All parameters in the order of the model, frozen ones included."""
        return tuple(Weight(name, prod(size)) for name, size in self.shapes.items())

    @cached_property
    def layers(self) -> int:
        """Number of layers."""
        return len(self._layer_bytes)

    @cached_property
    def mixtures(self) -> int:
        """Number of layers with experts, which are the last ones."""
        return sum(name.endswith("router.weight") for name in self.shapes)

    @cached_property
    def all(self) -> int:
        """Bytes of all parameters."""
        return sum(self.bytes.values())

    @property
    def frozen(self) -> int:
        """Bytes of all weights that are not trained."""
        return self.frozen_root + sum(self.frozen_layers)

    @property
    def frozen_layer(self) -> int:
        """Bytes of weights that are not trained, in the layer with most of them."""
        return max(self.frozen_layers, default=0)

    @cached_property
    def _layer_bytes(self) -> list[int]:
        sizes: dict[int, int] = {}
        for name, count in self.bytes.items():
            if name.startswith("layers."):
                sizes[_index(name)] = sizes.get(_index(name), 0) + count
        return list(sizes.values())

    @property
    def layer(self) -> int:
        """Bytes of the largest layer."""
        return max(self._layer_bytes, default=0)

    @property
    def in_layers(self) -> int:
        """Bytes of all layers."""
        return sum(self._layer_bytes)

    @cached_property
    def norms(self) -> int:
        """Bytes in layers that are used in fp32 at any precision of products (`Decoder.product_parameters`)."""
        return sum(
            count
            for name, count in self.bytes.items()
            if name.startswith("layers.") and (len(self.shapes[name]) == 1 or name.endswith("router.weight"))
        )

    @property
    def root(self) -> int:
        """Bytes outside of layers."""
        return self.all - self.in_layers

    @property
    def table(self) -> int:
        """Bytes of the embedding table, 0 without one."""
        return self.bytes.get("embedding.weight", 0)

    @property
    def own_table(self) -> int:
        """Bytes of the embedding table unless it is also the projection."""
        return 0 if self.tied else self.table

    @property
    def projection(self) -> int:
        """Bytes of the vocabulary projection, 0 without one."""
        return self.table if self.tied else self.bytes.get("head.weight", 0)

    @property
    def has_loss(self) -> bool:
        """Whether it computes projection and loss."""
        return self.projection > 0

    @property
    def down(self) -> int:
        """Bytes of the largest second matrix of a feed-forward or Mamba-2 layer."""
        return self._largest_of("feed_forward.down.weight", "experts.down", "mamba.output.weight")

    @property
    def gate_up(self) -> int:
        """Bytes of the largest first matrix of a feed-forward or Mamba-2 layer."""
        first = ("gate_up_groups.weight", "feed_forward.up.weight")
        return self._largest_of(*first, "experts.gate_up", "mamba.input.weight")

    def _largest_of(self, *endings: str) -> int:
        return max((count for name, count in self.bytes.items() if name.endswith(endings)), default=0)

    @property
    def largest(self) -> int:
        """Bytes of the largest parameter."""
        return max(self.bytes.values())

    @property
    def largest_hidden(self) -> int:
        """Bytes of the largest matrix in layers."""
        return max(count for name, count in self.bytes.items() if name.startswith("layers."))

    @property
    def largest_in_8_bits(self) -> int:
        """Bytes of the largest parameter whose moments fit into blocks of 8-bit values; 0 without one."""
        return max((self.bytes[name] for name, size in self.shapes.items() if block_size(size)), default=0)

    def owners(self, workers: int) -> list[list[str]]:
        """Return the parameters of each worker, as `parallel/ownership.py` assigns them."""
        load = [0] * workers
        names: list[list[str]] = [[] for _ in range(workers)]
        for name in sorted(self.bytes, key=lambda name: -self.bytes[name]):
            least = min(range(workers), key=lambda rank: (load[rank], rank))
            names[least].append(name)
            load[least] += self.bytes[name]
        return names

    def largest_share(self, workers: int) -> int:
        """Return the bytes of parameters of the worker that owns most."""
        return max(sum(self.bytes[name] for name in names) for names in self.owners(workers))

    def largest_moments(self, workers: int, optimizer: str) -> int:
        """Return the bytes of moments of the worker that has most."""
        spec = find_optimizer(optimizer)
        moments = {name: spec.moment_bytes(name, size) for name, size in self.shapes.items()}
        return max(sum(moments[name] for name in names) for names in self.owners(workers))

    def handed_over(self, workers: int, *, sums: bool, on_host: bool = False) -> dict[str, int]:
        """Simulate the memory of gradients that go to their owners by bucket (`parallel/zero.py`).

        Covers the worker that owns most: gradients that wait, buckets in flight, and sums stored here.

        Args:
            sums: Whether sums of all owned gradients exist from earlier micro-batches.
            on_host: Whether sums are in host memory; a bucket is then sent in fp32.

        Returns:
            For each parameter, in the order of the backward pass, the peak until the next one has its gradient.
        """
        dealt = self.owners(workers)
        owner = {name: rank for rank, names in enumerate(dealt) for name in names}
        most_owned = max(range(workers), key=lambda rank: sum(self.bytes[name] for name in dealt[rank]))
        order = list(reversed(self.bytes))
        buckets = self._buckets_by_owner(order, owner)
        waiting = 0
        arrived = sum(self.bytes[name] for name in dealt[most_owned]) if sums and not on_host else 0
        larger = FP32_BYTES // self.element_bytes if on_host else 1
        sent = 0
        in_flight: deque[tuple[int, bool]] = deque()
        done: set[str] = set()
        found: dict[str, int] = {}
        for name in order:
            done.add(name)
            waiting += self.bytes[name]
            most = waiting + arrived + sum(size for size, _ in in_flight)
            while sent < len(buckets) and done.issuperset(buckets[sent]):
                if len(in_flight) == BUCKETS_IN_FLIGHT:
                    size, mine = in_flight.popleft()
                    arrived += size if mine and not sums and not on_host else 0
                size = sum(self.bytes[member] for member in buckets[sent])
                in_flight.append((larger * size, owner[buckets[sent][0]] == most_owned))
                packed = size if on_host else 0
                most = max(most, waiting + packed + arrived + sum(size for size, _ in in_flight))
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
        """Return the first worker's part of all parameters, each sharded along its first dimension."""
        return sum(self._shard(name, shards) for name in self.bytes)

    def shard_of_moments(self, shards: int, optimizer: str) -> int:
        """Return the first worker's part of the moments."""
        return sum(
            find_optimizer(optimizer).moment_bytes(name, (self._rows(name, shards), *rest))
            for name, (_, *rest) in self.shapes.items()
        )

    def shard_of_layers(self, shards: int) -> int:
        """Return the first worker's part of all layers."""
        return sum(self._shard(name, shards) for name in self.bytes if name.startswith("layers."))

    def shard_of_root(self, shards: int) -> int:
        """Return the first worker's part of the parameters outside of layers."""
        return self.shard(shards) - self.shard_of_layers(shards)

    def _shard(self, name: str, shards: int) -> int:
        return self.element_bytes * self._rows(name, shards) * prod(self.shapes[name][1:])

    def _rows(self, name: str, shards: int) -> int:
        """Return the rows of one shard of a parameter."""
        more, fewer = self.sharers if ".experts." in name else (1, 1)
        return -(-self.shapes[name][0] // max(1, shards * more // fewer))
