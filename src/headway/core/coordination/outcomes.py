"""Words for how an attempt ended, as its record holds them and readers of run directories know them."""

from __future__ import annotations

from headway.core.errors import DELIBERATE, BudgetReached, Cancelled, Preempted

FINISHED = "finished"
PREEMPTED = "preempted"
FAILED = "failed"
#: The run was saved and stopped to stay within its budget.
BUDGET_REACHED = "budget reached"
#: Stopped on purpose; no scheduler starts it again by itself.
CANCELLED = "cancelled"

#: Exit codes of deliberate errors that the next attempt would meet again (usage and config, data, checkpoint, diverged,
#: budget reached), and of a stop that is meant.
FINAL_CODES = tuple(sorted({kind.exit_code for kind in DELIBERATE} - {Preempted.exit_code}))

_BY_CODE = {
    0: FINISHED,
    Preempted.exit_code: PREEMPTED,
    BudgetReached.exit_code: BUDGET_REACHED,
    Cancelled.exit_code: CANCELLED,
}
#: Exit codes of a process that has saved its state, and the outcomes that its attempt may record for them.
SAVED_CODES = tuple(_BY_CODE)
SAVED_OUTCOMES = tuple(_BY_CODE.values())


def outcome_of(exit_code: int, what: str) -> str:
    """Return the outcome to record for an exit code; for an error that is its description."""
    return _BY_CODE.get(exit_code, what)
