"""The record in a run's owner file: which attempt, of which process, owns the run."""

from __future__ import annotations

import functools
import os
import secrets
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from headway.core.coordination.lease import OWNER_FILE, RECORD_BYTES
from headway.core.files.foreign import SETTINGS_BYTES, parse_json, read_bytes
from headway.core.machine.system import host_name


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
        return parse_owner(read_bytes(run / OWNER_FILE, SETTINGS_BYTES))
    except OSError:
        return None


def parse_owner(content: bytes) -> Owner | None:
    """Return the owner in the content of an owner file; None if it holds none."""
    return _parse(content[:RECORD_BYTES])


@functools.lru_cache(maxsize=4)  # parsed at every step, and nearly always the same record
def _parse(record: bytes) -> Owner | None:
    try:
        return Owner(**parse_json(record))
    except (ValueError, TypeError):
        return None
