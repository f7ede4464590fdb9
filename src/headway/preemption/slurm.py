"""Slurm: the end of the job's time limit. Its signals (`--signal=USR1@120`, SIGTERM on preemption) need no watcher.

`SLURM_JOB_END_TIME` is what the job was started with. An administrator may have moved the end since, so `squeue` is
asked once when it is near, and at the start if the variable is not there: the controller is not to be asked often.
"""

from __future__ import annotations

import re
import time

from headway.core.machine import Machine
from headway.core.preemption_board import Notice

_PAUSE_SECONDS = 5.0
_LEFT = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d\d)")


class Slurm:
    """The job that this process is part of.

    Args:
        machine: Whose environment and commands are used.
        grace_seconds: How near the end is when it matters.
    """

    name, pause_seconds = "slurm", _PAUSE_SECONDS

    def __init__(self, machine: Machine, grace_seconds: float) -> None:
        self._machine, self._near = machine, grace_seconds + 2 * _PAUSE_SECONDS
        self._job = machine.environment.get("SLURM_JOB_ID", "")
        end = machine.environment.get("SLURM_JOB_END_TIME", "")
        self._end = float(end) if end.isdecimal() else None
        self._asked = False

    def check(self) -> Notice | None:
        """The end of the time limit, however far away; None when nobody knows it."""
        if not self._asked and (self._end is None or self._end - time.time() < self._near):
            self._asked = True
            self._end = self._told() or self._end
            if self._end is not None and self._end - time.time() >= self._near:
                self._asked = False  # it was moved: ask again when the new one is near
        if self._end is None:
            return None
        return Notice(self.name, f"time limit of job {self._job}", "stop", self._end, key=self._job)

    def acknowledge(self, notice: Notice) -> None:
        """Slurm waits for no answer."""

    def _told(self) -> float | None:
        """The end by `squeue`, which prints the time left as days-hours:minutes:seconds."""
        output = self._machine.run(("squeue", "--noheader", "--jobs", self._job, "--format", "%L"))
        match = _LEFT.fullmatch(output.text.strip()) if output.state == "ok" else None
        if match is None:
            return None
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return time.time() + ((days * 24 + hours) * 60 + minutes) * 60 + seconds
