"""The condition of the processors: whether other processes slow a run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from headway.core.machine.cores import read_cores
from headway.core.machine.neighbours import Load, LoadMeter
from headway.core.machine.system import Machine
from headway.telemetry.drifts import CPU_OTHERS, CPU_WAIT_SHARE
from headway.training.conditions.condition import Reading

#: What others must take of the processors' time that a run waited for to be the cause. A desktop or a service always
#: takes some, and threads of a run wait for each other too.
_CAUSED_BY_OTHERS = 0.5
#: What is measured over less time than this says little.
_SHORT_SECONDS = 1.0
#: Neighbours come and go; a warning is not repeated within this time.
_QUIET_SECONDS = 600.0


class Processors:
    """The processors that a run shares with other processes.

    Args:
        machine: The machine that has them.
        own: The process that the run's processes descend from; this one if not given.
        measure: Returns the load since the last call.
        clock: Seconds that never decrease.
    """

    def __init__(
        self,
        machine: Machine,
        own: int | None = None,
        measure: Callable[[], Load] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._usable = read_cores(machine).usable
        self._clock = clock
        self._measure = measure or LoadMeter(machine, own or os.getpid()).read
        self._warned: tuple[float, str] | None = None

    def read(self) -> Reading:
        """Report what this run's threads wait, and what others take; warn if that makes steps longer."""
        load = self._measure()
        if load.seconds < _SHORT_SECONDS:  # the first reading, which shows how the run has begun
            return Reading()
        known = {
            "health/cpu_wait_share": load.waited,
            "health/cpu_used_by_others": load.others,
            "health/cpu_stolen_share": load.stolen,
            "health/cpu_throttled_share": load.throttled,
        }
        metrics = {name: value for name, value in known.items() if value is not None}
        warning = self._explain(load)
        now = self._clock()
        if warning is not None:
            self._warned = (now, warning)
        elif self._warned is not None and now - self._warned[0] >= _QUIET_SECONDS:
            self._warned = None
        return Reading(metrics, {} if self._warned is None else {"processors": self._warned[1]})

    def _explain(self, load: Load) -> str | None:
        if load.throttled is not None and load.throttled >= CPU_WAIT_SHARE:
            what = f"the quota of its control group kept this run from its processors {load.throttled:.0%} of the time"
            return f"{what}; ask for more of them, or take fewer threads (parallel.threads)"
        if load.stolen is not None and load.stolen >= CPU_WAIT_SHARE:
            return f"other virtual machines took {load.stolen:.0%} of this one's processors: steps take longer"
        waited = load.waited or 0.0
        others = load.others or 0.0
        if waited >= CPU_WAIT_SHARE and others >= max(CPU_OTHERS, _CAUSED_BY_OTHERS * waited * self._usable):
            what = f"other processes use {others:.1f} of {self._usable} processors"
            return f"{what}: this run's threads wait {waited:.0%} of their time for one, and steps take longer"
        return None
