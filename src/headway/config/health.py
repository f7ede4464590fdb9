"""The section `health`: what is done when a run, its data or its machines are not well."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from headway.config.base import Section


class HealthConfig(Section):
    """What is done when a run, its data or its machines are not well ([health.md](health.md))."""

    on_nonfinite: Literal["skip", "rollback", "stop"] = "skip"
    """A step whose loss or gradient is not finite. `skip`: leave its update out, at most `train.skip_limit` times in a
    row. `rollback`: go back to a checkpoint from before it and leave its rows out. `stop`: end with exit code 5."""
    on_spike: Literal["off", "warn", "skip", "rollback", "stop"] = "warn"
    """A step whose loss or gradient norm is far above that of the steps before: the same choices, or only a warning."""
    spike_window: PositiveInt = 64
    """Accepted steps that say what is usual; before there are as many, nothing is a spike."""
    spike_deviations: Annotated[float, Field(gt=0.0)] = 8.0
    """How far above the usual a spike is, in standard deviations."""
    leave_out_steps: PositiveInt = 1
    """Steps whose rows a rollback leaves out: the one with the trouble, and those right before it."""
    rollback_limit: PositiveInt = 10
    """Rollbacks in the life of a run; the next one ends it with exit code 5."""
    replay_every: Annotated[int, Field(ge=0)] = 0
    """Compute a step's gradients twice each so many steps and compare their bits, and compare the weights of workers
    that have the same ones (0: never). Finds hardware that computes or stores wrongly now and then."""

    watch_seconds: Annotated[float, Field(gt=0.0)] | None = 60.0
    """How often disk space, main memory, the clock and GPUs are looked at, on a thread; null: never."""

    @property
    def rolls_back(self) -> bool:
        """Whether a rollback may come."""
        return "rollback" in (self.on_nonfinite, self.on_spike)
