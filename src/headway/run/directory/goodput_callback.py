"""The callback that records the goodput up to the start of an attempt, in metrics and ledger."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from headway.checkpoint.save.fence import OwnerUnknown
from headway.core.console import warning
from headway.run.directory.ledger import Ledger, UnwritableLedger
from headway.telemetry.goodput import Goodput, goodput_before
from headway.telemetry.record import open_run
from headway.training.job import Callback, Job


class GoodputKeeper(Callback):
    """A callback that adds the goodput to the metrics of an early step; it must come before the recorder of metrics.

    A thread computes it during the first steps: histories are long, and a restart after a failure must not wait.

    Args:
        run: The run directory.
        ledger: The run's ledger.
        attempt: Number of this attempt; the first one has no history.
        may_write: Called before the ledger's line; it raises an error if another attempt owns the run now.
    """

    def __init__(self, run: Path, ledger: Ledger, attempt: int, may_write: Callable[[], None] = lambda: None) -> None:
        self._run = run
        self._ledger = ledger
        self._attempt = attempt
        self._may_write = may_write
        self._found: Goodput | None = None

    def on_start(self, job: Job) -> None:
        """Start the computation."""
        if self._attempt > 1:
            step = job.state.cursor.step
            threading.Thread(target=self._look_back, args=(step,), name="headway-goodput", daemon=True).start()

    def _look_back(self, step: int) -> None:
        try:
            self._found = goodput_before(open_run(self._run), self._attempt, step)
        except Exception as error:  # informative only, so training continues
            warning(f"the goodput until this attempt cannot be computed: {type(error).__name__}: {error}")

    def on_step(self, job: Job, step: int, metrics: dict[str, float]) -> None:
        """Record the goodput once it is computed."""
        found = self._found
        self._found = None
        if found is None:
            return
        metrics.update(found.metrics())
        try:
            self._may_write()
            self._ledger.note_goodput(self._attempt, found.ratio, found.lost_seconds, found.lost_steps)
        except (UnwritableLedger, OwnerUnknown) as error:
            warning(f"{error.what}; training continues, and the ledger lacks the goodput until this attempt")
