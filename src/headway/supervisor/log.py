"""The log of what a supervisor says of an attempt."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from pathlib import Path

from headway.core.secrets import redact

#: So long a line is waited for. It takes microseconds, and signals come and workers hang meanwhile.
_SECONDS = 1.0


class SupervisorLog:
    """Its lines wait in memory while its disk hangs, and are lost where that is full: a supervisor that waits in the
    kernel passes no signal on.

    A thread writes, and ends when it has: who has another thread cannot be copied into the next attempt's first
    process (`supervise.processes.can_be_copied`), and would have to start one anew.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: deque[str] = deque()
        self._thread: threading.Thread | None = None

    def write(self, text: str) -> None:
        """Append a line; for one thread."""
        self._waiting.append(redact(text))
        while self._waiting:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._write, name="headway-supervisor-log", daemon=True)
                self._thread.start()
            self._thread.join(_SECONDS)
            if self._thread.is_alive():
                break

    def _write(self) -> None:
        while self._waiting:
            line = self._waiting.popleft()
            # Opened each time: to open a file on such a disk waits too.
            with suppress(OSError), self._path.open("ab", buffering=0) as file:
                file.write(f"{line}\n".encode())
