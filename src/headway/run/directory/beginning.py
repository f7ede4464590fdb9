"""The beginning of a run from a checkpoint of another run, its parent.

The new run directory appears whole, by one rename: the checkpoint, the parent's config and provenance, and a ledger
that begins with the parent's lines up to that step. So the new run proves its rows also when the parent is gone.

    ledger.jsonl    |-- copied: what the parent's ledger has up to step N --|-- beginning --|-- of this run --|
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.checkpoint.format.folders import checkpoint_folders, pruning
from headway.checkpoint.format.manifest import MANIFEST, Manifest, step_name, step_of
from headway.checkpoint.index import LOCAL, CheckpointIndex
from headway.checkpoint.run_identity import IDENTITY, RUN_FILE, RUN_ID, new_run_id, read_run_id, run_identity
from headway.checkpoint.skipped_ranges import is_outdated
from headway.checkpoint.transfer import copy_checkpoints, local_folders
from headway.checkpoint.verify import verify_checkpoint
from headway.config import Config, dump_config, identity, load_resolved
from headway.config.sections.segments import SEGMENTS, Segment
from headway.core.errors import CheckpointError, explaining_os_errors, fix_for
from headway.core.files.atomic import atomic_write, sync_folder, write_json
from headway.core.files.foreign import read_json_or_empty
from headway.core.files.hashes import fingerprint, sha256_file
from headway.core.files.paths import link_or_copy
from headway.core.process.faults import fault_point
from headway.data.used_by import FOLDER as DATA_FOLDER
from headway.run.directory.ledger import Ledger, decided
from headway.run.directory.ledger_beginning import BEGINNING, AttemptSteps, Beginning
from headway.run.directory.ownership import OwnerLock
from headway.run.directory.run_directory import RunDirectory, attempt_folder
from headway.telemetry.record import RESTORED, open_run

#: What a checkpoint needs besides itself, to be exported and to find its rows.
_COMPANIONS = ("tokenizer", DATA_FOLDER)
_HIDDEN = ".begins-"


@dataclass(frozen=True)
class ParentCheckpoint:
    """A checkpoint of another run, from which a run may begin."""

    run: RunDirectory
    folder: Path
    manifest: Manifest
    config: Config
    """The config that it was trained with."""

    @property
    def step(self) -> int:
        """Finished steps."""
        return self.manifest.step


def parent_run(source: Path) -> RunDirectory | None:
    """Return the run directory that a path names, a run or one of its checkpoints; None if it has no ledger."""
    place = source.absolute()
    if (place / MANIFEST).exists() or place.parent.name == "checkpoints":
        place = place.parent.parent
    run = RunDirectory(place)
    return run if run.ledger_path.is_file() else None


def find_parent(source: Path, step: int | None = None) -> ParentCheckpoint:
    """Find the checkpoint of a run from which another is to begin.

    Args:
        source: A run directory, or a checkpoint in one.
        step: The step; the newest one that verifies if None.

    Raises:
        CheckpointError: There is no such checkpoint, it does not verify, or its run skips rows that it was trained on.
    """
    run = parent_run(source)
    if run is None:
        raise CheckpointError(
            f"'{source}' is no run with a ledger, and no checkpoint of one",
            where=str(source.absolute()),
            fix="give a run directory; headway checkpoints restore RUN --from PLACE takes copies and URLs",
        )
    step = step_of(source.name) if step is None else step
    folders = local_folders(run.path)
    skipped = decided(Ledger(run.ledger_path))
    for found in sorted(folders, reverse=True) if step is None else [step]:
        checked = verify_checkpoint(folders[found]) if found in folders else None
        if checked is None or checked.manifest is None or not checked.good:
            continue
        if is_outdated(checked.manifest, skipped):
            if step is None:
                continue
            raise CheckpointError(
                f"step {step} was trained on rows that its run skips now",
                where=str(folders[found]),
                fix="begin from an earlier step, or a later one",
            )
        return ParentCheckpoint(run, folders[found], checked.manifest, _config_of(run, checked.manifest))
    which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    raise CheckpointError(
        f"there is {which} that verifies", where=str(source.absolute()), fix="headway checkpoints list shows them"
    )


def begin(run: RunDirectory, parent: ParentCheckpoint, command: str) -> Beginning:
    """Make a run directory that continues from a checkpoint of another run.

    Args:
        run: The new run; its directory does not exist, or is empty.
        parent: The checkpoint.
        command: The command, for the record of attempts.

    Returns:
        The record of the beginning in the ledger of the new run.

    Raises:
        CheckpointError: There is something at its place already, or it cannot be written.
    """
    run.check_usable()
    hidden = run.path.parent / f"{_HIDDEN}{run.path.name}-{os.getpid()}"
    try:
        with explaining_os_errors(
            CheckpointError,
            "the run cannot begin here",
            run.path,
            "choose another name=..., or move what is there aside with --restart",
        ):
            run.path.parent.mkdir(parents=True, exist_ok=True)
            # Remove what beginnings of this run have left that were killed.
            for left in run.path.parent.glob(f"{_HIDDEN}{run.path.name}-*"):
                with suppress(CheckpointError), OwnerLock.take(left):
                    shutil.rmtree(left, ignore_errors=True)
            hidden.mkdir()
            with OwnerLock.take(hidden):
                made = RunDirectory(hidden / run.path.name)
                beginning = _fill(made, parent, command)
                fault_point("begin.rename")
                made.path.rename(run.path)
                sync_folder(run.path.parent)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    CheckpointIndex(run.path).add(parent.manifest, LOCAL, str(run.checkpoints / step_name(parent.step)))
    return beginning


def copy_for_beginning(run: RunDirectory, step: int, target: Path) -> None:
    """Copy what other runs need to begin from a checkpoint, as a run directory with no other checkpoint.

    The run may be training. The files of the checkpoint become links to the same bytes where that is possible.

    Args:
        run: The run.
        step: The step of the checkpoint, up to which the ledger goes.
        target: The copy; it does not exist.

    Raises:
        CheckpointError: The checkpoint is gone, or the copy cannot be written.
    """
    checkpoint = run.checkpoints / step_name(step)
    try:
        with pruning(run.checkpoints):
            shutil.copytree(checkpoint, target / "checkpoints" / checkpoint.name, copy_function=link_or_copy)
        for name in _COMPANIONS:
            if (run.path / name).is_dir():
                shutil.copytree(run.path / name, target / name)
        records = [*run.attempts.glob("*/attempt.json"), *run.attempts.glob("*/config.yaml")]
        records += [*run.attempts.glob(f"*/{RUN_FILE}"), run.record_path, run.metrics_path, run.ledger_path]
        for path in (*records, run.config_path):
            there = target / path.relative_to(run.path)
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, there)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint cannot be copied: {error.strerror or error}",
            where=str(error.filename or checkpoint),
            fix=fix_for(error, "make room there, or take another step"),
        ) from error


def config_at_beginning(run: RunDirectory, step: int) -> Config | None:
    """Return the parent's config, for a run that is still at the step where it began; None for any other run."""
    begun = Ledger(run.ledger_path).beginnings()
    path = _config_of_attempt(run, 1)
    if not begun or begun[-1].step != step or not path.is_file():  # records of another disk have no configs
        return None
    return load_resolved(path)


def _fill(made: RunDirectory, parent: ParentCheckpoint, command: str) -> Beginning:
    """Write everything that the new run begins with."""
    attempt = made.begin_attempt(command)
    copy_checkpoints(str(parent.folder), str(made.checkpoints), parent.step)
    for name in _COMPANIONS:
        if (parent.run.path / name).is_dir():
            shutil.copytree(parent.run.path / name, made.path / name)
    record = {**_record_of(parent), RUN_ID: new_run_id()}
    for folder in (attempt.directory, made.path):
        write_json(folder / RUN_FILE, record)
        with atomic_write(folder / "config.yaml", "w") as file:
            file.write(dump_config(parent.config))
    # Write the ledger: the parent's lines up to the checkpoint, and where they come from.
    lines = Ledger(parent.run.ledger_path).lines_up_to(parent.step)
    attempts = open_run(parent.run.path).attempts if lines else []
    beginning = Beginning(
        step=parent.step,
        run=run_identity(parent.config, run=parent.run.path).record(),
        place=str(parent.run.path),
        manifest_sha256=sha256_file(made.checkpoints / step_name(parent.step) / MANIFEST),
        state_sha256=parent.manifest.state_sha256,
        attempts=tuple(AttemptSteps(one.number, one.first_step, one.last_step) for one in attempts),
        lines_sha256=fingerprint(lines),
    )
    with atomic_write(made.ledger_path, "w") as file:
        for line in [*lines, {"kind": BEGINNING, **beginning.to_json()}]:
            file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")
    attempt.finish(RESTORED, 0, parent.step, parent.step)
    return beginning


def _config_of(run: RunDirectory, manifest: Manifest) -> Config:
    """Return the config that a checkpoint in a run directory was trained with.

    Raises:
        CheckpointError: The run directory has not kept it.
    """
    attempt = manifest.context.get("attempt")
    begun = Ledger(run.ledger_path).beginnings()
    if begun and begun[-1].step == manifest.step:
        attempt = 1  # which has brought the checkpoint here
    path = _config_of_attempt(run, attempt if isinstance(attempt, int) else 0)
    config = load_resolved(path if path.is_file() else run.config_path)
    if not path.is_file() and manifest.context.get(IDENTITY) != fingerprint(identity(config)):
        raise CheckpointError(
            f"the config that step {manifest.step} was trained with is not in its run directory",
            where=str(path),
            fix="begin from another step",
        )
    return config.with_segments([Segment.model_validate(one) for one in manifest.context.get(SEGMENTS, ())])


def _config_of_attempt(run: RunDirectory, attempt: int) -> Path:
    return attempt_folder(run.path, attempt) / "config.yaml"


def _record_of(parent: ParentCheckpoint) -> dict[str, Any]:
    attempt = parent.manifest.context.get("attempt")
    if isinstance(attempt, int):
        of_attempt = read_json_or_empty(attempt_folder(parent.run.path, attempt) / RUN_FILE)
        if of_attempt:
            return of_attempt
    return read_json_or_empty(parent.run.record_path)


def beginning_problems(run: Path, begun: list[Beginning]) -> Iterator[str]:
    """Yield differences between the checkpoints of a run and the one that it began from.

    Args:
        run: The run directory.
        begun: Its beginnings, by the ledger; the last one is its own.
    """
    if not begun:
        return
    last = begun[-1]
    if last.run.get("id") is not None and last.run["id"] == read_run_id(run):
        yield f"the run says that it began from itself, at step {last.step:,}"
    for step, folder in checkpoint_folders(run / "checkpoints").items():
        manifest = folder / MANIFEST
        if step == last.step and manifest.is_file() and sha256_file(manifest) != last.manifest_sha256:
            yield f"{folder.name} is not the checkpoint that the run began from: its manifest has another hash"
        context = read_json_or_empty(manifest).get("context")
        start = context.get("parent") if isinstance(context, dict) else None
        before = start if isinstance(start, dict) else {}
        if before.get("step") == last.step and before.get("state_sha256") != last.state_sha256:
            yield f"{folder.name} was trained from another state of step {last.step:,} than the run began from"
