"""The training loop: fetch, step, observe, checkpoint, stop. Everything else is a callback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from headway.checkpoint.save.fence import Fenced
from headway.core.coordination.heartbeat import Phase, beat
from headway.core.errors import CheckpointError, CorruptionError, DivergedError, HeadwayError, Preempted
from headway.core.process.faults import fault_point
from headway.data.feeding.prefetch import Prefetcher
from headway.data.first_use import WrongShardError
from headway.training.ending import check_not_diverged, stopped
from headway.training.evaluation.in_loop import LoopEvaluation
from headway.training.failed_saves import FailedSaves
from headway.training.health.rollback import roll_back
from headway.training.job import Callback, Job
from headway.training.recording.step_metrics import StepMetrics
from headway.training.saves import Saves, report_outcomes
from headway.training.setup.trial import explain_out_of_memory
from headway.training.step import TrainStep
from headway.training.stop import NoticeReader, Requests, StopSignals

#: Errors after which a snapshot in memory is not written: a newer state is saved, no state can be trusted, or another
#: process has the run.
_DISCARD_SNAPSHOT_ON = (Preempted, DivergedError, CorruptionError, Fenced, WrongShardError)


def train_loop(job: Job, notices: NoticeReader | None = None, failed_saves: FailedSaves | None = None) -> None:
    """Train to the last step.

    Args:
        notices: Reads notices that this machine will be taken away.
        failed_saves: Ends the run where no save succeeds any more; None trains on without checkpoints.

    Raises:
        DivergedError: too many steps in a row had a non-finite loss or gradient. The last state is not saved, so the
            same command meets the same steps again.
        Preempted: a signal asked to stop; the state is saved. `BudgetReached` if the run has spent its budget.
        CheckpointError: `checkpoint.max_failed_saves` saves in a row have failed, or that of the last state;
            `SavesFailed` where another machine can continue the run. Or all steps are done and saved here, but another
            attempt, or another run, has the remote tier.
    """
    state = job.state
    signals = StopSignals(notices, job.own_process)
    feed = _open_feed(job, signals)
    train_step = TrainStep(job.assembled)
    step_metrics = StepMetrics(job, feed)
    saves = Saves(job, failed_saves)
    evaluation = LoopEvaluation(job, signals)
    _reset_peak_memory(job.world.device)
    with signals, feed, _run_callbacks(job, lambda: signals.stop):
        check_not_diverged(job, resumed=True)
        saves.save_first()
        evaluation.catch_up()
        if evaluation.ends_early():  # the state was saved when the run ended, and the same command was run again
            return
        step_metrics.restart()
        for _, batches in feed:  # fetch
            mine = Requests(signals.stop, saves.due or signals.save, saves.have_failed)
            with _explain_first_step(job, batches):
                result = train_step.run(batches, mine)  # step
            agreed = Requests(*result.flags)
            metrics = step_metrics.metrics(result)
            for callback in job.callbacks:  # observe
                callback.on_step(job, state.cursor.step, metrics)
            if roll_back(job, feed, result):
                saves.go_back()
                step_metrics.restart()
                continue
            check_not_diverged(job)
            saves.check_failures(agreed.give_up)
            ending = evaluation.after_step(agreed.stop)
            fault_point("step", state.cursor.step)
            saves.after_step(agreed.save or ending is not None, ending is not None and ending.last)  # checkpoint
            if ending is not None:  # stop
                saves.finish()
                if ending.leaves:
                    raise stopped(job, signals)
                return
            step_metrics.restart()
        if state.cursor.step < job.total_steps:  # asked to stop while waiting for the next batches
            saves.finish()
            raise stopped(job, signals)


def _open_feed(job: Job, signals: StopSignals) -> Prefetcher:
    """Open the feed of this worker's lanes, from the current step on.

    One worker that is asked to stop does not wait for its data. Several would have to agree on stopping; those whose
    data have arrived wait for the others in the step.
    """

    def leaves() -> bool:
        return job.world.size == 1 and signals.stop

    return Prefetcher(job.task.feed, job.assembled.lanes, job.state.cursor.step, job.total_steps, stopped=leaves)


def _reset_peak_memory(device: torch.device) -> None:
    """Have metrics report the peak of training, not that of the trial steps."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _explain_first_step(job: Job, batches: Any) -> AbstractContextManager[None]:
    """Explain a lack of memory in the first step of a run: what does not fit there never will.

    Later, other processes may be the cause, and another attempt helps.
    """
    if job.state.cursor.step > 0:
        return nullcontext()
    return explain_out_of_memory(job.config.train, job.config.parallel, job.config.optimizer, batches)


@contextmanager
def _run_callbacks(job: Job, is_hurried: Callable[[], bool]) -> Iterator[None]:
    """Run callbacks around all steps, and save what was handed over, whatever ends the steps.

    A snapshot that is only in memory is saved, too, unless the way the steps ended rules out resuming from it or makes
    it superfluous.

    Raises:
        CheckpointError: The steps are done, and another process has prevented the upload of the last state.
    """
    flush_snapshot = True
    started: list[Callback] = []
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
        job.writer.close(flush_snapshot=flush_snapshot, hurried=is_hurried)
        report_outcomes(job)
        for callback in started:  # a callback that could not start has nothing to end
            callback.on_end(job)
    lost = job.writer.lost_upload()
    if lost is not None:
        raise CheckpointError(f"the run is finished here, but {lost.what}", where=lost.where, fix=lost.fix)
