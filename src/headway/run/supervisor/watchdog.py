"""Detection of a dead, hanging or slow worker, from the workers' heartbeats and the process table.

Workers wait for each other, so when one hangs all stand still. Only the one that is behind is to blame: it has finished
fewer steps or begun fewer exchanges, and does not wait for another. Limits apply to that one, by its phase; workers
that wait for it have none.
"""

from __future__ import annotations

import os
import signal
import statistics
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from headway.config.sections.supervise import SuperviseConfig
from headway.core.coordination.heartbeat import Phase, Reading
from headway.core.coordination.outcomes import SAVED_CODES
from headway.core.format import format_seconds
from headway.core.process.table import DEAD, STOPPED, TRACED, UNINTERRUPTIBLE, ProcessState

#: A stopped process cannot continue by itself; short stops (a snapshot, a shell) are tolerated.
_STOPPED_SECONDS = 5.0
#: Workers' own times are compared over at least so many seconds and steps, so often in a row before one is named.
_WINDOW_SECONDS = 8.0
_WINDOW_STEPS = 3
_WINDOWS = 2
#: In a window this long one step is enough: a worker that slows steps to 20 s is named within a minute, too.
_LONG_WINDOW_SECONDS = 10.0
_MEDIAN_OF = 21
#: Before its first step a worker loads and compiles, with few heartbeats.
_START_SECONDS = 55.0
#: A healthy worker may be silent for this multiple of the longest recent silence that ended well.
_SILENCES = 3.0
#: Phases whose silences depend on the model, not on a disk, a store or a compiler.
_AT_WORK = frozenset((Phase.COMPUTE, Phase.BACKWARD, Phase.REDUCE, Phase.UPDATE, Phase.RECORD, Phase.EVALUATION))
#: A hanging worker is ended this share of the others' patience before they give an exchange up. Otherwise they would
#: end the attempt with an error of their own, and one of them would be blamed.
_BEFORE_TIMEOUT = 0.1


@dataclass(frozen=True)
class Finding:
    """A fault of a worker."""

    kind: Literal["died", "hung", "slow", "waits"]
    """`waits`: longer than usual, in a phase where that is allowed (data, a disk, a compiler); only a warning."""
    rank: int
    what: str
    """The fault in words, without the worker's name."""
    seconds: float = 0.0
    """Seconds since its last sign of life."""
    signal: int | None = None
    exit_code: int | None = None
    suspects: tuple[int, ...] = ()
    """All workers that may be to blame."""


@dataclass
class _Window:
    """Positions of the workers when a comparison began."""

    at: float
    steps: dict[int, int]
    own: dict[int, float]
    data: dict[int, float]
    done: int = 0
    """Steps that all workers had finished since then, at the last look."""


@dataclass
class _Silences:
    """The longest silence of each recent step, after which the worker continued."""

    _of_steps: dict[int, float] = field(default_factory=dict)
    _of_the_first: float = 0.0

    def add(self, reading: Reading, seconds: float) -> None:
        """Add a silence that began with this reading and has ended."""
        if not reading.has_finished_a_step:
            self._of_the_first = max(self._of_the_first, seconds)
            return
        self._of_steps[reading.step] = max(seconds, self._of_steps.pop(reading.step, 0.0))
        if len(self._of_steps) > _MEDIAN_OF:
            del self._of_steps[next(iter(self._of_steps))]

    def longest(self, with_first: bool) -> float:
        """Return the longest silence in seconds, with or without the attempt's first step, which does one-time work."""
        return max(*self._of_steps.values(), self._of_the_first if with_first else 0.0, 0.0)


@dataclass
class _UsualSilences:
    """How long workers are silent in normal operation."""

    at_steps: _Silences = field(default_factory=_Silences)
    at_evaluations: _Silences = field(default_factory=_Silences)
    _silent: dict[int, tuple[Reading, float]] = field(default_factory=dict)
    """The stragglers, and how long each has been silent."""

    def learn(self, readings: Mapping[int, Reading], silent: Mapping[int, float]) -> None:
        """Learn from the silences that have ended since the last look."""
        for rank, (reading, seconds) in self._silent.items():
            if readings[rank].beat_seconds != reading.beat_seconds and reading.phase in _AT_WORK:
                kind = self.at_evaluations if reading.phase == Phase.EVALUATION else self.at_steps
                kind.add(reading, seconds)
        self._silent = {rank: (readings[rank], seconds) for rank, seconds in silent.items()}


@dataclass
class _Pace:
    """How long recent steps took."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_MEDIAN_OF))
    _newest: tuple[int, float] | None = None

    def measure(self, readings: Mapping[int, Reading]) -> None:
        """Add the steps that the first worker has finished since the last look."""
        if not readings:
            return
        first = readings[min(readings)]
        if first.steps_seconds and (self._newest is None or first.step > self._newest[0]):
            if self._newest is not None and self._newest[0] > 0:
                steps, at = self._newest
                self.seconds.append((first.steps_seconds - at) / (first.step - steps))
            self._newest = (first.step, first.steps_seconds)


@dataclass
class _SlowWorkers:
    """Compares the workers' own time of a step over windows of several steps."""

    slow_factor: float
    """How many times as long as the others a slow worker takes."""
    _window: _Window | None = None
    _slow: dict[int, int] = field(default_factory=dict)
    """In how many windows in a row a worker was slow."""
    _named: set[int] = field(default_factory=set)

    def begin_anew(self) -> None:
        """Drop the present window."""
        self._window = None

    def look(self, now: float, readings: Mapping[int, Reading]) -> Finding | None:
        """Return a worker that takes much longer for its part of a step than the others, once."""
        if len(readings) < 2 or not all(reading.has_finished_a_step for reading in readings.values()):
            return None
        window = self._window
        self._window = self._window or _window(now, readings)
        if window is None or window.steps.keys() != readings.keys():
            self._window = _window(now, readings)
            return None
        done = {rank: reading.step - window.steps[rank] for rank, reading in readings.items()}
        if min(done.values()) < 0:  # after a rollback the number of finished steps is unknown
            self._window = _window(now, readings)
            return None
        seconds = now - window.at
        before = window.done
        window.done = min(done.values())
        # Amid a step some workers have done their part of it and others have not, which distorts a short comparison.
        if window.done == before or seconds < _WINDOW_SECONDS:
            return None
        if window.done < _WINDOW_STEPS and seconds < _LONG_WINDOW_SECONDS:
            return None
        self._window = _window(now, readings)
        own = {rank: (r.own_seconds - window.own[rank]) / done[rank] for rank, r in readings.items()}
        rank = max(own, key=own.__getitem__)
        others = statistics.median(value for other, value in own.items() if other != rank)
        if own[rank] < self.slow_factor * max(others, 1e-6):
            self._slow.clear()
            return None
        self._slow = {rank: self._slow.get(rank, 0) + 1}
        if self._slow[rank] < _WINDOWS or rank in self._named:
            return None
        self._named.add(rank)
        data = (readings[rank].data_seconds - window.data[rank]) / done[rank]
        cause = "waiting for data" if data > own[rank] / 2 else "computing"
        what = (
            f"takes {own[rank]:.3g} s for its part of a step, mostly {cause};"
            f" the others take {others:.3g} s and wait for it"
        )
        return Finding("slow", rank, what, suspects=(rank,))


@dataclass
class Watchdog:
    """Judges an attempt's workers, look by look."""

    config: SuperviseConfig
    compiles: bool = False
    """Whether the model is compiled: then the first batch of an evaluation may wait for the compiler."""
    timeout_seconds: float = 600.0
    """How long workers wait for others in an exchange."""
    _pace: _Pace = field(default_factory=_Pace)
    _usual: _UsualSilences = field(default_factory=_UsualSilences)
    _stopped_since: dict[int, float] = field(default_factory=dict)
    _slow: _SlowWorkers = field(init=False)
    _waited: set[tuple[int, int, Phase]] = field(default_factory=set)
    _looked: float | None = None
    _forgiven: float = 0.0

    def __post_init__(self) -> None:
        self._slow = _SlowWorkers(self.config.slow_factor)

    def look(
        self, now: float, readings: Mapping[int, Reading], states: Mapping[int, ProcessState | None]
    ) -> Finding | None:
        """Return the first fault found; None if all is well.

        Args:
            now: Time of the monotonic clock.
            readings: Heartbeats of the workers that have begun, by rank.
            states: Process states by rank; None for a process that is gone.
        """
        # If this process was stopped, or the machine asleep, no worker is to blame for that time.
        if self._looked is not None and now - self._looked > 5.0:
            self._forgiven = now
            self._stopped_since.clear()
            self._slow.begin_anew()
        self._looked = now
        self._pace.measure(readings)
        return (
            _dead(readings, states)
            or self._stopped(now, readings, states)
            or self._hung(now, readings, states)
            or self._slow.look(now, readings)
        )

    @property
    def step_seconds(self) -> float | None:
        """The median of recent steps."""
        return statistics.median(self._pace.seconds) if self._pace.seconds else None

    def limit_seconds(self, reading: Reading) -> float:
        """Return how long a worker may be without a sign of life in its phase."""
        config = self.config
        if reading.phase == Phase.START or not reading.has_finished_a_step:
            return config.start_seconds
        if reading.phase in (Phase.CHECKPOINT, Phase.END):
            return config.save_seconds
        if reading.phase == Phase.EVALUATION and self.compiles:
            return config.start_seconds
        limit = max(self.patience_seconds(reading), config.hang_steps * (self.step_seconds or self._usual_silence))
        return max(limit, config.data_seconds) if reading.phase == Phase.DATA else limit

    def patience_seconds(self, reading: Reading) -> float:
        """Return how long a worker may be without a sign of life before a warning."""
        usual = self._usual_silence
        if reading.phase == Phase.EVALUATION:
            usual = max(usual, self._usual.at_evaluations.longest(with_first=False))
        least = 0.0 if reading.has_finished_a_step else _START_SECONDS
        return max(least, self.config.hang_seconds, _SILENCES * usual)

    @property
    def start_patience_seconds(self) -> float:
        """How long a worker may take to its first sign of life before a warning."""
        return max(_START_SECONDS, self.config.hang_seconds)

    @property
    def _usual_silence(self) -> float:
        """The longest silence of recent steps, or of the first step until another is done."""
        return self._usual.at_steps.longest(with_first=not self._pace.seconds)

    def _silences(self, now: float, readings: Mapping[int, Reading]) -> dict[int, float]:
        """Return how long each straggler has been silent."""
        behind = {rank: readings[rank] for rank in stragglers(readings)}
        # If all wait in an exchange, it began when the last one joined, which may have waited for late data.
        since = max((r.beat_seconds for r in behind.values() if r.waits_for), default=0.0)
        return {rank: now - max(reading.beat_seconds, since, self._forgiven) for rank, reading in behind.items()}

    def _stopped(
        self, now: float, readings: Mapping[int, Reading], states: Mapping[int, ProcessState | None]
    ) -> Finding | None:
        for rank, state in states.items():
            if state is None or state.state != STOPPED:
                self._stopped_since.pop(rank, None)
            elif now - self._stopped_since.setdefault(rank, now) >= _STOPPED_SECONDS:
                silent = now - readings[rank].beat_seconds
                what = f"was stopped by a signal (SIGSTOP) {silent:.0f} s ago and has not been continued"
                return Finding("hung", rank, what, silent, suspects=(rank,))
        return None

    def _hung(
        self, now: float, readings: Mapping[int, Reading], states: Mapping[int, ProcessState | None]
    ) -> Finding | None:
        if any(state is not None and state.state == TRACED for state in states.values()):
            return None  # it is being debugged
        silent = self._silences(now, readings)
        self._usual.learn(readings, silent)
        limits = {rank: self.limit_seconds(readings[rank]) for rank in silent}
        if self._others_give_up_soon(now, readings, silent):
            limits = {rank: min(limit, self.patience_seconds(readings[rank])) for rank, limit in limits.items()}
        if any(silent[rank] < limit for rank, limit in limits.items()):  # a suspect is still within its limit
            rank = max(silent, key=silent.__getitem__)
            return self._waits(rank, readings[rank], silent[rank])
        if not silent:
            return None
        rank = min(silent)
        reading = readings[rank]
        state = states.get(rank)
        seconds = now - reading.beat_seconds
        where = f"in phase '{reading.phase}' after step {reading.step}"
        if state is not None and state.state == UNINTERRUPTIBLE:
            where += ", in an uninterruptible call of the kernel"
        what = f"gave no sign of life for {seconds:.0f} s, {where}"
        return Finding("hung", rank, what, seconds, suspects=tuple(silent))

    def _others_give_up_soon(self, now: float, readings: Mapping[int, Reading], behind: Collection[int]) -> bool:
        """Return whether the exchange in which the others wait is about to time out.

        It may have begun before their wait, by as much as a backward pass takes.
        """
        waiting = [r.beat_seconds for rank, r in readings.items() if r.waits_for and rank not in behind]
        before = max(_BEFORE_TIMEOUT * self.timeout_seconds, self._usual_silence)
        return bool(waiting) and now - max(min(waiting), self._forgiven) >= self.timeout_seconds - before

    def _waits(self, rank: int, reading: Reading, silent: float) -> Finding | None:
        """Return a warning, once per silence, for a worker that is silent longer than usual where that is allowed."""
        key = (rank, reading.step, reading.phase)
        if silent < self.patience_seconds(reading) or key in self._waited:
            return None
        self._waited.add(key)
        what = f"has waited {silent:.0f} s for data of step {reading.step + 1}"
        if reading.phase != Phase.DATA:
            limit = format_seconds(self.limit_seconds(reading))
            what = f"gave no sign of life for {silent:.0f} s, in phase '{reading.phase}', which may take {limit}"
        return Finding("waits", rank, what, silent)


def _window(now: float, readings: Mapping[int, Reading]) -> _Window:
    return _Window(
        now,
        {rank: reading.step for rank, reading in readings.items()},
        {rank: reading.own_seconds for rank, reading in readings.items()},
        {rank: reading.data_seconds for rank, reading in readings.items()},
    )


def _dead(readings: Mapping[int, Reading], states: Mapping[int, ProcessState | None]) -> Finding | None:
    """Return a finding for a worker that a signal or a crash has ended, but not for a regular or requested end.

    Of several dead workers, pick the one to blame: a death makes others crash, because they lose their connection to
    it, and the agent ends the rest by SIGTERM.
    """
    codes = {
        rank: os.waitstatus_to_exitcode(state.wait_status)
        for rank in readings
        if (state := states.get(rank)) is not None and state.state == DEAD and state.wait_status is not None
    }
    # A worker that the agent has already reaped died first; one that ends regularly reports that it ends.
    reaped = [rank for rank, r in readings.items() if rank in states and states[rank] is None and r.phase != Phase.END]
    if reaped:
        return Finding("died", reaped[0], "died", suspects=(reaped[0],))
    dead = {rank: code for rank, code in codes.items() if code not in SAVED_CODES}
    if not dead:
        return None
    rank = min(dead, key=lambda rank: (dead[rank] == -signal.SIGTERM, dead[rank] > 0, rank))
    code = dead[rank]
    ended = {"signal": -code} if code < 0 else {"exit_code": code}
    return Finding("died", rank, f"died ({in_words(code)})", suspects=(rank,), **ended)


def stragglers(readings: Mapping[int, Reading]) -> list[int]:
    """Return the workers that the others wait for; all of them if all wait for each other.

    They have begun the fewest exchanges and, among those that have, do not wait themselves.
    """
    if not readings:
        return []
    fewest = min(reading.collectives for reading in readings.values())
    behind = [rank for rank, reading in readings.items() if reading.collectives == fewest]
    free = [rank for rank in behind if not readings[rank].waits_for]
    return sorted(free or behind)


def in_words(code: int) -> str:
    """Describe how a process ended, from the exit code that Python returns."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"
