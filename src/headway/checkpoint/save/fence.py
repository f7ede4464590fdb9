"""What keeps a process from writing to a run that another has taken over."""

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

from headway.core.errors import CheckpointError
from headway.core.foreign import SETTINGS_BYTES, parse_json, read_bytes
from headway.core.machine import host_name

OWNER_FILE = ".owner"
#: How long a fault of the file system is waited out before it is said that the owner's record cannot be read.
_PATIENCE_SECONDS = 5.0


class Fenced(CheckpointError):
    """The run belongs to another process now, so this one has nothing to save any more."""


class OwnerUnknown(CheckpointError):
    """Whose the run is cannot be read at the moment, which is no proof that another process has it."""


@dataclass(frozen=True)
class Owner:
    """The content of `.owner`."""

    attempt: int
    token: str
    """Random, so that attempt 1 of a run is not taken for attempt 1 of the run that took its place."""
    host: str
    pid: int
    since: float
    """Unix seconds."""

    @classmethod
    def this_process(cls, attempt: int) -> Owner:
        """A new owner with a new token."""
        return cls(attempt, secrets.token_hex(8), host_name(), os.getpid(), time.time())

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since).astimezone().isoformat(" ", "seconds")
        return f"attempt {self.attempt}, process {self.pid} on {self.host}, since {since}"


def read_owner(run: Path) -> Owner | None:
    """Who has, or last had, the run; None when that was never written."""
    try:
        return _parse(read_bytes(run / OWNER_FILE, SETTINGS_BYTES))
    except OSError:
        return None


@functools.lru_cache(maxsize=4)  # asked for at every step, and nearly always the same
def _parse(content: bytes) -> Owner | None:
    try:
        return Owner(**parse_json(content))
    except (ValueError, TypeError):
        return None


def _read_patiently(run: Path, seconds: float) -> Owner | None:
    """As `read_owner`, but a disk that answers with an error has not said that there is no owner."""
    path = run / OWNER_FILE
    until = time.monotonic() + seconds
    while True:
        try:
            return _parse(read_bytes(path, SETTINGS_BYTES))
        except (FileNotFoundError, NotADirectoryError):  # the run was moved away
            return None
        except OSError as error:
            if time.monotonic() >= until:
                raise OwnerUnknown(
                    f"it cannot be read whose run this is: {error.strerror or error}",
                    where=str(path),
                    fix="mend the disk or the network to it, then run the same command again",
                ) from error
        time.sleep(0.1)


def fenced(run: Path, attempt: int) -> Fenced:
    """The error of an attempt that has lost its run."""
    return Fenced(
        f"attempt {attempt} no longer owns this run; it is now with {read_owner(run) or 'nobody'}",
        where=str(run),
        fix="stop this process; the other one goes on with the run",
    )


@dataclass(frozen=True)
class Fence:
    """A run, and the owner on whose behalf this process writes to it."""

    run: Path
    owner: Owner

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> Fence:
        """From its JSON form."""
        return cls(Path(record["run"]), Owner(**record["owner"]))

    def record(self) -> dict[str, Any]:
        """Its JSON form."""
        return {"run": str(self.run), "owner": asdict(self.owner)}

    def assert_held(self, patience_seconds: float | None = None) -> None:
        """Make sure that the run still has this owner.

        Args:
            patience_seconds: How long a fault of the file system is waited out, if not for the usual time.

        Raises:
            Fenced: it has another one, or was moved away.
            OwnerUnknown: that cannot be read for a while. Nothing may be published then, but the run is not lost.
        """
        if _read_patiently(self.run, _PATIENCE_SECONDS if patience_seconds is None else patience_seconds) != self.owner:
            raise fenced(self.run, self.owner.attempt)
