"""The budget of a run as a source of notices: it asks to save and stop while there is still enough for the save.

The first worker has it. What is counted ahead is what the machines are still needed for after the decision: the time
until the loop reads the board, the step that has begun and the one after it, and the save, as they were measured.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from headway.core.console import warning
from headway.core.coordination.preemption_board import BUDGET_SOURCE, Notice, post
from headway.core.format import format_usd
from headway.cost.spending import CostBudget, SpendMeter
from headway.run.directory.account import REMEMBERED_SAVES, measured_saves, save_seconds
from headway.run.notices.watch import watching
from headway.telemetry.metrics import Metrics
from headway.training.job import Callback

if TYPE_CHECKING:
    from headway.checkpoint.save.outcomes import Outcome, Upload
    from headway.training.job import Job

#: How often the loop reads the board, at least.
_BOARD_SECONDS = 1.0
#: The loop reads its flags before a step, so the step that has begun and the next one still run.
_STEPS = 2
#: Number of steps of which the longest counts.
_REMEMBERED = 5


class BudgetGuard(Callback):
    """Watches what a run spends, on a thread, and posts on the attempt's board when the budget is nearly spent.

    Args:
        attempt: The attempt's folder.
        budget: The budget.
        meter: What the run has spent.
        history: The run's metrics until now, for how long saves took.
    """

    name = BUDGET_SOURCE
    pause_seconds = 0.25

    def __init__(self, attempt: Path, budget: CostBudget, meter: SpendMeter, history: Metrics) -> None:
        self._attempt = attempt
        self._budget = budget
        self._meter = meter
        self._steps = deque[float](maxlen=_REMEMBERED)
        self._saves = {name: deque(times, maxlen=REMEMBERED_SAVES) for name, times in measured_saves(history).items()}
        self._posted: Notice | None = None
        self._warned = False
        self._open = ExitStack()

    @property
    def reserve_seconds(self) -> float:
        """How long the machines are needed after a decision to stop."""
        steps = _STEPS * max(list(self._steps), default=0.0)
        return self.pause_seconds + _BOARD_SECONDS + steps + save_seconds(self._saves)

    def check(self) -> Notice | None:
        """Return the notice to save and stop once it is time; warn before."""
        spent = self._meter.now().total_usd
        if not self._warned and self._budget.is_near(spent):
            self._warned = True
            share = f"{spent / self._budget.usd:.0%}".replace("%", " %")
            warning(f"{format_usd(spent)} is spent, {share} of the budget of {format_usd(self._budget.usd)}")
        if self._posted is None and self._budget.must_stop(self._meter, self.reserve_seconds):
            what = f"{format_usd(spent)} of {format_usd(self._budget.usd)} is spent"
            self._posted = Notice(BUDGET_SOURCE, what, "stop")
        return self._posted

    def acknowledge(self, notice: Notice) -> None:
        """Do nothing: no process waits for an answer."""

    def on_start(self, job: Job) -> None:
        """Start the thread, after a first look: the run may have little left."""
        found = self.check()
        if found is not None:
            post(self._attempt, found)
            return
        watch = watching(job.config.preemption, lambda notice: post(self._attempt, notice), sources=[self])
        self._open.enter_context(watch)

    def on_step(self, job: Job, step: int, metrics: dict[str, float]) -> None:
        """Remember how long steps take."""
        if (seconds := metrics.get("speed/step_seconds")) is not None:
            self._steps.append(seconds)

    def on_checkpoint(self, job: Job, step: int, stall_seconds: float) -> None:
        """Remember how long training waits for a save."""
        self._saves["stall"].append(stall_seconds)

    def on_saved(self, job: Job, outcome: Outcome) -> None:
        """Remember how long a save takes."""
        if outcome.error is None:
            self._saves["write"].append(outcome.seconds)

    def on_uploaded(self, job: Job, upload: Upload) -> None:
        """Remember how long an upload takes: the last one is waited for."""
        if upload.seconds is not None:
            self._saves["upload"].append(upload.seconds)

    def on_end(self, job: Job) -> None:
        """End the thread."""
        self._open.close()
