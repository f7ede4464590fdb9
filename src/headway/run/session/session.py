"""One attempt inside one process: join the others, find where to start, train, and record why it ended.

The same code runs in a plain process, under the local launcher and under torchrun. They differ only in which process
owns the attempt. The owner, which began it, also ends it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from math import gcd

import torch

from headway.checkpoint.discovery import find_latest
from headway.checkpoint.format.manifest import Manifest
from headway.checkpoint.lineage import PARENT, parent_record
from headway.checkpoint.post_save import CheckpointMaintainer
from headway.checkpoint.remote.acquire import acquire_tier, find_tier
from headway.checkpoint.remote.ownership import read_claim
from headway.checkpoint.remote.tier import CLAIM
from headway.checkpoint.run_identity import IDENTITY, OF_RUN, run_identity
from headway.checkpoint.save.writer import CheckpointWriter
from headway.checkpoint.save.writer_client import WriterSettings
from headway.checkpoint.skipped_ranges import is_outdated
from headway.checkpoint.store import CheckpointInfo, CheckpointStore
from headway.config import (
    Batches,
    Config,
    LaneGrid,
    MeshShape,
    crossing_groups,
    identity,
    ineffective_settings,
)
from headway.config.derived.segments import SEGMENTS, Segment
from headway.config.sections.early_stopping import EVALUATIONS
from headway.core.alerts import alerting
from headway.core.code_identity import object_identity
from headway.core.console import log_to, notice, warning
from headway.core.coordination.launched import is_rescheduled
from headway.core.errors import ConfigError, SavesFailed
from headway.core.files.hashes import fingerprint
from headway.core.format import counted, format_count
from headway.core.process.waiting import VISIBILITY_TIMEOUT
from headway.core.startup.garbage import pause_collection, resume_collection
from headway.core.version import __version__
from headway.cost.pricing import budget_of
from headway.parallel.strategy import Strategy
from headway.parallel.world import World
from headway.run.directory.goodput_callback import GoodputKeeper
from headway.run.directory.ledger import Ledger
from headway.run.directory.ledger_callback import LedgerKeeper
from headway.run.directory.rewind import CheckpointRewinder, decided, discard_outdated, load_state, take_decisions
from headway.run.directory.run_directory import Attempt, RunDirectory, what_to_do
from headway.run.notices.budget import BudgetGuard
from headway.run.notices.listening import listening
from headway.run.session.assemble import assemble
from headway.run.session.attempt import (
    ATTEMPT_VARIABLE,
    RunOptions,
    attempt_scope,
    is_finished,
    without_done_restart,
    write_config,
)
from headway.run.session.checks import CODE, check_code, check_data
from headway.run.session.compiled import decide_compile
from headway.run.session.grid import choose_micro_batch, common_threads
from headway.run.session.join import join_workers
from headway.run.session.own_disks import CheckpointAccess
from headway.run.session.preflight import RunPlan
from headway.run.session.spending import meter_of, price_warnings
from headway.telemetry.metrics import read_metrics
from headway.training.conditions.watch import ConditionWatch, conditions
from headway.training.evaluation.benchmarks import Benchmarks
from headway.training.evaluation.early_stopping import EvaluationHistory, recorded_evaluations
from headway.training.failed_saves import FailedSaves
from headway.training.job import Callback, Job, load_callbacks
from headway.training.loop import train_loop
from headway.training.recording.communication import CommunicationMeter
from headway.training.recording.recorders import Recorder, StateHashes
from headway.training.setup.available import shortfalls
from headway.training.setup.compiling import compile_model
from headway.training.setup.model_proofs import prove_model
from headway.training.setup.precision import begin_scaling
from headway.training.setup.trial import largest_micro_batch, trial_step
from headway.training.staged import check_model_is_cut, make_pipeline
from headway.training.state import TrainState
from headway.training.stop import NoticeReader
from headway.training.task import Task
from headway.training.waiting_threads import WaitingThreads


def run_in_this_process(
    plan: RunPlan,
    make_task: Callable[[Config, LaneGrid, MeshShape, int], Task],
    callbacks: Sequence[Callback] = (),
    own: Callable[..., AbstractContextManager[Attempt]] = attempt_scope,
    *,
    own_process: bool = False,
) -> None:
    """Train as one worker: the only one, or one of those that torchrun or the local launcher started.

    Args:
        own: Begins an attempt if no other process has, and ends it.
        own_process: This process ends with the attempt.
    """
    config, options, grid = plan.config, plan.options, plan.grid
    of_callbacks = {f"callbacks {type(one).__name__}": object_identity([type(one)]) for one in callbacks}
    callbacks = [*load_callbacks(config.callbacks), *callbacks]
    with join_workers(config, plan.mesh) as world:
        task = make_task(config, grid, world.mesh, world.rank)
        check_model_is_cut(task, world)
        if _is_finished(config, task, world, options):
            return
        with (
            # Outside of the attempt: its record and the answer to a notice do not wait for an alert command.
            alerting(config.telemetry.alert, config.run_directory) as alerts,
            _joined_attempt(config, task, world, options, own) as attempt,
            # Other workers redirect all their output (`supervisor.worker`).
            log_to(attempt.worker_log(0), tolerate_hangs=True) if world.is_first else nullcontext(),
        ):
            if alerts is not None:
                alerts.open_file()
            _train(
                config,
                task,
                make_task,
                world,
                grid,
                attempt=attempt,
                callbacks=callbacks,
                code={**task.code, **of_callbacks},
                # A later attempt of the supervisor accepts the config that the first one has checked, not other code.
                accept_code=options.accept_changes and not own_process,
                own_process=own_process,
            )


def _is_finished(config: Config, task: Task, world: World, options: RunOptions) -> bool:
    """Return whether there is nothing to do, equally on every worker; False if another process has begun the
    attempt."""
    if ATTEMPT_VARIABLE in os.environ or not options.leave_finished:
        return False
    finished = world.is_first and is_finished(config, task.fingerprints, options)
    return bool(world.broadcast_number(int(finished)))


@contextmanager
def _joined_attempt(
    config: Config, task: Task, world: World, options: RunOptions, own: Callable[..., AbstractContextManager[Attempt]]
) -> Iterator[Attempt]:
    """Join the attempt that this worker takes part in.

    If no other process has begun it, the first worker begins it, and records its outcome.
    """
    given = os.environ.pop(ATTEMPT_VARIABLE, None)  # not for the children of this process
    if given:
        attempt = Attempt.join(config.run_directory, int(given))
        # The agent does not listen: it will be copied, so it can have no threads. On every machine one worker does.
        with listening(attempt.directory, config.preemption) if world.local_rank == 0 else nullcontext():
            yield attempt
        return
    options = without_done_restart(config, options, world.gather)
    if world.is_first:
        with own(config, task.fingerprints, task.facts(), options) as attempt:
            world.gather_json([attempt.number, attempt.owner.token])
            yield attempt
    else:
        number, token = world.gather_json(None)[0]
        attempt = Attempt.join(config.run_directory, number, token, VISIBILITY_TIMEOUT)
        # The attempt's owner listens on its machine, and on every other the first worker there.
        with listening(attempt.directory, config.preemption) if world.local_rank == 0 else nullcontext():
            yield attempt


def _train(
    config: Config,
    task: Task,
    make_task: Callable[[Config, LaneGrid, MeshShape, int], Task],
    world: World,
    grid: LaneGrid,
    *,
    attempt: Attempt,
    callbacks: Sequence[Callback],
    code: Mapping[str, str],
    accept_code: bool,
    own_process: bool,
) -> None:
    run = RunDirectory(config.run_directory)
    store = CheckpointStore(run.checkpoints, may_write=attempt.assert_current)
    began = time.monotonic()
    step = _find_start(config, task, run, store, world, attempt=attempt)
    fingerprints = task.fingerprints
    with_loss = {**{key: value for key, value in fingerprints.items() if key == "loss"}, **code}
    access = CheckpointAccess.agree(config, store, world, attempt, fingerprints=fingerprints, code=with_loss)
    start = access.info(step) if step >= 0 else None
    load_seconds = time.monotonic() - began
    config, task = _adopt_segments(start, config, task, make_task=make_task, grid=grid, world=world, run=run)
    _check_rows(config.train.batches, grid, start)
    threads = _threads(config, world, grid, start)
    torch.set_num_threads(threads)

    parameters = task.facts()["parameters"]  # counted now: a strategy may take them away
    state, strategy = assemble(config, task, world, threads, fresh=start is None)
    resume_collection()
    if start is not None:
        check_data(config, task.fingerprints, start)
        check_code(config, with_loss, start, accept=accept_code)
        began = time.monotonic()
        load_state(state, store, start, world)
        load_seconds += time.monotonic() - began
    state.decides = config.health.on_spike in ("skip", "rollback", "stop")
    left_out = take_decisions(state, config.segments, Ledger(run.ledger_path), start, world)
    begin_scaling(state.cursor, config.train.precision)
    world.broadcast_(task.model.buffers())  # including those that are not part of the state
    proofs = prove_model(config, task, state, strategy, world, kept=start.context if start else None)
    grid = choose_micro_batch(config, task, state, strategy, world, grid=grid, start=start)
    compiled = decide_compile(config, task, world, grid, start)
    if compiled:
        if own_process:
            pause_collection()
        compile_model(config.parallel, task.model)
        resume_collection()
    _try_memory(config, task, state, strategy, world, grid=grid)

    claim = read_claim(attempt.run)
    context = {
        IDENTITY: fingerprint(identity(config)),
        **task.fingerprints,
        CODE: dict(code),
        "world_size": world.size,
        "mesh": world.mesh.arrangement,
        "strategy": config.parallel.strategy,
        "lanes": grid.lanes,
        "micro_batch": grid.micro_batch,
        "threads": threads,
        "compiled": compiled,
        "determinism": config.determinism,
        "attempt": attempt.number,
        OF_RUN: run_identity(config).record(),  # the id may have just come from the remote tier
        CLAIM: claim.number if claim is not None and claim.attempt == attempt.number else None,
        PARENT: parent_record(start.manifest) if start else None,
        "headway": __version__,
        "torch": torch.__version__,
        **({SEGMENTS: [s.model_dump(mode="json") for s in config.segments]} if config.segments else {}),
        **proofs,
        **left_out,
    }
    evaluations = None
    if config.train.early_stopping is not None:
        known = None
        if world.is_first:
            known = recorded_evaluations(start.context if start else None, run.path, state.cursor.step)
        context[EVALUATIONS] = world.gather_json(known)[0]
        evaluations = EvaluationHistory(config.train.early_stopping, context)
    notices, remote = NoticeReader(attempt.directory), config.checkpoint.remote
    failed_saves = _failed_saves(config, run)
    recorders = [notices, failed_saves, *_recorders(config, run, attempt, start, world, load_seconds=load_seconds)]
    job = Job(
        config=config,
        task=task,
        state=state,
        strategy=strategy,
        world=world,
        grid=grid,
        writer=CheckpointWriter(
            WriterSettings(
                directory=run.checkpoints,
                fence=attempt.fence,
                memory_snapshots=config.checkpoint.memory_every is not None,
                rank=world.rank,
                workers=world.size,
                patience_seconds=config.parallel.timeout_seconds,
                stalled_seconds=config.supervise.save_seconds / 2,  # before the supervisor considers the worker hung
                after_save=CheckpointMaintainer.settings(
                    config,
                    attempt.number,
                    state.skipped_ranges,
                    task.fingerprints.get("data"),
                    sends_all=access.relay is not None,
                ),
                sign=config.checkpoint.sign,
                encrypt=config.checkpoint.encrypt,
                relay=None if access.relay is None else access.relay.record(),
            ),
            world.gather_json,
        ),
        checkpoint_context=context,
        callbacks=[*callbacks, *recorders],  # recorders come last, to record what the others have added
        rewinder=CheckpointRewinder(
            store,
            world,
            None if remote is None else partial(find_tier, remote, run_identity(config)),
            access.info,
        ),
        notices=notices,
        failed_saves=failed_saves,
        evaluations=evaluations,
        pipeline=make_pipeline(config, task, world),
        own_process=own_process,
    )
    _report_start(job, start, parameters)
    train_loop(job)


def _adopt_segments(
    start: CheckpointInfo | None,
    config: Config,
    task: Task,
    *,
    make_task: Callable[[Config, LaneGrid, MeshShape, int], Task],
    grid: LaneGrid,
    world: World,
    run: RunDirectory,
) -> tuple[Config, Task]:
    """Adopt the segments of a checkpoint that came without its run directory, as after the loss of a disk."""
    known = start.context.get(SEGMENTS) if start is not None else None
    if not known or config.segments:
        return config, task
    config = config.with_segments([Segment.model_validate(segment) for segment in known])
    if world.is_first:
        write_config(config, run.path)
    return config, make_task(config, grid, world.mesh, world.rank)


def _check_rows(batches: Batches, grid: LaneGrid, start: CheckpointInfo | None) -> None:
    """Check that the steps of an earlier segment to which the run returns can be cut into the lanes of the last one.

    Raises:
        ConfigError: they cannot.
    """
    for first, _, rows in batches.stretches(start.step if start is not None else 0, batches.begins):
        if rows % grid.lanes:
            raise ConfigError(
                f"the run goes back to step {first:,}, whose {rows} rows cannot be cut into {grid.lanes} lanes",
                where="train.lanes",
                fix=f"train.lanes={gcd(rows, grid.lanes)}",
            )


def _try_memory(
    config: Config, task: Task, state: TrainState, strategy: Strategy, world: World, *, grid: LaneGrid
) -> None:
    """Try a step, so that a lack of memory shows before the first one."""
    by_default = world.device.type == "cuda" and world.mesh.pp == 1
    wanted = by_default if config.train.trial_step is None else config.train.trial_step
    step, last = state.cursor.step, config.train.steps
    assert last is not None, "the config is resolved"
    if wanted and step < last:
        lane = grid.of_worker(world.data_rank, world.mesh.data)[0]
        trial_step(config, task, state, strategy, world, batch=largest_micro_batch(task.feed, lane, step, last))


def _find_start(
    config: Config, task: Task, run: RunDirectory, store: CheckpointStore, world: World, *, attempt: Attempt
) -> int:
    """Return the step of the checkpoint to resume from, equal on every worker; -1 to start at step 0.

    Only the first worker verifies every byte, and downloads it from the remote tier if necessary.
    """
    if not world.is_first:
        return world.broadcast_number(0)
    left_out = decided(Ledger(run.ledger_path))
    discard_outdated(store, left_out)
    claimed, remote = None, config.checkpoint.remote
    if remote is not None:
        # With a local checkpoint there is no need to wait long for a store's answer.
        patience = 10.0 if store.folders() else 120.0
        mine = run_identity(config, task.fingerprints.get("data"))
        claimed = partial(acquire_tier, remote, attempt.number, mine, patience_seconds=patience)
    find = partial(
        find_latest,
        store,
        claimed,
        accept=partial(_check_same_run, config),
        usable=lambda m: not is_outdated(m, left_out),
    )
    found = what_to_do(run, store, find).checkpoint
    return world.broadcast_number(found.step if found else -1)


def _check_same_run(config: Config, manifest: Manifest, where: str) -> None:
    """Check that a remote checkpoint belongs to this run; without a run directory only the checkpoint shows that.

    Raises:
        ConfigError: it was made with another config.
    """
    if manifest.context.get(IDENTITY) != fingerprint(identity(config)):
        raise ConfigError(
            "there is no checkpoint here, and those in the remote tier were made with another config",
            where=where,
            fix="choose another name=..., or start over with --restart; to continue from it nevertheless, first"
            " `headway checkpoints restore` it, then train with --accept-changes",
        )


def _threads(config: Config, world: World, grid: LaneGrid, start: CheckpointInfo | None) -> int:
    """Return the CPU threads of every worker. Bits can depend on them, so a resumed run keeps its number."""
    threads = common_threads(config, world, grid)
    context, mesh = start.context if start else {}, world.mesh.arrangement
    before: int | None = context.get("threads")
    same_layout = config.determinism == "elastic" or (
        context.get("world_size") == world.size and context.get("mesh", mesh) == mesh
    )
    if before is None or before == threads or not same_layout:
        return threads
    if config.parallel.threads == "auto":
        if before > threads:
            notice(f"{before} threads per worker as before, since bits depend on it; {threads} would suit this machine")
        return before
    if config.determinism == "elastic":
        raise ConfigError(
            f"this run computes with {before} threads per worker; its bits would change with {threads}",
            where="parallel.threads",
            fix=f"parallel.threads={before}, or auto",
        )
    if config.determinism == "run":
        warning(f"{threads} threads per worker instead of {before}: the run continues, but not bit for bit")
    return threads


def _recorders(
    config: Config,
    run: RunDirectory,
    attempt: Attempt,
    start: CheckpointInfo | None,
    world: World,
    *,
    load_seconds: float,
) -> list[Callback]:
    recorders: list[Callback] = []
    ledger = Ledger(run.ledger_path)
    if world.is_first:
        meter = meter_of(config, run.path, attempt.number)
        if meter is not None and (budget := budget_of(config)) is not None:
            recorders.append(BudgetGuard(attempt.directory, budget, meter, read_metrics(run.path)))
        recorders += [
            GoodputKeeper(run.path, ledger, attempt.number, attempt.assert_current),
            Recorder(
                run.metrics_path,
                attempt.number,
                meter,
                load_seconds if start is not None else None,
                partial(attempt.fence.assert_held, patience_seconds=0.0),  # every step's record asks
            ),
            LedgerKeeper(ledger, attempt.number, run.checkpoints, attempt.assert_current),
        ]
    if config.health.watch_seconds and world.local_rank == 0:
        ours = os.getppid() if world.size > 1 else os.getpid()  # the process that has started the workers here
        watched = conditions(run.checkpoints, run=ours, attempt=attempt.directory)
        recorders.insert(0, ConditionWatch(watched, config.health.watch_seconds))
    recorders.insert(0, WaitingThreads())
    benchmarks = config.evaluation.benchmarks
    if world.is_first and benchmarks is not None and benchmarks.every is not None:
        recorders.insert(0, Benchmarks(run.path, benchmarks))
    if world.is_first and world.size > 1 and config.telemetry.communication_every:
        recorders.insert(0, CommunicationMeter(config.telemetry.communication_every))
    if config.telemetry.state_hash_every:
        recorders.append(StateHashes(run.path / "hashes.jsonl", config.telemetry.state_hash_every))
    return recorders


def _failed_saves(config: Config, run: RunDirectory) -> FailedSaves:
    """Return what ends a run whose saves fail, with an exit code by which another machine continues it if one can."""
    can_move = config.checkpoint.remote is not None or config.parallel.machines > 1 or is_rescheduled()
    before = run.attempt_records()[-2:-1]
    has_moved = any(record.get("error") == SavesFailed.__name__ for record in before)
    return FailedSaves(config.checkpoint.max_failed_saves, can_move, has_moved)


def _report_start(job: Job, start: CheckpointInfo | None, parameters: int) -> None:
    """Report what is about to happen, before the first step takes its time."""
    config, world, step = job.config, job.world, job.state.cursor.step
    if config.parallel.all_workers not in (1, world.size) and config.parallel.min_workers is None:
        started = counted(world.size, "worker")
        notice(f"parallel.workers={config.parallel.workers} is ignored: the agent has started {started}")
    sizes = list(dict.fromkeys(rows for _, _, rows in config.train.batches.stretches(0, job.total_steps)))
    batch = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])
    notice(
        f"{config.name}: {format_count(parameters)} parameters · {job.total_steps:,} steps of"
        f" {batch} rows · {counted(world.size, 'worker')} on"
        f" {world.device.type} · {config.train.precision} · determinism {config.determinism}"
    )
    if world.is_first:
        evaluates = job.task.evaluation is not None
        for line in (
            *shortfalls(config.train, world.device),
            *crossing_groups(config, world.size),
            *price_warnings(config, world.size),
            *ineffective_settings(config, evaluates),
        ):
            warning(line)
    if start is None:
        return
    if step >= job.total_steps:
        notice(f"all {job.total_steps:,} steps of {config.run_directory} are done")  # an evaluation may be left
        return
    notice(f"resuming from {start.path} (state {start.state_sha256[:12]})")
    before, mesh = start.context.get("world_size"), start.context.get("mesh")
    if config.determinism != "run":
        return
    if before != world.size:
        warning(
            f"{world.size} workers instead of {before}: the run continues, but not bit for bit"
            " (determinism=elastic promises that)"
        )
    elif mesh not in (None, world.mesh.arrangement):
        then = MeshShape(**mesh)
        warning(f"workers arranged as {world.mesh} instead of {then}: the run continues, but not bit for bit")
