"""The training loop: fetch, step, observe, checkpoint, stop. Everything else is a callback."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import torch

from headway.checkpoint.save.fence import Fenced
from headway.checkpoint.save.outcomes import Outcome
from headway.checkpoint.store import CheckpointStore
from headway.core.console import notice
from headway.core.coordination.heartbeat import Phase, beat
from headway.core.errors import Cancelled, CheckpointError, CorruptionError, DivergedError, HeadwayError, Preempted
from headway.core.machine.allocator import give_back_freed_memory
from headway.core.process.faults import fault_point
from headway.cost.pricing import budget_reached
from headway.data.feeding.prefetch import Prefetcher
from headway.data.first_use import WrongShardError
from headway.telemetry.metrics import read_metrics
from headway.training.evaluation.evaluate import evaluate
from headway.training.health.rollback import rolled_back
from headway.training.job import Callback, Job
from headway.training.recording.step_metrics import StepMetrics
from headway.training.save_schedule import SaveSchedule, saves_on_the_way
from headway.training.setup.trial import explain_out_of_memory
from headway.training.step import TrainStep
from headway.training.stop import StopSignals

#: How often another process tries to write the last state of an attempt when one dies while writing it.
_RETRIES = 2
#: Errors after which a snapshot in memory is not written: a newer state is saved, no state can be trusted, or another
#: process has the run.
_DISCARD_SNAPSHOT_ON = (Preempted, DivergedError, CorruptionError, Fenced, WrongShardError)
#: How long a save waits for the checks of opened shards; the last save of a run waits for all of them.
_DATA_CHECK_SECONDS = 5.0


def train_loop(job: Job) -> None:
    """Train to the last step.

    Raises:
        DivergedError: too many steps in a row had a non-finite loss or gradient. The last state is not saved, so the
            same command meets the same steps again.
        Preempted: a signal asked to stop; the state is saved. `BudgetReached` if the run has spent its budget.
        CheckpointError: `checkpoint.max_failed_saves` saves in a row have failed, or that of the last state;
            `SavesFailed` where another machine can continue the run. Or all steps are done and saved here, but another
            attempt, or another run, has the remote tier.
    """
    config, state = job.config, job.state
    lanes = job.grid.of_worker(job.world.data_rank, job.world.mesh.data)
    signals, saved = StopSignals(job.notices, job.own_process), state.cursor.step
    # Several workers would have to agree on stopping; those whose data have arrived wait for the others in the step.
    stopped = (lambda: signals.stop) if job.world.size == 1 else (lambda: False)
    feed = Prefetcher(job.task.feed, lanes, state.cursor.step, job.total_steps, stopped=stopped)
    train_step = TrainStep(config, job.task, state, job.strategy, job.world, job.pipeline)
    step_metrics, schedule = StepMetrics(job, feed), SaveSchedule.of(job)
    if job.world.device.type == "cuda":  # metrics report the peak of training, not that of the trial steps
        torch.cuda.reset_peak_memory_stats(job.world.device)
    with signals, feed, _run_callbacks(job, lambda: signals.stop):
        if _skip_limit_reached(job):  # an older version's checkpoint, or a lower limit than before
            raise _diverged(job, resumed=True)
        if state.cursor.step == 0 and config.health.rolls_back:
            _checkpoint(job)  # a state to roll back to
        if _evaluation_pending(job):
            if not _evaluate(job, signals):
                raise _stopped(job, signals)
            step_metrics.restart()
        last = _ends_early(job)  # the state was saved when the run ended, and the same command was run again
        for ready, (_, batches) in enumerate(() if last else feed):  # fetch
            unsaved = job.failed_saves is not None and job.failed_saves.too_many
            flags = (signals.stop, schedule.due() or signals.save, unsaved)
            # What does not fit in the first step never will. Later, other processes may be the cause: another attempt
            # helps.
            with explain_out_of_memory(config, batches) if state.cursor.step == 0 else nullcontext():
                result = train_step.run(batches, flags)  # step
            stop, save, unsaved = result.flags
            step, last = state.cursor.step, state.cursor.step == job.total_steps
            metrics = step_metrics.metrics(result)
            for callback in job.callbacks:  # observe
                callback.on_step(job, step, metrics)
            if rolled_back(job, feed, result):
                saved = state.cursor.step
                step_metrics.restart()
                continue
            if _skip_limit_reached(job):  # stop; not saved, or the same command would continue past the limit
                raise _diverged(job)
            if unsaved and job.failed_saves is not None:
                raise job.failed_saves.end_of_run(job)
            # A machine that is taken away does not wait for an evaluation; the next attempt does it.
            evaluation_missed = _evaluation_is_due(job) and (stop or not _evaluate(job, signals))
            last = last or (_evaluation_is_due(job) and _ends_early(job))
            leaves = evaluation_missed or (stop and not last)
            fault_point("step", step)
            if leaves or save or last or job.due(config.checkpoint.every):  # checkpoint
                if last:  # free gradients and cached memory, so that the copy of the state fits in their place
                    if state.engine is None:
                        state.optimizer.zero_grad(set_to_none=True)
                    give_back_freed_memory()
                with schedule.saving():
                    _checkpoint(job, last)
                saved = step
            elif config.checkpoint.memory_every is not None and job.due(config.checkpoint.memory_every):
                _snapshot(job)
            elif ready == 0 and saves_on_the_way(job):  # moments exist from the first update on
                beat(Phase.CHECKPOINT)
                job.writer.get_ready(state.blocks())
            for outcome in _report_outcomes(job):
                schedule.written(outcome)
            if leaves or last:
                _save_with_retries(job)
            if leaves:
                raise _stopped(job, signals)
            if last:
                break
            step_metrics.restart()
        if state.cursor.step < job.total_steps and not last:  # asked to stop while waiting for the next batches
            if state.cursor.step > saved:
                _checkpoint(job)
            _save_with_retries(job)
            raise _stopped(job, signals)
    lost = job.writer.lost_upload()
    if lost is not None:
        raise CheckpointError(f"the run is finished here, but {lost.what}", where=lost.where, fix=lost.fix)


@contextmanager
def _run_callbacks(job: Job, stopped: Callable[[], bool]) -> Iterator[None]:
    """Run callbacks around all steps, and save what was handed over, whatever ends the steps.

    A snapshot that is only in memory is saved, too, unless the way the steps ended rules out resuming from it or makes
    it superfluous.
    """
    flush_snapshot, started = True, list[Callback]()
    try:
        for callback in job.callbacks:
            callback.on_start(job)
            started.append(callback)
        yield
        flush_snapshot = False
    except HeadwayError as error:
        flush_snapshot = job.config.checkpoint.memory_every is not None and not isinstance(error, _DISCARD_SNAPSHOT_ON)
        raise
    finally:
        beat(Phase.END)
        job.writer.close(flush_snapshot=flush_snapshot, hurried=stopped)
        _report_outcomes(job)
        for callback in started:  # a callback that could not start has nothing to end
            callback.on_end(job)


def _evaluate(job: Job, signals: StopSignals) -> bool:
    """Evaluate, and return whether it finished. All workers leave when one is asked to stop; then no loss is
    reported."""
    task, precision = job.task, job.config.train.precision
    assert task.evaluation is not None
    result = evaluate(
        task.evaluated or task.objective,
        job.state.model,
        task.evaluation,
        job.world,
        precision=precision,
        pipeline=job.pipeline,
        stopped=lambda: signals.stop,
    )
    if result is None:
        return False
    if job.evaluations is not None and result.items:
        job.evaluations.add(job.state.cursor.step, result.loss)
    for callback in job.callbacks:
        callback.on_evaluation(job, job.state.cursor.step, result)
    return True


def _ends_early(job: Job) -> bool:
    """Return whether the run ends after the current step by `train.early_stopping`, and report it."""
    step = job.state.cursor.step
    reason = None if job.evaluations is None else job.evaluations.reason_to_stop(step)
    if reason is not None:
        notice(f"stopped early at step {step:,}: {reason}")
    return reason is not None


def _evaluation_is_due(job: Job) -> bool:
    """Return whether an evaluation is due after the current step."""
    step = job.state.cursor.step
    return job.task.evaluation is not None and (step == job.total_steps or job.due(job.config.evaluation.every))


def _evaluation_pending(job: Job) -> bool:
    """Return whether the step that the attempt resumes from still lacks its evaluation.

    Only the first worker looks; all workers get its answer.
    """
    step = job.state.cursor.step
    if not 0 < step <= job.total_steps or not _evaluation_is_due(job):
        return False
    if job.evaluations is not None:
        return not job.evaluations.has(step)
    pending = job.world.is_first and not _was_evaluated(job.config.run_directory, step)
    return bool(job.world.broadcast_number(int(pending)))


def _was_evaluated(run: Path, step: int) -> bool:
    """Look for the evaluation of a step in its checkpoint, which may come from elsewhere, then in the history."""
    with suppress(CheckpointError):
        metrics = CheckpointStore(run / "checkpoints").info(step).context.get("metrics")
        if isinstance(metrics, dict) and "evaluation/loss" in metrics:
            return True
    return step in read_metrics(run).series("evaluation/loss")[0].tolist()


def _checkpoint(job: Job, last: bool = False) -> None:
    """Hand over the state, which is written while training continues.

    After the last step, in a process that ends with it, the optimizer's part may be used up by the writer.
    """
    beat(Phase.CHECKPOINT)
    _check_used_data(job, math.inf if last else _DATA_CHECK_SECONDS)
    _before_save(job)
    state = job.state
    blocks, spends = state.blocks(), last and job.own_process and state.engine is None
    spent = {name for name in blocks if spends and name.startswith("optimizer.")}
    stall = job.writer.submit(state.cursor.step, blocks, state.cursor_record(), job.checkpoint_context, spent)
    for callback in job.callbacks:
        callback.on_checkpoint(job, state.cursor.step, stall)


def _snapshot(job: Job) -> None:
    """Keep a copy of the state in memory, to be written if this worker dies."""
    beat(Phase.CHECKPOINT)  # it may have to wait for an earlier write, too
    _check_used_data(job, 0.0)
    _before_save(job)
    state = job.state
    stall = job.writer.snapshot(state.cursor.step, state.blocks(), state.cursor_record(), job.checkpoint_context)
    for callback in job.callbacks:
        callback.on_hold(job, state.cursor.step, stall)


def _check_used_data(job: Job, seconds: float) -> None:
    """Make sure that no state trained on damaged data is saved, as far as that is known within so many seconds.

    Raises:
        DataError: the data are damaged.
    """
    if job.task.settle_data is not None:
        job.task.settle_data(job.state.cursor.step, seconds, lambda: beat(Phase.CHECKPOINT))


def _before_save(job: Job) -> None:
    for callback in job.callbacks:
        callback.before_save(job)


def _save_with_retries(job: Job) -> None:
    """Write the newest state to disk. No later save would make up for it, so a retry follows when a process dies.

    Raises:
        CheckpointError: the state cannot be written. `SavesFailed` where another machine can continue the run.
    """
    beat(Phase.END)
    for _ in range(_RETRIES):
        if not job.writer.wants_another_try():
            break
        _report_outcomes(job)
        _checkpoint(job)
        beat(Phase.END)
    try:
        job.writer.wait()
    except CheckpointError as error:
        if job.failed_saves is None:
            raise
        raise job.failed_saves.end_without(error) from error


def _report_outcomes(job: Job) -> list[Outcome]:
    """Report finished saves and uploads to callbacks; return the saves."""
    outcomes = list(job.writer.outcomes())
    for outcome in outcomes:
        for callback in job.callbacks:
            callback.on_saved(job, outcome)
    for upload in job.writer.uploads():
        for callback in job.callbacks:
            callback.on_uploaded(job, upload)
    return outcomes


def _skip_limit_reached(job: Job) -> bool:
    return job.state.cursor.skipped_in_row >= job.config.train.skip_limit


def _diverged(job: Job, resumed: bool = False) -> DivergedError:
    half = job.config.parallel.reduce_precision == "fp16"
    intact = (
        "then go back to before these steps with `headway checkpoints restore`"
        if resumed
        else "the last checkpoint is intact"
    )
    return DivergedError(
        f"{job.state.cursor.skipped_in_row} steps in a row had a loss or gradient that is not finite, or far above the"
        " usual",
        where=f"step {job.state.cursor.step} of {job.config.run_directory}",
        fix="lower optimizer.learning_rate or lengthen schedule.warmup"
        + (", or set parallel.reduce_precision to bf16, which overflows later" if half else "")
        + f"; {intact}",
    )


def _stopped(job: Job, signals: StopSignals) -> Preempted:
    step = job.state.cursor.step
    reason = "its budget" if signals.budget_reached else signals.reason()
    what = f"stopped by {reason}" + (f"; step {step} is saved" if step else " before the first step")
    if signals.budget_reached:  # whoever ends the attempt adds what the run has spent by then
        return budget_reached(job.config, what)
    kind, then = Preempted, "to continue from here"
    if signals.is_cancelled:
        kind, then = Cancelled, "if it is to continue after all"
    return kind(
        what,
        where=str(job.config.run_directory),
        fix=f"run the same command again {then}",
    )
