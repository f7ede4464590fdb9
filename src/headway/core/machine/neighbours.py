"""Other processes on the processors of a run: what they take, and whether its threads had better sleep while they wait.

Most is read of this process alone, so it holds in a container too. Counters are read twice; what lies between two
readings is what is judged.
"""

from __future__ import annotations

import math
import os
import re
import time
from dataclasses import dataclass
from typing import Literal

from headway.core.machine.cgroups import cpu_throttled_seconds
from headway.core.machine.cores import allowed_processors, read_cores
from headway.core.machine.system import Machine

WaitMode = Literal["spin", "sleep"]

#: Threads begin to sleep when this share of time is lost, and spin again below the second one. A few threads need a
#: larger one, the third and fourth divided by their number: two that sleep on idle processors take up to a third longer
#: for a step of small operations, since each wake-up of a virtual processor takes as long as an operation does. Beside
#: one busy process two threads lose a third of their time, which is more than half of one thread's.
_SLEEP_ABOVE = 0.05
_SPIN_BELOW = 0.02
_SLEEP_ABOVE_OF_ONE = 0.3
_SPIN_BELOW_OF_ONE = 0.1
#: The share of the last 10 seconds in which some process waited for a processor, from which a start is cautious.
_PRESSURE = 0.2
_SAMPLES = 5
_SAMPLE_SECONDS = 0.002


@dataclass(frozen=True)
class Load:
    """What keeps a run's threads from running. What the machine does not show is None."""

    waited: float | None = None
    """Share of the time in which threads had work that they waited for a processor."""
    others: float | None = None
    """Processors' worth of time that processes besides the run have used, of those that it may use."""
    stolen: float | None = None
    """Share of the time that a hypervisor gave to other machines."""
    throttled: float | None = None
    """Share of the time in which the control group's quota was used up."""
    seconds: float = math.inf
    """Over how long it was measured."""

    @property
    def lost(self) -> float:
        """The share of time that is lost, by the worst of the known readings."""
        return max(self.waited or 0.0, self.stolen or 0.0, self.throttled or 0.0)


@dataclass(frozen=True)
class Start:
    """What is seen of a machine before a run computes."""

    threads: int
    """Threads that will compute, over all workers here."""
    allowed: int
    """Processors on which they may run."""
    runnable: float | None
    """Threads of other processes that run or wait for a processor."""
    pressure: float | None
    """Share of the last 10 seconds in which some process waited for a processor."""


def choose_at_start(seen: Start) -> WaitMode:
    """Choose how threads wait for work when a run starts, before anything can be measured on itself."""
    crowded = seen.runnable is not None and seen.threads + seen.runnable > seen.allowed
    return "sleep" if crowded or (seen.pressure or 0.0) > _PRESSURE else "spin"


def choose_wait_mode(load: Load, before: WaitMode, threads: int) -> WaitMode:
    """Choose how threads wait for work from now on.

    Args:
        load: What keeps them from running.
        before: How they wait now.
        threads: Threads that compute, over all workers here.
    """
    if before == "sleep":
        limit = max(_SPIN_BELOW, _SPIN_BELOW_OF_ONE / threads)
    else:
        limit = max(_SLEEP_ABOVE, _SLEEP_ABOVE_OF_ONE / threads)
    return "sleep" if load.lost >= limit else "spin"


def look_at_start(machine: Machine, threads: int, workers: int) -> Start:
    """Look at the machine for some milliseconds.

    Args:
        machine: This machine.
        threads: Threads that will compute, over all workers here.
        workers: Workers here, which may all be looking.
    """
    cores = read_cores(machine)
    found = list[int]()
    for sample in range(_SAMPLES):
        if sample:
            time.sleep(_SAMPLE_SECONDS)
        running = re.search(r"^procs_running (\d+)", machine.text("/proc/stat") or "", re.MULTILINE)
        if running:
            found.append(int(running[1]) - _own_running(machine) - (workers - 1))
    # The kernel counts them for the whole machine; a part of its processors gets that part of them.
    others = None
    if found:
        others = max(0, sorted(found)[len(found) // 2]) * cores.allowed / cores.seen
    pressure = re.search(r"^some avg10=([\d.]+)", machine.text("/proc/pressure/cpu") or "", re.MULTILINE)
    return Start(threads, cores.allowed, others, float(pressure[1]) / 100 if pressure else None)


def _own_running(machine: Machine) -> int:
    """Return how many threads of this process run or wait for a processor: at least the one that looks."""
    states = (machine.text(f"/proc/self/task/{name}/stat") for name in machine.names("/proc/self/task"))
    return max(1, sum((text or "").rpartition(")")[2].split()[:1] == ["R"] for text in states))


@dataclass(frozen=True)
class _Counters:
    """Seconds since the machine, the group or the process began; None is unknown."""

    at: float
    ran: float | None
    waited: float | None
    busy: float | None
    stolen: float | None
    own: float | None
    throttled: float | None


class LoadMeter:
    """Measures the load between two readings.

    Args:
        machine: This machine.
        own: The process that this run's processes on the machine descend from. If given, what other processes use is
            measured too, which takes a look at all processes.
    """

    def __init__(self, machine: Machine, own: int | None = None) -> None:
        self._machine = machine
        self._own = own
        self._tick = os.sysconf("SC_CLK_TCK")
        self._allowed = frozenset(allowed_processors(machine) or range(read_cores(machine).allowed))
        self._threads = dict[str, tuple[float, float]]()
        self._before = self._count()

    def read(self) -> Load:
        """Return the load since the last reading, or since this object was made."""
        before = self._before
        self._before = self._count()
        now = self._before
        seconds = max(1e-9, self._before.at - before.at)
        ran = _difference(before.ran, now.ran)
        waited = _difference(before.waited, now.waited)
        busy = _difference(before.busy, now.busy)
        stolen = _difference(before.stolen, now.stolen)
        own = _difference(before.own, now.own)
        throttled = _difference(before.throttled, now.throttled)
        time_of_all = seconds * max(1, len(self._allowed))
        return Load(
            waited / (ran + waited) if ran is not None and waited is not None and ran + waited > 0 else None,
            None if busy is None or own is None else max(0.0, busy - own) / seconds,
            None if stolen is None else min(1.0, stolen / time_of_all),
            None if throttled is None else min(1.0, throttled / seconds),
            seconds,
        )

    def _count(self) -> _Counters:
        ran, waited = self._of_threads()
        busy, stolen = self._of_processors()
        own = self._of_run() if self._own is not None else None
        return _Counters(time.monotonic(), ran, waited, busy, stolen, own, cpu_throttled_seconds(self._machine))

    def _of_threads(self) -> tuple[float | None, float | None]:
        """Return how long this process's threads ran, and how long they waited for a processor (proc(5), schedstat).

        Those of threads that have ended since are kept.
        """
        for name in self._machine.names("/proc/self/task"):
            fields = (self._machine.text(f"/proc/self/task/{name}/schedstat") or "").split()
            if len(fields) >= 2:
                self._threads[name] = (int(fields[0]) / 1e9, int(fields[1]) / 1e9)
        if not self._threads:
            return None, None
        return sum(ran for ran, _ in self._threads.values()), sum(waited for _, waited in self._threads.values())

    def _of_processors(self) -> tuple[float | None, float | None]:
        """Return how long the processors that this process may use were busy, and how long they were stolen."""
        busy = 0.0
        stolen = 0.0
        found = False
        lines = re.findall(r"^cpu(\d+) (.+)$", self._machine.text("/proc/stat") or "", re.MULTILINE)
        for number, fields in lines:
            if int(number) in self._allowed:
                # user, nice, system, idle, iowait, irq, softirq, steal; a guest's time is in user's
                times = [int(field) / self._tick for field in fields.split()[:8]]
                busy += sum(times[:3]) + sum(times[5:7])
                stolen += times[7] if len(times) > 7 else 0.0
                found = True
        return (busy, stolen) if found else (None, None)

    def _of_run(self) -> float:
        """Return how long the processes of the run have run, those that have ended included."""
        seconds = dict[int, float]()
        parents = dict[int, int]()
        for name in self._machine.names("/proc"):
            if name.isdigit():
                fields = (self._machine.text(f"/proc/{name}/stat") or "").rpartition(")")[2].split()
                if len(fields) > 14:
                    parents[int(name)] = int(fields[1])
                    seconds[int(name)] = sum(map(int, fields[11:15])) / self._tick
        return sum(used for pid, used in seconds.items() if self._belongs(pid, parents))

    def _belongs(self, pid: int, parents: dict[int, int]) -> bool:
        while pid > 1 and pid != self._own:
            pid = parents.get(pid, 0)
        return pid == self._own


def _difference(before: float | None, now: float | None) -> float | None:
    return None if before is None or now is None else max(0.0, now - before)
