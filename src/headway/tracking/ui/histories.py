"""Whole histories of runs, read once and then only what is new; those looked at longest ago are forgotten."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from headway.telemetry.metrics import FILE_NAME, Metrics, is_own
from headway.telemetry.record import as_int, as_time
from headway.telemetry.tail import JsonLinesTail
from headway.tracking.readings import Readings

#: Most values that are kept of all runs together: 16 bytes each.
_MOST_VALUES = 24_000_000


class _RunHistory:
    """The history of one run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tail = JsonLinesTail(path / FILE_NAME)
        self._readings = Readings(path, lag_seconds=0.0)
        self.metrics = Metrics()
        self.size = 0
        """Number of its values; other threads may ask for it at any time."""
        self.lock = threading.Lock()

    def refresh(self) -> None:
        """Read what is new; what cannot be read is as before."""
        with suppress(OSError):
            for begins_anew, records in self._tail.read():
                if begins_anew:
                    self.metrics = Metrics()
                    self._readings = Readings(self._path, lag_seconds=0.0)
                for record in records:
                    self.metrics.add({**record, **self._due(record)})
        self.size = self.metrics.size

    def _due(self, record: dict[str, Any]) -> dict[str, float]:
        """Return the readings of machines that a step's record takes along (`system/<machine>/...`)."""
        attempt = as_int(record.get("attempt"))
        moment = as_time(record.get("time"))
        if attempt is None or moment is None or not is_own(record):
            return {}
        return dict(self._readings.due(attempt, moment))


class Histories:
    """Histories by path.

    Args:
        most_values: Most values that are kept; the one that is read is kept whatever its size.
    """

    def __init__(self, most_values: int = _MOST_VALUES) -> None:
        self._most = most_values
        self._kept: OrderedDict[Path, _RunHistory] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    @contextmanager
    def read(self, path: Path) -> Iterator[Metrics]:
        """Give the history of a run directory as it stands; no other thread adds to it meanwhile."""
        with self._lock:
            history = self._kept.setdefault(path, _RunHistory(path))
            self._kept.move_to_end(path)
        with history.lock:
            history.refresh()
            yield history.metrics
        with self._lock:
            while len(self._kept) > 1 and sum(one.size for one in self._kept.values()) > self._most:
                self._kept.popitem(last=False)
