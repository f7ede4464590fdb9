"""Verification of the checkpoints behind a URL; one file at a time is downloaded, so little space is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.checkpoint.format.manifest import Manifest, step_name
from headway.checkpoint.remote.files import name_there
from headway.checkpoint.remote.objects import Objects, UnreachableError
from headway.checkpoint.run_identity import OF_RUN, in_words, run_record
from headway.checkpoint.transfer import remote_tier, step_in
from headway.checkpoint.verify import Damage, Verification, check_file
from headway.core.errors import CheckpointError, ConfigError, fix_for
from headway.core.files.scratch import scratch_folder


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A remote checkpoint to verify."""

    folder: Objects
    manifest: Manifest | CheckpointError
    """The manifest, or why it cannot be trusted."""
    made_by: str = ""
    """The run that made it, in words, if that run does not own the remote tier."""

    @property
    def bytes(self) -> int:
        """Number of bytes to read."""
        return self.manifest.total_bytes if isinstance(self.manifest, Manifest) else 0


def remote_checkpoints(url: str, options: dict[str, Any] | None = None) -> list[RemoteCheckpoint]:
    """Return the published checkpoints behind a URL of a run or of one checkpoint, in ascending order of steps.

    Raises:
        ConfigError: The URL cannot be used, or a checkpoint is encrypted and cannot be read with the given key.
        CheckpointError: The store cannot be reached.
    """
    tier = remote_tier(url, options)
    only = step_in(url)
    owner = tier.owner()
    checkpoints = []
    for step, manifest in tier.look_through(None if only is None else [only]):
        if isinstance(manifest, ConfigError):
            raise manifest
        made_by = run_record(manifest.context.get(OF_RUN)) if isinstance(manifest, Manifest) else None
        is_others = owner is not None and made_by is not None and made_by["id"] != owner.record["id"]
        other = in_words(made_by) if is_others and made_by is not None else ""
        checkpoints.append(RemoteCheckpoint(tier.objects.at(step_name(step)), manifest, other))
    return checkpoints


def verify_remote(checkpoint: RemoteCheckpoint, advance: Callable[[int], None] = lambda _: None) -> Verification:
    """Compare every byte of a remote checkpoint with its manifest's hashes. Damage is reported, never raised.

    Args:
        checkpoint: The checkpoint.
        advance: Called with the number of bytes read since the last call.

    Raises:
        CheckpointError: The store cannot be reached, or there is no room for a downloaded file.
    """
    folder = checkpoint.folder
    manifest = checkpoint.manifest
    if isinstance(manifest, CheckpointError):
        return Verification(folder.url, None, (Damage(folder.url.rsplit("/", 1)[-1], manifest.what),))
    with scratch_folder("headway-verify-") as scratch:
        found = [_check(folder, name, manifest, scratch, advance) for name in manifest.files]
    if checkpoint.made_by:
        found.append(Damage("manifest.json", f"is of {checkpoint.made_by}, which does not own this remote tier"))
    return Verification(folder.url, manifest, tuple(damage for damage in found if damage is not None))


def _check(
    folder: Objects, name: str, manifest: Manifest, scratch: Path, advance: Callable[[int], None]
) -> Damage | None:
    tensors = tuple(t for t, _ in manifest.slices_of(name))
    expected = manifest.files[name].bytes
    path = scratch / name
    try:
        there = name_there(folder, manifest, name)
        facts = folder.stat(there)
        if facts is None:
            return Damage(name, "is missing", tensors)
        if facts.bytes != expected:
            return Damage(name, f"has {facts.bytes:,} bytes, {expected:,} were written", tensors)
        folder.download(there, path, expected, advance)
    except UnreachableError:
        raise
    except CheckpointError as error:
        return Damage(name, error.what, tensors)
    except OSError as error:
        raise CheckpointError(
            f"{name} cannot be downloaded for verification: {error.strerror or error}",
            where=str(scratch),
            fix=fix_for(error, "make room there, or set TMPDIR to another folder"),
        ) from error
    try:
        return check_file(scratch, name, manifest, tensors=True)
    finally:
        path.unlink()
