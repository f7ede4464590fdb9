"""Drifts of a run's speed, waiting and memory.

A drift compares the newest stretches of training with earlier ones of equal work. A stretch is at least a minute and
ten steps long, and a drift takes eight of them, so a tiny run has none: over less time noise looks like a drift. It
names a cause only where a record shows it, which is still a suspicion and no proof.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from headway.core.files.foreign import as_number
from headway.core.format import format_seconds
from headway.telemetry.anomaly import (
    DATA_WAIT,
    GPU_MEMORY,
    HEAT,
    OTHER_PROCESSES,
    OWN_MEMORY,
    QUOTA,
    RESTART,
    UNKNOWN,
    VIRTUAL_MACHINES,
    Anomaly,
)

#: The share of a run's time that its threads wait for a processor, or that is taken from them, from which it is
#: slowed; and the number of processors that others must use to be the cause.
CPU_WAIT_SHARE = 0.1
CPU_OTHERS = 0.1
#: Waiting for data is an anomaly from this share of the time.
DATA_WAIT_SHARE = 0.2
#: A stretch has at least this much training.
_STRETCH_SECONDS = 60.0
_STRETCH_STEPS = 10
#: The newest stretches, and those before that they are compared with.
_NEWEST = 3
_EARLIER = 5
#: Stretches that are remembered: four hours of them.
_REMEMBERED = 240
#: The first steps of an attempt compile and fill caches.
_WARM_STEPS = 5
#: A lower speed is a drift from this share, or from so many median deviations of what was usual.
_SLOWER = 0.15
_DEVIATIONS = 4.0
#: Steps are uneven from this coefficient of variation, this many times the usual one, and this many seconds.
_UNEVEN = 0.3
_MORE_UNEVEN = 3.0
_UNEVEN_SECONDS = 0.02
#: Memory grows by at least this share and this much, over at least so many stretches, without slowing down.
_GROWTH_SHARE = 0.05
_GROWTH_GIB = 0.5
_GROWTH_STRETCHES = 8
_HOT_CELSIUS = 85.0
#: Work of two stretches is equal up to this share.
_EQUAL_WORK = 0.1
#: No number of a record is greater; one that is was not measured.
_GREATEST = 1e15

_PEAK = "memory/peak_gib"
_AVAILABLE = "health/memory_available_gib"
_CPU_WAIT = "health/cpu_wait_share"
_OTHERS = "health/cpu_used_by_others"
_THROTTLED = "health/cpu_throttled_share"
_STOLEN = "health/cpu_stolen_share"
_HOTTEST = "health/gpu_temperature_celsius"
#: Readings that few records have.
_CONDITIONS = frozenset((_AVAILABLE, _CPU_WAIT, _OTHERS, _THROTTLED, _STOLEN, _HOTTEST))


@dataclass(slots=True)
class _Stretch:
    """Some steps of one attempt, one after the other."""

    attempt: int
    started: float
    ended: float = 0.0
    steps: int = 0
    seconds: float = 0.0
    squares: float = 0.0
    items: float = 0.0
    waited: float = 0.0
    readings: dict[str, float] = field(default_factory=dict)
    """The newest of the peak of memory and of each of `_CONDITIONS`."""

    @property
    def mean(self) -> float:
        """Seconds of a step."""
        return self.seconds / self.steps

    @property
    def deviation(self) -> float:
        """Standard deviation of the seconds of a step."""
        return math.sqrt(max(0.0, self.squares / self.steps - self.mean**2))

    @property
    def work(self) -> float:
        """Items of a step; 1 if they are not recorded."""
        return self.items / self.steps or 1.0

    @property
    def wait_share(self) -> float:
        """Share of the time that waited for data."""
        return self.waited / self.seconds

    def add(self, seconds: float, record: Mapping[str, Any]) -> None:
        """Add a step."""
        self.steps += 1
        self.seconds += seconds
        self.squares += seconds * seconds
        self.items += measured(record, "train/items") or 0.0
        self.waited += seconds * (measured(record, "speed/data_wait_share") or 0.0)
        self.readings[_PEAK] = measured(record, _PEAK) or self.readings.get(_PEAK, 0.0)
        if not _CONDITIONS.isdisjoint(record):
            found = ((name, measured(record, name)) for name in _CONDITIONS)
            self.readings.update((name, value) for name, value in found if value is not None)


class Stretches:
    """Collects the steps of a run into stretches, and finds in them what drifts."""

    def __init__(self) -> None:
        self.on_gpu = False
        """Whether the peak of memory is that of a GPU."""
        self._ended: deque[_Stretch] = deque(maxlen=_REMEMBERED)
        self._open: _Stretch | None = None
        self._steps = 0
        self._found: tuple[Anomaly, ...] | None = ()

    def begin_attempt(self) -> None:
        """Leave out the first steps of the attempt that begins."""
        self._open = None
        self._steps = 0

    def add(self, attempt: int, time: float, record: Mapping[str, Any]) -> None:
        """Add the record of a step that ended at a time, in Unix seconds."""
        seconds = measured(record, "speed/step_seconds")
        if seconds is None or seconds < 0.0:
            return
        self._steps += 1
        if self._steps <= _WARM_STEPS:
            return
        if self._open is None:
            self._open = _Stretch(attempt, time - seconds)
        self._open.add(seconds, record)
        if self._open.seconds >= _STRETCH_SECONDS and self._open.steps >= _STRETCH_STEPS:
            self._end(self._open, time)
            self._open = None
            self._found = None

    def add_sample(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add a few records from the middle of a history, one after the other, as one stretch of before."""
        sample: _Stretch | None = None
        ended = 0.0
        for record in records:
            seconds = measured(record, "speed/step_seconds")
            attempt = record.get("attempt", 0)
            if seconds is None or seconds <= 0.0 or not isinstance(attempt, int):
                continue
            if sample is not None and attempt != sample.attempt:
                break
            ended = measured(record, "time") or 0.0
            if sample is None:
                sample = _Stretch(attempt, ended - seconds)
            sample.add(seconds, record)
        if sample is not None and sample.steps >= _STRETCH_STEPS:
            self._end(sample, ended)

    def _end(self, stretch: _Stretch, time: float) -> None:
        stretch.ended = time
        self._ended.append(stretch)

    def found(self) -> tuple[Anomaly, ...]:
        """Return the anomalies that last: those of speed, waiting and memory."""
        if self._found is None:
            self._found = tuple(_drifts(list(self._ended), self.on_gpu))
        return self._found


def measured(record: Mapping[str, Any], name: str) -> float | None:
    """Return a number of a record; None if it has none, or one that cannot have been measured."""
    value = as_number(record.get(name))
    return value if value is not None and abs(value) <= _GREATEST else None


def _drifts(stretches: list[_Stretch], on_gpu: bool) -> Iterator[Anomaly]:
    if len(stretches) < _NEWEST:
        return
    newest = stretches[-_NEWEST:]
    work = median(one.work for one in newest)
    earlier = [one for one in stretches[:-_NEWEST] if abs(one.work - work) <= _EQUAL_WORK * work]
    cause = _cause(newest, earlier)
    waits = list(_data_wait(newest, earlier, cause))
    yield from waits
    if len(earlier) >= _EARLIER:
        yield from _slower(newest, earlier, cause, waits_grew=bool(waits))
        yield from _uneven(newest, earlier, cause)
    attempt = [one for one in stretches if one.attempt == newest[-1].attempt]
    yield from _memory_growth(attempt, on_gpu)


def _data_wait(newest: list[_Stretch], earlier: list[_Stretch], cause: str) -> Iterator[Anomaly]:
    share = median(one.wait_share for one in newest)
    usual = median(one.wait_share for one in earlier) if len(earlier) >= _EARLIER else None
    lasts = min(one.wait_share for one in newest) > share / 2
    has_risen = usual is not None and share > DATA_WAIT_SHARE / 2 and share > 3 * usual
    if lasts and (share > DATA_WAIT_SHARE or has_risen):
        before = "" if usual is None else f", {usual:.0%} before"
        yield Anomaly(DATA_WAIT, cause, f"{share:.0%} of the time waits for data{before}")


def _slower(newest: list[_Stretch], earlier: list[_Stretch], cause: str, *, waits_grew: bool) -> Iterator[Anomaly]:
    before = sorted(one.mean / one.work for one in earlier)
    spread = median(abs(time - median(before)) for time in before)
    # The fastest tenth, so that a run that stays slow does not soon count as usual.
    usual = before[len(before) // 10]
    if usual <= 0.0:  # no time that was measured
        return
    now = [one.mean / one.work for one in newest]
    # The speed that is lost, as a share: twice the time is half of the speed.
    limit = usual / (1.0 - min(0.9, max(_SLOWER, _DEVIATIONS * 1.4826 * spread / usual)))
    if median(now) <= limit or min(now) <= (usual + limit) / 2:
        return
    work = median(one.work for one in newest)
    extra = fmean(one.mean * one.wait_share for one in newest) - median(one.mean * one.wait_share for one in earlier)
    if extra > (median(now) - usual) * work / 2:
        if waits_grew:  # the same trouble
            return
        cause = DATA_WAIT
    same = [one.mean / one.work for one in earlier if one.attempt == newest[-1].attempt]
    if cause == UNKNOWN and len(same) < len(earlier) and min(same, default=math.inf) > (usual + limit) / 2:
        cause = RESTART
    text = f"a step takes {median(now) * work:.3g} s, {usual * work:.3g} s were usual"
    yield Anomaly("slower", cause, text)


def _uneven(newest: list[_Stretch], earlier: list[_Stretch], cause: str) -> Iterator[Anomaly]:
    usual = median(one.deviation / one.mean for one in earlier)
    now = [one.deviation / one.mean for one in newest]
    is_much = median(one.deviation for one in newest) > _UNEVEN_SECONDS
    if is_much and median(now) > max(_UNEVEN, _MORE_UNEVEN * usual) and min(now) > max(_UNEVEN / 2, 1.5 * usual):
        yield Anomaly("uneven steps", cause, f"step times deviate by {median(now):.0%}, {usual:.0%} were usual")


def _memory_growth(stretches: list[_Stretch], on_gpu: bool) -> Iterator[Anomaly]:
    """Find memory that grows as fast as before; an allocator or a cache that fills up slows down."""
    own = _growth(stretches, _PEAK)
    if on_gpu:
        if own is not None:
            yield Anomaly("memory growth", GPU_MEMORY, f"the peak of GPU memory grew {own[0]}")
        return
    # The peak of a process counts files that are mapped; what is available does not.
    taken = _growth(stretches, _AVAILABLE, falls=True)
    if taken is not None:
        left = format_seconds(taken[1])
        cause = OWN_MEMORY if own is not None else OTHER_PROCESSES
        yield Anomaly("memory growth", cause, f"available memory fell {taken[0]}: none is left in {left} at this pace")


def _growth(stretches: list[_Stretch], name: str, *, falls: bool = False) -> tuple[str, float] | None:
    """Return how a reading has grown in words, and how long until a falling one is zero; None if it has not."""
    known = [(one.ended, one.readings[name]) for one in stretches[1:] if name in one.readings]
    if len(known) < _GROWTH_STRETCHES:
        return None
    sign = -1.0 if falls else 1.0
    (began, first), (ended, last), middle = known[0], known[-1], known[len(known) // 2][1]
    growth = sign * (last - first)
    newer = sign * (last - middle)
    if growth < max(_GROWTH_GIB, _GROWTH_SHARE * first) or newer < 0.35 * growth:
        return None
    half = known[len(known) // 2 :]
    steps = [sign * (after - before) for (_, before), (_, after) in pairwise(half)]
    if sum(one > 0 for one in steps) < 0.6 * len(steps):
        return None
    took = max(ended - began, 1.0)
    return f"from {first:.1f} to {last:.1f} GiB in {format_seconds(took)}", last / (growth / took)


def _cause(newest: list[_Stretch], earlier: list[_Stretch]) -> str:
    """Return what else is different about the newest stretches."""

    def is_high(name: str, limit: float) -> bool:
        now = [one.readings[name] for one in newest if name in one.readings]
        before = sorted(one.readings[name] for one in earlier if name in one.readings)
        return bool(now) and fmean(now) >= limit and (not before or fmean(now) > 1.5 * before[len(before) // 10])

    if is_high(_THROTTLED, CPU_WAIT_SHARE):
        return QUOTA
    if is_high(_STOLEN, CPU_WAIT_SHARE):
        return VIRTUAL_MACHINES
    if is_high(_CPU_WAIT, CPU_WAIT_SHARE) and is_high(_OTHERS, CPU_OTHERS):
        return OTHER_PROCESSES
    hot = [one.readings[_HOTTEST] for one in newest if _HOTTEST in one.readings]
    if hot and min(hot) >= _HOT_CELSIUS:
        return HEAT
    return UNKNOWN
