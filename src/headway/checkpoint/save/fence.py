"""Fencing: a process stops writing to a run once another process has taken it over.

The fencing token is the owner's record in `.owner`: before each write, a process checks that the record is still its
own.
"""

from __future__ import annotations

import functools
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from headway.core.coordination.lease import OWNER_FILE as OWNER_FILE
from headway.core.coordination.lease import RECORD_BYTES
from headway.core.errors import CheckpointError, lost_working_folder
from headway.core.files.foreign import SETTINGS_BYTES, parse_json, read_bytes
from headway.core.machine.system import host_name

#: How long to retry after a fault of the file system before the owner's record counts as unreadable.
_PATIENCE_SECONDS = 5.0


class Fenced(CheckpointError):
    """The error of a process that no longer owns its run, so that it must not save anything."""


class OwnerUnknown(CheckpointError):
    """The owner's record cannot be read at the moment, which does not prove that another process owns the run."""


@dataclass(frozen=True)
class Owner:
    """The content of `.owner`."""

    attempt: int
    token: str
    """Random, so that attempt 1 of a run is not mistaken for attempt 1 of a run that replaced it."""
    host: str
    pid: int
    since: float
    """Unix seconds."""

    @classmethod
    def this_process(cls, attempt: int) -> Owner:
        """Create the record of this process, with a new token."""
        return cls(attempt, secrets.token_hex(8), host_name(), os.getpid(), time.time())

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since).astimezone().isoformat(" ", "seconds")
        return f"attempt {self.attempt}, process {self.pid} on {self.host}, since {since}"


def read_owner(run: Path) -> Owner | None:
    """Return the current or last owner of a run; None if there is no readable record."""
    try:
        return _parse(read_bytes(run / OWNER_FILE, SETTINGS_BYTES)[:RECORD_BYTES])
    except OSError:
        return None


@functools.lru_cache(maxsize=4)  # parsed at every step, and nearly always the same content
def _parse(content: bytes) -> Owner | None:
    try:
        return Owner(**parse_json(content))
    except (ValueError, TypeError):
        return None


def _read_with_retries(run: Path, seconds: float) -> Owner | None:
    """Return the owner of a run, or None; unlike `read_owner`, retry a disk error, which does not mean "no owner"."""
    path = run / OWNER_FILE
    until = time.monotonic() + seconds
    while True:
        try:
            return _parse(read_bytes(path, SETTINGS_BYTES)[:RECORD_BYTES])
        except (FileNotFoundError, NotADirectoryError):  # the run was moved away
            return None
        except OSError as error:
            if time.monotonic() >= until:
                raise OwnerUnknown(
                    f"the owner of this run cannot be read: {error.strerror or error}",
                    where=str(path),
                    fix="repair the disk or the network to it, then run the same command again",
                ) from error
        time.sleep(0.1)


def fenced(run: Path, attempt: int) -> Fenced:
    """Make the error of an attempt that no longer owns its run."""
    owner = read_owner(run)
    lost = None
    if owner is None and not run.is_absolute():
        lost = lost_working_folder()
    if lost is not None:
        return Fenced(lost.what, where=lost.where, fix=lost.fix)
    return Fenced(
        f"attempt {attempt} no longer owns this run; its owner is now {owner or 'unknown'}",
        where=str(run),
        fix="stop this process; the other one continues the run",
    )


@dataclass(frozen=True)
class Fence:
    """A run, and the owner on whose behalf this process writes to it."""

    run: Path
    owner: Owner

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> Fence:
        """Parse the JSON form."""
        return cls(Path(record["run"]), Owner(**record["owner"]))

    def record(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"run": str(self.run), "owner": asdict(self.owner)}

    def assert_held(self, patience_seconds: float | None = None) -> None:
        """Raise an error unless the run still has this owner.

        Args:
            patience_seconds: How long to retry after a fault of the file system; 5 s if None.

        Raises:
            Fenced: The run has another owner, or was moved away.
            OwnerUnknown: The record cannot be read. Nothing may be published then, but the run is not lost.
        """
        patience = _PATIENCE_SECONDS if patience_seconds is None else patience_seconds
        if _read_with_retries(self.run, patience) != self.owner:
            raise fenced(self.run, self.owner.attempt)
