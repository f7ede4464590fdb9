"""Where the time of a run went: the effective training time ratio, and the losses by cause.

The effective training time ratio (ETTR; Kokolis et al. 2024, "Revisiting Reliability in Large-Scale Machine Learning
Research Clusters", section 2) is the time of steps that led to the newest weights, as a share of all time since the run
began. Repeated steps count once, and those whose rows a rollback leaves out do not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headway.core.coordination.outcomes import BUDGET_REACHED, FINISHED, SAVED_OUTCOMES
from headway.core.errors import INTERRUPTED
from headway.core.files.foreign import as_number
from headway.core.format import counted, format_seconds
from headway.telemetry.metrics import read_records
from headway.telemetry.record import RUNNING, Attempt, Run, as_int, as_text
from headway.telemetry.work import AttemptWork, Work

#: Causes, in the order in which they are shown.
START = "start-up"
AGAIN = "steps computed again"
SAVING = "waiting for checkpoints"
DATA = "waiting for data"
HANGING = "until a hang was noticed"
DOWN = "between attempts"
OTHER = "evaluation and the rest"


@dataclass(frozen=True)
class Goodput:
    """The time of a run, in seconds."""

    wall_seconds: float
    """From the start of the first attempt to the end of the last, without the time in which the run was not meant
    to continue: after it was finished, had spent its budget, or was stopped by Ctrl-C."""
    effective_seconds: float
    lost_seconds: dict[str, float]
    """By cause; with `effective_seconds` these add up to `wall_seconds`."""
    lost_steps: dict[int, int] = field(default_factory=dict)
    """Steps that were computed again, or left out later, by the attempt that had computed them first."""

    @property
    def ratio(self) -> float:
        """ETTR, 0 to 1."""
        return self.effective_seconds / self.wall_seconds if self.wall_seconds > 0 else 0.0

    def metrics(self) -> dict[str, float]:
        """Return metrics for a step's record: `goodput/ratio`, seconds in all and by cause, and steps that did not
        count."""
        return {
            "goodput/ratio": self.ratio,
            "goodput/wall_seconds": self.wall_seconds,
            **{f"goodput/lost_seconds/{cause.replace(' ', '_')}": lost for cause, lost in self.lost_seconds.items()},
            "goodput/lost_steps": float(sum(self.lost_steps.values())),
        }

    def __str__(self) -> str:
        parts = [f"goodput {self.ratio:.1%} of {format_seconds(self.wall_seconds)}"]
        causes = sorted(self.lost_seconds.items(), key=lambda item: -item[1])
        parts += [f"{cause} {format_seconds(seconds)}" for cause, seconds in causes if seconds >= 0.05]
        if steps := sum(self.lost_steps.values()):
            parts.append(f"{counted(steps, 'step')} computed again")
        return " · ".join(parts)


def goodput(
    attempts: Iterable[Attempt],
    endings: Mapping[int, Mapping[str, Any]],
    records: Iterable[Mapping[str, Any]],
    counts_to: float = math.inf,
) -> Goodput | None:
    """Split the time of a run; None if it has no attempt whose beginning and end are known.

    Args:
        attempts: Attempts in their order.
        endings: `attempt.json` by attempt, for hangs and for what stopped the run (`stopped_by`, or without a
            supervisor `notices`).
        records: Records of `metrics.jsonl` as they were written, superseded ones included.
        counts_to: The last step that led to the current state.
    """
    work = Work()
    for record in records:
        work.add(record)
    return _split(attempts, endings, work, counts_to)


def _split(
    attempts: Iterable[Attempt], endings: Mapping[int, Mapping[str, Any]], all_work: Work, counts_to: float = math.inf
) -> Goodput | None:
    known = [attempt for attempt in attempts if attempt.started is not None and attempt.ended is not None]
    if not known:
        return None
    lost = dict.fromkeys((START, AGAIN, SAVING, DATA, HANGING, DOWN, OTHER), 0.0)
    wall = effective = 0.0
    lost_steps: dict[int, int] = {}
    counts_below = counts_to + 1  # a step counts when no later attempt has computed it
    for index in range(len(known) - 1, -1, -1):
        attempt = known[index]
        work = all_work.by_attempt.get(attempt.number, AttemptWork())
        ending = endings.get(attempt.number, {})
        assert attempt.started is not None and attempt.ended is not None, "known"
        silent = as_number(ending.get("silent_seconds")) or 0.0
        # The wall clock may have been set meanwhile; steps, stalls and silence are measured by a monotonic clock.
        measured = sum(work.seconds) + work.stalls + silent
        went = max(attempt.seconds or 0.0, measured)
        wall += went
        if index + 1 < len(known):
            gap = max(0.0, (known[index + 1].started or 0.0) - attempt.ended)
            if not was_meant_to_end(attempt, ending):
                lost[DOWN] += gap
                wall += gap
        lost[HANGING] += silent
        until = attempt.ended - silent if work.began is None else work.began
        start = min(max(0.0, until - attempt.started), went - measured)
        lost[START] += start
        if (step := _unrecorded(work, ending)) is not None and step >= counts_below:
            lost_steps[attempt.number] = 1  # how long it took is not known
        # Start from the last one: after a rollback an attempt does the same steps again.
        for step, seconds, waited in reversed(list(zip(work.steps, work.seconds, work.waited, strict=True))):
            if step < counts_below:
                counts_below = step
                effective += seconds - waited
                lost[DATA] += waited
            else:
                lost[AGAIN] += seconds
                lost_steps[attempt.number] = lost_steps.get(attempt.number, 0) + (seconds > 0)
        lost[SAVING] += work.stalls
        if work.began is not None and attempt.outcome not in (*SAVED_OUTCOMES, RUNNING):
            down = max(0.0, attempt.ended - work.last_time - silent)
            lost[DOWN] += min(down, went - measured - start)  # it was down from there on
    lost[OTHER] = max(0.0, wall - effective - sum(lost.values()))
    return Goodput(wall, effective, lost, dict(sorted(lost_steps.items())))


def goodput_of(run: Run) -> Goodput | None:
    """Split the time of the run in a run directory."""
    return _split(run.attempts, run.attempt_records, run.work)


def goodput_before(run: Run, attempt: int, step: int) -> Goodput | None:
    """Split the time until an attempt began, which resumed from the state after a step."""
    # An attempt takes no time yet, but there is time between it and the previous one.
    attempts = [
        replace(one, ended=one.started) if one.number == attempt else one
        for one in run.attempts
        if one.number <= attempt
    ]
    records = (record for record in read_records(run.path) if (as_int(record.get("attempt")) or 0) < attempt)
    return goodput(attempts, run.attempt_records, records, step)


def was_meant_to_end(attempt: Attempt, ending: Mapping[str, Any]) -> bool:
    """Return whether the run was not meant to continue at that time."""
    return (
        attempt.outcome in (FINISHED, BUDGET_REACHED)
        or attempt.exit_code == INTERRUPTED
        or _stopped_by(ending) == "SIGINT"
    )


def _stopped_by(ending: Mapping[str, Any]) -> str | None:
    """Return the signal that stopped the run: as the supervisor reported it, or the worker itself."""
    said = as_text(ending.get("stopped_by"))
    notices = ending.get("notices")
    if said is not None or not isinstance(notices, list):
        return said
    signals = (notice for notice in notices if isinstance(notice, Mapping) and notice.get("key") == "signal")
    return next((as_text(notice.get("what")) for notice in signals), None)


def _unrecorded(work: AttemptWork, ending: Mapping[str, Any]) -> int | None:
    """Return the last finished step by the heartbeat, if the attempt ended before the step's record was written."""
    step = as_int(ending.get("step"))
    return step if step is not None and work.steps and step == work.steps[-1] + 1 else None
