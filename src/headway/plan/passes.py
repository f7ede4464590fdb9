"""What the forward and backward pass of a stage have in memory, whatever a strategy makes of weights and gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.plan.activations import Activations, LayerSizes

if TYPE_CHECKING:
    from headway.config import Config
    from headway.plan.layout import Layout
    from headway.plan.stages import Stage


class Passes:
    """Of one stage, one micro-batch being under way."""

    def __init__(
        self, stage: Stage, layout: Layout, sizes: Activations, config: Config, on_cpu: bool, gloo: bool, lasting: int
    ) -> None:
        self.stage, self.layout, self.sizes, self.config = stage, layout, sizes, config
        self.on_cpu, self.gloo, self.lasting = on_cpu, gloo, lasting
        self.accumulates = layout.micro_batches > 1
        #: Weights that are brought together in half precision need no copies; what products save is let go of.
        #: With fp8 layers cast their weights themselves, so that those travel in fp32.
        self.half = layout.is_sharded and config.train.precision in ("bf16", "fp16")
        dense, mixture = self.kept_of(sizes.dense), self.kept_of(sizes.mixture)
        last, first = (sizes.mixture if stage.mixtures else sizes.dense), self._first
        #: Activations that each layer keeps, in the order of layers.
        self.kept = [dense] * (stage.layers - stage.mixtures) + [mixture] * stage.mixtures
        self.last_norm = sizes.last_norm if stage.projection else 0
        #: Activations at the end of the forward pass, when the backward pass begins, and that of the last and the
        #: first layer.
        self.after_forward = (1 + stage.ahead) * sum(self.kept) + self.last_norm
        self.last_layer = self.after_forward - self.last_norm + self.whole(last) - self.kept_of(last)
        self.first_layer = stage.ahead * sum(self.kept) + self.whole(first)
        #: Comes and goes in a layer's backward pass: also the gradient of one of its matrices, before it is added.
        again = 2 if stage.mixtures else 1  # each expert's gradient, before they are put together
        matrices = {"down": stage.down, "gate_up": stage.gate_up}
        if self.half:
            matrices = {name: count // 2 for name, count in matrices.items()}
        backward = max(last.backward, first.backward) + max(last.rounding, first.rounding)
        self.passing = sizes.gradient + max(backward + again * matrices["down"], again * matrices["gate_up"])
        self.loss = sizes.loss_forward if stage.projection else 0
        self.loss_backward = sizes.loss_backward if stage.projection else 0
        self.copies_of_lanes = max(1, (layout.lanes - 1).bit_length()) if layout.elastic else 0

    @property
    def _first(self) -> LayerSizes:
        return self.sizes.mixture if self.stage.mixtures == self.stage.layers else self.sizes.dense

    def kept_of(self, layer: LayerSizes) -> int:
        """What a layer keeps until its backward pass."""
        kept = {"none": self.whole(layer), "selective": layer.selected, "full": self.sizes.layer_input}
        return kept[self.layout.checkpointing]

    def whole(self, layer: LayerSizes) -> int:
        """What it has when its backward pass begins."""
        return layer.saved + (0 if self.half else layer.casts)

    def moments_of(self, count: int) -> int:
        """Moments of an optimizer that keeps so many bytes of them; host memory may have them."""
        return 0 if self.config.optimizer.offload and not self.on_cpu else count
