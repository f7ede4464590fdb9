"""Which worker has died, hangs, or is slow: judged from what workers tell and what the process table says.

Workers wait for each other, so when one hangs all stand still. Only the one that is behind is to blame: it has finished
fewer steps or begun fewer exchanges, and does not wait for anybody. Limits are for that one, by its phase; those who
wait for it have none of their own.
"""

from __future__ import annotations

import os
import signal
import statistics
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from headway.config.supervise import SuperviseConfig
from headway.core.format import format_seconds
from headway.core.heartbeat import Phase, Reading
from headway.core.process_table import DEAD, STOPPED, TRACED, UNINTERRUPTIBLE, ProcessState

#: A stopped process does nothing by itself any more; short stops (a snapshot, a shell) are let pass.
_STOPPED_SECONDS = 5.0
#: Own times are compared over so long, and so many steps, at least; and so often in a row before anyone is named.
_WINDOW_SECONDS, _WINDOW_STEPS, _WINDOWS = 8.0, 3, 2
#: From here on one step is enough: who slows steps down to 20 s is named within a minute, too.
_LONG_WINDOW_SECONDS = 10.0
_MEDIAN_OF = 21
#: Before its first step a worker loads and compiles, and says little.
_START_SECONDS = 55.0
#: What a worker that is well may be silent for, in the longest silence after which the run went on lately.
_SILENCES = 3.0
#: Phases whose silences are as long as the model makes them, and not a disk, a store or a compiler.
_AT_WORK = frozenset((Phase.COMPUTE, Phase.BACKWARD, Phase.REDUCE, Phase.UPDATE, Phase.RECORD, Phase.EVALUATION))
#: How long before others give an exchange up the one whom they wait for is ended, in their patience at least: they
#: would end the attempt with an error of their own, and one of them would be blamed.
_BEFORE_TIMEOUT = 0.1


@dataclass(frozen=True)
class Finding:
    """What is wrong with a worker."""

    kind: Literal["died", "hung", "slow", "waits"]
    """`waits`: longer than a step may take, where that is allowed (for data, a disk, a compiler); it is only said."""
    rank: int
    what: str
    """In words, without the worker's name."""
    seconds: float = 0.0
    """Since its last sign of life."""
    signal: int | None = None
    exit_code: int | None = None
    suspects: tuple[int, ...] = ()
    """All of those that may be to blame."""


@dataclass
class _Window:
    """Where a worker was when the comparison began."""

    at: float
    steps: dict[int, int]
    own: dict[int, float]
    data: dict[int, float]
    done: int = 0
    """Steps that all have finished since, when it was last looked at."""


@dataclass
class _Silences:
    """The longest silence of every step, after which the worker went on."""

    _of_steps: dict[int, float] = field(default_factory=dict)
    _of_the_first: float = 0.0

    def add(self, reading: Reading, seconds: float) -> None:
        """One has ended that began with this reading."""
        if not reading.has_finished_a_step:
            self._of_the_first = max(self._of_the_first, seconds)
            return
        self._of_steps[reading.step] = max(seconds, self._of_steps.pop(reading.step, 0.0))
        if len(self._of_steps) > _MEDIAN_OF:
            del self._of_steps[next(iter(self._of_steps))]

    def longest(self, with_first: bool) -> float:
        """In seconds; with that of the attempt's first step or without, in which much is done for once."""
        return max(*self._of_steps.values(), self._of_the_first if with_first else 0.0, 0.0)


@dataclass
class Watchdog:
    """Looks at an attempt's workers again and again."""

    config: SuperviseConfig
    compiles: bool = False
    """The model is compiled, which the first batch of an evaluation may have to wait for."""
    timeout_seconds: float = 600.0
    """How long workers wait for others in an exchange."""
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=_MEDIAN_OF))
    _newest: tuple[int, float] | None = None
    _silent: dict[int, tuple[Reading, float]] = field(default_factory=dict)
    """Those that the others wait for, and how long each has been silent."""
    _at_steps: _Silences = field(default_factory=_Silences)
    _at_evaluations: _Silences = field(default_factory=_Silences)
    _stopped_since: dict[int, float] = field(default_factory=dict)
    _window: _Window | None = None
    _slow: dict[int, int] = field(default_factory=dict)
    _named: set[int] = field(default_factory=set)
    _waited: set[tuple[int, int, Phase]] = field(default_factory=set)
    _looked: float | None = None
    _forgiven: float = 0.0

    def look(
        self, now: float, readings: Mapping[int, Reading], states: Mapping[int, ProcessState | None]
    ) -> Finding | None:
        """The first thing that is wrong.

        Args:
            now: Of the monotonic clock.
            readings: By rank; of the workers that have begun.
            states: By rank; None for one that is gone.
        """
        # When this process itself was stopped, or the machine asleep, nothing of that time is anybody's fault.
        if self._looked is not None and now - self._looked > 5.0:
            self._forgiven = now
            self._stopped_since.clear()
            self._window = None
        self._looked = now
        self._measure(readings)
        return (
            _dead(readings, states)
            or self._stopped(now, readings, states)
            or self._hung(now, readings, states)
            or self._slow_one(now, readings)
        )

    @property
    def step_seconds(self) -> float | None:
        """The median of recent steps."""
        return statistics.median(self._steps) if self._steps else None

    def limit_seconds(self, reading: Reading) -> float:
        """How long a worker may be without a sign of life in its phase."""
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
        """How long a worker may be without a sign of life until that is said, though it may take longer."""
        usual = self._usual_silence
        if reading.phase == Phase.EVALUATION:
            usual = max(usual, self._at_evaluations.longest(with_first=False))
        least = 0.0 if reading.has_finished_a_step else _START_SECONDS
        return max(least, self.config.hang_seconds, _SILENCES * usual)

    @property
    def start_patience_seconds(self) -> float:
        """How long a worker may take to its first sign of life until that is said."""
        return max(_START_SECONDS, self.config.hang_seconds)

    @property
    def _usual_silence(self) -> float:
        """The longest of recent steps; of the first one until another is done: nothing else is known of steps."""
        return self._at_steps.longest(with_first=not self._steps)

    def _measure(self, readings: Mapping[int, Reading]) -> None:
        if not readings:
            return
        first = readings[min(readings)]
        if first.steps_seconds and (self._newest is None or first.step > self._newest[0]):
            if self._newest is not None and self._newest[0] > 0:
                steps, at = self._newest
                self._steps.append((first.steps_seconds - at) / (first.step - steps))
            self._newest = (first.step, first.steps_seconds)

    def _silences(self, now: float, readings: Mapping[int, Reading]) -> dict[int, float]:
        """How long each of those that the others wait for has been silent."""
        behind = {rank: readings[rank] for rank in those_behind(readings)}
        # Who waits with all others has waited for the last one to come, which may have been data that were late.
        since = max((r.beat_seconds for r in behind.values() if r.waits_for), default=0.0)
        return {rank: now - max(reading.beat_seconds, since, self._forgiven) for rank, reading in behind.items()}

    def _learn(self, readings: Mapping[int, Reading], silent: Mapping[int, float]) -> None:
        """How long workers are silent while all is well: this is what a step is made of."""
        for rank, (reading, seconds) in self._silent.items():
            if readings[rank].beat_seconds != reading.beat_seconds and reading.phase in _AT_WORK:
                evaluates = reading.phase == Phase.EVALUATION
                (self._at_evaluations if evaluates else self._at_steps).add(reading, seconds)
        self._silent = {rank: (readings[rank], seconds) for rank, seconds in silent.items()}

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
            return None  # somebody looks at it with a debugger
        silent = self._silences(now, readings)
        self._learn(readings, silent)
        limits = {rank: self.limit_seconds(readings[rank]) for rank in silent}
        if self._others_give_up_soon(now, readings, silent):
            limits = {rank: min(limit, self.patience_seconds(readings[rank])) for rank, limit in limits.items()}
        if any(silent[rank] < limit for rank, limit in limits.items()):  # who may be to blame is still within his time
            rank = max(silent, key=silent.__getitem__)
            return self._waits(rank, readings[rank], silent[rank])
        if not silent:
            return None
        rank = min(silent)
        reading, state = readings[rank], states.get(rank)
        seconds = now - reading.beat_seconds
        where = f"in phase '{reading.phase}' after step {reading.step}"
        if state is not None and state.state == UNINTERRUPTIBLE:
            where += ", in an uninterruptible call of the kernel"
        what = f"gave no sign of life for {seconds:.0f} s, {where}"
        return Finding("hung", rank, what, seconds, suspects=tuple(silent))

    def _others_give_up_soon(self, now: float, readings: Mapping[int, Reading], behind: Collection[int]) -> bool:
        """Whether the exchange in which the others wait is about to fail; it may have begun as long before they wait
        for it as a backward pass takes."""
        waiting = [r.beat_seconds for rank, r in readings.items() if r.waits_for and rank not in behind]
        before = max(_BEFORE_TIMEOUT * self.timeout_seconds, self._usual_silence)
        return bool(waiting) and now - max(min(waiting), self._forgiven) >= self.timeout_seconds - before

    def _waits(self, rank: int, reading: Reading, silent: float) -> Finding | None:
        """Said once for every time that a worker is silent for longer than is usual, where it is allowed to."""
        key = (rank, reading.step, reading.phase)
        if silent < self.patience_seconds(reading) or key in self._waited:
            return None
        self._waited.add(key)
        what = f"has waited {silent:.0f} s for data of step {reading.step + 1}"
        if reading.phase != Phase.DATA:
            limit = format_seconds(self.limit_seconds(reading))
            what = f"gave no sign of life for {silent:.0f} s, in phase '{reading.phase}', which may take {limit}"
        return Finding("waits", rank, what, silent)

    def _slow_one(self, now: float, readings: Mapping[int, Reading]) -> Finding | None:
        if len(readings) < 2 or not all(reading.has_finished_a_step for reading in readings.values()):
            return None
        window, self._window = self._window, self._window or _window(now, readings)
        if window is None or window.steps.keys() != readings.keys():
            self._window = _window(now, readings)
            return None
        done = {rank: reading.step - window.steps[rank] for rank, reading in readings.items()}
        if min(done.values()) < 0:  # a rollback: how many steps were done since is not to be told
            self._window = _window(now, readings)
            return None
        seconds, before, window.done = now - window.at, window.done, min(done.values())
        # In the middle of a step some have done their part of it and others have not, which counts in a few steps.
        if window.done == before or seconds < _WINDOW_SECONDS:
            return None
        if window.done < _WINDOW_STEPS and seconds < _LONG_WINDOW_SECONDS:
            return None
        self._window = _window(now, readings)
        own = {rank: (r.own_seconds - window.own[rank]) / done[rank] for rank, r in readings.items()}
        rank = max(own, key=own.__getitem__)
        others = statistics.median(value for other, value in own.items() if other != rank)
        if own[rank] < self.config.slow_factor * max(others, 1e-6):
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


def _window(now: float, readings: Mapping[int, Reading]) -> _Window:
    return _Window(
        now,
        {rank: reading.step for rank, reading in readings.items()},
        {rank: reading.own_seconds for rank, reading in readings.items()},
        {rank: reading.data_seconds for rank, reading in readings.items()},
    )


def _dead(readings: Mapping[int, Reading], states: Mapping[int, ProcessState | None]) -> Finding | None:
    """A worker that has ended by a signal or a crash; one that has ended well, or was told to stop, is not dead.

    Of several the one to blame: a death makes others crash, which lose their connection to it, and the agent ends the
    rest by SIGTERM.
    """
    codes = {
        rank: os.waitstatus_to_exitcode(state.wait_status)
        for rank in readings
        if (state := states.get(rank)) is not None and state.state == DEAD and state.wait_status is not None
    }
    # Whom the agent has taken leave of already was the first to go; what ends by itself says that it ends.
    taken = [rank for rank, r in readings.items() if rank in states and states[rank] is None and r.phase != Phase.END]
    if taken:
        return Finding("died", taken[0], "died", suspects=(taken[0],))
    dead = {rank: code for rank, code in codes.items() if code not in (0, 75)}
    if not dead:
        return None
    rank = min(dead, key=lambda rank: (dead[rank] == -signal.SIGTERM, dead[rank] > 0, rank))
    code = dead[rank]
    ended = {"signal": -code} if code < 0 else {"exit_code": code}
    return Finding("died", rank, f"died ({in_words(code)})", suspects=(rank,), **ended)


def those_behind(readings: Mapping[int, Reading]) -> list[int]:
    """The workers that the others wait for: those that have begun the fewest exchanges, and of them those that do not
    wait themselves. Everyone, when all wait for each other."""
    if not readings:
        return []
    fewest = min(reading.collectives for reading in readings.values())
    behind = [rank for rank, reading in readings.items() if reading.collectives == fewest]
    free = [rank for rank in behind if not readings[rank].waits_for]
    return sorted(free or behind)


def in_words(code: int) -> str:
    """How a process ended, from the exit code that Python gives."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"
