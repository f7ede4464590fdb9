"""What an attempt keeps on disk: its checkpoints with their context, metrics, ledger and hashes."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch

from headway.checkpoint.lineage import PARENT, parent_record
from headway.checkpoint.post_save import MaintainerSettings
from headway.checkpoint.remote.acquire import find_tier
from headway.checkpoint.remote.ownership import read_claim
from headway.checkpoint.remote.tier_reader import CLAIM
from headway.checkpoint.run_identity import IDENTITY, OF_RUN, run_identity
from headway.checkpoint.save.messages import WriterSettings
from headway.checkpoint.save.writer import CheckpointWriter
from headway.config import identity
from headway.config.sections.early_stopping import EVALUATIONS
from headway.config.sections.segments import SEGMENTS
from headway.core.coordination.launched import is_rescheduled
from headway.core.errors import SavesFailed
from headway.core.files.hashes import fingerprint
from headway.core.version import __version__
from headway.cost.pricing import budget_of
from headway.parallel.strategy import SavedInPlace
from headway.run.directory.goodput_callback import GoodputKeeper
from headway.run.directory.ledger_callback import LedgerKeeper
from headway.run.directory.rewind import CheckpointRewinder
from headway.run.session.budget import BudgetGuard
from headway.run.session.checks import CODE
from headway.run.session.joined import Joined
from headway.run.session.spending import meter_of
from headway.run.session.start import Start
from headway.telemetry.metrics import read_metrics
from headway.training.assembled import Assembled
from headway.training.conditions.watch import ConditionWatch, conditions
from headway.training.evaluation.benchmarks import Benchmarks
from headway.training.evaluation.early_stopping import EvaluationHistory, recorded_evaluations
from headway.training.failed_saves import FailedSaves
from headway.training.job import Callback
from headway.training.omp_wait_policy import WaitingThreads
from headway.training.recording.communication import CommunicationMeter
from headway.training.recording.recorders import Recorder, StateHashes
from headway.training.state import TrainState


def checkpoint_context(joined: Joined, assembled: Assembled, start: Start) -> dict[str, Any]:
    """Return what every checkpoint of the attempt records of how it was made."""
    config = assembled.config
    world = assembled.world
    number = joined.attempt.number
    claim = read_claim(joined.attempt.run)
    return {
        IDENTITY: fingerprint(identity(config)),
        **assembled.task.fingerprints,
        CODE: dict(joined.code),
        "world_size": world.size,
        "mesh": world.mesh.arrangement,
        "strategy": config.parallel.strategy,
        "lanes": assembled.grid.lanes,
        "micro_batch": assembled.grid.micro_batch,
        "determinism": config.determinism,
        "attempt": number,
        OF_RUN: run_identity(config).record(),  # the id may have just come from the remote tier
        CLAIM: claim.number if claim is not None and claim.attempt == number else None,
        PARENT: parent_record(start.info.manifest) if start.info else None,
        "headway": __version__,
        "torch": torch.__version__,
        **({SEGMENTS: [s.model_dump(mode="json") for s in config.segments]} if config.segments else {}),
    }


def evaluation_history(joined: Joined, start: Start, step: int, context: dict[str, Any]) -> EvaluationHistory | None:
    """Return the evaluations by which the run may end early, kept in the context; all workers must call it."""
    wanted = joined.config.train.early_stopping
    if wanted is None:
        return None
    known = None
    if joined.world.is_first:
        known = recorded_evaluations(start.info.context if start.info else None, joined.run.path, step, wanted.metric)
    context[EVALUATIONS] = joined.world.gather_json(known)[0]
    return EvaluationHistory(wanted, context)


def make_writer(joined: Joined, state: TrainState, start: Start) -> CheckpointWriter:
    """Make what writes the checkpoints of this worker."""
    config = joined.config
    relay = start.access.relay
    return CheckpointWriter(
        WriterSettings(
            directory=joined.run.checkpoints,
            fence=joined.attempt.fence,
            memory_snapshots=config.checkpoint.memory_every is not None,
            in_place=isinstance(state.engine, SavedInPlace),
            buffers_in=state.engine.kept_in if isinstance(state.engine, SavedInPlace) else None,
            rank=joined.world.rank,
            workers=joined.world.size,
            patience_seconds=config.parallel.timeout_seconds,
            stalled_seconds=config.supervise.save_seconds / 2,  # before the supervisor considers the worker hung
            after_save=MaintainerSettings.of(
                config,
                joined.attempt.number,
                state.skipped_ranges,
                joined.task.fingerprints.get("data"),
                sends_all=relay is not None,
            ),
            sign=config.checkpoint.sign,
            encrypt=config.checkpoint.encrypt,
            relay=relay,
        ),
        joined.world.gather_json,
    )


def make_rewinder(joined: Joined, start: Start) -> CheckpointRewinder:
    """Make what returns the run to an earlier checkpoint."""
    remote = joined.config.checkpoint.remote
    tier = None if remote is None else partial(find_tier, remote, run_identity(joined.config))
    return CheckpointRewinder(joined.store, joined.world, tier, start.access.info)


def make_recorders(joined: Joined, start: Start) -> list[Callback]:
    """Make the callbacks that record the attempt."""
    config = joined.config
    run = joined.run
    attempt = joined.attempt
    world = joined.world
    ledger = joined.ledger
    recorders: list[Callback] = []
    if world.is_first:
        meter = meter_of(config, run.path, attempt.number)
        if meter is not None and (budget := budget_of(config.budget)) is not None:
            recorders.append(BudgetGuard(attempt.directory, budget, meter, read_metrics(run.path)))
        recorders += [
            GoodputKeeper(run.path, ledger, attempt.number, attempt.assert_current),
            Recorder(
                run.metrics_path,
                attempt.number,
                meter,
                start.seconds if start.info is not None else None,
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


def make_failed_saves(joined: Joined) -> FailedSaves:
    """Return what ends a run whose saves fail, with an exit code by which another machine continues it if one can."""
    config = joined.config
    can_move = config.checkpoint.remote is not None or config.parallel.machines > 1 or is_rescheduled()
    before = joined.run.attempt_records()[-2:-1]
    has_moved = any(record.get("error") == SavesFailed.__name__ for record in before)
    return FailedSaves(config.checkpoint.max_failed_saves, can_move, has_moved)
