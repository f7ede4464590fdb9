"""Discovery of the newest checkpoint of all tiers; a remote one is downloaded into the local tier.

A download lies in a hidden folder until every byte of it is verified, and a rename makes it visible. A download that
was cut short is continued.
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
from headway.core.errors import CheckpointError, HeadwayError, explaining_os_errors
from headway.core.files.atomic import sync_folder
from headway.core.format import format_bytes
from headway.core.process.faults import fault_point

#: Prefix of a checkpoint that is being downloaded.
_COMING = ".bring-"
_FILES_AT_A_TIME = 4


class CannotBePutHere(CheckpointError):
    """A download failed for lack of room or a disk error; an older checkpoint would fail too."""


def find_latest(
    store: CheckpointStore,
    open_tier: Callable[[], RemoteTier] | None,
    notice: Callable[[str], None] = console.warning,
    accept: Callable[[Manifest, str], None] = lambda manifest, where: None,
    usable: Callable[[Manifest], bool] = lambda manifest: True,
) -> CheckpointInfo | None:
    """Return the newest checkpoint that verifies, from the nearest tier that has it; None if there are none.

    Args:
        store: The local checkpoints.
        open_tier: Acquires and returns the remote tier, so that an earlier attempt can no longer publish there.
        notice: Called with a message about each newer checkpoint that is passed over.
        accept: Called with a remote checkpoint if there is no local one; it raises an error to refuse the checkpoint.
        usable: Return whether the run may resume from a checkpoint; others are passed over.

    Raises:
        OtherRunError: Another run made the newest remote checkpoint.
        CheckpointError: There are checkpoints, and none verifies. Or there is no local one, and the remote tier cannot
            be reached. Or a newer remote one cannot be downloaded.
        ConfigError: The remote tier denies access, or the encryption key is missing or wrong.
    """
    if open_tier is None:
        return store.newest(notice, usable)
    here = None
    damaged = None
    try:
        here = store.newest(notice, usable)
    except CheckpointError as error:
        damaged = error
    try:
        step = here.step if here else -1
        found = _newer(store, open_tier(), step, notice=notice, accept=accept, usable=usable)
    except UnreachableError as error:
        if here is None:
            raise CheckpointError(
                f"there is no local checkpoint, and the remote ones cannot be read: {error.what}",
                where=str(error.where),
                fix="try again when the store answers; to continue without it, set checkpoint.remote=null",
            ) from error
        notice(f"the remote checkpoints cannot be read ({error.what}); resuming from {here.path}")
        return here
    if found is None and here is None and damaged is not None:
        raise damaged
    return found or here


def bring_earlier(
    store: CheckpointStore, find_tier: Callable[[], RemoteTier], step: int, usable: Callable[[Manifest], bool]
) -> int | None:
    """Download the newest usable remote checkpoint up to a step.

    Args:
        store: The local checkpoints.
        find_tier: Return the remote tier.
        step: The last step that is acceptable.
        usable: Return whether the run may resume from a checkpoint.

    Returns:
        Its step; None if there is none.
    """

    def wanted(manifest: Manifest, where: str) -> bool:
        return tier.relation_of(manifest) == "own" and usable(manifest)

    try:
        tier = find_tier()
        steps = [s for s in tier.steps() if s <= step]
        found, _ = _newest_of(store, tier, steps, console.warning, wanted)
    except HeadwayError as error:
        console.warning(f"the remote checkpoints cannot be read: {error.what}")
        return None
    return found.step if found else None


def bring_same(store: CheckpointStore, tier: RemoteTier, step: int, state_sha256: str) -> CheckpointInfo:
    """Download the checkpoint that the first worker has chosen, on a machine that shares no disk with it.

    A copy from before that verifies is used again; others are removed.

    Raises:
        CheckpointError: The tier does not have it, or it cannot be downloaded.
    """
    for info in store.list():
        if (info.step, info.state_sha256) == (step, state_sha256) and store.verify(step, full=True).good:
            return info
    manifest = tier.manifest(step)
    if manifest is None or manifest.state_sha256 != state_sha256:
        raise CheckpointError(
            f"the remote tier does not have the checkpoint of step {step} that the first machine continues from",
            where=tier.objects.url_of(step_name(step)),
            fix="the next attempt looks for it again",
        )
    for folder in store.folders():
        discard(folder)
    return bring(store, tier, manifest, index=False)


def _newer(
    store: CheckpointStore,
    tier: RemoteTier,
    step: int,
    *,
    notice: Callable[[str], None],
    accept: Callable[[Manifest, str], None],
    usable: Callable[[Manifest], bool],
) -> CheckpointInfo | None:
    """Download the newest remote checkpoint after a step that verifies; None if there is none."""

    def wanted(manifest: Manifest, where: str) -> bool:
        tier.check_same_run(manifest)
        if step >= 0 and tier.relation_of(manifest) == "unknown":
            notice(f"passing over {where}: it has no run id, and was made with a config that this run never had")
            return False
        if not usable(manifest):
            notice(f"passing over {where}: it was trained on rows that are skipped now")
            return False
        if step < 0:
            accept(manifest, where)
        return True

    found, damaged = _newest_of(store, tier, [s for s in tier.steps() if s > step], notice, wanted)
    if damaged and found is None and step < 0:
        raise CheckpointError(
            "none of the remote checkpoints verifies, and there is no local one",
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
    """Download the newest of some remote checkpoints that is wanted and verifies; also return whether one was damaged.

    Args:
        store: The local checkpoints.
        tier: The remote tier.
        steps: Steps to choose from.
        notice: Called with a message about each damaged checkpoint.
        wanted: Return whether to download a checkpoint, given its manifest and URL.
    """
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
    """Download a remote checkpoint into a `checkpoints` folder, verify it, and make it visible.

    Args:
        store: The folder.
        tier: The remote tier.
        manifest: The checkpoint.
        index: Whether the folder belongs to a run, whose index then gets the checkpoint.

    Raises:
        CannotBePutHere: There is no room for it, or the disk fails.
        CheckpointError: The download is damaged twice, or the store cannot be used.
    """
    name = step_name(manifest.step)
    coming = store.directory / f"{_COMING}{name}"
    source = tier.objects.at(name)
    console.notice(f"downloading {source.url} ({format_bytes(manifest.total_bytes)})")
    with explaining_os_errors(
        CannotBePutHere,
        f"the remote checkpoint of step {manifest.step} cannot be stored here",
        coming,
        "make room there, or check the disk; the partial download is kept",
    ):
        coming.mkdir(parents=True, exist_ok=True)
        damage = ""
        for _ in range(2):
            with console.progress(f"downloading step {manifest.step}", manifest.total_bytes, "B") as bar:
                _fetch_files(source, manifest, coming, bar.advance)
            write_manifest(coming, manifest)
            found = verify_checkpoint(coming)
            if found.good:
                break
            damage = "; ".join(map(str, found.damage))
            for broken in found.damage:  # otherwise the next try would take it for complete
                remove(coming / broken.file)
        else:
            raise CheckpointError(
                f"the download differs from the upload: {damage}", where=source.url, fix="use another checkpoint"
            )
        fault_point("bring.rename")
        sync_folder(coming)
        target = store.directory / name
        if os.path.lexists(target):
            console.warning(f"replacing {target}, which does not verify")
            discard(target)
        coming.rename(target)
        sync_folder(store.directory)
    if index:  # the folder belongs to a run, so no other process downloads into it
        for other in store.directory.glob(f"{_COMING}*"):
            remove(other)
        CheckpointIndex(store.directory.parent).add(manifest, LOCAL, str(target))
    return CheckpointInfo(target, manifest)


def _fetch_files(source: Objects, manifest: Manifest, folder: Path, advance: Callable[[int], None]) -> None:
    def fetch(name: str) -> None:
        path = folder / name
        if path.is_symlink():
            path.unlink()
        source.download(name_there(source, manifest, name), path, manifest.files[name].bytes, advance)

    with ThreadPoolExecutor(_FILES_AT_A_TIME, "headway-bring") as pool:
        for done in [pool.submit(fetch, name) for name in manifest.files]:
            done.result()
