"""The cursor of a sink: up to which place of `metrics.jsonl` a tracker has a run, in `tracking/` of the run directory.

A cursor belongs to a run, a sink and its target: what was sent to one server does not count for another. Before a batch
is sent, its end is written (`pending`); so after a kill at any moment the next follower knows the very batch whose
fate is uncertain. The lock beside it ends with its holder.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from headway.core.errors import CheckpointError, fix_for
from headway.core.files.atomic import remove_unfinished, write_json
from headway.core.files.foreign import open_regular, read_json_object
from headway.core.files.hashes import fingerprint
from headway.core.files.locks import lock_file

FOLDER = "tracking"


@dataclass(frozen=True)
class Cursor:
    """What a sink has sent. Places are bytes of `metrics.jsonl`."""

    run: str
    """Id of the run."""
    place: int = 0
    """All before it has arrived."""
    pending: int | None = None
    """End of the batch that was being sent."""
    generation: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    """What the sink keeps."""
    status: str | None = None
    """The status that was sent last."""
    model: str | None = None
    """Fingerprint of the model that was sent: its step, and what was wanted of it."""
    sink: str = ""
    """Name and target of the sink, for people."""


def cursor_name(sink: str, target: str) -> str:
    """Return the name of a sink's files: its own, and a few digits of its target's fingerprint."""
    return f"{re.sub(r'[^A-Za-z0-9]+', '-', sink)}-{fingerprint(target)[:8]}"


def unfinished(run: Path) -> dict[str, str]:
    """Return the trackers that may still show a run as running: names of cursors, and of what they send to."""
    found = {}
    for path in sorted((run / FOLDER).glob("*.json")):
        with suppress(OSError, ValueError, TypeError):
            cursor = Cursor(**read_json_object(path))
            if cursor.status not in ("finished", "failed", "killed"):
                found[path.stem] = str(cursor.sink)
    return found


class CursorFile:
    """The cursor of one sink on disk, held by this process until `close`.

    Args:
        run: The run directory.
        name: From `cursor_name`.

    Raises:
        CheckpointError: another follower holds it, or the file cannot be written.
    """

    def __init__(self, run: Path, name: str) -> None:
        self.path = run / FOLDER / f"{name}.json"
        self.current = Cursor("")
        """As read last, with the changes since."""
        lock = self.path.with_suffix(".lock")
        try:
            self.path.parent.mkdir(exist_ok=True)
            self._lock = lock_file(lock)
            os.register_at_fork(after_in_child=self._lock.close)
            self._lock.truncate(0)
            self._lock.write(str(os.getpid()).encode())
            remove_unfinished(self.path.parent)
        except BlockingIOError:
            raise InUse(
                f"another process follows this run into the same tracker: {_holder(lock) or 'unknown'}",
                where=str(lock),
                fix="let it go on, or stop it first",
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"the cursor of a tracker cannot be written: {error.strerror or error}",
                where=str(error.filename or self.path),
                fix=fix_for(error, "make room there, or allow this user to write to the run directory"),
            ) from error

    def read(self, run: str) -> Cursor:
        """Read the cursor, and return it; a new one if there is none, or if it belongs to another run."""
        self.current = Cursor(run)
        with suppress(OSError, ValueError, TypeError):
            found = Cursor(**read_json_object(self.path))
            if found.run == run and _is_sound(found):
                self.current = found
        return self.current

    def open(self, run: str, sink: str) -> None:
        """Read the cursor for a sink that is about to be opened.

        The status is sent again: a sink may have been killed before it made certain of the last one.

        Args:
            run: Id of the run.
            sink: Name and target of the sink, for people.
        """
        self.current = replace(self.read(run), sink=sink, status=None)

    def restart(self) -> Cursor:
        """Begin anew: nothing counts as sent. Return the new cursor.

        Raises:
            OSError: it cannot be written.
        """
        self.change(**vars(Cursor(self.current.run, sink=self.current.sink)))
        return self.current

    def begin_generation(self, generation: int) -> None:
        """Begin a generation, without a word on disk yet: the sink is opened first."""
        self.current = replace(self.current, state={}, status=None, generation=generation)

    def change(self, **changes: Any) -> None:
        """Keep changes of the cursor, atomically.

        Raises:
            OSError: they cannot be written.
        """
        changed = replace(self.current, **changes)
        if changed != self.current or not self.path.exists():
            self.write(changed)
        self.current = changed

    def write(self, cursor: Cursor) -> None:
        """Replace the cursor atomically.

        Raises:
            OSError: it cannot be written.
        """
        write_json(self.path, asdict(cursor))

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()


class InUse(CheckpointError):
    """Another follower holds the cursor."""


def _holder(lock: Path) -> str:
    """Return the number of the process that holds a lock; empty if it cannot be read."""
    with suppress(OSError), open_regular(lock) as file:
        return file.read(20).decode(errors="replace")
    return ""


def _is_sound(cursor: Cursor) -> bool:
    places = (cursor.place, cursor.generation, *(() if cursor.pending is None else (cursor.pending,)))
    return all(isinstance(place, int) and place >= 0 for place in places) and isinstance(cursor.state, dict)
