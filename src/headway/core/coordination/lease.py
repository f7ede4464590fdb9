"""The lease in a run's owner file: it tells readers on every machine whether the run lives, and how long its attempt
has run by a clock that nobody sets."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headway.core.files.foreign import SETTINGS_BYTES, as_number, open_regular, parse_json, read_bytes

OWNER_FILE = ".owner"
#: The owner's record is padded to this size, so that one write replaces a whole record, and a reader never sees parts
#: of two. Behind it lies the lease, of `_LEASE_BYTES`.
RECORD_BYTES = 512
_LEASE_BYTES = 128
#: How long a lease lasts. Its owner may be busy for a while, and clocks of machines differ by seconds.
_LASTS_SECONDS = 60.0


@dataclass(frozen=True)
class Lease:
    """Until when the owner of a run counts as alive."""

    attempt: int
    until: float
    """Unix seconds, by the owner's clock."""
    ran: float | None = None
    """For how many seconds the attempt had run when the lease was renewed, by a monotonic clock; None if unknown."""

    @property
    def is_valid(self) -> bool:
        """Whether it has not run out."""
        return time.time() < self.until

    def seconds_at(self, moment: float) -> float | None:
        """Return for how many seconds the attempt had run at a moment; None if unknown.

        Of the wall clock, which may have been set, counts only what it says of the time since the renewal, and of that
        no more than a lease lasts.

        Args:
            moment: Unix seconds.
        """
        if self.ran is None:
            return None
        return self.ran + min(max(0.0, moment - (self.until - _LASTS_SECONDS)), _LASTS_SECONDS)


def read_lease(run: Path) -> Lease | None:
    """Return the lease of the owner of a run; None if there is none, as of a run without a supervisor."""
    try:
        found = parse_json(read_bytes(run / OWNER_FILE, SETTINGS_BYTES)[RECORD_BYTES:])
        ran = as_number(found.get("ran"))
        return Lease(int(found["attempt"]), float(found["until"]), None if ran is None else max(0.0, ran))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None


def seconds_run(run: Path, attempt: int, moment: float) -> float | None:
    """Return for how many seconds an attempt without a recorded end had run at a moment, by a monotonic clock.

    Args:
        run: The run directory.
        attempt: Number of the attempt.
        moment: Unix seconds.

    Returns:
        None if the owner's lease is that of another attempt, or does not say.
    """
    lease = read_lease(run)
    return None if lease is None or lease.attempt != attempt else lease.seconds_at(moment)


def new_lease(attempt: int, ran: float) -> bytes:
    """Return a lease of an attempt that has run for some seconds; it begins now, and lies behind the owner's record."""
    until = round(time.time() + _LASTS_SECONDS, 3)
    return json.dumps({"attempt": attempt, "until": until, "ran": round(ran, 3)}).encode().ljust(_LEASE_BYTES)


def write_lease(owner_file: Path, attempt: int, ran: float) -> None:
    """Renew the lease. It is lost if the disk fails; then readers see what they see of a dead run."""
    # Opened anew: the lock's own file may be closed, and its number taken, before a hanging write is done.
    with suppress(OSError), open_regular(owner_file, "r+b") as file:
        os.pwrite(file.fileno(), new_lease(attempt, ran), RECORD_BYTES)
