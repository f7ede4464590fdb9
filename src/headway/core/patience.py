"""Writing to a disk that may hang, for who must not hang with it."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import IO

#: So long a write is waited for. It takes microseconds, and a busy disk is not to be taken for one that hangs.
_SECONDS = 1.0


class Patiently:
    """Has something done again and again, in a thread of its own, and waits for it each time, but not for long.

    A call of the kernel that waits for a disk can neither be given a time limit nor be given up.

    Args:
        action: What; it must not raise.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._asked: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self) -> bool:
        """Whether it has been done. While it hangs that is said at once, and it is not ordered again."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="headway-patience", daemon=True)
            self._thread.start()
        elif not self.idle:
            return False
        self._done.clear()
        self._asked.put(None)
        return self._done.wait(_SECONDS)

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return self._thread is None or self._done.is_set()

    def _work(self) -> None:
        while True:
            self._asked.get()
            self._action()
            self._done.set()


class PatientLog:
    """A log file whose lines wait in memory while its disk hangs, and are lost where that is full.

    Args:
        file: Unbuffered.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._waiting: deque[bytes] = deque()
        self._write_waiting = Patiently(self._write)

    def write(self, line: bytes) -> None:
        """Append a line."""
        self._waiting.append(line)
        self._write_waiting()

    def _write(self) -> None:
        while self._waiting:
            with suppress(OSError, ValueError):  # full, or closed
                self._file.write(self._waiting.popleft())
