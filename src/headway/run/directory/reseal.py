"""Changing the keys of a run's checkpoints, here and in its remote tier, while the run is not in use."""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.checkpoint.format.folders import checkpoint_folders
from headway.checkpoint.format.manifest import step_name
from headway.checkpoint.remote.acquire import find_tier
from headway.checkpoint.remote.ownership import other_run
from headway.checkpoint.remote.reseal import TierReseal
from headway.checkpoint.remote.tier import UPLOADS
from headway.checkpoint.reseal import Keys, old_and_new_keys, reseal_folder
from headway.checkpoint.run_identity import RunIdentity, run_identity
from headway.checkpoint.save.publish import Publisher
from headway.config import RemoteConfig, load_resolved
from headway.core.errors import CheckpointError
from headway.core.files.atomic import write_json
from headway.run.directory.ownership import OwnerLock, wait_for_orphaned_writers
from headway.run.directory.restore import ASIDE
from headway.run.directory.run_directory import RESEALING_FILE, Attempt, RunDirectory


@dataclass
class Resealed:
    """Places of checkpoints, by what became of them."""

    changed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """They have the new keys already, or none."""
    failed: list[CheckpointError] = field(default_factory=list)


def reseal(run: RunDirectory, command: str) -> Resealed:
    """Change the keys of all checkpoints of a run, those that are set aside too. The same call continues one that was
    killed; until then no attempt may begin, which would have one of the keys only.

    Args:
        run: The run.
        command: The command, for the audit log.

    Raises:
        ConfigError: There are no two keys, or another run owns the remote tier.
        CheckpointError: The run is in use, or the store cannot be reached.
        OSError: A checkpoint cannot be written.
    """
    old, new = old_and_new_keys()
    config = load_resolved(run.config_path)
    wait_for_orphaned_writers(run.path)
    with OwnerLock.take(run.path) as lock:
        attempt = run.begin_attempt(command, lock, action="checkpoints reseal")
        try:
            write_json(run.path / RESEALING_FILE, {"from": old.name, "to": new.name})
            done = Resealed()
            for folder in (run.checkpoints, *sorted((run.path / ASIDE).glob("*"))):
                # Change the keys of the checkpoints in a folder.
                Publisher(folder).clear_leftovers()
                for step in checkpoint_folders(folder).values():
                    try:
                        found = done.changed if reseal_folder(step, old, new) else done.left
                        found.append(str(step))
                    except CheckpointError as error:
                        done.failed.append(error)
            # A file that was sent under the old key must not be part of a checkpoint of the new one.
            for journal in run.path.glob(UPLOADS):
                journal.unlink()
            if config.checkpoint.remote is not None:
                identity = run_identity(config, run=run.path)
                _reseal_there(config.checkpoint.remote, attempt, identity, (old, new), done)
            if not done.failed:
                (run.path / RESEALING_FILE).unlink()
        finally:
            attempt.withdraw()
    return done


def _reseal_there(
    remote: RemoteConfig, attempt: Attempt, identity: RunIdentity, keys: tuple[Keys, Keys], done: Resealed
) -> None:
    """Change the keys of the checkpoints in the run's remote tier."""
    old, new = keys
    with old.in_use():
        tier = find_tier(remote, identity)
    with new.in_use():
        renewed = find_tier(remote, identity).objects
    owner = tier.owner()
    if owner is None:
        return  # nothing was ever uploaded
    if owner.record["id"] != identity.id:
        raise other_run(tier.url, owner.record)
    tier = tier.acquire(identity.run, attempt.number, identity)
    for step, result in TierReseal(tier, renewed, old, new, identity.run).run():
        if isinstance(result, CheckpointError):
            done.failed.append(result)
        else:
            found = done.changed if result else done.left
            found.append(tier.objects.url_of(step_name(step)))
