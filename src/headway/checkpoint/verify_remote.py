"""Are the checkpoints behind a URL what was written? A file at a time is brought here, so little room is needed."""

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
from headway.core.scratch import scratch_folder


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A checkpoint to be verified."""

    folder: Objects
    manifest: Manifest | CheckpointError
    """What it says about itself, or why that cannot be trusted."""
    made_by: str = ""
    """The run that made it, in words, if it is not the one that owns the place."""

    @property
    def bytes(self) -> int:
        """What has to be read."""
        return self.manifest.total_bytes if isinstance(self.manifest, Manifest) else 0


def remote_checkpoints(url: str, options: dict[str, Any] | None = None) -> list[RemoteCheckpoint]:
    """Those behind a URL, of a run or of one checkpoint, by rising step; not what is on its way or was left half-way.

    Raises:
        ConfigError: the URL cannot be used, or one of them is encrypted and cannot be read with the key that is given.
        CheckpointError: the store cannot be reached.
    """
    tier, only = remote_tier(url, options), step_in(url)
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
    """Compare every byte with the manifest's hashes. Damage is reported, never raised.

    Args:
        checkpoint: Which one.
        advance: Called with the bytes read so far unreported, for progress.

    Raises:
        CheckpointError: the store cannot be reached, or there is no room here for one of the files.
    """
    folder, manifest = checkpoint.folder, checkpoint.manifest
    if isinstance(manifest, CheckpointError):
        return Verification(folder.url, None, (Damage(folder.url.rsplit("/", 1)[-1], manifest.what),))
    with scratch_folder("headway-verify-") as scratch:
        found = [_check(folder, name, manifest, scratch, advance) for name in manifest.files]
    if checkpoint.made_by:
        found.append(Damage("manifest.json", f"is of {checkpoint.made_by}, which does not own this place"))
    return Verification(folder.url, manifest, tuple(damage for damage in found if damage is not None))


def _check(
    folder: Objects, name: str, manifest: Manifest, scratch: Path, advance: Callable[[int], None]
) -> Damage | None:
    tensors, expected, path = tuple(t for t, _ in manifest.slices_of(name)), manifest.files[name].bytes, scratch / name
    try:
        there = name_there(folder, manifest, name)
        facts = folder.facts(there)
        if facts is None:
            return Damage(name, "is missing", tensors)
        if facts.bytes != expected:
            return Damage(name, f"has {facts.bytes:,} bytes, {expected:,} were written", tensors)
        folder.fetch(there, path, expected, advance)
    except UnreachableError:
        raise
    except CheckpointError as error:
        return Damage(name, error.what, tensors)
    except OSError as error:
        raise CheckpointError(
            f"{name} cannot be put here to be verified: {error.strerror or error}",
            where=str(scratch),
            fix=fix_for(error, "make room there, or set TMPDIR to another folder"),
        ) from error
    try:
        return check_file(scratch, name, manifest, tensors=True)
    finally:
        path.unlink()
