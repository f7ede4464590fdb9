"""Records of a run from its remote tier, for a start on a disk that has none or older ones.

A lead that starts elsewhere continues ledger, curves, account and trackers of the run, and the numbers of its attempts,
as they were at the newest checkpoint. What followed that checkpoint is trained again, and recorded again.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from headway.checkpoint.format.manifest import Manifest
from headway.checkpoint.records import RECORDS, RECORDS_FILE, record_names, unpack_records
from headway.checkpoint.remote.acquire import find_tier, resolve_identity
from headway.checkpoint.remote.ownership import read_claim
from headway.checkpoint.remote.tier import RemoteTier
from headway.checkpoint.remote.tier_reader import CLAIM
from headway.checkpoint.run_identity import RUN_ID, RunIdentity, run_identity
from headway.config import Config
from headway.core.console import notice, warning
from headway.core.errors import CheckpointError, ConfigError
from headway.core.files.atomic import write_json
from headway.core.files.foreign import as_number, read_json_object, read_json_or_empty
from headway.core.files.scratch import scratch_folder
from headway.run.directory.run_directory import LAST_SIGN_KEY, RunDirectory, attempt_folder

#: How long to wait for the store. An attempt that needs it waits longer.
_PATIENCE_SECONDS = 10.0
#: Names the archive that was taken up last.
_TAKEN_FILE = ".taken-up.json"


def fetch_records(config: Config, data: str) -> bool:
    """Bring the records of a run into its directory if its remote tier has newer ones, and return whether it did.

    Records that were here are kept aside. Errors of the tier are left to the attempt, which meets them too.

    Args:
        config: Complete; its run directory has no owner.
        data: Fingerprint of the data.

    Raises:
        CheckpointError: The run is in use, or the directory cannot be written.
    """
    remote = config.checkpoint.remote
    if remote is None:
        return False
    mine = run_identity(config, data)
    run = RunDirectory(config.run_directory)
    try:
        tier = find_tier(remote, mine, patience_seconds=_PATIENCE_SECONDS)
        identity = resolve_identity(tier, mine)
        tier = RemoteTier(tier.objects, identity=identity)
        newest = _newest(tier)
        if newest is None or not _is_behind(run, newest):
            return False
        with scratch_folder("headway-records-") as folder:
            path = folder / RECORDS_FILE
            if not tier.records.fetch(newest, path):
                return False
            with run.claim():
                if not _is_behind(run, newest):  # another process was faster
                    return False
                _replace(run, path, newest, identity)
    except (CheckpointError, ConfigError) as error:
        if isinstance(error, CheckpointError):
            warning(f"the records of the run are not taken over from {remote.url}: {error.what}")
        return False
    except OSError as error:
        raise CheckpointError(
            f"the records of the run cannot be written: {error.strerror or error}",
            where=str(error.filename or run.path),
            fix="make room there, then run the same command again",
        ) from error
    notice(f"ledger, metrics and account of the run continue from {tier.url}, step {newest.step}")
    return True


def _newest(tier: RemoteTier) -> Manifest | None:
    """Return the newest checkpoint of this run; None if there is none."""
    for _, found in tier.look_through(reversed(tier.steps())):
        if isinstance(found, Manifest) and tier.relation_of(found) == "own":
            return found
    return None


def _is_behind(run: RunDirectory, newest: Manifest) -> bool:
    """Return whether a checkpoint was saved from another directory after this one last had the run."""
    entry = newest.context.get(RECORDS)
    taken = read_json_or_empty(run.path / _TAKEN_FILE).get("sha256")  # the archive that was taken up here last
    if not isinstance(entry, dict) or taken == entry.get("sha256"):
        return False
    if not run.ledger_path.exists() and not run.metrics_path.exists():
        return True
    here = read_claim(run.path)
    there = newest.context.get(CLAIM)
    return here is None or (isinstance(there, int) and there > here.number)


def _replace(run: RunDirectory, archive: Path, newest: Manifest, identity: RunIdentity) -> None:
    """Put the records in place. After a kill in between, the next start does it again."""
    entry = newest.context[RECORDS]
    aside = run.path / "set-aside" / f"records-{time.strftime('%Y%m%d-%H%M%S')}"
    for name in record_names(run.path):
        (aside / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(run.path / name, aside / name)
    names = unpack_records(archive, entry, run.path)
    numbers = sorted(int(Path(name).parent.name) for name in names if Path(name).name == "attempt.json")
    if numbers:
        _end(attempt_folder(run.path, numbers[-1]) / "attempt.json", as_number(entry.get("time")))
    if identity.id is not None:  # trackers know the run by it; the attempt completes the record
        known = newest.context.get("run")
        write_json(run.record_path, {**(known if isinstance(known, dict) else {}), RUN_ID: identity.id})
    write_json(run.path / _TAKEN_FILE, {"sha256": entry["sha256"], "step": newest.step})


def _end(path: Path, seen: float | None) -> None:
    """Complete the record of the attempt that made the checkpoint: as far as is known here, it was killed then."""
    try:
        record = read_json_object(path)
    except ValueError:  # readers of attempts pass over it too
        return
    if "outcome" not in record:
        noted = {} if seen is None else {LAST_SIGN_KEY: seen}
        write_json(path, {**record, "outcome": "died", **noted})
