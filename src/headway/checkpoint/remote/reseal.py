"""Changing the key of the checkpoints in a remote tier, without a moment at which a kill loses one.

The files of a checkpoint are uploaded again under other names. Then one write replaces its manifest, and the old files
go. So each checkpoint can be read with the old key alone up to that write, and with the new key alone from then on.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from headway.checkpoint.format.file_hash import is_as_written
from headway.checkpoint.format.manifest import MANIFEST, FileEntry, Manifest, step_name
from headway.checkpoint.format.sealing import SEALED
from headway.checkpoint.records import RECORDS, RECORDS_FILE, segments_of
from headway.checkpoint.remote.files import SENT_AS, name_there, sent_name
from headway.checkpoint.remote.objects import Objects
from headway.checkpoint.remote.sealed_objects import SealedObjects
from headway.checkpoint.remote.tier import RESEALING, RemoteTier
from headway.checkpoint.remote.tier_reader import ASIDE
from headway.checkpoint.reseal import SEALED_WITH, Keys, reseal_file, resealed
from headway.core.errors import CheckpointError
from headway.core.files.foreign import LISTING_BYTES
from headway.core.files.scratch import scratch_folder
from headway.core.process.faults import fault_point


class TierReseal:
    """The change of keys of a remote tier.

    Args:
        tier: The tier, acquired, opened with the old key.
        renewed: The same place, opened with the new key.
        old: The keys that checkpoints have.
        new: The keys that they shall have.
        within: Folder for files under way.
    """

    def __init__(self, tier: RemoteTier, renewed: Objects, old: Keys, new: Keys, within: Path) -> None:
        self._tier = tier
        self._old = old
        self._new = new
        self._within = within
        self._there = tier.objects
        self._renewed = renewed
        self._plain = Objects(tier.url, tier.objects.options)
        self._left: set[str] = set()

    def run(self) -> Iterator[tuple[int, bool | CheckpointError]]:
        """Yield each step with whether its keys were changed now, or why they could not be."""
        self._tier.assert_owner()
        self._plain.write(RESEALING, b"{}")
        failed = False
        for step in self._tier.steps():
            try:
                changed = [self._change(step, name) for name in (MANIFEST, ASIDE)]
                self._remove_left(step)
                yield step, any(changed)
            except CheckpointError as error:
                failed = True
                yield step, error
        if not failed:
            self._tier.assert_owner()
            self._plain.remove([*self._left, RESEALING])

    def _change(self, step: int, name: str) -> bool:
        """Change the keys of one checkpoint, in use or set aside; return whether there is one with the old keys."""
        path = f"{step_name(step)}/{name}"
        if self._read_new(path) is not None:
            return False
        content = self._there.read(path, LISTING_BYTES)
        if content is None:
            return False
        try:
            with self._old.in_use():
                manifest = Manifest.parse(content)
        except ValueError as error:
            raise CheckpointError(
                f"its key is not changed, since its manifest {error}",
                where=self._plain.url_of(path),
                fix="remove it, or set the keys that it has; then run the same command again",
            ) from None
        is_sealed = self._plain.stat(path + SEALED) is not None
        if isinstance(self._renewed, SealedObjects):
            self._renewed.seals = is_sealed
        digits = secrets.token_hex(8)
        self._send_segments(manifest)
        files = {file: self._send(manifest, file, digits) for file in manifest.files}
        if RECORDS in manifest.context:
            folder = step_name(manifest.step)
            self._copy(f"{folder}/{sent_name(manifest, RECORDS_FILE)}", f"{folder}/{digits}-{RECORDS_FILE}")
        renewed = resealed(manifest, files, self._new, **{SENT_AS: digits})
        fault_point("reseal.files")
        self._tier.assert_owner()
        self._renewed.write(path, renewed.render())
        fault_point("reseal.manifest")
        return True

    def _read_new(self, path: str) -> Manifest | None:
        """Return a manifest that has the new keys; None if there is none."""
        with suppress(CheckpointError, ValueError), self._new.in_use():
            content = self._renewed.read(path, LISTING_BYTES)
            manifest = None if content is None else Manifest.parse(content)
            sealed_here = manifest is not None and any(name.endswith(SEALED) for name in manifest.files)
            if manifest is not None and (not sealed_here or manifest.context.get(SEALED_WITH) == self._new.name):
                return manifest
        return None

    def _send(self, manifest: Manifest, file: str, digits: str) -> FileEntry:
        """Upload a file of a checkpoint again, with the new key, and return its entry in the manifest."""
        folder = self._there.at(step_name(manifest.step))
        entry = manifest.files[file]
        with scratch_folder("headway-reseal-", self._within) as scratch:
            folder.download(name_there(folder, manifest, file), scratch / file, entry.bytes)
            if not is_as_written(scratch / file, entry):
                raise CheckpointError(
                    f"its key is not changed, since {file} is damaged", where=folder.url, fix="remove the checkpoint"
                )
            (scratch / "new").mkdir()
            with self._old.in_use():
                renewed = reseal_file(scratch / file, scratch / "new", entry, self._new)
            self._tier.assert_owner(publishes=False)
            self._renewed.upload(f"{step_name(manifest.step)}/{digits}-{file}", scratch / "new" / file)
        return renewed

    def _send_segments(self, manifest: Manifest) -> None:
        """Upload the segments of records that a checkpoint names under the name that the new key gives them."""
        entry = manifest.context.get(RECORDS)
        if not isinstance(self._renewed, SealedObjects) or not isinstance(self._there, SealedObjects):
            return
        for segment in segments_of(entry) if isinstance(entry, dict) else []:
            before = self._there.sealed_name(segment.name)
            after = self._renewed.sealed_name(segment.name)
            if before != after and self._plain.stat(after) is None:
                self._copy(segment.name, segment.name)
            if before != after:
                self._left.add(before)

    def _copy(self, source: str, target: str) -> None:
        """Copy an object, if it is there, from the old key to the new one."""
        found = self._there.stat(source)
        if found is None:
            return
        with scratch_folder("headway-reseal-", self._within) as scratch:
            # Its folder is where a file is sealed before it is sent.
            (scratch / "file").mkdir()
            self._there.download(source, scratch / "file" / "object", found.bytes)
            self._tier.assert_owner(publishes=False)
            self._renewed.upload(target, scratch / "file" / "object")

    def _remove_left(self, step: int) -> None:
        """Remove what a resealed checkpoint has left behind, and an earlier try that was killed."""
        found = [self._read_new(f"{step_name(step)}/{name}") for name in (MANIFEST, ASIDE)]
        kept = tuple(sent_name(manifest, "") for manifest in found if manifest is not None)
        if not any(manifest is not None and SEALED_WITH in manifest.context for manifest in found):
            return
        folder = self._plain.at(step_name(step))
        for name in folder.names():
            if not name.startswith((*kept, "manifest.")):
                self._tier.assert_owner()
                folder.remove([name])
