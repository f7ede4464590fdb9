"""Restoring an earlier checkpoint and pruning old ones by hand, only while the run is not in use."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from headway.checkpoint.discovery import bring, find_latest
from headway.checkpoint.format.folders import checkpoint_folders, discard
from headway.checkpoint.format.manifest import Manifest, read_manifest, step_name
from headway.checkpoint.index import LOCAL, CheckpointIndex
from headway.checkpoint.pruning import Pruner
from headway.checkpoint.remote.acquire import acquire_tier, find_tier, resolve_identity
from headway.checkpoint.remote.tier import RemoteTier
from headway.checkpoint.retention import Candidate, Rules, kept
from headway.checkpoint.run_identity import IDENTITY, OF_RUN, RUN_ID, run_identity, run_record
from headway.checkpoint.skipped_ranges import is_outdated
from headway.checkpoint.store import CheckpointStore
from headway.checkpoint.transfer import Found, copy_checkpoints, is_url, local_folders, remote_manifests
from headway.checkpoint.verify import verify_checkpoint
from headway.config import Config, identity, load_resolved
from headway.config.loading.document import parse, to_yaml
from headway.core import console
from headway.core.credentials.secrets import redact, redact_values
from headway.core.errors import CheckpointError, ConfigError
from headway.core.files.atomic import atomic_write, sync_folder, write_json
from headway.core.files.hashes import fingerprint
from headway.run.directory.beginning import begin, find_parent, parent_run
from headway.run.directory.ledger import Ledger, decided
from headway.run.directory.ownership import OwnerLock, wait_for_orphaned_writers
from headway.run.directory.run_directory import Attempt, RunDirectory
from headway.telemetry.record import RESTORED

#: Folder of a run for checkpoints that it must not resume from.
ASIDE = "set-aside"


@dataclass(frozen=True)
class Restored:
    """The result of a restore."""

    step: int
    path: Path
    state_sha256: str
    set_aside: tuple[str, ...]
    """Folders and URLs of later steps, which were moved aside; nothing was removed."""


def restore(
    run: RunDirectory,
    step: int | None = None,
    source: str | None = None,
    options: Mapping[str, Any] | None = None,
    command: str = "headway checkpoints restore",
) -> Restored:
    """Make the run resume from a checkpoint, and set later ones aside, locally and in the remote tier.

    A run directory that is new begins from the checkpoint of a run on this disk under another name
    (`run.directory.beginning`).

    Args:
        run: The run; with a `source`, its directory may be new.
        step: The step; if None, the newest that verifies, as training would choose it.
        source: A run, a checkpoint, a folder of copies, or a URL of one. If None, the run itself and its remote tier.
        options: Options for `fsspec`, for a URL.
        command: The command, for the record of attempts.

    Raises:
        CheckpointError: The run is in use, no such checkpoint verifies, or it was trained on rows that the run skips
            now. Only the number of the next attempt has changed then.
        ConfigError: The checkpoint of a `source` was made with another config than the run's.
    """
    if source is None and not run.path.is_dir():
        raise CheckpointError(
            "there is no such run", where=str(run.path), fix="to restore one from another place, give --from URL"
        )
    if source is not None and _is_other_run(run, source):
        parent = find_parent(Path(source), step)
        begin(run, parent, command)
        place = run.checkpoints / step_name(parent.step)
        return Restored(parent.step, place, parent.manifest.state_sha256, ())
    wait_for_orphaned_writers(run.path)
    attempt = run.begin_attempt(command, action="checkpoints restore")
    try:
        config = load_resolved(run.config_path) if run.config_path.exists() else None
        found = _bring(run, config, step, source, dict(options or {}))
    except BaseException:
        attempt.withdraw()
        raise
    try:
        if source is not None:
            _complete(run, found)
        tier = _acquire_tier(config, run, attempt) if config is not None else _acquire_tier_if_possible(run, attempt)
        aside = [*_set_aside_remote(tier, found.step), *_set_aside_local(run, attempt, found.step)]
        _roll_back(run, found.step)
        index(run.path)
    except BaseException as error:
        attempt.finish(f"could not restore: {error}", getattr(error, "exit_code", 1))
        raise
    attempt.finish(RESTORED, 0, found.step, found.step)
    return Restored(found.step, run.checkpoints / step_name(found.step), found.state_sha256, tuple(aside))


def prune(run: RunDirectory, rules: Rules, dry_run: bool = False) -> tuple[dict[int, str], list[int]]:
    """Remove the checkpoints of a run that the retention rules do not keep.

    The newest checkpoint that training would resume from always stays: every byte of it verifies, and it was not
    trained on rows that the run skips now. Newer ones do not count for any rule.

    Args:
        run: The run.
        rules: The retention rules.
        dry_run: Whether to only return what would be removed.

    Returns:
        The steps that stay, each with the rule that keeps it, and the steps that go.

    Raises:
        CheckpointError: The run is in use, or a checkpoint cannot be removed.
    """
    lock = None if dry_run else OwnerLock.take(run.path)
    try:
        config = load_resolved(run.config_path) if run.config_path.exists() else None
        pruner = Pruner(run.checkpoints, rules, config.train.batches if config else None)
        folders = checkpoint_folders(run.checkpoints)
        candidates = _usable_from_the_top(pruner.candidates(), folders, Ledger(run.ledger_path))
        if rules.keep_best and not any(c.metric is not None for c in candidates):
            console.warning(
                f"no checkpoint has the metric '{rules.keep_metric}', so the rule for the best ones keeps none"
            )
        stay = kept(candidates, rules, time.time())
        go = [c.step for c in candidates if c.step not in stay]
        if not any(c.good for c in candidates):
            return {c.step: "training would resume from none" for c in candidates}, []
        for step in [] if dry_run else go:
            try:
                discard(folders[step])
            except OSError as error:
                raise CheckpointError(
                    f"the checkpoint of step {step} cannot be removed: {error.strerror}", where=str(folders[step])
                ) from error
            CheckpointIndex(run.path).forget(LOCAL, step)
        return stay, go
    finally:
        if lock is not None:
            lock.release()


def index(run: Path) -> list[Found]:
    """Update the index of a run to match its folders, and return its checkpoints in ascending order of steps."""
    found = []
    for folder in checkpoint_folders(run / "checkpoints").values():
        checked = verify_checkpoint(folder, hashes=False)
        if checked.manifest is None:
            console.warning(f"{folder}: {'; '.join(map(str, checked.damage))}")
        else:
            found.append(Found(checked.manifest, str(folder)))
    CheckpointIndex(run).rebuild((f.manifest, f.place) for f in found)
    return found


def _usable_from_the_top(candidates: list[Candidate], folders: Mapping[int, Path], ledger: Ledger) -> list[Candidate]:
    """Return the candidates, with those newer than the one that training would resume from marked as not good."""

    def usable(step: int) -> bool:
        found = verify_checkpoint(folders[step])
        return found.good and found.manifest is not None and _can_resume_from(ledger, found.manifest)

    checked: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: -c.step):
        good = candidate.good and (any(c.good for c in checked) or usable(candidate.step))
        checked.append(replace(candidate, good=good))
    return checked[::-1]


def _is_other_run(run: RunDirectory, source: str) -> bool:
    """Return whether a source is a run on this disk with a ledger, and a new run is to begin from it."""
    if is_url(source) or (run.path.is_dir() and any(run.path.iterdir())):
        return False
    parent = parent_run(Path(source))
    return parent is not None and parent.path.resolve().name != run.path.resolve().name


def _bring(
    run: RunDirectory, config: Config | None, step: int | None, source: str | None, options: dict[str, Any]
) -> Manifest:
    """Bring the requested checkpoint into the run's `checkpoints` folder, verified, and return its manifest."""
    store = CheckpointStore(run.checkpoints)
    if source is not None:
        wanted = _newest_step(run, source, options) if step is None else step
        for manifest in _manifests(source, options, wanted):
            _check_up_to_date(run, manifest, source)
            made_with = manifest.context.get(IDENTITY)
            if config is not None and made_with not in (None, fingerprint(identity(config))):
                raise ConfigError(
                    f"the checkpoint of step {manifest.step} was made with another config than this run",
                    where=source,
                    fix="restore it into a run of its own, under another name",
                )
        present = checkpoint_folders(run.checkpoints).get(wanted)
        # A download replaces a damaged checkpoint itself, once it is complete. A good one of another state stays.
        replaces = present is not None and not is_url(source) and _verifies(Path(source), wanted)
        if present is not None and replaces and not verify_checkpoint(present).good:
            console.warning(f"replacing {present}, which does not verify")
            discard(present)
        (found,) = copy_checkpoints(source, str(run.checkpoints), wanted, options, replace_damaged=True)
        return found.manifest
    remote = config.checkpoint.remote if config is not None else None
    open_tier = partial(_own_tier, config, run) if config is not None and remote is not None else None
    if step is None:
        newest = find_latest(store, open_tier, usable=partial(_can_resume_from, Ledger(run.ledger_path)))
        if newest is not None:
            return newest.manifest
    else:
        folder = checkpoint_folders(run.checkpoints).get(step)
        checked = verify_checkpoint(folder) if folder is not None else None
        if checked is not None and checked.good and checked.manifest is not None:
            _check_up_to_date(run, checked.manifest, str(folder))
            return checked.manifest
        if checked is not None:
            console.warning(f"{folder}: {'; '.join(map(str, checked.damage))}")
        tier = open_tier() if open_tier is not None else None
        there = tier.manifest(step) if tier is not None else None
        if tier is not None and there is not None:
            tier.check_same_run(there)
            _check_up_to_date(run, there, tier.objects.url_of(step_name(step)))
            bring(store, tier, there)
            return there
    raise CheckpointError(
        "there is no checkpoint that verifies" if step is None else f"no checkpoint of step {step} verifies",
        where=str(run.checkpoints) + (f", {remote.url}" if remote else ""),
        fix="headway checkpoints list and verify show which there are; --from restores one from another place",
    )


def _own_tier(config: Config, run: RunDirectory) -> RemoteTier:
    """Return the run's own remote tier, for reading.

    Raises:
        OtherRunError: Another run owns the tier.
    """
    assert config.checkpoint.remote is not None
    mine = run_identity(config, run=run.path)
    tier = find_tier(config.checkpoint.remote, mine)
    return RemoteTier(tier.objects, identity=resolve_identity(tier, mine))


def _can_resume_from(ledger: Ledger, manifest: Manifest) -> bool:
    """Return whether a run would resume from a checkpoint, and not remove it as outdated."""
    return not is_outdated(manifest, decided(ledger))


def _check_up_to_date(run: RunDirectory, manifest: Manifest, where: str) -> None:
    """Raise an error for an outdated checkpoint: the next attempt would remove it, with all later ones set aside."""
    if not _can_resume_from(Ledger(run.ledger_path), manifest):
        raise CheckpointError(
            f"step {manifest.step} was trained on rows that are skipped now: training would remove the checkpoint",
            where=where,
            fix="restore one of an earlier step, or this one into a run of its own: with --from, under another name",
        )


def _newest_step(run: RunDirectory, source: str, options: dict[str, Any]) -> int:
    ledger = Ledger(run.ledger_path)
    if is_url(source):
        manifests = [found.manifest for found in remote_manifests(source, options)]
    else:
        checked = map(verify_checkpoint, local_folders(Path(source)).values())
        manifests = [c.manifest for c in checked if c.good and c.manifest is not None]
    steps = [manifest.step for manifest in manifests if _can_resume_from(ledger, manifest)]
    if not steps:
        raise CheckpointError("there is no checkpoint that verifies", where=source, fix="give another --from")
    return max(steps)


def _manifests(source: str, options: dict[str, Any], step: int) -> list[Manifest]:
    """Return the manifests of a step; empty if there is no such checkpoint, which the copy will report."""
    if is_url(source):
        return [f.manifest for f in remote_manifests(source, options) if f.manifest.step == step]
    return [read_manifest(folder) for s, folder in local_folders(Path(source)).items() if s == step]


def _verifies(source: Path, step: int) -> bool:
    folder = local_folders(source).get(step)
    return folder is not None and verify_checkpoint(folder).good


def _acquire_tier(config: Config | None, run: RunDirectory, attempt: Attempt) -> RemoteTier | None:
    """Acquire the remote tier, if there is one, so that later checkpoints in it can be set aside."""
    if config is None or config.checkpoint.remote is None:
        return None
    return acquire_tier(config.checkpoint.remote, attempt.number, run_identity(config, run=run.path))


def _acquire_tier_if_possible(run: RunDirectory, attempt: Attempt) -> RemoteTier | None:
    """Acquire the remote tier of a run whose config came with the restored checkpoint, if it can be reached."""
    if not run.config_path.exists():
        return None
    try:
        return _acquire_tier(load_resolved(run.config_path), run, attempt)
    except (CheckpointError, ConfigError) as error:
        console.warning(f"later checkpoints in the remote tier are not set aside: {error.what}")
        return None


def _set_aside_remote(tier: RemoteTier | None, step: int) -> list[str]:
    if tier is None:
        return []
    later = [s for s in tier.steps() if s > step]
    return [tier.objects.url_of(step_name(s)) for s in later if tier.set_aside(s)]


def _set_aside_local(run: RunDirectory, attempt: Attempt, step: int) -> list[str]:
    """Set later local checkpoints aside, the newest first: a kill in between leaves no gap for a resumed run."""
    moved = []
    target = run.path / ASIDE / f"{attempt.number:03d}"
    for later, folder in reversed(checkpoint_folders(run.checkpoints).items()):
        if later > step:
            target.mkdir(parents=True, exist_ok=True)
            folder.rename(target / step_name(later))
            moved.append(str(target / step_name(later)))
    if moved:
        sync_folder(target)
        sync_folder(run.checkpoints)
    return moved


def _roll_back(run: RunDirectory, step: int) -> None:
    ledger = Ledger(run.ledger_path)
    if ledger.committed_step > step:
        ledger.rollback(step, f"restored to step {step} by hand")


def _without_credentials(config: str) -> str:
    """Redact credentials in a checkpoint's config, which earlier versions may have stored."""
    try:
        values = parse(config, "the checkpoint's config").plain()
    except ConfigError:  # the next command on the run reports it
        return redact(config)
    redacted = redact_values(values)
    return config if redacted == values else to_yaml(redacted)


def _complete(run: RunDirectory, manifest: Manifest) -> None:
    """Write config and provenance of a full checkpoint into the run directory if it has none.

    Under another name, the directory becomes a run of its own, with an id of its own.
    """
    config = manifest.context.get("config")
    record = manifest.context.get("run")
    if isinstance(config, str) and not run.config_path.exists():
        with atomic_write(run.config_path, "w") as file:
            file.write(_without_credentials(config))
    if isinstance(record, dict) and not run.record_path.exists():
        made_by = run_record(manifest.context.get(OF_RUN))
        if made_by is None or made_by["name"] != run.path.resolve().name:
            record = {key: value for key, value in record.items() if key != RUN_ID}
        write_json(run.record_path, record)
