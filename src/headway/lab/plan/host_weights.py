"""Memory of a step with weights in bf16 on the device, and masters, moments and gradients in host memory.

It follows `parallel/host_weights`: a gradient leaves the device as soon as the backward pass has computed it, through
`transfers.BUFFERS` pinned pieces; only what is on its way is on the device. With `zero2` gradients wait for their
bucket first, which is sent in fp32; with `zero3` those of a layer are summed in fp32 and leave as shards.
"""

from __future__ import annotations

from math import prod

from headway.config.derived.host_weights import host_types
from headway.config.optimizers import FP32_BYTES
from headway.lab.plan.host import REST_BYTES, HostPlan
from headway.lab.plan.memory_plan import Moment
from headway.lab.plan.pass_memory import Passes
from headway.lab.plan.stages import BUCKET_BYTES, BUCKETS_IN_FLIGHT

BF16_BYTES = 2
#: Elements of a piece, and pinned buffers for pieces (`parallel/host_weights/transfers.py`).
_PIECE = 2**22
_BUFFERS = 8


class HostWeightsStep(Passes):
    """The moments of a step of a stage whose sizes are in bf16."""

    def moments(self) -> list[Moment]:
        """Return every point of the step that may be the peak."""
        strategy = self.layout.strategy
        if strategy.cuts_parameters:
            return self._in_shards()
        return self._by_owner() if strategy.divides_update else self._single()

    def host(self) -> HostPlan:
        """Plan host memory: fp32 masters, their moments and summed gradients, of the worker that has most."""
        types = host_types(self.config)
        elements = self._owned // BF16_BYTES
        kept = types.kept_bytes * elements
        sums = types.summed_bytes * elements
        masters = types.master_bytes * elements
        # Read and written by an update; sums are read for the norm too, and new weights are written and sent.
        moved = 2 * (kept + sums + BF16_BYTES * elements)
        return HostPlan(
            masters, sums, kept - masters, pinned=_BUFFERS * _PIECE * FP32_BYTES, rest=REST_BYTES, updated=moved
        )

    @property
    def _owned(self) -> int:
        """Bytes of this worker's part of the weights, in bf16."""
        if self.layout.strategy.cuts_parameters:
            return self.stage.shard(self.layout.shards)
        return self.stage.largest_share(self.layout.mesh.replicas if self.layout.strategy.divides_update else 1)

    @property
    def _state(self) -> Moment:
        return Moment(weights=self.stage.all + self.stage.frozen, buffers=self.lasting)

    @property
    def _leaving(self) -> int:
        """Bytes of gradients on their way to the host at most: those of the last pieces."""
        sizes = [BF16_BYTES * prod(size) for size in self.stage.shapes.values()]
        pieces = [count for size in reversed(sizes) for count in _pieces(size)]
        return max(sum(pieces[begin : begin + _BUFFERS]) for begin in range(len(pieces)))

    def _single(self) -> list[Moment]:
        """Plan one worker. A tied table has its projection's gradient until the end of the backward pass."""
        stage = self.stage
        waits = stage.projection if stage.tied else 0
        head = 0 if stage.tied else stage.projection
        leaving = self._leaving
        base = self._state
        return [
            *self.losses(base),
            base.plus("last layer, backward", activations=self.last_layer, gradients=waits + min(head, leaving),
                      buffers=self.passing),
            base.plus("a layer, backward", activations=self.last_layer - min(self.kept), gradients=waits + leaving,
                      buffers=self.passing),
            base.plus("embedding, backward", gradients=waits + stage.table + leaving, buffers=self.sizes.gradient),
        ]  # fmt: skip

    def _by_owner(self) -> list[Moment]:
        """Plan `zero2`: gradients wait until their bucket is full, and their owner takes its sum to the host."""
        stage = self.stage
        there = stage.handed_over(self.layout.mesh.replicas, sums=True, on_host=True)
        waits = stage.projection if stage.tied else 0
        base = self._state
        bucket = max(stage.largest, min(BUCKET_BYTES, self._owned))
        return [
            *self.losses(base),
            *self.layers_handed_over(base.plus(gradients=waits), there),
            base.plus("weights sent", communication=min(stage.all, BUCKETS_IN_FLIGHT * bucket)),
        ]

    def _in_shards(self) -> list[Moment]:
        """Plan `zero3`: layers and their gradients are whole in bf16 one after the other, sums of them in fp32."""
        stage = self.stage
        layout = self.layout
        shards = layout.shards
        unit = stage.layer + stage.frozen_layer
        root = stage.root + stage.frozen_root
        gloo = int(self.gloo)
        wide = FP32_BYTES // BF16_BYTES * stage.layer
        base = Moment(weights=stage.shard(shards) + stage.frozen // shards, buffers=self.lasting)
        stays = 0 if layout.reshard_after_forward else stage.in_layers + sum(stage.frozen_layers)
        ahead = ((layout.prefetch or 1) - 1) * unit
        kept = 0 if stays else unit + ahead
        arriving = max(self.passing, gloo * kept)
        second = self.last_layer - self.kept[-1] if stage.layers > 1 else self.last_layer
        before_last = self.after_forward - self.last_norm - self.kept[-1]
        # A layer's gradients in bf16, what they are summed from in fp32, and this worker's part of the sum.
        sending = stage.layer + (1 + gloo) * wide + wide // shards
        root_sums = FP32_BYTES // BF16_BYTES * stage.root
        return [
            base.plus("root gathered", communication=(2 + gloo) * root + unit),
            base.plus("last layer gathered", activations=before_last,
                      communication=root + 2 * unit + ahead + (stays or unit)),
            base.plus("loss", activations=self.after_forward, buffers=self.loss, communication=root + unit + stays),
            base.plus("loss, backward", activations=self.after_forward, buffers=self.loss_backward,
                      communication=root + kept + stays),
            base.plus("last layer, backward", activations=self.last_layer, gradients=stage.projection,
                      buffers=arriving, communication=root + 2 * kept + stays),
            base.plus("a layer, backward", activations=second, gradients=stage.projection, buffers=arriving,
                      communication=root + 2 * kept + sending + stays),
            base.plus("first layer sent", gradients=stage.projection, buffers=self.sizes.gradient,
                      communication=root + (kept or unit) + sending),
            base.plus("root sent", gradients=stage.root, communication=root + (1 + gloo) * root_sums),
        ]  # fmt: skip


def _pieces(size: int) -> list[int]:
    """Return the bytes of each piece of a gradient of so many bytes."""
    whole, rest = divmod(size, BF16_BYTES * _PIECE)
    return [BF16_BYTES * _PIECE] * whole + ([rest] if rest else [])
