"""The training loop: fetch, step, observe, checkpoint, stop. Everything else is a callback."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headway.checkpoint.save.fence import Fenced
from headway.checkpoint.save.outcomes import Outcome
from headway.checkpoint.store import CheckpointStore
from headway.config import Config, LaneGrid
from headway.core.allocator import give_back_freed_memory
from headway.core.errors import CheckpointError, CorruptionError, DivergedError, HeadwayError, Preempted
from headway.core.faults import fault_point
from headway.core.heartbeat import Phase, beat
from headway.core.types import MicroBatch
from headway.data.feeding.prefetch import Prefetcher
from headway.data.first_use import WrongShardError
from headway.parallel.pipeline import Pipeline
from headway.parallel.strategy import Strategy
from headway.parallel.world import World
from headway.telemetry.metrics import read_metrics
from headway.training.callbacks import Callback
from headway.training.clock import SaveClock, StepMetrics, StopSignals, saves_on_the_way
from headway.training.evaluate import evaluate
from headway.training.notices import NoticeReader
from headway.training.rollback import Rewinder, rolled_back
from headway.training.state import TrainState
from headway.training.state_writer import StateWriter
from headway.training.step import train_step
from headway.training.task import Task
from headway.training.trial import explain_out_of_memory

#: Of writing the last state of an attempt, when a process died over it.
_MORE_TRIES = 2
#: Ends at which no state that is held in memory is written: a newer one is saved, none may be trusted, or the run is
#: another process's.
_DISCARD_SNAPSHOT_ON = (Preempted, DivergedError, CorruptionError, Fenced, WrongShardError)
#: For which a save waits until shards that were opened have been checked; the last one of a run waits for all.
_SETTLE_SECONDS = 5.0


@dataclass
class Job:
    """One attempt at a run, as one worker sees it."""

    config: Config
    task: Task
    state: TrainState
    strategy: Strategy
    world: World
    grid: LaneGrid
    writer: StateWriter
    """Where checkpoints go."""
    checkpoint_context: dict[str, Any] = field(default_factory=dict)
    callbacks: Sequence[Callback] = ()
    rewinder: Rewinder | None = None
    """Goes back to an earlier checkpoint, where health wants that."""
    notices: NoticeReader | None = None
    """Hears that this machine will be taken away."""
    pipeline: Pipeline | None = None
    """The stages of the model that this worker has, when others have the rest."""
    own_process: bool = False
    """This process ends with the attempt."""

    @property
    def total_steps(self) -> int:
        """Where the run ends."""
        assert self.config.train.steps is not None, "the config is resolved"
        return self.config.train.steps

    def due(self, interval: Any) -> bool:
        """Whether something that happens every so many steps (or tokens) happens after the current step."""
        return interval != "auto" and self.config.train.batches.is_due(interval, self.state.cursor.step)


def train_loop(job: Job) -> None:
    """Train to the last step.

    Raises:
        DivergedError: too many steps in a row had a non-finite loss or gradient. No checkpoint of the last one is
            written, so the same command comes to it again.
        Preempted: a signal asked to stop; the state is saved.
        CheckpointError: all steps are done and saved here, but another attempt, or another run, has the remote tier.
    """
    config, state = job.config, job.state
    lanes = job.grid.of_worker(job.world.data_rank, job.world.mesh.data)
    signals, saved = StopSignals(job.notices, job.own_process), state.cursor.step
    # Several workers would have to agree, and those whose data have come wait for the others inside the step.
    stopped = (lambda: signals.stop) if job.world.size == 1 else (lambda: False)
    feed = Prefetcher(job.task.feed, lanes, state.cursor.step, job.total_steps, stopped=stopped)
    watch, clock = StepMetrics(job, feed), SaveClock.of(job)
    _forget_peak(job.world.device)
    with signals, feed, _run_callbacks(job, lambda: signals.stop):
        if _skip_limit_reached(job):  # checkpoints of older versions, or with a lower limit than before
            raise _diverged(job, resumed=True)
        if state.cursor.step == 0 and config.health.rolls_back:
            state.prepare_to_load()  # so that there are moments to be saved, and a place to go back to
            _checkpoint(job)
        if _evaluation_pending(job):
            if not _evaluate(job, signals):
                raise _stopped(job, signals)
            watch.restart()
        for ready, (_, batches) in enumerate(feed):  # fetch
            flags = (signals.stop, clock.due() or signals.save)
            with _explain_first_step_memory(job, batches):
                result = train_step(  # step
                    config, job.task, state, job.strategy, job.world, batches, flags, job.pipeline
                )
            stop, save = result.flags
            step, last = state.cursor.step, state.cursor.step == job.total_steps
            metrics = watch.metrics(result)
            for callback in job.callbacks:  # observe
                callback.on_step(job, step, metrics)
            if rolled_back(job, feed, result):
                saved = state.cursor.step
                watch.restart()
                continue
            if _skip_limit_reached(job):  # stop; not saved, or the same command would go on behind the limit
                raise _diverged(job)
            # A machine that goes does not wait for an evaluation, nor for the rest of one: the next attempt does it.
            owed = _evaluation_is_due(job) and (stop or not _evaluate(job, signals))
            leaves = owed or (stop and not last)
            fault_point("step", step)
            if leaves or save or last or job.due(config.checkpoint.every):  # checkpoint
                if last:
                    _make_room(state)
                with clock.saving():
                    _checkpoint(job, last)
                saved = step
            elif config.checkpoint.memory_every is not None and job.due(config.checkpoint.memory_every):
                _hold(job)
            elif ready == 0 and saves_on_the_way(job):  # all moments are there now
                beat(Phase.CHECKPOINT)
                job.writer.get_ready(state.blocks())
            for outcome in _tell_outcomes(job):
                clock.written(outcome)
            if leaves or last:
                _save_with_retries(job)
            if leaves:
                raise _stopped(job, signals)
            watch.restart()
        if state.cursor.step < job.total_steps:  # told to stop while the next batches did not come
            if state.cursor.step > saved:
                _checkpoint(job)
            _save_with_retries(job)
            raise _stopped(job, signals)
    lost = job.writer.lost_upload()
    if lost is not None:
        raise CheckpointError(f"the run is finished here, but {lost.what}", where=lost.where, fix=lost.fix)


def _explain_first_step_memory(job: Job, batches: Mapping[int, Sequence[MicroBatch]]) -> AbstractContextManager[None]:
    """What does not fit into memory in the first step never will; later it may be others on this machine, and another
    attempt helps."""
    return explain_out_of_memory(job.config, batches) if job.state.cursor.step == 0 else nullcontext()


def _forget_peak(device: torch.device) -> None:
    """The peak that metrics tell is of training, not of the trial steps that chose the micro-batch."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


@contextmanager
def _run_callbacks(job: Job, stopped: Callable[[], bool]) -> Iterator[None]:
    """Callbacks around all steps; whatever ends them, what was handed over is saved before. What is only held is, too,
    unless the end says that it is not to be gone on from, or not to be needed."""
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
        _tell_outcomes(job)
        for callback in started:  # one that could not begin has nothing to end
            callback.on_end(job)


def _evaluate(job: Job, signals: StopSignals) -> bool:
    """Whether it came to its end; all workers leave it when one is told to stop, and nobody hears of its losses."""
    task, precision = job.task, job.config.train.precision
    assert task.evaluation is not None
    result = evaluate(
        task.objective, job.state.model, task.evaluation, job.world, precision, job.pipeline, lambda: signals.stop
    )
    if result is None:
        return False
    for callback in job.callbacks:
        callback.on_evaluation(job, job.state.cursor.step, result)
    return True


def _evaluation_is_due(job: Job) -> bool:
    """After the current step."""
    step = job.state.cursor.step
    return job.task.evaluation is not None and (step == job.total_steps or job.due(job.config.evaluation.every))


def _evaluation_pending(job: Job) -> bool:
    """Whether the step that the attempt goes on from is due for an evaluation that nobody has done. The same on every
    worker, though only the first one looks."""
    step = job.state.cursor.step
    if not 0 < step <= job.total_steps or not _evaluation_is_due(job):
        return False
    owes = job.world.is_first and not _was_evaluated(job.config.run_directory, step)
    return bool(job.world.broadcast_number(int(owes)))


def _was_evaluated(run: Path, step: int) -> bool:
    """By the history, or by the checkpoint itself: it may have been made where this history is not."""
    with suppress(CheckpointError):
        metrics = CheckpointStore(run / "checkpoints").info(step).context.get("metrics")
        if isinstance(metrics, dict) and "evaluation/loss" in metrics:
            return True
    return step in read_metrics(run).series("evaluation/loss")[0].tolist()


def _make_room(state: TrainState) -> None:
    """Let the copy of the last state have the place of what a step needs."""
    if state.engine is None:
        state.optimizer.zero_grad(set_to_none=True)
    give_back_freed_memory()


def _checkpoint(job: Job, last: bool = False) -> None:
    """Hand over the state; it is written while training goes on. After the last one, in a process that ends with it,
    nobody needs the optimizer's part."""
    beat(Phase.CHECKPOINT)
    _settle_data(job, math.inf if last else _SETTLE_SECONDS)
    _announce(job)
    state = job.state
    blocks, spends = state.blocks(), last and job.own_process and state.engine is None
    spent = {name for name in blocks if spends and name.startswith("optimizer.")}
    stall = job.writer.submit(state.cursor.step, blocks, state.cursor_record(), job.checkpoint_context, spent)
    for callback in job.callbacks:
        callback.on_checkpoint(job, state.cursor.step, stall)


def _hold(job: Job) -> None:
    """Have the state in memory, for when this worker dies."""
    beat(Phase.CHECKPOINT)  # it may have to wait for the write of an earlier one, too
    _settle_data(job, 0.0)
    _announce(job)
    state = job.state
    stall = job.writer.snapshot(state.cursor.step, state.blocks(), state.cursor_record(), job.checkpoint_context)
    for callback in job.callbacks:
        callback.on_hold(job, state.cursor.step, stall)


def _settle_data(job: Job, seconds: float) -> None:
    """See that no state is saved that was trained on damaged data, as far as that is known within so many seconds.

    Raises:
        DataError: it was.
    """
    if job.task.settle_data is not None:
        job.task.settle_data(job.state.cursor.step, seconds, lambda: beat(Phase.CHECKPOINT))


def _announce(job: Job) -> None:
    for callback in job.callbacks:
        callback.before_save(job)


def _save_with_retries(job: Job) -> None:
    """Have the newest state on disk. There is no later save that would make up for it: when a process dies over this
    one, another tries.

    Raises:
        CheckpointError: it cannot be written.
    """
    beat(Phase.END)
    for _ in range(_MORE_TRIES):
        if not job.writer.wants_another_try():
            break
        _tell_outcomes(job)
        _checkpoint(job)
        beat(Phase.END)
    job.writer.wait()


def _tell_outcomes(job: Job) -> list[Outcome]:
    """Tell callbacks what has become of saves and uploads; the saves are returned."""
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
        "then go back behind these steps with `headway checkpoints restore`"
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
    return Preempted(
        f"stopped by {signals.reason()}" + (f"; step {step} is saved" if step else " before the first step"),
        where=str(job.config.run_directory),
        fix="run the same command again to go on from here",
    )
