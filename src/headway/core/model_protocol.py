"""What a model may declare: one protocol for each way in which training can treat it specially.

Any `torch.nn.Module` trains if its state consists of tensors, at least one parameter is trainable, and it draws random
numbers from PyTorch's generators only. A model that declares nothing trains on one worker, or on several with copies of
it. A model declares more by having the methods of a protocol; it derives from nothing. Whoever needs a declaration asks
`isinstance(model, Protocol)`. A wrapper around a model declares its own methods, not those of the wrapped one.
`headway.models.conformance` checks that a model keeps what it declares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from headway.core.types import Fusion

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor.parallel.style import ParallelStyle


@runtime_checkable
class Shardable(Protocol):
    """Declares which of its modules `zero3` gathers one at a time.

    Without it these are the children of the outermost module lists.
    """

    def wrap_units(self) -> Sequence[nn.Module]:
        """Return modules of the model that share no parameter with each other.

        What they leave over stays gathered during both passes.
        """
        ...


@runtime_checkable
class HasProductParameters(Protocol):
    """Declares which parameters autocast casts at every use, so that they may travel in half precision."""

    def product_parameters(self) -> Sequence[nn.Parameter]:
        """Return the parameters that are used in matrix products only."""
        ...


@runtime_checkable
class MakesBuffers(Protocol):
    """Can be built on the meta device, where it has no values."""

    def make_buffers(self) -> None:
        """Compute the buffers that are not part of the state, on the device of the weights."""
        ...


@runtime_checkable
class TensorParallelizable(Protocol):
    """Declares how workers share its matrices."""

    def tensor_plan(self, workers: int) -> dict[str, ParallelStyle]:
        """Return a style for modules by name, as `parallelize_module` takes them, which together cover all parameters.

        Raises:
            ConfigError: the parts of so many workers would not be equal.
        """
        ...


@runtime_checkable
class ContextParallelizable(Protocol):
    """Can compute some positions of each row while other workers compute the rest."""

    def share_positions(self, group: ProcessGroup) -> None:
        """Share every row with the workers of a group.

        From then on all of them call the model with the same whole rows, and each computes the loss of its own
        positions.
        """
        ...


@runtime_checkable
class DrawsByPosition(Protocol):
    """Declares what its random numbers are for.

    Workers that share rows have different positions, and dropout masks that repeat between them would not be random.
    For tensors that all of these workers hold whole, they must draw equal numbers.
    """

    draws_by_position: bool
    """Whether all random numbers are for activations that are divided by position, so each worker draws its own."""


@runtime_checkable
class Pipelineable(Protocol):
    """Can be reduced to some of its layers, which the workers of a pipeline share.

    Its loss is computed stage by stage (`headway.training.task.StagedLoss`).
    """

    def keep_stages(self, stages: Sequence[range]) -> None:
        """Drop all but some stages, each given by its layers; what remains keeps its name and values."""
        ...

    def stage_output(self, ids: torch.Tensor, workers: int = 1) -> torch.Tensor:
        """Return a meta tensor with the shape and dtype of what any stage but the last returns for a micro-batch.

        Args:
            ids: The micro-batch's inputs.
            workers: Number of workers that divide the positions of each row between layers.
        """
        ...

    def shared_between_stages(self) -> Sequence[torch.Tensor]:
        """Return the parameters that both the first and the last stage hold, in a fixed order; none if it has both."""
        ...


@runtime_checkable
class HasExperts(Protocol):
    """Has parameters that are stacked by expert, which workers can share."""

    def expert_units(self) -> Sequence[nn.Module] | None:
        """Return the modules whose parameters are all stacked by expert along the first dimension.

        Returns None if the model has no experts, and nothing if only other pipeline stages have them.
        """
        ...

    def share_experts(self, workers: ProcessGroup | None, row_sharers: ProcessGroup | None) -> None:
        """Compute mixtures of experts together with other workers.

        Args:
            workers: The workers that share the experts of a layer, each with an equal contiguous range. None if all
                experts are local.
            row_sharers: The workers that compute other positions of the same rows; None if rows are whole.
        """
        ...


@runtime_checkable
class ScalesLosses(Protocol):
    """Adds losses of its own in the backward pass."""

    def scale_losses(self, scale: float) -> None:
        """Multiply the gradients of these losses by the factor by which the main loss is multiplied (fp16)."""
        ...


@runtime_checkable
class TakesCounts(Protocol):
    """Has state that follows from integers which it counts in its passes.

    Sums of integers do not depend on their order, so every worker gives its copy equal state, whatever their number.
    """

    def take_counts(self) -> torch.Tensor | None:
        """Return what backward passes have counted since the last call, int64 on the CPU; None if nothing is counted.

        The shape is that of the whole model, whichever pipeline stage counts.
        """
        ...

    def after_step(self, counts: torch.Tensor, updated: bool) -> dict[str, float]:
        """Change the state by the sum of all workers' counts, unless the step was skipped, and return metrics.

        Args:
            counts: The sum of `take_counts` over workers.
            updated: Whether the step has updated the weights.
        """
        ...


@runtime_checkable
class ScalesRates(Protocol):
    """Trains some parameters at a learning rate of their own."""

    def rate_scales(self) -> dict[nn.Parameter, float]:
        """Return the learning rate of these parameters as a multiple of that of the run."""
        ...


@runtime_checkable
class FusesProjections(Protocol):
    """Computes several projections in one product; Muon and Adafactor update each as if it had a matrix of its own."""

    def fusions(self) -> Mapping[nn.Parameter, Fusion]:
        """Return the matrices and biases that hold those of several projections."""
        ...


@runtime_checkable
class KeptElsewhere(Protocol):
    """Has tensors that never change and are read from somewhere else at each start, such as the base of adapters."""

    def kept_elsewhere(self) -> set[str]:
        """Return the names of these tensors in the module's state, which checkpoints leave out."""
        ...


@runtime_checkable
class HasOutputProjection(Protocol):
    """Names its output projection, which Muon and fp8 treat unlike the matrices between layers.

    Without it Muon takes the last matrix for it. Stage 3 of DeepSpeed keeps it gathered for the whole model, since the
    loss uses it outside of its module.
    """

    def output_projection(self) -> torch.Tensor | None:
        """Return the matrix that turns the last activations into logits; None if another pipeline stage has it."""
        ...
