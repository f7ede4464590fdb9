"""Weights, gradients and moments of the part of a model that one worker computes, in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from headway.models.facts import parameter_shapes, part_costs
from headway.parallel.stages import plan_stages

if TYPE_CHECKING:
    from headway.config import Config, ModelConfig
    from headway.plan.layout import Layout

#: Weights and gradients are kept in fp32 whatever the precision of products.
FP32_BYTES = 4
_ADAMW_MOMENTS, _MUON_MOMENTS = 2, 1


def pipeline_stages(config: Config, model: ModelConfig, layout: Layout) -> list[Stage]:
    """The whole model, or what each worker of a pipeline has of it.

    Args:
        config: Of the run; `train.sequence_length` and the pipeline's settings are read.
        model: Complete.
        layout: How the step is spread.
    """
    workers, tensor = layout.mesh.pp, layout.mesh.tp
    whole = {name: _cut(size, tensor) for name, size in parameter_shapes(model).items()}
    if workers == 1:
        return [Stage(whole, tied=model.tie_embeddings)]
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
    return Stage(shapes, ahead=ahead, received=received)


def _cut(size: tuple[int, ...], tensor: int) -> tuple[int, ...]:
    """Every matrix is cut between tensor-parallel workers, vectors are not."""
    return size if len(size) == 1 else (size[0] // tensor, *size[1:])


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

    @cached_property
    def bytes(self) -> dict[str, int]:
        """By parameter."""
        return {name: FP32_BYTES * prod(size) for name, size in self.shapes.items()}

    @cached_property
    def layers(self) -> int:
        """How many."""
        return len({_index(name) for name in self.shapes if name.startswith("layers.")})

    @cached_property
    def all(self) -> int:
        """All parameters."""
        return sum(self.bytes.values())

    @property
    def layer(self) -> int:
        """One layer."""
        return sum(count for name, count in self.bytes.items() if name.startswith("layers.0."))

    @property
    def root(self) -> int:
        """What is outside of layers."""
        return self.all - self.layers * self.layer

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
        """The second matrix of a feed-forward layer."""
        return self.bytes["layers.0.feed_forward.down.weight"]

    @property
    def gate_up(self) -> int:
        """The first one."""
        return self.bytes["layers.0.feed_forward.gate_up_groups.weight"]

    @property
    def largest(self) -> int:
        """The largest parameter."""
        return max(self.bytes.values())

    @property
    def largest_hidden(self) -> int:
        """The largest matrix between layers."""
        return max(count for name, count in self.bytes.items() if name.startswith("layers."))

    def moments(self, name: str, muon: bool) -> int:
        """The optimizer's moments of a parameter: two, or Muon's one of a matrix between layers."""
        hidden = name.startswith("layers.") and len(self.shapes[name]) == 2
        return self.bytes[name] * (_MUON_MOMENTS if muon and hidden else _ADAMW_MOMENTS)

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

    def largest_moments(self, workers: int, muon: bool) -> int:
        """Moments of the worker that has most."""
        return max(sum(self.moments(name, muon) for name in names) for names in self.owners(workers))

    def shard(self, shards: int) -> int:
        """The first worker's part of everything, each parameter being cut along its first dimension."""
        return sum(self._shard(name, shards) for name in self.bytes)

    def shard_of_moments(self, shards: int, muon: bool) -> int:
        """The first worker's part of the moments."""
        parts = {name: self._shard(name, shards) for name in self.bytes}
        return sum(part * self.moments(name, muon) // self.bytes[name] for name, part in parts.items())

    def shard_of_layer(self, shards: int) -> int:
        """The first worker's part of one layer."""
        return sum(self._shard(name, shards) for name in self.bytes if name.startswith("layers.0."))

    def shard_of_root(self, shards: int) -> int:
        """The first worker's part of what is outside of layers."""
        return self.shard(shards) - self.layers * self.shard_of_layer(shards)

    def _shard(self, name: str, shards: int) -> int:
        rows, *rest = self.shapes[name]
        return FP32_BYTES * -(-rows // shards) * prod(rest)
