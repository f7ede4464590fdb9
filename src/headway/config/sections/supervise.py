"""The section `supervise`: reactions to a worker that dies, hangs or is slow."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headway.config.base import Section, conflict
from headway.config.units import Duration, Interval

Seconds = Annotated[float, Field(gt=0.0)]


class SuperviseConfig(Section):
    """Reactions to a worker that dies, hangs or is slow ([supervision.md](supervision.md))."""

    enabled: bool = True
    """Train in separate processes that are supervised and restarted. `false`: one worker trains in the command's
    process, as a debugger needs it, and a failure ends the command."""
    max_failures: Annotated[int, Field(ge=0)] = 3
    """Failures within `failure_window` that lead to a new attempt; one more ends the run. Preemptions do not
    count. A fault that repeats at the same step ends the run at once."""
    failure_window: Duration = Interval(3600, "seconds")
    """How long a failure counts."""
    restart_preempted: bool = False
    """Continue when workers, but not the command itself, were asked to stop (exit code 75). Otherwise the command ends
    with 75 as well, so that its scheduler can start it again."""
    max_delay_seconds: Seconds = 60.0
    """Longest delay before a new attempt. The first one begins at once; the delay doubles with each further one that
    makes no progress."""
    hang_seconds: Seconds = 30.0
    """A worker without a sign of life for this long, or for `hang_steps` steps if that is longer, counts as hung. Must
    be less than `parallel.timeout_seconds`, or the workers that wait for it give up first."""
    hang_steps: Seconds = 10.0
    """In median steps of this attempt. A warning names the worker after `hang_seconds`, or after three times the
    longest silence of recent steps."""
    start_seconds: Seconds = 900.0
    """Like `hang_seconds`, until the first step is done: loading, compiling, warming up."""
    save_seconds: Seconds = 900.0
    """Like `hang_seconds`, at the end of an attempt and while a state is handed over to be saved, which may wait for
    the write of an earlier one."""
    data_seconds: Seconds = 300.0
    """Like `hang_seconds`, while a worker waits for data; after `hang_seconds` there is a warning."""
    slow_worker: Literal["warn", "restart"] = "warn"
    """Reaction to a worker that takes `slow_factor` times as long as the others."""
    slow_factor: Annotated[float, Field(gt=1.0)] = 3.0
    """Multiple of the median of the other workers' own time in a step."""

    load_ahead: bool = True
    """Import the libraries of workers in a process from which workers are forked. After a failure the next ones start a
    second or two faster, and the libraries are in memory once."""
    grow_after: Duration = Interval(600, "seconds")
    """With `parallel.min_workers`: how long a run with fewer workers waits before it tries all of them again; doubled
    after each failed try."""

    lost_seconds: Seconds = 15.0
    """With `parallel.machines`: a machine that says nothing for this long is lost, and its workers are ended. It holds
    in both directions: a machine that does not hear the lead for this long ends its own workers."""
    rejoin_seconds: Seconds = 600.0
    """With `parallel.machines`: how long a machine tries to reach the lead, and the lead waits for the machines that
    the run needs. Then the command ends with 75, so that its scheduler starts all of them again."""

    @model_validator(mode="after")
    def _check_timeouts(self) -> Self:
        for key in ("start_seconds", "save_seconds", "data_seconds"):
            if getattr(self, key) < self.hang_seconds:
                raise conflict(f"{key} is shorter than hang_seconds", key, "hang_seconds")
        return self
