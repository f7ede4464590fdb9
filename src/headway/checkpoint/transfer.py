"""Copies of checkpoints between places that a person names: a run, a checkpoint, or a URL of either."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.checkpoint.discovery import bring
from headway.checkpoint.format.folders import TEMPORARY, checkpoint_folders
from headway.checkpoint.format.manifest import MANIFEST, Manifest, read_manifest, step_name, step_of
from headway.checkpoint.remote.open import open_place
from headway.checkpoint.remote.tier import RemoteTier
from headway.checkpoint.store import CheckpointStore
from headway.checkpoint.verify import verify_checkpoint
from headway.core.console import warning
from headway.core.errors import CheckpointError
from headway.core.files.atomic import sync_folder
from headway.core.files.foreign import read_bytes
from headway.core.storage import scheme_of


@dataclass(frozen=True)
class Found:
    """A checkpoint, local or behind a URL."""

    manifest: Manifest
    place: str
    """Folder or URL."""


def is_url(text: str) -> bool:
    """Return whether a place is a URL."""
    return scheme_of(text) is not None


def step_in(url: str) -> int | None:
    """Return the step of a URL that names one checkpoint; None if it names a run or a folder of checkpoints."""
    return step_of(url.rstrip("/").rsplit("/", 1)[-1])


def local_folders(path: Path) -> dict[int, Path]:
    """Return the checkpoints that a path names, by step.

    Args:
        path: A checkpoint, a run, its `checkpoints` folder, or a folder of copies.

    Raises:
        CheckpointError: The path is not a folder.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"'{path}' is not a folder", where=str(path.absolute()), fix="headway runs list shows the runs there are"
        )
    if step_of(path.name) is not None or (path / MANIFEST).exists():
        return {read_manifest(path).step: path}
    inside = path / "checkpoints"
    return checkpoint_folders(inside if inside.is_dir() else path)


def remote_tier(url: str, options: dict[str, Any] | None = None) -> RemoteTier:
    """Open the checkpoints that a URL names: a folder of checkpoints, or the newest generation of a run's remote tier.

    Raises:
        ConfigError: The URL cannot be used.
        CheckpointError: The store cannot be reached.
    """
    place = open_place(url, options)
    if step_in(place.url) is not None:
        place = open_place(place.url.rsplit("/", 1)[0], options)
    generations = RemoteTier.newest_generation(place)
    return RemoteTier(place.at(f"run-{generations:03d}") if generations else place)


def remote_manifests(url: str, options: dict[str, Any] | None = None) -> list[Found]:
    """Return the checkpoints behind a URL, in ascending order of steps."""
    tier = remote_tier(url, options)
    only = step_in(url)
    found = tier.manifests() if only is None else [m for m in [tier.manifest(only)] if m is not None]
    return [Found(manifest, tier.objects.url_of(step_name(manifest.step))) for manifest in found]


def copy_checkpoints(
    source: str,
    target: str,
    step: int | None = None,
    options: dict[str, Any] | None = None,
    *,
    replace_damaged: bool = False,
) -> list[Found]:
    """Copy one or all checkpoints of a place to another; those already there that verify are not copied again.

    A copy into a folder is verified before it becomes visible. A checkpoint that its run removes meanwhile is skipped
    with a warning.

    Args:
        source: A run, a checkpoint, or a URL of either.
        target: Folder or URL for the folders of steps.
        step: The step to copy; all steps if None.
        options: Options for `fsspec`, for a URL.
        replace_damaged: Whether a download replaces a local checkpoint that does not verify.

    Returns:
        The copies, including those that were already there.

    Raises:
        CheckpointError: There is nothing to copy, the source is damaged, or the copy cannot be written.
    """
    if is_url(source) and is_url(target):
        raise CheckpointError(
            "a copy from one URL to another would go through this machine",
            where=f"{source}, {target}",
            fix="copy to a folder first, or with the tools of the store",
        )
    if is_url(source):
        copies = _download(source, target, step, options, replace_damaged)
    else:
        copies = _from_here(source, target, step, options)
    if not copies:
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise CheckpointError(f"there is {which} to copy", where=source, fix="headway checkpoints list shows them")
    return copies


def _download(
    source: str, target: str, step: int | None, options: dict[str, Any] | None, replace_damaged: bool
) -> list[Found]:
    tier = remote_tier(source, options)
    store = CheckpointStore(Path(target))
    copies = []
    for found in remote_manifests(source, options):
        if step is None or found.manifest.step == step:
            there = store.directory / step_name(found.manifest.step)
            good = there.exists() and verify_checkpoint(there).good
            if not os.path.lexists(there) or (replace_damaged and not good):
                bring(store, tier, found.manifest, index=False)
            elif not (good and _same(there, found.manifest)):
                raise _taken(there)
            copies.append(Found(found.manifest, str(there)))
    return copies


def _from_here(source: str, target: str, step: int | None, options: dict[str, Any] | None) -> list[Found]:
    folders = {s: f for s, f in local_folders(Path(source)).items() if step is None or s == step}
    put = _uploader(target, options) if is_url(target) else _copier(Path(target))
    copies = []
    for folder in folders.values():
        found = verify_checkpoint(folder)
        if not found.good or found.manifest is None:
            if _is_gone(folder):
                continue
            if len(folders) == 1:
                raise CheckpointError(
                    f"{folder.name} is damaged: {'; '.join(map(str, found.damage))}",
                    where=str(folder),
                    fix="take another",
                )
            warning(f"passing over {folder}: {'; '.join(map(str, found.damage))}")
            continue
        try:
            copies.append(Found(found.manifest, put(folder, found.manifest)))
        except (CheckpointError, OSError):
            if not _is_gone(folder):
                raise
    return copies


def _is_gone(folder: Path) -> bool:
    """Return whether a checkpoint was removed during the copy, by its live run."""
    gone = not folder.exists()
    if gone:
        warning(f"passing over {folder}: it was removed while it was copied")
    return gone


def _uploader(target: str, options: dict[str, Any] | None) -> Callable[[Path, Manifest], str]:
    place = open_place(target, options)

    def put(folder: Path, manifest: Manifest) -> str:
        name = step_name(manifest.step)
        url = place.url_of(name)
        taken = CheckpointError("another state is there", where=url, fix="copy to another place")
        there = RemoteTier(place).manifest(manifest.step)
        if there is not None and there.state_sha256 == manifest.state_sha256:
            return url
        if there is not None:
            raise taken
        for file in manifest.files:
            place.upload(f"{name}/{file}", folder / file)
        if not place.create(f"{name}/{MANIFEST}", read_bytes(folder / MANIFEST)):  # last, since it publishes the rest
            raise taken
        return url

    return put


def _copier(target: Path) -> Callable[[Path, Manifest], str]:
    def put(folder: Path, manifest: Manifest) -> str:
        there = target / step_name(manifest.step)
        if there.exists() and verify_checkpoint(there).good and _same(there, manifest):
            return str(there)
        if there.exists():
            raise _taken(there)
        hidden = target / f"{TEMPORARY}{there.name}-{os.getpid()}"
        try:
            hidden.mkdir(parents=True)
            for name in (*manifest.files, MANIFEST):
                shutil.copyfile(folder / name, hidden / name)
                with (hidden / name).open("rb") as file:
                    os.fsync(file.fileno())
            sync_folder(hidden)
            copied = verify_checkpoint(hidden)
            if not copied.good:
                shutil.rmtree(hidden, ignore_errors=True)
                raise CheckpointError(
                    f"the copy differs from the original: {'; '.join(map(str, copied.damage))}",
                    where=str(there),
                    fix="copy it again; if that does not help, check disk and memory",
                )
            hidden.rename(there)
            sync_folder(target)
        except OSError as error:
            shutil.rmtree(hidden, ignore_errors=True)
            raise CheckpointError(
                f"the copy cannot be written: {error.strerror or error}", where=str(there), fix="choose another place"
            ) from error
        return str(there)

    return put


def _taken(there: Path) -> CheckpointError:
    return CheckpointError(
        "something else is there already", where=str(there), fix="move it away, or copy to another folder"
    )


def _same(folder: Path, manifest: Manifest) -> bool:
    try:
        return read_manifest(folder).state_sha256 == manifest.state_sha256
    except CheckpointError:
        return False
