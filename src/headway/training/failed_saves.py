"""Saves that fail: counted, reported without the disk, and after too many in a row the end of the run.

One save that fails is made up for by the next one. Where none succeeds any more, each further step is lost at the end.
"""

from __future__ import annotations

from headway.checkpoint.save.fence import Fenced
from headway.checkpoint.save.outcomes import Outcome
from headway.core.coordination.heartbeat import report_failed_saves
from headway.core.errors import CheckpointError, HeadwayError, SavesFailed
from headway.training.job import Callback, Job

_AGAIN = "make room there or repair the disk, then run the same command again"


class FailedSaves(Callback):
    """Counts failed saves on the first worker, which learns the outcome of whole checkpoints.

    Args:
        limit: Failed saves in a row that end the run (`checkpoint.max_failed_saves`).
        can_move: Whether another machine can continue the run, so that it ends with exit code 75, else with 4.
        has_moved: Whether the attempt before has ended in this way. If this one saves nothing either, a third would
            not, as on a full disk that all machines share.
    """

    def __init__(self, limit: int, can_move: bool = False, has_moved: bool = False) -> None:
        self._limit = limit
        self._can_move = can_move
        self._has_moved = has_moved
        self._total = self._in_row = self._saved_step = 0
        self._error: CheckpointError | None = None

    @property
    def too_many(self) -> bool:
        """Whether so many saves in a row have failed that the run must end."""
        return self._in_row >= self._limit

    @property
    def _moves(self) -> bool:
        return self._can_move and not self._has_moved

    def on_start(self, job: Job) -> None:
        """Remember where the attempt starts: so much is saved."""
        self._saved_step = job.state.cursor.step

    def on_saved(self, job: Job, outcome: Outcome) -> None:
        """Count, and report the counts on the page of heartbeats."""
        if not job.world.is_first:
            return
        self._error = outcome.error
        if outcome.error is None:
            self._saved_step = outcome.step
            self._in_row = 0
            self._has_moved = False
        else:
            self._total += 1
            self._in_row += 1
        report_failed_saves(self._total, self._in_row)

    def end_of_run(self, job: Job) -> HeadwayError:
        """Return the error that ends the run after too many failed saves; all workers call this together."""
        mine = self._explain(job) if job.world.is_first else None
        what, where, fix, moves = job.world.gather_json(mine)[0]
        kind = SavesFailed if moves else CheckpointError
        return kind(what, where=where, fix=fix)

    def end_without(self, error: CheckpointError) -> HeadwayError:
        """Return the error that ends a run whose last state cannot be saved; another machine may be able to.

        Args:
            error: Why it cannot be saved.
        """
        if isinstance(error, Fenced) or not self._moves:
            return error
        return SavesFailed(error.what, where=error.where, fix=self._fix(error.fix or _AGAIN))

    def _explain(self, job: Job) -> tuple[str, str | None, str, bool]:
        """Return what is wrong, where, what to do, and whether another machine can continue."""
        error = self._error
        step = job.state.cursor.step
        assert error is not None, "the last save has failed"
        saved = min(self._saved_step, step)  # a rollback may have gone back to before the newest checkpoint
        what = (
            f"{self._in_row} saves in a row have failed (checkpoint.max_failed_saves), the last one because"
            f" {error.what}; steps {saved + 1:,} to {step:,} are lost"
        )
        begins = f"it continues from step {saved:,}" if saved else "it begins at step 0, since nothing is saved"
        where = error.where or str(job.config.run_directory)
        return what, where, f"{self._fix(error.fix or _AGAIN)}; {begins}", self._moves

    def _fix(self, here: str) -> str:
        if not self._moves:
            return here
        return f"run the same command on another machine, as a scheduler does by itself; or on this one: {here}"
