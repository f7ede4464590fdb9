"""Slurm: the end of the job's time limit. Slurm's signals (`--signal=USR1@120`, SIGTERM) need no watcher.

`SLURM_JOB_END_TIME` is the end as of the job's start, and an administrator may have moved it since. So `squeue` is
queried once when the end is near, and at the start if the variable is missing. More queries would burden the
controller.
"""

from __future__ import annotations

import re
import time

from headway.core.coordination.preemption_board import Notice
from headway.core.machine.system import Machine

_PAUSE_SECONDS = 5.0
_LEFT = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d\d)")


class Slurm:
    """The time limit of the job that this process belongs to.

    Args:
        machine: The machine, for its environment and commands.
        grace_seconds: Time before the end at which the run stops.
    """

    name = "slurm"
    pause_seconds = _PAUSE_SECONDS

    def __init__(self, machine: Machine, grace_seconds: float) -> None:
        self._machine = machine
        self._near = grace_seconds + 2 * _PAUSE_SECONDS
        self._job = machine.environment.get("SLURM_JOB_ID", "")
        end = machine.environment.get("SLURM_JOB_END_TIME", "")
        self._end = float(end) if end.isdecimal() else None
        self._asked = False

    def check(self) -> Notice | None:
        """Return the end of the time limit as a notice, however far away; None if it is unknown."""
        if not self._asked and (self._end is None or self._end - time.time() < self._near):
            self._asked = True
            self._end = self._end_by_squeue() or self._end
            if self._end is not None and self._end - time.time() >= self._near:
                self._asked = False  # the end was moved: ask again when the new one is near
        if self._end is None:
            return None
        return Notice(self.name, f"time limit of job {self._job}", "stop", self._end, key=self._job)

    def acknowledge(self, notice: Notice) -> None:
        """Do nothing: Slurm takes no answer."""

    def _end_by_squeue(self) -> float | None:
        """Return the end from the time left that `squeue` prints, as days-hours:minutes:seconds; None if unknown."""
        output = self._machine.run(("squeue", "--noheader", "--jobs", self._job, "--format", "%L"))
        match = _LEFT.fullmatch(output.text.strip()) if output.state == "ok" else None
        if match is None:
            return None
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return time.time() + ((days * 24 + hours) * 60 + minutes) * 60 + seconds
