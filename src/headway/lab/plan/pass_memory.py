"""Memory of the forward and backward pass of a stage, independent of how a strategy stores weights and gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.lab.plan.activations import Activations, LayerSizes

if TYPE_CHECKING:
    from headway.config import Config
    from headway.lab.plan.layout import Layout
    from headway.lab.plan.stages import Stage


class Passes:
    """The passes of one stage with one micro-batch in progress."""

    def __init__(
        self,
        stage: Stage,
        layout: Layout,
        sizes: Activations,
        config: Config,
        *,
        on_cpu: bool,
        gloo: bool,
        lasting: int,
    ) -> None:
        self.stage = stage
        self.layout = layout
        self.sizes = sizes
        self.config = config
        self.on_cpu = on_cpu
        self.gloo = gloo
        self.lasting = lasting
        self.accumulates = layout.micro_batches > 1
        self.sums_each_micro_batch = config.parallel.reduces_each_micro_batch(stage.all)
        #: Weights gathered in half precision need no copies, and products save nothing that outlives them.
        #: fp8 layers cast their weights themselves, so those travel in fp32.
        in_half = config.train.precision in ("bf16", "fp16")
        self.half = layout.strategy.cuts_parameters and stage.gathers_half and in_half
        dense = self.kept_of(sizes.dense)
        mixture = self.kept_of(sizes.mixture)
        last = sizes.mixture if stage.mixtures else sizes.dense
        first = self._first
        #: Activations that each layer keeps, in the order of layers.
        self.kept = [dense] * (stage.layers - stage.mixtures) + [mixture] * stage.mixtures
        self.last_norm = sizes.last_norm if stage.has_loss else 0
        #: Activations at the end of the forward pass, and when the backward pass of the last and of the first layer
        #: begins.
        self.after_forward = (1 + stage.ahead) * sum(self.kept) + self.last_norm
        self.last_layer = self.after_forward - self.last_norm + self.whole(last) - self.kept_of(last)
        self.first_layer = stage.ahead * sum(self.kept) + self.whole(first)
        #: Temporaries of a layer's backward pass, including the gradient of one matrix before it is accumulated.
        again = 2 if stage.mixtures else 1  # gradients of single experts before they are stacked
        matrices = {"down": stage.down, "gate_up": stage.gate_up}
        if self.half:
            matrices = {name: count // 2 for name, count in matrices.items()}
        backward = max(last.backward, first.backward) + max(last.rounding, first.rounding)
        self.passing = sizes.gradient + max(backward + again * matrices["down"], again * matrices["gate_up"])
        self.loss = sizes.loss_forward if stage.has_loss else 0
        self.loss_backward = sizes.loss_backward if stage.has_loss else 0
        self.copies_of_lanes = max(1, (layout.lanes - 1).bit_length()) if layout.elastic else 0

    @property
    def _first(self) -> LayerSizes:
        return self.sizes.mixture if self.stage.mixtures == self.stage.layers else self.sizes.dense

    def kept_of(self, layer: LayerSizes) -> int:
        """Return the bytes that a layer keeps until its backward pass."""
        kept = {"none": self.whole(layer), "selective": layer.selected, "full": self.sizes.layer_input}
        # With `offload` the input of a layer is in host memory.
        kept["offload"] = self.sizes.layer_input if self.on_cpu else 0
        return kept[self.layout.checkpointing]

    def whole(self, layer: LayerSizes) -> int:
        """Return the bytes of a layer when its backward pass begins."""
        return layer.saved + (0 if self.half else layer.casts)

    def moments_of(self, count: int) -> int:
        """Return the bytes of moments on the device; with offload they are in host memory."""
        return 0 if self.config.optimizer.offload and not self.on_cpu else count
