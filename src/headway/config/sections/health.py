"""The section `health`: reactions to problems of a run, its data or its machines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from headway.config.base import Section


class HealthConfig(Section):
    """Reactions to problems of a run, its data or its machines ([health.md](health.md))."""

    on_nonfinite: Literal["skip", "rollback", "stop"] = "skip"
    """A step whose loss or gradient is not finite. `skip`: skip its update, at most `train.skip_limit` times in a row.
    `rollback`: return to an earlier checkpoint and skip the rows of the step. `stop`: end with exit code 5."""
    on_spike: Literal["off", "warn", "skip", "rollback", "stop"] = "warn"
    """A step whose loss or gradient norm is far above that of earlier steps: the same choices, or only a warning."""
    spike_window: PositiveInt = 64
    """Number of accepted steps that define the usual range; until there are as many, no step counts as a spike."""
    spike_deviations: Annotated[float, Field(gt=0.0)] = 8.0
    """Distance of a spike above the mean, in standard deviations. For a gradient norm it is twice that where the loss
    of the step is as usual."""
    leave_out_steps: PositiveInt = 1
    """Number of steps whose rows a rollback skips: the failed step and those right before it."""
    rollback_limit: PositiveInt = 10
    """Maximum number of rollbacks of a run; one more ends it with exit code 5."""
    replay_every: Annotated[int, Field(ge=0)] = 0
    """Every so many steps, compute the gradients twice and compare their bits, and compare weights that several workers
    hold (0: never). Finds hardware that sometimes computes or stores wrong values."""

    watch_seconds: Annotated[float, Field(gt=0.0)] | None = 60.0
    """How often a thread checks disk space, main memory, the clock and GPUs; null: never."""

    @property
    def rolls_back(self) -> bool:
        """Whether any reaction is a rollback."""
        return "rollback" in (self.on_nonfinite, self.on_spike)
