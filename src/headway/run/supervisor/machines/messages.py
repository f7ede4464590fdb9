"""The readings of a machine's workers as messages, and the difference between the clocks of two machines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headway.core.coordination.heartbeat import Exchange, Phase, Reading
from headway.core.process.table import ProcessState

#: A clock may drift, and a message may be late. Smaller differences are ignored, so that beats keep their times.
_TOLERANCE_SECONDS, _WINDOW_SECONDS = 0.25, 30.0
_NUMBERS = ("pid", "step", "collectives", "first_step")
_SECONDS = ("beat_seconds", "phase_seconds", "own_seconds", "data_seconds", "steps_seconds")
#: Times of the machine's clock; 0 is "never".
_TIMES = ("beat_seconds", "phase_seconds", "steps_seconds")
_STATES = "RSDTtZXIPW"


@dataclass
class ClockOffset:
    """What is added to times of another machine's clock: from the messages that took least time."""

    seconds: float = math.inf
    _least: float = math.inf
    _since: float = 0.0

    def update(self, here: float, there: float) -> float:
        """Learn from a message that was sent at `there` by the other clock and arrived at `here` by this one."""
        late = here - there
        if late < self.seconds - _TOLERANCE_SECONDS or math.isinf(self.seconds):
            self.seconds = late
        self._least = min(self._least, late)
        if here - self._since >= _WINDOW_SECONDS:
            if self._least > self.seconds + _TOLERANCE_SECONDS:
                self.seconds = self._least
            self._least, self._since = math.inf, here
        return self.seconds


def pack_workers(
    readings: Mapping[int, Reading], states: Mapping[int, ProcessState | None]
) -> list[tuple[int, dict[str, Any], list[Any] | None]]:
    """Return the readings and states of workers as JSON values."""
    packed = []
    for rank, reading in readings.items():
        values: dict[str, Any] = {name: getattr(reading, name) for name in (*_NUMBERS, *_SECONDS, "waits_for")}
        values |= {"phase": int(reading.phase), "begun": list(reading.begun), "finished": list(reading.finished)}
        state = states.get(rank)
        packed.append((rank, values, None if state is None else [state.state, state.wait_status]))
    return packed


def unpack_workers(
    packed: Any, ranks: range, offset: float
) -> tuple[dict[int, Reading], dict[int, ProcessState | None]]:
    """Return readings and states by rank, with times of this machine's clock.

    Args:
        packed: As received. What is not as `pack_workers` makes it is left out.
        ranks: The ranks that the sender may speak for.
        offset: What is added to its times.
    """
    readings: dict[int, Reading] = {}
    states: dict[int, ProcessState | None] = {}
    for item in packed if isinstance(packed, list) else ():
        try:
            rank, values, state = item
            if rank not in ranks:
                continue
            reading = _reading(values)
            times = {name: getattr(reading, name) for name in _TIMES}
            shifted = {name: time + offset if time else 0.0 for name, time in times.items()}
            readings[rank] = replace(reading, **shifted)  # type: ignore[arg-type]
            states[rank] = _state(state, reading.pid)
        except (TypeError, ValueError, KeyError, OverflowError):
            continue
    return readings, states


def _reading(values: Mapping[str, Any]) -> Reading:
    numbers = {name: _whole(values[name]) for name in _NUMBERS}
    seconds = {name: _real(values[name]) for name in _SECONDS}
    begun, finished = (Exchange(_whole(values[name][0]), _word(values[name][1])) for name in ("begun", "finished"))
    phase, waits = Phase(_whole(values["phase"])), _word(values["waits_for"])
    return Reading(phase=phase, waits_for=waits, begun=begun, finished=finished, **numbers, **seconds)  # type: ignore[arg-type]


def _state(state: Any, pid: int) -> ProcessState | None:
    if state is None:
        return None
    letter, status = state
    if letter not in tuple(_STATES):
        raise ValueError(letter)
    return ProcessState(pid, letter, -1, -1, None if status is None else _whole(status))


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 2**63:
        raise ValueError(value)
    return value


def _real(value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(value)
    return float(value)


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    return value[:64]
