"""Anomalies of a run, found in its records: what health has found, and drifts (`drifts`).

What health has found is an event with its step; the report lists every one. An event alone is often harmless, above all
a gradient norm: it is an anomaly, and so an alert, only once the loss has moved too, or the event repeats.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headway.core.files.foreign import as_number
from headway.telemetry.anomaly import (
    GRADIENT_SPIKE,
    LOSS_SPIKE,
    NOT_FINITE,
    ROLLBACK,
    ROWS,
    SKIPPED,
    UNKNOWN,
    UNSTABLE,
    Anomaly,
)
from headway.telemetry.drifts import Stretches, measured
from headway.telemetry.metrics import LEFT_OUT, recorded_number
from headway.telemetry.record import Run, dig

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
#: Of the last `_RECENT_STEPS` steps; fewer are how fp16 finds its loss scale.
_FP16_SKIPS = 6


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


class AnomalyWatch:
    """Takes the records of a run one by one, and says what is not as usual after the last one."""

    def __init__(self) -> None:
        self.spike_deviations = 8.0
        """As in the config: `health.spike_deviations`."""
        self.stretches = Stretches()
        """In which drifts are found."""
        self._attempt = -1
        self._step = 0
        self._time = 0.0
        self._events: deque[Event] = deque(maxlen=_RECENT_STEPS)
        self._spike: Event | None = None
        """A spike whose effect on the loss is not known yet."""
        self._skipped: deque[bool] = deque(maxlen=_RECENT_STEPS)
        self._skipped_steps: float | None = None

    def configure(self, run: Run) -> None:
        """Take limits from the config of a run, and what its memory is from its hardware."""
        self.spike_deviations = as_number(run.get("health.spike_deviations")) or self.spike_deviations
        self.stretches.on_gpu = bool(dig(run.facts, "hardware", "accelerators"))

    def add(self, step: int, attempt: int, record: Mapping[str, Any]) -> list[Event]:
        """Add the next record that counts, and return the events that begin with it."""
        # As in `Metrics`; in the same attempt only a rollback does it.
        goes_back = step < self._step or (step == self._step and LEFT_OUT in record)
        self._step = step
        self._time = measured(record, "time") or self._time
        events: list[Event] = []
        if attempt != self._attempt:
            self._attempt = attempt
            self.stretches.begin_attempt()
            self._skipped_steps = None
            self._spike = None
        elif goes_back:
            self._spike = None
            events += self._note(ROLLBACK, "the run went back to an earlier checkpoint", alerts=True)
        events += self._judge(record)
        self.stretches.add(attempt, self._time, record)
        return events

    def add_sample(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add a few records from the middle of a history, one after the other, as one stretch of before."""
        self.stretches.add_sample(records)

    def found(self) -> tuple[Anomaly, ...]:
        """Return the anomalies that there are now."""
        newest = {one.kind: one for one in self._events if one.alerts and self._is_recent(one)}
        said = (replace(one.anomaly, text=f"{one.text} (step {one.first_step:,})") for one in newest.values())
        return (*said, *self.drifts())

    def drifts(self) -> tuple[Anomaly, ...]:
        """Return the anomalies that last: those of speed, waiting and memory."""
        return self.stretches.found()

    def _is_recent(self, event: Event) -> bool:
        return self._time - event.time <= RECENT_SECONDS or 0 <= self._step - event.last_step < _RECENT_STEPS

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
            kind = LOSS_SPIKE
            text = f"the loss was {loss:.1f} deviations above the usual"
        else:
            kind = GRADIENT_SPIKE
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
        if spike.kind == GRADIENT_SPIKE:
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
        skipped = measured(record, "train/skipped_steps")
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
            SKIPPED,
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
