"""Callbacks that record what happens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from difflib import get_close_matches
from pathlib import Path

from headway.checkpoint.format.manifest import hash_tensors, state_hash_of
from headway.checkpoint.save.fence import OwnerUnknown
from headway.checkpoint.save.outcomes import Outcome, Upload
from headway.config import CheckpointConfig
from headway.config.sections.checkpoint import EVALUATED
from headway.core.console import warning
from headway.core.files.atomic import append_json_line
from headway.cost.spending import SpendMeter
from headway.parallel.blocks import gather_whole
from headway.telemetry.line import StatusLine
from headway.telemetry.metrics import MetricsLog
from headway.telemetry.record import stored_bytes
from headway.training.evaluation.evaluate import Evaluation
from headway.training.job import Callback, Job


class Recorder(Callback):
    """Writes `metrics.jsonl` and the line on the screen; for the first worker only.

    Args:
        meter: What the run has spent; None if it has no price.
        load_seconds: Time to find the newest good checkpoint and to load it, if there was one; recorded with the
            attempt's first step.
        may_write: Called before each record, on a separate thread; raises an error when another attempt has taken the
            run over.
    """

    def __init__(
        self,
        metrics_path: Path,
        attempt: int,
        meter: SpendMeter | None = None,
        load_seconds: float | None = None,
        may_write: Callable[[], None] = lambda: None,
    ) -> None:
        self._path, self._attempt, self._may_write, self._open = metrics_path, attempt, may_write, ExitStack()
        self._meter = meter
        self._load_seconds = load_seconds

    def on_start(self, job: Job) -> None:
        """Open the files."""
        telemetry = job.config.telemetry
        self._log = self._open.enter_context(MetricsLog(self._path, self._attempt, self._assert_not_lost))
        work = job.config.train.batches.tokens_before
        self._line = StatusLine(
            job.total_steps,
            telemetry.log_every,
            work,
            total_usd=None if self._meter is None else self._meter.in_seconds,
            budget_usd=job.config.budget.usd,
            language_model=job.task.is_language_model,
        )
        self._open.callback(self._line.close)
        self._has_steps = self._has_trained = False

    def on_step(self, job: Job, step: int, metrics: dict[str, float]) -> None:
        """Write one record, and a line if one is due."""
        if self._load_seconds is not None and not self._has_steps:
            metrics["checkpoint/load_seconds"] = self._load_seconds
        self._has_steps = True
        metrics.update(job.task.feed.metrics(step - 1))
        if self._meter is not None:
            metrics.update(self._meter.metrics())
        if not self._has_trained and "train/loss" in metrics:  # a skipped step has no other metrics
            self._has_trained = True
            evaluated = EVALUATED if job.task.is_language_model else EVALUATED[:1]
            if job.task.objective.figures is not None:
                evaluated = (*evaluated, *job.task.objective.figures.evaluated)
            _warn_of_unknown_best(job.config.checkpoint, step, metrics, evaluated)
        self._log.begin(step, metrics)
        self._line.step(step, metrics)

    def on_evaluation(self, job: Job, step: int, result: Evaluation) -> None:
        """Add to the step's record."""
        values = {"evaluation/loss": result.loss} if result.items else {}
        if result.items and job.task.is_language_model:
            values["evaluation/perplexity"] = result.perplexity
        if result.replay is not None and result.replay.items:
            values["evaluation/replay_loss"] = result.replay.loss
            values["evaluation/replay_perplexity"] = result.replay.perplexity
        values |= result.figures
        if values:
            self._log.write(step, values)
        if step < job.total_steps and job.ends_at(step):
            # It ends early, and the reason follows: no line of a step may come after that, with an ETA of steps that
            # will not be trained.
            self._line.close(is_over=True)
        if result.items:
            replay = None if result.replay is None else result.replay.loss
            self._line.evaluation(step, result.loss, replay, result.figures)
        else:
            warning(f"step {step:,}: no token of the rows for validation is trained, so there is no validation loss")

    def before_save(self, job: Job) -> None:
        """Write pending records, so that a run that resumes from this state has those of all steps up to it."""
        self._log.settle()

    def on_checkpoint(self, job: Job, step: int, stall_seconds: float) -> None:
        """Add to the step's record."""
        if step:  # a checkpoint of step 0 belongs to no step's record
            self._log.write(step, {"checkpoint/stall_seconds": stall_seconds})

    def on_hold(self, job: Job, step: int, stall_seconds: float) -> None:
        """Add to the step's record."""
        self._log.write(step, {"checkpoint/hold_stall_seconds": stall_seconds})

    def on_saved(self, job: Job, outcome: Outcome) -> None:
        """Add to the record of the current step, since records are only appended; warn of a failure."""
        step = job.state.cursor.step
        of = float(outcome.step)
        if outcome.error is None:
            self._log.write(step, {"checkpoint/saved_step": of, "checkpoint/write_seconds": outcome.seconds})
            self._line.saved()
            self._log.restore_reserve()
            if self._meter is not None and job.config.cost.storage_usd_per_gib_month:
                self._meter.stored(stored_bytes(job.config.run_directory))
        else:
            self._log.write(step, {"checkpoint/failed_step": of})
            warning(f"training continues without a checkpoint of step {outcome.step}: {outcome.error.what}")

    def on_uploaded(self, job: Job, upload: Upload) -> None:
        """Add to the record of the current step; the process that uploads reports why it failed."""
        of = float(upload.step)
        if not self._has_steps:  # an earlier attempt's checkpoint and record
            return
        if upload.seconds is None:
            self._log.write(job.state.cursor.step, {"checkpoint/upload_failed_step": of})
        else:
            self._log.write(
                job.state.cursor.step, {"checkpoint/uploaded_step": of, "checkpoint/upload_seconds": upload.seconds}
            )

    def on_end(self, job: Job) -> None:
        """Close the files that were opened."""
        self._open.close()

    def _assert_not_lost(self) -> None:
        with suppress(OwnerUnknown):  # readers ignore records of superseded attempts
            self._may_write()


def _warn_of_unknown_best(
    checkpoint: CheckpointConfig, step: int, metrics: Mapping[str, float], evaluated: Sequence[str]
) -> None:
    """Warn if `keep_best` names a metric that steps do not have.

    Only a step shows which metrics there are: models and callbacks add some of their own. The config has checked names
    of evaluation metrics itself.
    """
    remote = [("checkpoint.remote", checkpoint.remote)] if checkpoint.remote is not None else []
    for key, rules in [("checkpoint", checkpoint), *remote]:
        name = rules.keep_metric
        if not rules.keep_best or name in (*metrics, *evaluated):
            continue
        near = get_close_matches(name, (*metrics, *evaluated), n=1)
        meant = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(metrics))}"
        warning(
            f"{key}.keep_best goes by {name}, which step {step} does not have, so no checkpoint is kept by it; {meant}"
        )


class StateHashes(Callback):
    """Writes the SHA-256 of every state tensor every so many steps, to compare two runs step by step.

    A record also has the name that a checkpoint of the state would have. Every worker has this callback, since all
    contribute their parts; the first worker writes.
    """

    def __init__(self, path: Path, every: int) -> None:
        self._path = path
        self._every = every

    def on_start(self, job: Job) -> None:
        """Write the hashes of the state that the attempt starts from."""
        self._write(job, job.state.cursor.step)

    def on_step(self, job: Job, step: int, metrics: dict[str, float]) -> None:
        """Write the hashes after the update, if they are due."""
        if step % self._every == 0:
            self._write(job, step)

    def _write(self, job: Job, step: int) -> None:
        tensors = gather_whole(job.state.blocks(), job.world)
        if job.world.is_first:
            hashes = hash_tensors(tensors)
            name = state_hash_of(tensors, hashes, {**job.state.cursor_record(), "step": step})
            try:
                append_json_line(self._path, {"step": step, "state_sha256": name, "tensors": hashes})
            except OSError as error:
                why = error.strerror or error
                warning(f"the hashes of step {step} cannot be written ({why}); training continues: {self._path}")
