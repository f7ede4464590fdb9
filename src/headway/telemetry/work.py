"""The work of a run by attempt, from its records: what goodput is computed from. Superseded steps count."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.core.files.foreign import as_number
from headway.telemetry.metrics import LEFT_OUT

_STALLS = ("checkpoint/stall_seconds", "checkpoint/hold_stall_seconds")
#: Metrics that the loop records when a piece of work is done. (Outcomes of saves can also arrive after a failure.)
_DONE = frozenset(("speed/step_seconds", "evaluation/loss", LEFT_OUT, *_STALLS))


@dataclass
class AttemptWork:
    """The steps of one attempt, and its waiting for checkpoints."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    seconds: array[float] = field(default_factory=lambda: array("d"))
    """0 for a step that was left out, which stands for whatever was computed of it before."""
    waited: array[float] = field(default_factory=lambda: array("d"))
    stalls: float = 0.0
    began: float | None = None
    """When the first step that was computed began, Unix seconds."""
    last_time: float = 0.0
    """When the last of all that was done was finished."""


class Work:
    """Takes the records of a run one by one, as they were written."""

    def __init__(self) -> None:
        self.by_attempt: dict[int, AttemptWork] = {}

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the next record; skip it if it is not a record of a step."""
        number = record.get("attempt")
        step = record.get("step")
        if type(number) is not int or type(step) is not int or not 0 <= step < 2**63:
            return
        work = self.by_attempt.setdefault(number, AttemptWork())
        if not _DONE.isdisjoint(record):
            work.last_time = as_number(record.get("time")) or 0.0
        seconds = record.get("speed/step_seconds")
        if isinstance(seconds, float):
            share = record.get("speed/data_wait_share")
            if work.began is None:
                work.began = (as_number(record.get("time")) or 0.0) - seconds
            work.steps.append(step)
            work.seconds.append(seconds)
            work.waited.append(seconds * share if isinstance(share, float) else 0.0)
        elif LEFT_OUT in record:
            work.steps.append(step)
            work.seconds.append(0.0)
            work.waited.append(0.0)
        stalls = (record.get(key) for key in _STALLS)
        work.stalls += sum(stall for stall in stalls if isinstance(stall, float))
