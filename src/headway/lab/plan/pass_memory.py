"""Memory of the forward and backward pass of a stage, independent of how a strategy stores weights and gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from headway.config import Config
from headway.lab.plan.activations import Activations, LayerSizes
from headway.lab.plan.host import HostPlan
from headway.lab.plan.layout import Layout
from headway.lab.plan.memory_plan import Moment
from headway.lab.plan.stages import Stage


@dataclass
class Passes(ABC):
    """The passes of one stage with one micro-batch in progress, and the step around them."""

    stage: Stage
    layout: Layout
    sizes: Activations
    config: Config
    on_cpu: bool
    gloo: bool
    """Whether collectives need buffers of their own."""
    lasting: int
    """Bytes that are there all along."""

    def __post_init__(self) -> None:
        stage = self.stage
        layout = self.layout
        sizes = self.sizes
        self.accumulates = layout.micro_batches > 1
        self.sums_each_micro_batch = self.config.parallel.reduces_each_micro_batch(stage.all)
        #: Weights gathered in half precision need no copies, and products save nothing that outlives them.
        #: fp8 layers cast their weights themselves, so those travel in fp32.
        in_half = self.config.train.precision in ("bf16", "fp16")
        self.half = layout.strategy.cuts_parameters and stage.gathers_half and in_half
        dense = self.kept_of(sizes.dense)
        mixture = self.kept_of(sizes.mixture)
        last = sizes.mixture if stage.mixtures else sizes.dense
        first = sizes.mixture if stage.mixtures == stage.layers else sizes.dense
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

    @abstractmethod
    def moments(self) -> list[Moment]:
        """Return every point of the step that may be the peak."""

    @abstractmethod
    def host(self) -> HostPlan:
        """Plan host memory, where it is not the device's."""

    def losses(self, base: Moment) -> list[Moment]:
        """Return the two points of the loss, in a step that has what `base` has."""
        return [
            base.plus("loss", activations=self.after_forward, buffers=self.loss),
            base.plus("loss, backward", activations=self.after_forward, buffers=self.loss_backward),
        ]

    def layers_handed_over(self, base: Moment, there: Mapping[str, int]) -> list[Moment]:
        """Return the backward passes of layers whose gradients leave by bucket, with those of the embedding.

        Args:
            base: What the step has all along.
            there: As `Stage.handed_over`.
        """
        stage = self.stage
        moments = []
        for index in reversed(range(stage.layers)):
            here = gradients_of(there, index)
            below = stage.ahead * sum(self.kept) + sum(self.kept[:index])
            size = self.sizes.mixture if index >= stage.layers - stage.mixtures else self.sizes.dense
            # The layer begins with all its activations and ends with all its gradients.
            moments += [
                base.plus("a layer, backward", activations=below + self.whole(size), buffers=self.passing,
                          gradients=here[0]),
                base.plus("gradients sent", activations=below, buffers=self.sizes.gradient, gradients=max(here)),
            ]  # fmt: skip
        return [*moments, base.plus("gradients sent", gradients=there.get("embedding.weight", 0))]

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


def gradients_of(there: Mapping[str, int], layer: int) -> list[int]:
    """Return the amounts for a layer among those by parameter; 0 for one without any."""
    return [count for name, count in there.items() if name.startswith(f"layers.{layer}.")] or [0]
