"""The newest checkpoint of all tiers: here if it is here, else brought from the remote tier and put here.

What is brought lies under a hidden name until every byte of it has been verified, and gets its own by a rename. A
download that was cut short goes on where it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headway.checkpoint.format.folders import discard, remove
from headway.checkpoint.format.manifest import Manifest, step_name, write_manifest
from headway.checkpoint.index import LOCAL, CheckpointIndex
from headway.checkpoint.remote.files import name_there
from headway.checkpoint.remote.objects import Objects, UnreachableError
from headway.checkpoint.remote.tier import RemoteTier
from headway.checkpoint.store import CheckpointInfo, CheckpointStore
from headway.checkpoint.verify import verify_checkpoint
from headway.core import console
from headway.core.errors import CheckpointError, HeadwayError, fix_for
from headway.core.faults import fault_point
from headway.core.files import sync_folder
from headway.core.format import format_bytes

#: A checkpoint on its way here.
_COMING = ".bring-"
_FILES_AT_A_TIME = 4


class CannotBePutHere(CheckpointError):
    """There is no room here, or the disk fails. The remote checkpoint is good, and an older one no better."""


def find_latest(
    store: CheckpointStore,
    open_tier: Callable[[], RemoteTier] | None,
    notice: Callable[[str], None] = console.warning,
    accept: Callable[[Manifest, str], None] = lambda manifest, where: None,
    usable: Callable[[Manifest], bool] = lambda manifest: True,
) -> CheckpointInfo | None:
    """The newest checkpoint that verifies, from the nearest tier that has it; None when there never was one.

    Args:
        store: The checkpoints here.
        open_tier: Gives the remote tier, claimed, so that an attempt before cannot publish there any more.
        notice: Told about every newer one that is passed over, and why.
        accept: Asked about a remote checkpoint when there is none here; raises when it is not to be taken.
        usable: Whether a checkpoint may be gone on from; the others are passed over.

    Raises:
        OtherRunError: the newest remote one is of another run.
        CheckpointError: there are checkpoints, and none verifies; or there is none here, and the remote tier cannot be
            asked for one; or a newer one than those here cannot be put here.
        ConfigError: the remote tier does not let us in, or the key for what is encrypted there is missing or another.
    """
    if open_tier is None:
        return store.newest(notice, usable)
    here, damaged = None, None
    try:
        here = store.newest(notice, usable)
    except CheckpointError as error:
        damaged = error
    try:
        found = _newer(store, open_tier(), here.step if here else -1, notice, accept, usable)
    except UnreachableError as error:
        if here is None:
            raise CheckpointError(
                f"there is no checkpoint here, and the remote ones cannot be asked for: {error.what}",
                where=str(error.where),
                fix="try again when it answers; to go on without it, checkpoint.remote=null",
            ) from error
        notice(f"the remote checkpoints cannot be asked for ({error.what}); going on with {here.path}")
        return here
    if found is None and here is None and damaged is not None:
        raise damaged
    return found or here


def bring_earlier(
    store: CheckpointStore, find_tier: Callable[[], RemoteTier], step: int, usable: Callable[[Manifest], bool]
) -> int | None:
    """Bring the newest remote checkpoint of a step or before; returns its step, None when none can be had.

    Args:
        store: Where to.
        find_tier: Gives the remote tier.
        step: The last that will do.
        usable: Whether a checkpoint may be gone on from.
    """

    def wanted(manifest: Manifest, where: str) -> bool:
        return tier.relation_of(manifest) == "own" and usable(manifest)

    try:
        tier = find_tier()
        steps = [s for s in tier.steps() if s <= step]
        found, _ = _newest_of(store, tier, steps, console.warning, wanted)
    except HeadwayError as error:
        console.warning(f"the remote checkpoints cannot be asked for: {error.what}")
        return None
    return found.step if found else None


def _newer(
    store: CheckpointStore,
    tier: RemoteTier,
    step: int,
    notice: Callable[[str], None],
    accept: Callable[[Manifest, str], None],
    usable: Callable[[Manifest], bool],
) -> CheckpointInfo | None:
    """The newest remote checkpoint beyond a step that verifies, brought here; None when there is none."""

    def wanted(manifest: Manifest, where: str) -> bool:
        tier.check_same_run(manifest)
        if step >= 0 and tier.relation_of(manifest) == "unknown":
            notice(f"passing over {where}: it has no run id, and was made with a config that this run never had")
            return False
        if not usable(manifest):
            notice(f"passing over {where}: it was made with rows that are left out now")
            return False
        if step < 0:
            accept(manifest, where)
        return True

    found, damaged = _newest_of(store, tier, [s for s in tier.steps() if s > step], notice, wanted)
    if damaged and found is None and step < 0:
        raise CheckpointError(
            "none of the remote checkpoints verifies, and there is none here",
            where=tier.url,
            fix="restore one from a copy, or start a new run under another name",
        )
    return found


def _newest_of(
    store: CheckpointStore,
    tier: RemoteTier,
    steps: Sequence[int],
    notice: Callable[[str], None],
    wanted: Callable[[Manifest, str], bool],
) -> tuple[CheckpointInfo | None, bool]:
    """The newest of some remote checkpoints that is wanted and verifies, brought here; and whether one was damaged."""
    damaged = False
    for step in sorted(steps, reverse=True):
        where = tier.objects.url_of(step_name(step))
        try:
            manifest = tier.manifest(step)
            if manifest is not None and wanted(manifest, where):
                return bring(store, tier, manifest), damaged
        except (UnreachableError, CannotBePutHere):
            raise
        except CheckpointError as error:
            damaged = True
            notice(f"passing over {where}: {error.what}")
    return None, damaged


def bring(store: CheckpointStore, tier: RemoteTier, manifest: Manifest, index: bool = True) -> CheckpointInfo:
    """Download a remote checkpoint into a `checkpoints` folder, verify it, and give it its name.

    Args:
        store: The folder.
        tier: Where it is.
        manifest: Which one.
        index: Note it in the registry of the run whose folder this is.

    Raises:
        CannotBePutHere: there is no room for it, or the disk fails.
        CheckpointError: what comes is damaged, twice; or the store cannot be used.
    """
    name = step_name(manifest.step)
    coming, source = store.directory / f"{_COMING}{name}", tier.objects.at(name)
    console.notice(f"bringing {source.url} ({format_bytes(manifest.total_bytes)})")
    try:
        coming.mkdir(parents=True, exist_ok=True)
        damage = ""
        for _ in range(2):
            with console.progress(f"bringing step {manifest.step}", manifest.total_bytes, "B") as bar:
                _fetch_files(source, manifest, coming, bar.advance)
            write_manifest(coming, manifest)
            found = verify_checkpoint(coming)
            if found.good:
                break
            damage = "; ".join(map(str, found.damage))
            for broken in found.damage:  # or going on with it would find it complete
                remove(coming / broken.file)
        else:
            raise CheckpointError(f"what comes is not what was sent: {damage}", where=source.url, fix="use another one")
        fault_point("bring.rename")
        sync_folder(coming)
        target = store.directory / name
        if os.path.lexists(target):
            console.warning(f"replacing {target}, which does not verify")
            discard(target)
        coming.rename(target)
        sync_folder(store.directory)
    except OSError as error:
        raise CannotBePutHere(
            f"the remote checkpoint of step {manifest.step} cannot be put here: {error.strerror or error}",
            where=str(coming),
            fix=fix_for(error, "make room there, or see to the disk; what has come so far is kept"),
        ) from error
    if index:  # the folder is a run's own: nobody else brings anything
        for other in store.directory.glob(f"{_COMING}*"):
            remove(other)
        CheckpointIndex(store.directory.parent).add(manifest, LOCAL, str(target))
    return CheckpointInfo(target, manifest)


def _fetch_files(source: Objects, manifest: Manifest, folder: Path, advance: Callable[[int], None]) -> None:
    def fetch(name: str) -> None:
        path = folder / name
        if path.is_symlink():
            path.unlink()
        source.fetch(name_there(source, manifest, name), path, manifest.files[name].bytes, advance)

    with ThreadPoolExecutor(_FILES_AT_A_TIME, "headway-bring") as pool:
        for done in [pool.submit(fetch, name) for name in manifest.files]:
            done.result()
