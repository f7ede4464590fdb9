"""The account of a run: what its records show that it has spent.

How long an attempt ran is told by a monotonic clock: at its end by itself, before by its owner's lease, so that a wall
clock that is set costs nothing and gives nothing back. Where neither says, as of earlier versions, the wall clock does.

An attempt that was killed wrote no end. It is counted up to its last sign of life: its last record, or the last write
to a file of its folder, but never beyond the start of the next attempt.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.config import Config
from headway.core.coordination.lease import seconds_run
from headway.core.errors import BudgetReached
from headway.core.files.foreign import as_number
from headway.core.format import format_usd
from headway.cost.pricing import budget_reached
from headway.cost.spending import BilledAttempt, RunCost, run_cost, storage_cost
from headway.run.directory.run_directory import (
    HELD_KEY,
    LAST_SIGN_KEY,
    PRICE_KEY,
    RAN_KEY,
    RESTARTS_KEY,
    attempt_folder,
    last_sign_of_life,
)
from headway.telemetry.goodput import START, goodput_of
from headway.telemetry.metrics import Metrics
from headway.telemetry.record import RUNNING, Attempt, Run, is_run, stored_bytes


def account_of(run: Run, usd_per_hour: float | None = None, *, before: int | None = None) -> RunCost:
    """Return what a run has spent until now.

    Args:
        run: The run.
        usd_per_hour: Price of attempts whose record has none, as of versions that did not record it.
        before: Count only what was spent before this attempt began.
    """
    attempts = [attempt for attempt in run.attempts if before is None or attempt.number <= before]
    billed = [
        _billed(run, attempt, after, usd_per_hour, begins=before)
        for attempt, after in zip(attempts, [*attempts[1:], None], strict=False)
    ]
    return run_cost(billed, storage_of(run))


@dataclass(frozen=True)
class FleetRun:
    """What one of several runs has spent; None where the run knows no price."""

    name: str
    state: str
    attempts: int
    seconds: float | None
    """Time in which an attempt ran."""
    usd_per_hour: float | None
    """Price of the machines that it has now; None if it is unknown, or nothing runs."""
    total_usd: float | None
    compute_usd: float | None
    idle_usd: float | None
    storage_usd: float | None
    budget_usd: float | None


def fleet_account(folder: Path) -> list[FleetRun]:
    """Return what the runs directly in a folder have spent, the one that has spent most first."""
    runs = [Run(path) for path in sorted(folder.iterdir()) if path.is_dir() and is_run(path)]
    return sorted(map(_fleet_run, runs), key=lambda one: -(one.total_usd or 0.0))


def _fleet_run(run: Run) -> FleetRun:
    account = account_of(run)
    known = account.is_known
    newest = run.attempt_records[max(run.attempt_records)] if run.state == RUNNING else {}
    return FleetRun(
        name=run.name,
        state=run.state,
        attempts=len(run.attempt_records),
        seconds=run.seconds,
        usd_per_hour=as_number(newest.get(PRICE_KEY)),
        total_usd=account.total_usd if known else None,
        compute_usd=account.compute_usd if known else None,
        idle_usd=account.idle_usd if known else None,
        storage_usd=account.storage_usd if known else None,
        budget_usd=as_number(run.get("budget.usd")),
    )


def stopped_by_budget(config: Config, what: str) -> BudgetReached:
    """Return the error of a run whose attempt has ended at the budget, with what it has spent until now."""
    run = config.run_directory
    budget = config.budget.usd
    assert budget is not None, "it has stopped the run"
    spent = account_of(Run(run), config.usd_per_hour).total_usd
    what = f"the run has spent {format_usd(spent)} of its budget of {format_usd(budget)}: {what}"
    return budget_reached(config.budget, run, what, spent)


#: Number of saves of which the longest counts.
REMEMBERED_SAVES = 5


def measured_saves(history: Metrics) -> dict[str, list[float]]:
    """Return how long the newest saves took, by part: training waits, files are written, files are uploaded."""
    return {
        name: history.finite(f"checkpoint/{name}_seconds")[1][-REMEMBERED_SAVES:].tolist()
        for name in ("stall", "write", "upload")
    }


def save_seconds(saves: Mapping[str, Iterable[float]]) -> float:
    """Return how long a save takes at most, by what was measured; 0 if nothing was."""
    return sum(max(list(times), default=0.0) for times in saves.values())


def start_seconds(run: Run) -> float:
    """Return how long an attempt takes until its first step, on average; 0 if unknown."""
    found = goodput_of(run)
    began = sum(attempt.number in run.metrics.spans for attempt in run.attempts)
    return found.lost_seconds[START] / began if found is not None and began else 0.0


def storage_of(run: Run) -> float:
    """Return the cost of keeping the checkpoints until now.

    A run records it up to its newest step, with the checkpoints that were deleted on the way. From then on those that
    exist count.
    """
    price = as_number(run.get("cost.storage_usd_per_gib_month"))
    recorded = run.metrics.last("cost/storage_usd") or 0.0
    since = run.metrics.last("time")
    if not price or price < 0:
        return recorded
    if since is None:
        since = max((checkpoint.time for checkpoint in run.checkpoints if checkpoint.time), default=time.time())
    return recorded + storage_cost(stored_bytes(run.path), time.time() - since, price)


def _billed(
    run: Run, attempt: Attempt, after: Attempt | None, usd_per_hour: float | None, *, begins: int | None
) -> BilledAttempt:
    record: Mapping[str, Any] = run.attempt_records[attempt.number]
    price = as_number(record.get(PRICE_KEY))
    started = attempt.started
    ended = attempt.ended
    seconds = attempt.seconds
    if attempt.number == begins:
        # only the time before it counts
        ended = started
        seconds = 0.0
    elif as_number(record.get("ended")) is None and started is not None:
        ended = _last_seen(run, attempt, after, started)
        seconds = _seconds_until(run, attempt, started, ended)
    return BilledAttempt(
        number=attempt.number,
        started=started,
        ended=ended,
        seconds=seconds,
        usd_per_hour=usd_per_hour if price is None or price < 0 else price,
        held_before=(as_number(record.get(RESTARTS_KEY)) or 0) > 0,
        held_seconds=as_number(record.get(HELD_KEY)),
    )


def _last_seen(run: Run, attempt: Attempt, after: Attempt | None, started: float) -> float:
    """Return until when an attempt without a recorded end ran, in Unix seconds."""
    if attempt.outcome == RUNNING:
        return time.time()
    noted = as_number(run.attempt_records[attempt.number].get(LAST_SIGN_KEY))
    sign = last_sign_of_life(attempt_folder(run.path, attempt.number), started) if noted is None else noted
    ended = max(attempt.ended or started, sign or started)
    return ended if after is None or after.started is None else min(ended, after.started)


def _seconds_until(run: Run, attempt: Attempt, started: float, moment: float) -> float:
    """Return how long an attempt without a recorded end ran until a moment."""
    noted = as_number(run.attempt_records[attempt.number].get(RAN_KEY))
    ran = seconds_run(run.path, attempt.number, moment) if noted is None else noted
    return max(0.0, moment - started - attempt.clock_jumped if ran is None else ran)
