"""Bytes on the worker that has most, by part, at the moments of a step when there can be most of them.

Everything is arithmetic over the shape, the strategy and the mesh; `docs/plan.md` says how it was checked. Not counted
are what the device's driver and the communication library take for themselves, and what an allocator loses between
blocks: `fit.USABLE_SHARE` leaves room for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from headway.models.shape import Shape
from headway.plan.activations import Activations
from headway.plan.stages import FP32_BYTES, Stage, pipeline_stages

if TYPE_CHECKING:
    from headway.config import Config, ModelConfig
    from headway.plan.layout import Layout

#: Gradients travel in pieces of at most this many bytes, or one parameter (`parallel/buckets.py`).
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Moment:
    """What is in memory at one point of a step, in bytes."""

    name: str
    weights: int = 0
    """This worker's own."""
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    """What the backward pass needs, copies of weights that autocast made included."""
    buffers: int = 0
    """What comes and goes: the loss and its chunk of logits, temporaries, rotary tables, batches, sums of lanes."""
    communication: int = 0
    """Weights brought together, and gradients on their way."""

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "name"}

    @property
    def total(self) -> int:
        """All parts."""
        return sum(self.parts.values())

    def plus(self, name: str, **more: int) -> Moment:
        """The same with more of some parts."""
        return Moment(name, **{part: count + more.get(part, 0) for part, count in self.parts.items()})


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of the worker that has most."""

    moments: Sequence[Moment]

    @property
    def peak(self) -> Moment:
        """When there is most."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def peak_bytes(self) -> int:
        """The most there is at a time."""
        return self.peak.total


def plan_memory(
    config: Config, model: ModelConfig, layout: Layout, device: str, gloo: bool | None = None
) -> MemoryPlan:
    """Memory of a step.

    Args:
        config: Resolved; `train` and `optimizer` are read.
        model: Complete, that is with `vocab_size`.
        layout: How the step is spread.
        device: "cpu" or "cuda".
        gloo: Whether collectives go through gloo, which needs buffers of its own; on the CPU when not given.
    """
    gloo = device == "cpu" if gloo is None else gloo
    length = config.train.sequence_length // layout.mesh.cp
    sizes = Activations.of(model, layout.micro_batch, length, config.train.precision, device, layout.mesh.tp)
    # Ids and targets in int64. On the CPU the batches of a whole step wait where they are computed.
    batches = 16 * layout.micro_batch * length * (layout.micro_batches if device == "cpu" else 1)
    rotary = 2 * model.max_sequence_length * Shape.of(model).head_dim * FP32_BYTES
    moments: list[Moment] = []
    for stage in pipeline_stages(config, model, layout):
        lasting = batches + rotary + stage.received * sizes.gradient
        step = _Step(stage, layout, sizes, config.optimizer.name == "muon", device == "cpu", gloo, lasting)
        moments += step.sharded() if layout.is_sharded else step.replicated()
    return MemoryPlan(moments)


class _Step:
    """The moments of one stage's step."""

    def __init__(
        self, stage: Stage, layout: Layout, sizes: Activations, muon: bool, on_cpu: bool, gloo: bool, lasting: int
    ) -> None:
        self.stage, self.layout, self.sizes, self.muon = stage, layout, sizes, muon
        self.on_cpu, self.gloo, self.lasting = on_cpu, gloo, lasting
        self.accumulates = layout.micro_batches > 1
        full, layers = layout.checkpointing == "full", stage.layers
        casts = layers * sizes.layer_casts
        self.kept = sizes.layer_input if full else sizes.layer + sizes.layer_casts
        waiting = stage.ahead * layers * self.kept
        self.last_norm = sizes.last_norm if stage.projection else 0
        #: Activations at the end of the forward pass. Copies of weights stay until then even if not needed any more.
        self.after_forward = waiting + layers * self.kept + (casts if full else 0) + self.last_norm
        #: When the backward pass begins.
        self.backward = self.after_forward - (casts if full else 0)
        again = sizes.layer - sizes.layer_input + sizes.layer_casts if full else 0
        #: When that of the last and of the first layer begins.
        self.last_layer = self.backward - self.last_norm + again
        self.first_layer = self.last_layer - (layers - 1) * self.kept
        #: Comes and goes in a layer's backward pass: also the gradient of one of its matrices, before it is added.
        self.passing = sizes.gradient + max(sizes.layer_backward + stage.down, stage.gate_up)
        self.loss = sizes.loss_forward if stage.projection else 0
        self.loss_backward = sizes.loss_backward if stage.projection else 0
        self.copies_of_lanes = max(1, (layout.lanes - 1).bit_length()) if layout.elastic else 0

    # Weights whole on every worker ------------------------------------------------------------------------------------

    def replicated(self) -> list[Moment]:
        """`single`, `ddp`, `zero1` and `zero2`."""
        stage, layout = self.stage, self.layout
        owners = layout.mesh.data if layout.strategy in ("zero1", "zero2") else 1
        state = Moment("", weights=stage.all, optimizer=stage.largest_moments(owners, self.muon), buffers=self.lasting)
        if layout.strategy == "zero2" and not layout.elastic:
            # Every micro-batch's gradients wait, whole, until its backward pass has ended; then the owner's are added.
            sums = stage.largest_share(owners) if self.accumulates else 0
            bucket = max(stage.largest, min(BUCKET_BYTES, stage.largest_share(owners)))
            moments = self._passes(state.plus("", gradients=sums), growing=True)
            moments.append(state.plus("gradients sent", gradients=sums, communication=stage.all + bucket))
            gradients = stage.largest_share(owners)
        else:
            in_buckets = layout.strategy != "single" or layout.elastic
            growing = not (in_buckets or self.accumulates)
            # With one lane there is nothing to keep while it is computed.
            lanes = self.copies_of_lanes * stage.all if layout.lanes > 1 else 0
            moments = self._passes(state.plus("", gradients=0 if growing else stage.all, buffers=lanes), growing)
            if layout.elastic:
                # A half of a bucket arrives from the nearest worker (`parallel/tree.py`).
                parts = stage.largest // 2 if layout.mesh.data > 1 else 0
                lanes = self.copies_of_lanes * stage.all
                moments.append(state.plus("sum of lanes", gradients=stage.all, buffers=lanes, communication=parts))
            gradients = stage.all
        moments.append(state.plus("update", gradients=gradients, buffers=self._update(stage.largest)))
        if owners > 1:
            moments.append(state.plus("weights sent", gradients=gradients, communication=stage.all))
        return moments

    def _passes(self, base: Moment, growing: bool) -> list[Moment]:
        """Forward and backward pass. Gradients grow as they are computed, or are added to those in `base`."""
        stage = self.stage
        head, most = (stage.projection, stage.all - stage.own_table - stage.layer) if growing else (0, 0)
        # An embedding's gradient is as large as its table, however few of its rows were used.
        table = 0 if growing and stage.own_table else stage.table
        return [
            base.plus("loss", activations=self.after_forward, buffers=self.loss),
            base.plus("loss, backward", activations=self.backward, buffers=self.loss_backward),
            base.plus("last layer, backward", activations=self.last_layer, gradients=head, buffers=self.passing),
            base.plus("first layer, backward", activations=self.first_layer, gradients=most, buffers=self.passing),
            base.plus("embedding, backward", gradients=stage.all if growing else 0, buffers=table),
        ]

    def _update(self, largest: int) -> int:
        """Temporaries of the optimizer; fused AdamW has none."""
        if self.muon:
            # The update in fp32, three matrices in bf16 (Newton-Schulz): its argument, the last step's and the next.
            return self.stage.largest_hidden * (FP32_BYTES + 3 * 2) // FP32_BYTES
        # On the CPU an elastic update is one operation after the other: root, denominator and quotient.
        return 2 * largest if self.layout.elastic and self.on_cpu else 0

    # Weights cut between workers --------------------------------------------------------------------------------------

    def sharded(self) -> list[Moment]:
        """`zero3` and `hsdp`: a layer's weights, and those outside of layers, are brought together as units.

        A unit arrives in one flat buffer and is copied out of it; the buffer lives until the next unit is copied out.
        Weights outside of layers (embedding, projection) are there from the beginning to the end of either pass, and
        their gradients until the end of the backward pass. gloo needs one buffer more where a unit arrives or leaves;
        the sum in the fixed tree needs the lane's copy, the parts in the tree's order, and half of them that arrive.
        """
        stage, layout, shards = self.stage, self.layout, self.layout.mesh.dp_shard
        unit, root, layers = stage.layer, stage.root, stage.layers
        gloo = int(self.gloo)
        leaving = (2.5 if layout.lanes == 1 else 2) if layout.elastic else gloo
        state = Moment(
            "",
            weights=stage.shard(shards),
            optimizer=stage.shard_of_moments(shards, self.muon),
            buffers=self.lasting,
            # Between micro-batches gradients add up whole; they are sent in the last one only, of a lane when elastic.
            gradients=stage.all if layout.micro_batches > (layout.lanes if layout.elastic else 1) else 0,
        )
        if layout.elastic and layout.lanes > 1:
            state = state.plus("", buffers=self.copies_of_lanes * stage.all, gradients=stage.shard(shards))
        # What the lane before sent of the root is let go of when this one sends.
        held = root if layout.elastic and layout.lanes > 1 else 0
        growing = not state.gradients
        stays = 0 if layout.reshard_after_forward else layers * unit
        kept = 0 if stays else unit
        head = stage.projection if growing else 0
        grown, done = (unit, stage.shard_of_layer(shards)) if growing else (0, 0)
        before_last = self.after_forward - self.last_norm - self.kept
        second = self.last_layer - self.kept if layers > 1 else self.last_layer
        arriving = max(self.passing, gloo * kept)
        moments = [
            state.plus("last layer gathered", activations=before_last, communication=root + 2 * unit + (stays or unit)),
            state.plus("loss", activations=self.after_forward, buffers=self.loss,
                       communication=root + unit + held + stays),
            state.plus("root gathered", activations=self.backward, buffers=self.loss_backward // 2,
                       communication=2 * root + held + stays),
            state.plus("loss, backward", activations=self.backward, buffers=self.loss_backward,
                       communication=root + kept + held + stays),
            state.plus("last layer, backward", activations=self.last_layer, gradients=head, buffers=arriving,
                       communication=root + 2 * kept + held + stays),
            # From now on the gradients sent last are still in their buffer.
            state.plus("next layer, backward", activations=second, gradients=head + done, buffers=arriving,
                       communication=root + 2 * kept + unit + stays),
            state.plus("first layer, backward", gradients=head + grown + layers * done,
                       communication=root + (kept or unit) + int((1 + leaving) * unit), buffers=self.sizes.gradient),
            state.plus("root's gradients", gradients=(root if growing else 0) + layers * done,
                       communication=root + unit, buffers=0 if growing else stage.table),
            state.plus("root sent", gradients=layers * done + (stage.table if growing else 0),
                       communication=int((1 + leaving) * root) + stage.shard_of_root(shards)),
        ]  # fmt: skip
        update = Moment("update", weights=state.weights, optimizer=state.optimizer, gradients=stage.shard(shards))
        return [*moments, update.plus("update", buffers=self.lasting + self._update(stage.largest // shards))]
