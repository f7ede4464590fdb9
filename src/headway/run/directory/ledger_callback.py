"""The callback that writes the ledger while a run trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headway.checkpoint.lineage import UNKNOWN, ancestors, origin_of
from headway.checkpoint.save.fence import OwnerUnknown
from headway.checkpoint.save.outcomes import Outcome
from headway.checkpoint.store import CheckpointStore
from headway.config.sections.segments import Segment
from headway.core.console import warning
from headway.run.directory.ledger import (
    TAKEN_OVER,
    Ledger,
    UnwritableLedger,
    decided,
    merged_ranges,
    plan_fingerprint,
)
from headway.telemetry.record import Run
from headway.training.health.decisions import Decision
from headway.training.job import Callback, Job


class LedgerKeeper(Callback):
    """A callback that records in the ledger which rows the steps up to each checkpoint consumed.

    Args:
        ledger: The run's ledger.
        attempt: Number of the attempt.
        checkpoints: The run's `checkpoints` folder.
        may_write: Called before each line; it raises an error if another attempt owns the run now.
    """

    def __init__(
        self,
        ledger: Ledger,
        attempt: int,
        checkpoints: Path,
        may_write: Callable[[], None] = lambda: None,
    ) -> None:
        self._ledger = ledger
        self._attempt = attempt
        self._may_write = may_write
        self._store = CheckpointStore(checkpoints)

    def on_start(self, job: Job) -> None:
        """Bring the ledger to the step that the attempt starts from."""
        self._may_write()
        step = job.state.cursor.step
        self._note_segments(job)
        # Record decisions that only the checkpoint knows, since they were made with the run on another disk.
        known = decided(self._ledger)
        for first, last in job.state.skipped_ranges:
            if (first, last) not in known:
                self._ledger.decide(
                    self._attempt, first, last, "rollback", f"decided elsewhere, as checkpoint step-{step:08d} says"
                )
        self._strike(step, f"attempt {self._attempt} had to start from step {step}")
        self._catch_up(job, step)

    def on_saved(self, job: Job, outcome: Outcome) -> None:
        """Commit the steps up to a checkpoint; if a line cannot be written, that of the next checkpoint covers it."""
        if outcome.error is not None:
            return
        try:
            self._commit(job, outcome.step, self._attempt)
        except (UnwritableLedger, OwnerUnknown) as error:
            if job.ends_at(outcome.step):
                raise
            warning(f"{error.what}; training continues, and the line of the next checkpoint covers these steps too")

    def on_decision(self, job: Job, decision: Decision) -> None:
        """Record a decision before it is carried out, so that a kill in between changes nothing."""
        if decision.action == "warn":
            return  # it has no consequences
        steps = decision.first_step, decision.step + 1
        try:
            # Much time may have passed since the step: the worker may have waited for a write, or been stopped.
            self._may_write()
            self._ledger.decide(self._attempt, *steps, decision.action, decision.reason)
        except (UnwritableLedger, OwnerUnknown) as error:
            # Only the ledger records skipped rows. Other decisions are made again when their step is trained again.
            if decision.action == "rollback":
                raise
            follows = "training continues" if decision.action == "skip" else "the run stops anyway"
            warning(f"{error.what}; {follows}, and the ledger lacks that step {decision.step} had no update")
        if decision.to_step is not None and self._strike(
            decision.to_step, f"{decision.reason} in step {decision.step}"
        ):
            self._catch_up(job, decision.to_step)

    def _note_segments(self, job: Job) -> None:
        """Record the run's current segments if the ledger has others."""
        wanted = list(job.config.segments)
        known = [Segment.model_validate(start.segment) for start in self._ledger.segments()]
        if wanted == known:
            return
        same = 0
        while same < min(len(wanted), len(known)) and wanted[same] == known[same]:
            same += 1
        for segment in wanted[min(same, len(wanted) - 1) :]:
            self._ledger.begin_segment(self._attempt, segment.model_dump(mode="json"))

    def _strike(self, step: int, reason: str) -> bool:
        """Strike the commits that did not lead to the checkpoint of a step; return whether there were any."""
        # The last step up to which the commits are of the attempts that led to the checkpoint of a step. A checkpoint
        # may have outlived a rollback by a later attempt, which has trained and committed its steps again. A run that
        # starts from it has not come that way.
        origins = {info.step: origin_of(info.context) for info in self._store.list()}
        commits = self._ledger.commits()
        kept = step
        while (origin := origins.get(step, UNKNOWN)).start is not None and 0 <= origin.start < step:
            trained_by = {commit.attempt for commit in commits if origin.start < commit.last_step <= step}
            if origin.attempt is not None and trained_by - {origin.attempt}:
                kept = origin.start
            step = origin.start
        if self._ledger.committed_step <= kept:
            return False
        self._ledger.rollback(kept, reason)
        return True

    def _catch_up(self, job: Job, step: int) -> None:
        """Commit the steps of existing checkpoints up to a step.

        The previous attempt may have been killed between the save and the commit. Or a rollback may have struck a
        commit that began before this step. Or the steps were trained with the run on another disk.
        """
        if self._ledger.committed_step >= step:
            return
        run = Run(self._ledger.path.parent)
        infos = [info for info in self._store.list() if info.step <= step]
        line = ancestors({info.step: origin_of(info.context) for info in infos})
        for info in infos:
            if info.step in line and self._ledger.committed_step < info.step:
                attempt = int(info.context.get("attempt", self._attempt))
                first = self._ledger.committed_step
                if not run.has_done(attempt, info.step):
                    why = f"{info.path.name} is of attempt {attempt} elsewhere: nothing here tells of its steps"
                    self._ledger.decide(self._attempt, first, info.step, TAKEN_OVER, why)
                self._commit(job, info.step, attempt)

    def _commit(self, job: Job, step: int, attempt: int) -> None:
        self._may_write()
        first = self._ledger.step_to_follow()
        if step > first:
            feed = job.task.feed
            name = f"step-{step:08d}"
            plan = plan_fingerprint(feed.describe(step), step, job.task.fingerprints, job.config.segments)
            rows = feed.rows_by_source(first, step)
            for start, end in merged_ranges(list(job.state.skipped_ranges)):
                start = max(start, first)
                end = min(end, step)
                if start < end:
                    rows = {key: rows[key] - out for key, out in feed.rows_by_source(start, end).items()}
            self._ledger.commit(attempt, first, step, rows, name, plan=plan, epoch_rows=feed.rows)
