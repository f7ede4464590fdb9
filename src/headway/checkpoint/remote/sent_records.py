"""The records of a run in its remote tier: an archive with each checkpoint, and segments that later ones share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headway.checkpoint.format.manifest import Manifest, step_name
from headway.checkpoint.records import RECORDS, RECORDS_FILE, Segment, segments_of
from headway.checkpoint.remote.files import sent_name
from headway.checkpoint.remote.objects import Objects
from headway.core.console import warning
from headway.core.errors import CheckpointError
from headway.core.files.scratch import scratch_folder
from headway.core.storage import RECORD_BYTES


class SentRecords:
    """Sends and fetches the records of a run (`headway.checkpoint.records`).

    Args:
        objects: The tier's.
        assert_owner: Raises an error unless this process may upload files that no manifest names yet.
    """

    def __init__(self, objects: Objects, assert_owner: Callable[[], None]) -> None:
        self._objects = objects
        self._assert_owner = assert_owner
        self._segments_there: set[str] = set()

    def fetch(self, manifest: Manifest, path: Path) -> bool:
        """Download the archive of a run's records that came with a checkpoint, and return whether there is one.

        Args:
            manifest: The checkpoint's.
            path: Where the archive goes; its segments go below the same folder.

        Raises:
            CheckpointError: It is not what the manifest names, or the store cannot be used.
        """
        name = f"{step_name(manifest.step)}/{sent_name(manifest, RECORDS_FILE)}"
        entry = manifest.context.get(RECORDS)
        if not isinstance(entry, dict) or (there := self._objects.stat(name)) is None:
            return False
        if there.bytes != entry.get("bytes"):
            raise self._other_records(name, "differ from what was saved")
        self._objects.download(name, path, there.bytes)
        for segment in _segments(entry):
            there = self._objects.stat(segment.name)
            most = segment.end - segment.start + RECORD_BYTES
            if there is None or there.bytes > most:
                raise self._other_records(segment.name, "are not there as a whole")
            (path.parent / segment.name).parent.mkdir(exist_ok=True)
            self._objects.download(segment.name, path.parent / segment.name, there.bytes)
        return True

    def send(self, folder: Path, manifest: Manifest) -> None:
        """Upload the archive in the folder of a checkpoint, and the segments before it that are not there yet.

        Raises:
            CheckpointError: Another attempt or run owns the tier, or the store cannot be used.
        """
        try:
            for segment in _segments(manifest.context[RECORDS]):
                if segment.name in self._segments_there:
                    continue
                if self._objects.stat(segment.name) is None:
                    with scratch_folder("headway-records-") as scratch:
                        segment.write(folder.parent.parent, scratch / RECORDS_FILE)
                        self._assert_owner()
                        self._objects.upload(segment.name, scratch / RECORDS_FILE)
                self._segments_there.add(segment.name)
        except (OSError, ValueError) as error:  # the checkpoint itself is whole
            warning(f"the records of the run are not uploaded: {error}")
        self._assert_owner()
        name = f"{step_name(manifest.step)}/{sent_name(manifest, RECORDS_FILE)}"
        self._objects.upload(name, folder / RECORDS_FILE)

    def _other_records(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(
            f"the records of the checkpoint {what}", where=self._objects.url_of(name), fix="none is needed"
        )


def _segments(entry: Mapping[str, Any]) -> list[Segment]:
    """Return the segments of a run's records; none of an entry that is damaged, which unpacking reports."""
    try:
        return segments_of(entry)
    except ValueError:
        return []
