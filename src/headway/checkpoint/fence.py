"""What keeps a process from writing to a run that another has taken over, and lets it end what it has begun before."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.core.errors import CheckpointError


class Fenced(CheckpointError):
    """The run belongs to another process now, so this one has nothing to save any more."""


@dataclass(frozen=True)
class Fence:
    """A file that names the owner of a run, and the owner on whose behalf this process writes."""

    path: Path
    owner: Mapping[str, Any]
    name: str
    """Of the owner, for people."""

    def assert_held(self) -> None:
        """Make sure that the run still has this owner.

        Raises:
            Fenced: it has another one, or was moved away.
        """
        try:
            found = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            found = None
        if found != dict(self.owner):
            raise Fenced(
                f"{self.name} no longer owns this run; it is now with {describe_owner(found)}",
                where=str(self.path.parent),
                fix="stop this process; the other one goes on with the run",
            )


def describe_owner(record: Any) -> str:
    """The owner in a record, in words."""
    if not isinstance(record, dict):
        return "nobody"
    return f"attempt {record.get('attempt')}, process {record.get('pid')} on {record.get('host')}"


_WRITERS_FILE = ".writing"
_LOOK_SECONDS = 0.02


def open_writers_lock(run: Path) -> int:
    """A file descriptor that stands for a process that writes checkpoints of a run, as long as any process has it open.

    Raises:
        OSError: it cannot be made.
    """
    descriptor = os.open(run / _WRITERS_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def wait_for_writers(run: Path, seconds: float) -> bool:
    """Let processes of earlier attempts end the checkpoints that were handed to them; whether all have ended.

    They may go on when their workers were killed. Taking the run over before that would throw away what they do.
    """
    path, deadline = run / _WRITERS_FILE, time.monotonic() + seconds
    while path.exists():
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                pass
            except OSError:  # a file system without locks: nobody waits for anybody
                return False
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_SECONDS)
    return True
