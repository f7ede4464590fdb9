"""The section `supervise`: what happens when a worker dies, hangs or is slow."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headway.config.base import Section, conflict
from headway.config.units import Duration, Interval

Seconds = Annotated[float, Field(gt=0.0)]


class SuperviseConfig(Section):
    """What happens when a worker dies, hangs or is slow ([supervision.md](supervision.md))."""

    enabled: bool = True
    """Train in processes of their own, watched and started again. `false`: one worker trains in the command's process,
    as a debugger wants it, and whatever ends it ends the command."""
    max_failures: Annotated[int, Field(ge=0)] = 3
    """So many failures within `failure_window` are answered with a new attempt; one more ends the run. Preemptions do
    not count, and the same fault twice at the same step ends it at once."""
    failure_window: Duration = Interval(3600, "seconds")
    """How long a failure counts."""
    restart_preempted: bool = False
    """Go on, too, when workers were told to stop and the command itself was not (exit code 75). When not, the command
    ends with 75 as well, for whoever started it to start it again."""
    max_delay_seconds: Seconds = 60.0
    """The first new attempt begins at once, each further one without progress twice as late as the one before, up to
    this."""
    hang_seconds: Seconds = 30.0
    """A worker without a sign of life for this long, or for `hang_steps` steps if that is longer, is hung. Less than
    `parallel.timeout_seconds`, or those that wait for it give up first."""
    hang_steps: Seconds = 10.0
    """In median steps of this attempt. It is named after `hang_seconds`, or three times the longest silence of recent
    steps, with a warning."""
    start_seconds: Seconds = 900.0
    """The same until the first step is done: loading, compiling, warming up."""
    save_seconds: Seconds = 900.0
    """The same while a state is handed over to be saved, which may have to wait for the write of an earlier one, and at
    the end of an attempt."""
    data_seconds: Seconds = 300.0
    """The same while a worker waits for data; after `hang_seconds` that is said."""
    slow_worker: Literal["warn", "restart"] = "warn"
    """What to do about a worker that takes `slow_factor` times as long as the others."""
    slow_factor: Annotated[float, Field(gt=1.0)] = 3.0
    """Of the median of the other workers' own time in a step."""

    load_ahead: bool = True
    """Load what workers need into the supervisor, of which they are copies: after a failure the next ones start a
    second or two faster, and what was loaded lies in memory once."""
    grow_after: Duration = Interval(600, "seconds")
    """With `parallel.min_workers`: how long a run with fewer workers waits before it tries all of them again; each time
    in vain twice as long as the time before."""

    @model_validator(mode="after")
    def _allowances_are_longer(self) -> Self:
        for key in ("start_seconds", "save_seconds", "data_seconds"):
            if getattr(self, key) < self.hang_seconds:
                raise conflict(f"{key} is shorter than hang_seconds", key, "hang_seconds")
        return self
