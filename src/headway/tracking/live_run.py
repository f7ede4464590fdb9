"""One run as it stands, from its directory: read again and again, each time only what is new.

A `Snapshot` holds values by the names of the catalogue, so that the exporter, `headway top` and alert rules need no
names of their own. What a restart or a rollback supersedes is forgotten; totals of work that was done stay.
"""

from __future__ import annotations

import math
import os
import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from headway.config.units import Interval
from headway.core.coordination.heartbeat import read_heartbeat
from headway.core.coordination.outcomes import SAVED_OUTCOMES
from headway.core.files.foreign import as_number, open_regular, parse_json_lines, read_json_or_empty
from headway.core.machine.system import host_name
from headway.telemetry.anomalies import AnomalyWatch
from headway.telemetry.anomaly import Anomaly
from headway.telemetry.catalogue import CATALOGUE, Kind, metric
from headway.telemetry.goodput import was_meant_to_end
from headway.telemetry.metrics import CLOCK_JUMP, FILE_NAME, LEFT_OUT, is_own, place_of, recorded_number
from headway.telemetry.record import (
    NOT_ENDED,
    NOT_STARTED,
    RESTORED,
    RUNNING,
    STATES,
    Attempt,
    Run,
    as_int,
    as_text,
    as_time,
    attempt_outcome,
    dig,
    newest_of,
    state_of,
)
from headway.telemetry.system import newest_readings
from headway.telemetry.tags import FILE_NAME as TAGS_FILE
from headway.telemetry.tags import Tags, read_tags
from headway.telemetry.tail import JsonLinesTail

#: States of a run that trains, as far as can be seen from this machine.
LIVE_STATES = (RUNNING, NOT_ENDED)
#: Size of about a thousand records, for readers that show the newest values only.
NEWEST_BYTES = 512 * 1024

#: Stretches of older records that such readers take, and their size.
_SAMPLES = 10
_SAMPLE_BYTES = 32 * 1024

#: Number of recent steps over which speed and ETA are averaged, as in the line.
_WINDOW = 100
#: A run stands still when its newest step is older than this, and than twice the longest time between recent ones: an
#: evaluation or a save is no standstill.
_STILL_SECONDS = 60.0
_STILL_GAPS = 2.0
#: Most points of a short history.
_POINTS = 120
#: Most names that a user's own code records that are kept.
_OWN_NAMES = 200

_AMOUNTS = frozenset(name for name, entry in CATALOGUE.items() if entry.kind is Kind.AMOUNT)
#: Events that are counted, by the metric that tells of one.
_COUNTED = {
    "speed/step_seconds": "run/steps",
    "checkpoint/saved_step": "run/saves",
    "checkpoint/failed_step": "run/save_failures",
    "checkpoint/uploaded_step": "run/uploads",
    "checkpoint/upload_failed_step": "run/upload_failures",
}


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment."""

    name: str
    path: Path
    state: str
    outcome: str
    """How the newest attempt ended, in its own words."""
    values: Mapping[str, float]
    """By name, as in `metrics.jsonl`, with what is derived from the directory."""
    machines: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """What was read of each machine last, by the machine's name."""
    machine: str | None = None
    """The machine of the newest attempt's first process."""
    job: str | None = None
    """Number of the scheduler's job."""
    losses: tuple[float, ...] = ()
    """Recent training losses, thinned out."""
    items_per_second: float | None = None
    """Over the last steps that were done, also of a run that has ended; so is `mfu`."""
    mfu: float | None = None
    anomalies: tuple[Anomaly, ...] = ()
    """What is not as usual, while it trains."""
    is_language_model: bool = True
    tags: Tags = field(default_factory=Tags)
    """What people call it."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """`config.yaml`; the same object until it changes."""
    updated: float | None = None
    """Last sign of life, Unix seconds."""

    @property
    def is_live(self) -> bool:
        """Whether the run is training, as far as can be seen from this machine."""
        return self.state in LIVE_STATES


class LiveRun:
    """Follows one run directory.

    Args:
        path: The run directory.
        newest: Read the newest records only; totals then count from there.
        name: What it is called among other runs; the folder's name when not given.
    """

    def __init__(self, path: Path, *, newest: bool = False, name: str | None = None) -> None:
        self.path = path
        self._name = name or path.absolute().name
        self._tail = JsonLinesTail(path / FILE_NAME, NEWEST_BYTES if newest else None)
        self._history = _History()
        self._needs_samples = newest
        self._records: dict[int, dict[str, Any]] = {}
        #: The newest attempt, and its failed saves as its page has told: all, and those in a row; None without a page.
        self._told: tuple[int, tuple[int, int] | None] = (0, None)
        self._config = _Cached(path / "config.yaml")
        self._facts = _Cached(path / "run.json")
        self._tags_file = _Cached(path / TAGS_FILE)
        self._tags = Tags()
        self._recorded_config: Mapping[str, Any] = {}
        self._settings: dict[str, Any] = {}
        self._job: str | None = None
        self._is_language_model = True

    def _sample(self) -> None:
        """Read a little of what `newest` leaves out, so that a drift that began before is seen."""
        with suppress(OSError), open_regular(self.path / FILE_NAME) as file:
            size = os.fstat(file.fileno()).st_size - NEWEST_BYTES
            if size < _SAMPLES * _SAMPLE_BYTES:
                return
            for number in range(_SAMPLES):
                file.seek(int(size * (number + 0.5) / _SAMPLES))
                lines = file.read(_SAMPLE_BYTES).split(b"\n")
                self._history.watch.add_sample(parse_json_lines(lines[1:-1]))  # without the parts at both ends

    def _read_failed_saves(self, number: int, record: Mapping[str, Any], state: str) -> None:
        """Read the counts of the newest attempt from its page, on its own machine: records may wait for a disk."""
        if self._told[0] != number:
            self._told = number, None
        if state == RUNNING and record.get("host") == host_name():
            page = read_heartbeat(self.path / "attempts" / f"{number:03d}" / "heartbeat-0")
            if page is not None:
                self._told = number, (page.failed_saves, page.failed_saves_in_row)

    def refresh(self, now: float | None = None) -> Snapshot:
        """Read what is new; what cannot be read is as before."""
        now = time.time() if now is None else now
        self._read_settings()
        if self._needs_samples:  # not before: of a run that ended long ago nothing but its end is read
            self._needs_samples = False
            self._sample()
        with suppress(OSError):
            for begins_anew, records in self._tail.read():
                if begins_anew:
                    self._history = _History()
                    self._history.watch.configure(Run(self.path))
                for record in records:
                    self._history.add(record)
        self._read_attempts()
        number, record, outcome, state = self._newest()
        self._read_failed_saves(number, record, state)
        history = self._history
        is_live = state in LIVE_STATES
        anomalies = history.watch.found() if is_live else ()
        values = {**history.latest, **history.totals, **dict(self._derived(state, now))}
        recorded = history.failed_saves(number)
        failed, in_row = self._told[1] or recorded
        values["run/save_failures"] += max(0, failed - recorded[0])
        values["run/failed_saves_in_row"] = float(in_row)
        values["run/anomalies"] = float(len(anomalies))
        values.update({f"run/anomaly/{one.label}": 1.0 for one in anomalies})
        for one in STATES:
            values[f"run/state/{one}"] = float(one == state)
        known = (as_time(record.get("ended")), as_time(record.get("started")), history.time)
        folder = self.path / "attempts" / f"{number:03d}"
        return Snapshot(
            name=self._name,
            path=self.path,
            state=state,
            outcome=outcome,
            values=values,
            machines=newest_readings(folder) if is_live else {},
            machine=as_text(record.get("host")),
            job=self._job,
            losses=tuple(history.losses),
            items_per_second=history.rate(0),
            mfu=history.rate(1),
            anomalies=anomalies,
            is_language_model=self._is_language_model,
            tags=self._tags,
            config=self._recorded_config,
            updated=max((moment for moment in known if moment is not None), default=None),
        )

    def last_sign_of_life(self) -> tuple[str, float]:
        """Return the state, and when the run was last seen alive, without reading its history."""
        self._read_attempts()
        _, record, _, state = self._newest()
        if (ended := as_time(record.get("ended"))) is not None:
            return state, ended
        for path in (self.path / FILE_NAME, self.path / "attempts", self.path):
            with suppress(OSError):
                return state, path.stat().st_mtime
        return state, 0.0

    def _newest(self) -> tuple[int, dict[str, Any], str, str]:
        """Return number, record, outcome and state of the newest attempt."""
        number, record = newest_of(self._records)
        outcome = attempt_outcome(self.path, number, record, newest=True) if number else NOT_STARTED
        return number, record, outcome, state_of(self.path, record, outcome)

    def _read_settings(self) -> None:
        if self._tags_file.has_changed():
            self._tags = read_tags(self.path)
        config_changed = self._config.has_changed()
        facts_changed = self._facts.has_changed()
        if not config_changed and not facts_changed:
            return
        run = Run(self.path)
        self._history.watch.configure(run)
        if config_changed:
            self._recorded_config = run.config
            self._settings = {
                "steps": run.total_steps,
                "batches": run.batches,
                "failures": as_int(run.get("supervise.max_failures")),
                "window": _seconds(run.get("supervise.failure_window")),
                "budget": as_number(run.get("budget.usd")),
            }
        if facts_changed:
            self._job = as_text(dig(run.facts, "variables", "SLURM_JOB_ID"))
            self._is_language_model = run.is_language_model

    def _read_attempts(self) -> None:
        """Read the records of attempts; one that has ended does not change any more."""
        try:
            numbers = {int(entry.name) for entry in os.scandir(self.path / "attempts") if entry.name.isdecimal()}
        except OSError:
            numbers = set()
        self._records = {
            number: known
            if "outcome" in (known := self._records.get(number, {}))
            else read_json_or_empty(self.path / "attempts" / f"{number:03d}" / "attempt.json")
            for number in sorted(numbers)
        }

    def _derived(self, state: str, now: float) -> Iterator[tuple[str, float]]:
        history = self._history
        steps = self._settings.get("steps")
        started = next((m for one in self._records.values() if (m := as_time(one.get("started"))) is not None), None)
        if steps:
            yield "run/total_steps", float(steps)
        if (budget := self._settings.get("budget")) is not None:
            yield "run/budget_usd", budget
        if started is not None:
            yield "run/started_timestamp_seconds", started
            wall = self._wall_seconds(state, now)
            if wall and history.effective_seconds is not None:
                yield "run/goodput_ratio", min(1.0, history.effective_seconds / wall)
        if (running := self._running_seconds(state, now)) is not None:
            yield "run/running_seconds", running
        if history.step_time is not None:
            yield "run/last_step_timestamp_seconds", history.step_time
        saved = _last_saved(self.path / "checkpoints")
        if saved is not None:
            yield "run/last_saved_timestamp_seconds", saved
        if steps and state in LIVE_STATES and (eta := history.eta(steps, self._settings.get("batches"), now)):
            yield "run/eta_seconds", eta
        if (allowed := self._settings.get("failures")) is not None:
            since = now - (self._settings.get("window") or math.inf)
            ends = [as_time(one.get("ended")) or 0.0 for one in self._records.values() if _is_failure(one)]
            yield "run/recent_failures", float(sum(end >= since for end in ends))
            yield "run/allowed_failures", float(allowed)

    def _running_seconds(self, state: str, now: float) -> float | None:
        """Return the time in which an attempt was running; None if the end of one is unknown."""
        newest = max(self._records, default=0)
        total = 0.0
        for number, record in self._records.items():
            last, jumped = self._history.ends.get(number, (None, 0.0))
            if number == newest and state == RUNNING:
                last = now
            seconds = Attempt(
                number,
                str(record.get("outcome")),
                started=as_time(record.get("started")),
                ended=as_time(record.get("ended")) or last,
                measured=as_time(record.get("seconds")),
                clock_jumped=jumped,
            ).seconds
            if seconds is None:
                return None
            total += seconds
        return total if self._records else None

    def _wall_seconds(self, state: str, now: float) -> float | None:
        """Return the time since the run began, without that in which it was not meant to continue."""
        known = [
            (start, as_time(one.get("ended")), was_meant_to_end(_ended(number, one), one))
            for number, one in self._records.items()
            if (start := as_time(one.get("started"))) is not None
        ]
        if not known:
            return None
        last = now if state == RUNNING else known[-1][1] or self._history.time or known[-1][0]
        pairs = pairwise(known)
        away = sum(max(0.0, begins - (end or begins)) for (_, end, meant), (begins, *_) in pairs if meant)
        return last - known[0][0] - away


class _History:
    """What the records of a run come to."""

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}
        # From zero, or the first event would be no increase.
        self.totals: dict[str, float] = dict.fromkeys(_COUNTED.values(), 0.0)
        self.losses: deque[float] = deque(maxlen=_POINTS)
        self.watch = AnomalyWatch()
        self.time: float | None = None
        self.step_time: float | None = None
        #: Time of the last record of each attempt, and by how much the wall clock jumped meanwhile.
        self.ends: dict[int, tuple[float | None, float]] = {}
        self._at: dict[str, int] = {}
        self._step = -1
        self._attempt = -1
        self._failed = (-1, 0, 0)
        self._own_names = 0
        self._recent: deque[tuple[float, int, float, float, float]] = deque(maxlen=_WINDOW)
        # Steps that count, and the effective seconds up to each: after a rollback some no longer count.
        self._steps = array("q")
        self._seconds = array("d")

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the next record of the file; skip it if it is not a record of a step."""
        place = place_of(record)
        if place is None or place[1] < self._attempt:
            return
        step, attempt = place
        goes_back = step < self._step or (step == self._step and LEFT_OUT in record)
        if attempt != self._attempt or goes_back:
            self._restart_at(step if is_own(record) else step + 1)
        self._step = step
        self._attempt = attempt
        self.watch.add(step, attempt, record)
        self._count_saves(attempt, record)
        for name, value in record.items():
            number = value if type(value) is float else recorded_number(value)
            if number is None:
                continue
            if name not in self.latest and metric(name) is None:
                if self._own_names >= _OWN_NAMES:
                    continue
                self._own_names += 1
            if name in _AMOUNTS:
                self.totals[name] = self.totals.get(name, 0.0) + number
            else:
                self.latest[name] = number
                self._at[name] = step
            if name in _COUNTED:
                self.totals[_COUNTED[name]] += 1.0
        self.time = as_time(record.get("time")) or self.time
        jump = as_number(record.get(CLOCK_JUMP)) or 0.0
        self.ends[attempt] = self.time, self.ends.get(attempt, (None, 0.0))[1] + jump
        seconds = record.get("speed/step_seconds")
        if type(seconds) is float:
            self._add_step(step, seconds, record)

    def _count_saves(self, attempt: int, record: Mapping[str, Any]) -> None:
        total, in_row = self.failed_saves(attempt)
        if "checkpoint/failed_step" in record:
            self._failed = attempt, total + 1, in_row + 1
        elif "checkpoint/saved_step" in record:
            self._failed = attempt, total, 0

    def failed_saves(self, attempt: int) -> tuple[int, int]:
        """Return the saves of an attempt that have failed by the records: all, and those since the last good one."""
        recorded, total, in_row = self._failed
        return (total, in_row) if recorded == attempt else (0, 0)

    def _add_step(self, step: int, seconds: float, record: Mapping[str, Any]) -> None:
        self.step_time = self.time
        waited = as_number(record.get("speed/data_wait_share")) or 0.0
        self._steps.append(step)
        self._seconds.append((self._seconds[-1] if self._seconds else 0.0) + seconds * (1.0 - waited))
        items = as_number(record.get("train/items"))
        mfu = as_number(record.get("speed/mfu"))
        self._recent.append(
            (self.time or 0.0, step, seconds, math.nan if items is None else items, math.nan if mfu is None else mfu)
        )
        loss = recorded_number(record.get("train/loss"))
        self.losses.append(math.nan if loss is None else loss)

    def _restart_at(self, step: int) -> None:
        """Forget what this step and later ones recorded: they are computed again."""
        for name in [name for name, at in self._at.items() if at >= step]:
            del self._at[name], self.latest[name]
        kept = bisect_left(self._steps, step)
        for _ in range(len(self._steps) - kept):
            if self.losses:
                self.losses.pop()
        del self._steps[kept:], self._seconds[kept:]
        self._recent.clear()

    @property
    def effective_seconds(self) -> float | None:
        """Time of the steps that count, without waiting for data; None before the first one."""
        return self._seconds[-1] if self._seconds else None

    def rate(self, which: int) -> float | None:
        """Return items per second (0) or MFU (1) over recent steps, weighted by their time; None if unknown."""
        pairs = [(one[3 + which], one[2]) for one in self._recent if math.isfinite(one[3 + which])]
        seconds = sum(weight for _, weight in pairs)
        if seconds <= 0:
            return None
        return sum(value if which == 0 else value * weight for value, weight in pairs) / seconds

    def stands_still(self, now: float) -> bool:
        """Return whether the next step has been due for long, by the times between recent ones."""
        times = [moment for moment, *_ in self._recent]
        longest = max((later - earlier for earlier, later in pairwise(times)), default=0.0)
        return self.step_time is not None and now - self.step_time > max(_STILL_SECONDS, _STILL_GAPS * longest)

    def eta(self, steps: int, batches: Any, now: float) -> float | None:
        """Return the time that the remaining steps take at the pace of recent ones.

        None if it is unknown, or while the run stands still.
        """
        if len(self._recent) < 2 or self.stands_still(now):
            return None
        began, first, *_ = self._recent[0]
        ended, last, *_ = self._recent[-1]
        work = (lambda step: step) if batches is None else batches.tokens_before
        done = work(last) - work(first)
        return (ended - began) / done * (work(steps) - work(last)) if done > 0 and steps > last else None


class _Cached:
    """Whether a file is another than at the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = (-1, -1, -1)

    def has_changed(self) -> bool:
        """Look at the file."""
        try:
            found = self._path.stat()
        except OSError:
            return False
        before = self._seen
        self._seen = (found.st_ino, found.st_size, found.st_mtime_ns)
        return before != self._seen


def _ended(number: int, record: Mapping[str, Any]) -> Attempt:
    return Attempt(number, str(record.get("outcome")), as_int(record.get("exit_code")))


def _is_failure(record: Mapping[str, Any]) -> bool:
    outcome = as_text(record.get("outcome"))
    return outcome is not None and outcome not in (*SAVED_OUTCOMES, RESTORED, RUNNING)


def _seconds(value: Any) -> float | None:
    """Return a duration of the config in seconds."""
    try:
        found = Interval.parse(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return float(found.amount) if found is not None and found.unit == "seconds" else as_number(value)


def _last_saved(checkpoints: Path) -> float | None:
    """Return when the newest checkpoint was published; None if there is none."""
    try:
        names = [entry.name for entry in os.scandir(checkpoints) if entry.name.startswith("step-")]
        return (checkpoints / max(names) / "manifest.json").stat().st_mtime if names else None
    except OSError:
        return None
