"""Where an attempt starts: the checkpoint that its first worker finds, loaded into the state of every worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any

from headway.checkpoint.discovery import find_latest
from headway.checkpoint.format.manifest import Manifest
from headway.checkpoint.remote.acquire import acquire_tier
from headway.checkpoint.run_identity import IDENTITY, run_identity
from headway.checkpoint.skipped_ranges import is_outdated
from headway.checkpoint.store import CheckpointInfo
from headway.config import Batches, Config, LaneGrid, identity
from headway.config.sections.segments import SEGMENTS, Segment
from headway.core.console import warning
from headway.core.errors import CheckpointError, ConfigError
from headway.core.files.hashes import fingerprint
from headway.run.directory.ledger import Ledger, decided
from headway.run.directory.rewind import discard_outdated, load_state, take_decisions
from headway.run.directory.run_directory import RunDirectory
from headway.run.session.attempt import write_config
from headway.run.session.checks import check_code, check_data
from headway.run.session.joined import Joined
from headway.run.session.own_disks import CheckpointAccess
from headway.training.assembled import Assembled
from headway.training.setup.precision import begin_scaling


@dataclass(frozen=True)
class Start:
    """Where an attempt starts."""

    access: CheckpointAccess
    """How this worker gets at the checkpoints of the first one."""
    info: CheckpointInfo | None
    """The checkpoint to continue from; None for step 0."""
    seconds: float
    """How long it took to find and fetch."""

    @property
    def step(self) -> int:
        """The number of finished steps."""
        return self.info.step if self.info is not None else 0


def find_start(joined: Joined) -> Start:
    """Find where the attempt starts; all workers must call it.

    Raises:
        CheckpointError: no checkpoint verifies, or the remote tier cannot be reached.
        DataError: the data or the code of a machine differ from the first worker's.
    """
    began = time.monotonic()
    step = _find_step(joined)
    access = CheckpointAccess.agree(joined)
    info = access.info(step) if step >= 0 else None
    return Start(access, info, time.monotonic() - began)


def _find_step(joined: Joined) -> int:
    """Return the step of the checkpoint to resume from, equal on every worker; -1 to start at step 0.

    Only the first worker verifies every byte, and downloads it from the remote tier if necessary.
    """
    config = joined.config
    store = joined.store
    if not joined.world.is_first:
        return joined.world.broadcast_number(0)
    left_out = decided(joined.ledger)
    discard_outdated(store, left_out)
    claimed = None
    if config.checkpoint.remote is not None:
        # With a local checkpoint there is no need to wait long for a store's answer.
        patience = 10.0 if store.folders() else 120.0
        mine = run_identity(config, joined.task.fingerprints.get("data"))
        number = joined.attempt.number
        claimed = partial(acquire_tier, config.checkpoint.remote, number, mine, patience_seconds=patience)
    find = partial(
        find_latest,
        store,
        claimed,
        accept=partial(_check_same_run, config),
        usable=lambda m: not is_outdated(m, left_out),
    )
    found = find()
    check_nothing_lost(joined.run, found)
    return joined.world.broadcast_number(found.step if found else -1)


def check_nothing_lost(run: RunDirectory, found: CheckpointInfo | None) -> None:
    """Check that an attempt may start from the checkpoint that was found, or from step 0; call this as the run's owner.

    A start that repeats finished steps gives a warning.

    Args:
        run: The run.
        found: The newest checkpoint that verifies; None for step 0, whose state follows from the config alone.

    Raises:
        CheckpointError: the run had checkpoints, and none verifies now.
    """
    committed = Ledger(run.ledger_path).committed_step
    if found is None and committed:
        raise CheckpointError(
            f"step {committed} of this run was saved, but its checkpoints are gone; it does not start over by itself",
            where=str(run.checkpoints),
            fix="put the checkpoints back, choose another name=..., or move this run aside with --restart",
        )
    step = 0 if found is None else found.step
    if step < committed:
        warning(f"going back from step {committed} to step {step}; the steps between are trained again")
    elif found is None and len(run.attempt_records()) > 1:
        warning(f"{run.path} was started before, but has no checkpoint yet: starting again from step 0")


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


def adopt_segments(joined: Joined, start: Start, remake: Callable[[Config], Any]) -> Joined:
    """Adopt the segments of a checkpoint that came without its run directory, as after the loss of a disk.

    Args:
        remake: Makes the task of another config.
    """
    known = start.info.context.get(SEGMENTS) if start.info is not None else None
    if not known or joined.config.segments:
        return joined
    config = joined.config.with_segments([Segment.model_validate(segment) for segment in known])
    if joined.world.is_first:
        write_config(config, joined.run.path)
    return replace(joined, config=config, task=remake(config))


def check_rows(batches: Batches, grid: LaneGrid, start: Start) -> None:
    """Check that the steps of an earlier segment to which the run returns can be cut into the lanes of the last one.

    Raises:
        ConfigError: they cannot.
    """
    for first, _, rows in batches.stretches(start.step, batches.begins):
        if rows % grid.lanes:
            raise ConfigError(
                f"the run goes back to step {first:,}, whose {rows} rows cannot be cut into {grid.lanes} lanes",
                where="train.lanes",
                fix=f"train.lanes={gcd(rows, grid.lanes)}",
            )


def take_up(joined: Joined, start: Start, assembled: Assembled, *, accept_code: bool) -> tuple[Start, dict[str, Any]]:
    """Continue from a start: load its checkpoint, if there is one, and the decisions about earlier steps.

    All workers must call it.

    Args:
        accept_code: Continue with code that has changed.

    Returns:
        The start with the seconds that loading took, and what the decisions add to the context of checkpoints.

    Raises:
        CheckpointError: the checkpoint is of another model or optimizer.
        DataError: the data or the code have changed since.
    """
    config = joined.config
    state = assembled.state
    world = joined.world
    if start.info is not None:
        check_data(config, joined.task.fingerprints, start.info)
        check_code(config.loss, joined.code_with_loss, start.info, accept=accept_code)
        began = time.monotonic()
        load_state(state, joined.store, start.info, world)
        start = replace(start, seconds=start.seconds + time.monotonic() - began)
    state.decides = config.health.on_spike in ("skip", "rollback", "stop")
    left_out = take_decisions(state, config.segments, joined.ledger, start.info, world)
    begin_scaling(state.cursor, config.train.precision)
    world.broadcast_(joined.task.model.buffers())  # including those that are not part of the state
    return start, left_out
