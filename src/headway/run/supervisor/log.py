"""The log of an attempt's supervisor."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from pathlib import Path

from headway.core.credentials.secrets import redact

#: How long to wait for a line to be written. It usually takes microseconds; meanwhile signals arrive and workers hang.
_SECONDS = 1.0


class SupervisorLog:
    """A log whose lines wait in memory while its disk hangs, and are lost if it is full.

    A supervisor that waits in the kernel passes no signal on. So a thread writes, and ends when it is done: a process
    with another thread cannot be copied into the next attempt process (`processes.can_be_copied`).
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: deque[str] = deque()
        self._thread: threading.Thread | None = None

    def write(self, text: str) -> None:
        """Append a line. Only one thread may call this."""
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
            # Opened for each line: opening a file on a hanging disk waits, too.
            with suppress(OSError), self._path.open("ab", buffering=0) as file:
                file.write(f"{line}\n".encode())
