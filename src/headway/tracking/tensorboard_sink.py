"""The sink for TensorBoard: one event file of each run, which is a pure function of what was sent.

After a kill the file is cut to the size in the cursor, and what follows is written again with the same bytes: so each
step is in it once, and a TensorBoard that has read on meanwhile misses nothing. A new generation begins with a restart
event, after which TensorBoard drops the steps that it replaces.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from headway.config.sections.track import tensorboard_folder
from headway.core.errors import needing
from headway.core.files.atomic import sync_folder
from headway.core.files.foreign import open_regular
from headway.core.files.hashes import fingerprint
from headway.tracking.sink import Batch, Description, LostRun, Point, SinkSpec, Status, TrackedRun, Unreachable

#: Version of the format of event files that are written here.
_VERSION = "brain.Event:2"


class TensorboardSink:
    """Writes the event file of a run.

    Args:
        folder: Folder of the run's event files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._kept: dict[str, Any] = {}
        self._last_step = 0

    def open(self, run: TrackedRun, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Open the event file, and cut it to what is known to have been written."""
        _check_installed()
        path = self._folder / f"events.out.tfevents.{run.id[:16]}.headway"
        begins = "bytes" not in state
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path.touch()
            self._file = open_regular(path, "r+b")
            there = self._file.seek(0, os.SEEK_END)
            size = int(state.get("bytes", there if run.generation else 0))
            if size > there:
                raise LostRun(f"the event file {path} is gone, or was cut")
            self._file.truncate(size)
            self._file.seek(size)
            self._kept = {**state, "file": path.name, "bytes": size}
            if not size:
                self._write(file_version=_VERSION)
            if run.generation and begins:
                self._write_restart(run.first_step + 1)
            return self._flush()
        except OSError as error:
            raise _unwritable(error, path) from error

    def describe(self, description: Description) -> Mapping[str, Any]:
        """Write the config and facts about the run as texts."""
        for name, values in (("config", description.parameters), ("run", description.tags)):
            known = fingerprint(dict(values))[:16]
            if self._kept.get(name) != known:
                rows = [f"| {key} | `{text}` |" for key, text in values.items()]
                self._write_text(f"headway/{name}", "\n".join(["| key | value |", "|---|---|", *rows]))
                self._kept[name] = known
        return self._synced()

    def send(self, batch: Batch) -> Mapping[str, Any]:
        """Append the points, those of one record in one event."""
        for (step, moment), points in groupby(batch.points, key=lambda point: (point.step, point.time)):
            self._last_step = step
            self._write(wall_time=moment, step=step, summary=_scalars(points))
        return self._synced()

    def flush(self) -> Mapping[str, Any]:
        """Return the state: all is on disk."""
        return self._kept

    def set_status(self, status: Status, ended: float | None) -> None:
        """Do nothing: event files have no status; the text `headway/run` has the outcome."""

    def close(self) -> None:
        """Close the event file."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        assert self._file is not None, "open"
        try:
            RecordWriter(self._file).write(Event(**fields).SerializeToString())
        except OSError as error:
            raise _unwritable(error, self._folder) from error

    def _write_restart(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._write(step=step, session_log=SessionLog(status=SessionLog.START))

    def _write_text(self, tag: str, text: str) -> None:
        from tensorboard.plugins.text.summary import text_pb

        self._write(step=self._last_step, summary=text_pb(tag, text))

    def _synced(self) -> Mapping[str, Any]:
        try:
            return self._flush()
        except OSError as error:
            raise _unwritable(error, self._folder) from error

    def _flush(self) -> Mapping[str, Any]:
        assert self._file is not None, "open"
        os.fsync(self._file.fileno())
        sync_folder(self._folder)
        self._kept = {**self._kept, "bytes": self._file.tell()}
        return self._kept


def _scalars(points: Iterator[Point]) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=point.name, simple_value=point.value) for point in points])


def _check_installed() -> None:
    with needing("tensorboard", "tensorboard", "the tracker tensorboard"):
        import tensorboard.compat.proto.event_pb2
        import tensorboard.summary.writer.record_writer  # noqa: F401


def _unwritable(error: OSError, path: Path) -> Unreachable:
    return Unreachable(f"{error.filename or path}: {error.strerror or error}")


SPEC = SinkSpec(
    lambda settings, where: str(tensorboard_folder(settings, Path())),
    lambda settings, run, where: TensorboardSink(tensorboard_folder(settings, run)),
    library=("tensorboard", "tensorboard", "tensorboard"),
)
