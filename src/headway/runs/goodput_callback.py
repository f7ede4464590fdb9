"""What has become of a run's time until an attempt began, in its metrics and its ledger."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from headway.checkpoint.save.fence import OwnerUnknown
from headway.core.console import warning
from headway.runs.ledger import Ledger, UnwritableLedger
from headway.telemetry.goodput import Goodput, goodput_before
from headway.telemetry.record import open_run
from headway.training.callbacks import Callback

if TYPE_CHECKING:
    from headway.training.loop import Job


class GoodputKeeper(Callback):
    """Tells it with one of an attempt's first steps; to come before who records the step.

    It is reckoned in a thread beside the first steps, since histories are long, and nobody is to wait for that after a
    failure.

    Args:
        run: The run directory.
        ledger: The run's.
        attempt: The number of this attempt; the first one has nothing to look back on.
        may_write: Called before the ledger's line; raises when another attempt has the run by now.
    """

    def __init__(self, run: Path, ledger: Ledger, attempt: int, may_write: Callable[[], None] = lambda: None) -> None:
        self._run, self._ledger, self._attempt, self._may_write = run, ledger, attempt, may_write
        self._found: Goodput | None = None

    def on_start(self, job: Job) -> None:
        """Begin to reckon."""
        if self._attempt > 1:
            step = job.state.cursor.step
            threading.Thread(target=self._look_back, args=(step,), name="headway-goodput", daemon=True).start()

    def _look_back(self, step: int) -> None:
        try:
            self._found = goodput_before(open_run(self._run), self._attempt, step)
        except Exception as error:  # it is for people; training does without
            warning(f"the goodput until this attempt cannot be told: {type(error).__name__}: {error}")

    def on_step(self, job: Job, step: int, metrics: dict[str, float]) -> None:
        """Tell it, once it is known."""
        found, self._found = self._found, None
        if found is None:
            return
        metrics.update(found.metrics())
        try:
            self._may_write()
            self._ledger.note_goodput(self._attempt, found.ratio, found.lost_seconds, found.lost_steps)
        except (UnwritableLedger, OwnerUnknown) as error:
            warning(f"{error.what}; training goes on, and the ledger lacks the goodput until this attempt")
