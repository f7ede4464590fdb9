"""Weights, gradients and moments of the part of a model that one worker computes, in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from headway.models.facts import parameter_shapes
from headway.models.shape import Shape

if TYPE_CHECKING:
    from headway.config import ModelConfig
    from headway.plan.layout import Layout

#: Weights and gradients are kept in fp32 whatever the precision of products.
FP32_BYTES = 4
_ADAMW_MOMENTS, _MUON_MOMENTS = 2, 1


def pipeline_stages(model: ModelConfig, layout: Layout) -> list[Stage]:
    """The whole model, or the first and the last stage of a pipeline; those in between hold less."""
    stages, tensor = layout.mesh.pp, layout.mesh.tp
    whole = {name: _cut(size, tensor) for name, size in parameter_shapes(model).items()}
    if stages == 1:
        return [Stage(whole, tied=model.tie_embeddings)]
    layers = -(-Shape.of(model).layers // stages)
    inside = {name: size for name, size in whole.items() if name.startswith("layers.") and _index(name) < layers}
    table = whole["embedding.weight"]
    # One forward, one backward (Narayanan et al. 2021, section 2.2): the first stage is ahead of all the others.
    ahead = min(stages, layout.micro_batches) - 1
    return [
        Stage({"embedding.weight": table, **inside}, ahead=ahead),
        Stage({**inside, "norm.weight": whole["norm.weight"], "head.weight": table}),
    ]


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
