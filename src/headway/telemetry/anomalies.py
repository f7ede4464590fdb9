"""Anomalies of a run, found in its records: what health has found, and drifts of speed, waiting and memory.

What health has found is an event with its step; the report lists every one. An event alone is often harmless, above all
a gradient norm: it is an anomaly, and so an alert, only once the loss has moved too, or the event repeats.

A drift compares the newest stretches of training with earlier ones of equal work. A stretch is at least a minute and
ten steps long, and a drift takes eight of them, so a tiny run has none: over less time noise looks like a drift. An
anomaly names a cause only where a record shows it, which is still a suspicion and no proof.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from headway.core.files.foreign import as_number
from headway.core.format import format_seconds
from headway.telemetry.metrics import LEFT_OUT, recorded_number
from headway.telemetry.record import Run, dig

#: The share of a run's time that its threads wait for a processor, or that is taken from them, from which it is
#: slowed; and the number of processors that others must use to be the cause.
CPU_WAIT_SHARE = 0.1
CPU_OTHERS = 0.1
#: Waiting for data is an anomaly from this share of the time.
DATA_WAIT_SHARE = 0.2
#: What health found is an anomaly for this long, and for so many steps.
RECENT_SECONDS = 600.0
_RECENT_STEPS = 50
#: So many spikes of the gradient, or steps without an update, in `_RECENT_STEPS` are a repetition.
_REPEATED = 3
#: A gradient norm that is a spike by itself, in limits; with a lower one the loss must exceed this share of it.
_NORM_ALONE = 2.0
_LOSS_BESIDE = 0.25
#: Steps after a spike that show what it did, and the share of `health.spike_deviations` from which the loss has moved,
#: or up to which it is as usual.
_EFFECT_STEPS = 5
_MOVED = 0.5
_USUAL = 0.25

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
#: Of the last `_RECENT_STEPS` steps; fewer are how fp16 finds its loss scale.
_FP16_SKIPS = 6
#: Work of two stretches is equal up to this share.
_EQUAL_WORK = 0.1
#: No number of a record is greater; one that is was not measured.
_GREATEST = 1e15

DATA_WAIT = "data wait"
RESTART = "restart"
UNKNOWN = "unknown"
OTHER_PROCESSES = "other processes"
QUOTA = "processor quota"
VIRTUAL_MACHINES = "other virtual machines"
HEAT = "heat"
ROWS = "rows"
UNSTABLE = "learning rate"
NOT_FINITE = "not finite"
GPU_MEMORY = "gpu memory"
OWN_MEMORY = "own memory"
_LOSS_SPIKE = "loss spike"
_GRADIENT_SPIKE = "gradient spike"
_SKIPPED = "skipped steps"
_ROLLBACK = "rollback"
_DATA_WAIT = "data wait"
_ADVICE: Mapping[str, str] = {
    DATA_WAIT: "The steps wait for their data; headway profile shows the waits.",
    RESTART: "The attempt has another machine, number of workers or config: headway runs show RUN.",
    OTHER_PROCESSES: "Other processes use the processors of the machine: move them away, or take fewer threads.",
    QUOTA: "The control group allows fewer processors than the run uses: ask for more, or take fewer threads.",
    VIRTUAL_MACHINES: "The hypervisor gives the processors to other virtual machines: take another machine.",
    HEAT: "A GPU is hot and slows itself down: check its cooling.",
    ROWS: "Only the rows of the step had a high loss: look at them with headway data preview.",
    UNSTABLE: "The loss did not come back at once: lower the learning rate, or let health.on_spike skip or roll back.",
    NOT_FINITE: "The loss or the gradient was not finite: see the log, and docs/health.md.",
    GPU_MEMORY: "Tensors are kept from step to step, often by a callback that keeps a loss without detaching it.",
    OWN_MEMORY: "Objects are kept from step to step, often by a callback or a model of your own.",
    UNKNOWN: "headway profile shows where the time of a step goes, headway doctor examines the machine.",
}
#: By kind, where no cause is known.
_FIRST_LOOK: Mapping[str, str] = {
    _DATA_WAIT: "Put the token store on a faster disk, or prefetch more; headway profile shows the waits.",
    _LOSS_SPIKE: "See how the loss goes on; headway data preview shows the rows of the step.",
    _GRADIENT_SPIKE: "See whether the loss rises; if not, one such step needs nothing.",
    _SKIPPED: "The log says why each update was skipped; docs/health.md explains it.",
    _ROLLBACK: "headway ledger RUN has the reason, and the steps whose rows are skipped.",
}


@dataclass(frozen=True)
class Anomaly:
    """Something about a run that is not as usual."""

    kind: str
    cause: str
    """The suspected cause, one of a few."""
    text: str
    """What was seen, with numbers; part of a sentence."""

    @property
    def label(self) -> str:
        """Kind and cause in a few words."""
        return self.kind if self.cause == UNKNOWN else f"{self.kind}: {self.cause}"

    @property
    def advice(self) -> str:
        """What to do about the cause, or to learn it."""
        if self.cause == UNKNOWN and self.kind in _FIRST_LOOK:
            return _FIRST_LOOK[self.kind]
        return _ADVICE[self.cause]


@dataclass(slots=True)
class Event:
    """Something that health has found in a step, or in several steps in a row."""

    kind: str
    text: str
    """What was seen, of the first step."""
    first_step: int
    last_step: int
    time: float
    """Unix seconds of the last step."""
    cause: str = UNKNOWN
    """Known some steps later at the earliest."""
    alerts: bool = False
    """Whether it is an anomaly: the loss has moved, or the event repeats."""

    @property
    def anomaly(self) -> Anomaly:
        """The event as it is seen now."""
        return Anomaly(self.kind, self.cause, self.text)


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


_PEAK = "memory/peak_gib"
_AVAILABLE = "health/memory_available_gib"
_CPU_WAIT = "health/cpu_wait_share"
_OTHERS = "health/cpu_used_by_others"
_THROTTLED = "health/cpu_throttled_share"
_STOLEN = "health/cpu_stolen_share"
_HOTTEST = "health/gpu_temperature_celsius"
#: Readings that few records have.
_CONDITIONS = frozenset((_AVAILABLE, _CPU_WAIT, _OTHERS, _THROTTLED, _STOLEN, _HOTTEST))


class AnomalyWatch:
    """Takes the records of a run one by one, and says what is not as usual after the last one."""

    def __init__(self) -> None:
        self.spike_deviations = 8.0
        """As in the config: `health.spike_deviations`."""
        self.on_gpu = False
        """Whether the peak of memory is that of a GPU."""
        self._stretches: deque[_Stretch] = deque(maxlen=_REMEMBERED)
        self._open: _Stretch | None = None
        self._warm = 0
        self._attempt = -1
        self._step = 0
        self._time = 0.0
        self._drifts: tuple[Anomaly, ...] | None = ()
        self._events: deque[Event] = deque(maxlen=_RECENT_STEPS)
        self._spike: Event | None = None
        """A spike whose effect on the loss is not known yet."""
        self._skipped: deque[bool] = deque(maxlen=_RECENT_STEPS)
        self._skipped_steps: float | None = None

    def configure(self, run: Run) -> None:
        """Take limits from the config of a run, and what its memory is from its hardware."""
        self.spike_deviations = as_number(run.get("health.spike_deviations")) or self.spike_deviations
        self.on_gpu = bool(dig(run.facts, "hardware", "accelerators"))

    def add(self, step: int, attempt: int, record: Mapping[str, Any]) -> list[Event]:
        """Add the next record that counts, and return the events that begin with it."""
        # As in `Metrics`; in the same attempt only a rollback does it.
        goes_back = step < self._step or (step == self._step and LEFT_OUT in record)
        self._step, self._time = step, _measured(record, "time") or self._time
        events: list[Event] = []
        if attempt != self._attempt:
            self._attempt = attempt
            self._open = None
            self._warm = 0
            self._skipped_steps = None
            self._spike = None
        elif goes_back:
            self._spike = None
            events += self._note(_ROLLBACK, "the run went back to an earlier checkpoint", alerts=True)
        events += self._judge(record)
        seconds = _measured(record, "speed/step_seconds")
        if seconds is not None and seconds >= 0.0:
            self._warm += 1
            if self._warm > _WARM_STEPS:
                self._add_step(seconds, record)
        return events

    def add_sample(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add a few records from the middle of a history, one after the other, as one stretch of before."""
        sample = AnomalyWatch()
        for record in records:
            seconds = _measured(record, "speed/step_seconds")
            attempt = record.get("attempt", 0)
            if seconds is None or seconds <= 0.0 or not isinstance(attempt, int):
                continue
            if sample._open is not None and attempt != sample._open.attempt:
                break
            sample._attempt, sample._time = attempt, _measured(record, "time") or 0.0
            sample._add_step(seconds, record, ends=False)
        if sample._open is not None and sample._open.steps >= _STRETCH_STEPS:
            sample._open.ended = sample._time
            self._stretches.append(sample._open)

    def found(self) -> tuple[Anomaly, ...]:
        """Return the anomalies that there are now."""
        newest = {one.kind: one for one in self._events if one.alerts and self._is_recent(one)}
        said = (replace(one.anomaly, text=f"{one.text} (step {one.first_step:,})") for one in newest.values())
        return (*said, *self.drifts())

    def drifts(self) -> tuple[Anomaly, ...]:
        """Return the anomalies that last: those of speed, waiting and memory."""
        if self._drifts is None:
            self._drifts = tuple(_drifts(list(self._stretches), self.on_gpu))
        return self._drifts

    def _is_recent(self, event: Event) -> bool:
        return self._time - event.time <= RECENT_SECONDS or 0 <= self._step - event.last_step < _RECENT_STEPS

    def _add_step(self, seconds: float, record: Mapping[str, Any], *, ends: bool = True) -> None:
        one = self._open
        if one is None:
            one = self._open = _Stretch(self._attempt, self._time - seconds)
        one.steps += 1
        one.seconds += seconds
        one.squares += seconds * seconds
        one.items += _measured(record, "train/items") or 0.0
        one.waited += seconds * (_measured(record, "speed/data_wait_share") or 0.0)
        one.readings[_PEAK] = _measured(record, _PEAK) or one.readings.get(_PEAK, 0.0)
        if not _CONDITIONS.isdisjoint(record):
            one.readings.update((name, value) for name in _CONDITIONS if (value := _measured(record, name)) is not None)
        if ends and one.seconds >= _STRETCH_SECONDS and one.steps >= _STRETCH_STEPS:
            one.ended = self._time
            self._stretches.append(one)
            self._open = None
            self._drifts = None

    def _judge(self, record: Mapping[str, Any]) -> list[Event]:
        """Return the events of a step, and complete an earlier one by what the step shows."""
        # Most values are floats, and histories are long.
        loss = record.get("health/loss_deviations")
        norm = record.get("health/grad_norm_deviations")
        is_judged = loss is not None
        if type(loss) is not float or type(norm) is not float:
            loss = as_number(loss) or 0.0
            norm = as_number(norm) or 0.0
        if self._spike is not None and is_judged:
            self._see_effect(self._spike, loss)
        is_skipped = self._is_skipped(record)
        if not is_spike(loss, norm, self.spike_deviations):
            return self._note_skipped(record) if is_skipped else []
        if loss > self.spike_deviations:
            kind = _LOSS_SPIKE
            text = f"the loss was {loss:.1f} deviations above the usual"
        else:
            kind = _GRADIENT_SPIKE
            text = f"the gradient norm was {norm:.1f} deviations above the usual"
        if is_skipped:
            text = f"{text}; its update was skipped"
        begun = self._note(kind, text, alerts=loss > _MOVED * self.spike_deviations or self._repeats(kind))
        self._spike = self._events[-1]
        return begun

    def _see_effect(self, spike: Event, loss: float) -> None:
        """Complete a spike by the loss of a later step, in deviations above the usual."""
        after = self._step - spike.last_step
        has_moved = loss > _MOVED * self.spike_deviations
        if spike.kind == _GRADIENT_SPIKE:
            if has_moved:
                spike.alerts = True
                spike.cause = UNSTABLE
        elif after == 1 and loss <= _USUAL * self.spike_deviations:
            if spike.last_step - spike.first_step < _EFFECT_STEPS:
                spike.cause = ROWS
        elif after == _EFFECT_STEPS and has_moved:
            spike.cause = UNSTABLE
        if spike.cause != UNKNOWN or after >= _EFFECT_STEPS:
            self._spike = None

    def _is_skipped(self, record: Mapping[str, Any]) -> bool:
        """Return whether the step had no update."""
        skipped = _measured(record, "train/skipped_steps")
        if skipped is None:
            return False
        # The first count of an attempt is no news.
        self._skipped.append(self._skipped_steps is not None and skipped > self._skipped_steps)
        self._skipped_steps = skipped
        return self._skipped[-1]

    def _note_skipped(self, record: Mapping[str, Any]) -> list[Event]:
        number = sum(self._skipped)
        if "train/loss_scale" in record and number < _FP16_SKIPS:
            return []
        loss, norm = (recorded_number(record.get(name)) for name in ("train/loss", "train/grad_norm"))
        loss_is_finite = loss is None or math.isfinite(loss)
        begun = self._note(
            _SKIPPED,
            f"{number} of the last {len(self._skipped)} had no update",
            alerts=not loss_is_finite or number >= _REPEATED,
        )
        if not loss_is_finite or (norm is not None and not math.isfinite(norm)):
            self._events[-1].cause = NOT_FINITE
        return begun

    def _repeats(self, kind: str) -> bool:
        """Return whether an event of this step would be one of several."""
        steps = sum(
            one.last_step - one.first_step + 1
            for one in self._events
            if one.kind == kind and 0 <= self._step - one.last_step < _RECENT_STEPS
        )
        return steps + 1 >= _REPEATED

    def _note(self, kind: str, text: str, *, alerts: bool) -> list[Event]:
        """Note an event of this step; return it, or nothing if the one of the step before goes on."""
        last = self._events[-1] if self._events else None
        if last is not None and last.kind == kind and last.last_step == self._step - 1:
            last.last_step = self._step
            last.time = self._time
            last.alerts = last.alerts or alerts
            return []
        self._events.append(Event(kind, text, self._step, self._step, self._time, alerts=alerts))
        return [self._events[-1]]


def is_spike(loss: float, norm: float, limit: float) -> bool:
    """Return whether a step is a spike, by how far its loss and its gradient norm are above the usual.

    In healthy runs, the norm jumps now and then while the loss does not.

    Args:
        loss: In standard deviations.
        norm: The same of its logarithm.
        limit: `health.spike_deviations`.
    """
    return loss > limit or norm > _NORM_ALONE * limit or (norm > limit and loss > _LOSS_BESIDE * limit)


def _measured(record: Mapping[str, Any], name: str) -> float | None:
    """Return a number of a record; None if it has none, or one that cannot have been measured."""
    value = as_number(record.get(name))
    return value if value is not None and abs(value) <= _GREATEST else None


@dataclass(frozen=True)
class Episode:
    """An event with its steps, or a drift from when it was first found until it was found last."""

    anomaly: Anomaly
    """A drift as it was first found."""
    first_step: int
    last_step: int


class Episodes:
    """Collects the events and drifts of a history, those of steps that were done again included.

    Args:
        watch: A new watch.
    """

    def __init__(self, watch: AnomalyWatch) -> None:
        self._watch = watch
        self._events: list[Event] = []
        self._open: dict[str, Episode] = {}
        self._closed: list[Episode] = []
        self._attempt = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the next record of the file."""
        step = record.get("step")
        attempt = record.get("attempt", 0)
        if not isinstance(step, int) or not isinstance(attempt, int) or attempt < self._attempt:
            return
        self._attempt = attempt
        self._events += self._watch.add(step, attempt, record)
        now = {one.label: one for one in self._watch.drifts()}
        self._closed += [self._open.pop(label) for label in list(self._open) if label not in now]
        for label, one in now.items():
            before = self._open.get(label)
            self._open[label] = Episode(one, step, step) if before is None else replace(before, last_step=step)

    def found(self) -> list[Episode]:
        """Return the episodes by their first step."""
        events = (Episode(one.anomaly, one.first_step, one.last_step) for one in self._events)
        return sorted([*events, *self._closed, *self._open.values()], key=lambda one: one.first_step)


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
        yield Anomaly(_DATA_WAIT, cause, f"{share:.0%} of the time waits for data{before}")


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
