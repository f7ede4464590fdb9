"""Fencing: a process stops writing to a run once another process has taken it over.

The fencing token is the owner's record in `.owner`: before each write, a process checks that the record is still its
own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headway.core.coordination.lease import OWNER_FILE
from headway.core.coordination.owner import Owner, parse_owner, read_owner
from headway.core.errors import CheckpointError, lost_working_folder
from headway.core.files.foreign import SETTINGS_BYTES, read_bytes

#: How long to retry after a fault of the file system before the owner's record counts as unreadable.
_PATIENCE_SECONDS = 5.0


class Fenced(CheckpointError):
    """The error of a process that no longer owns its run, so that it must not save anything."""


class OwnerUnknown(CheckpointError):
    """The owner's record cannot be read at the moment, which does not prove that another process owns the run."""


def _read_with_retries(run: Path, seconds: float) -> Owner | None:
    """Return the owner of a run, or None; unlike `read_owner`, retry a disk error, which does not mean "no owner"."""
    path = run / OWNER_FILE
    until = time.monotonic() + seconds
    while True:
        try:
            return parse_owner(read_bytes(path, SETTINGS_BYTES))
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
