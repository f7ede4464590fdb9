"""Writes with a timeout, so that a hanging disk does not block the process."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import IO

#: Timeout of a write. A write takes microseconds, but a busy disk must not count as a hanging one.
_SECONDS = 1.0
#: Timeout of the last write; what is not written by then is lost.
_END_SECONDS = 10.0

_Action = Callable[[], object]


class TimeoutWriter:
    """Runs actions one after the other in a thread, and waits a limited time for each.

    A system call that waits for a disk has no timeout and cannot be cancelled. An `OSError` of an action is ignored; an
    action that needs it must catch it itself. Actions must not raise other errors.
    """

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._ended = False
        self._late: threading.Lock | None = None
        self._late_since = 0.0
        self._begun: threading.Lock | None = None
        self._asked: queue.SimpleQueue[tuple[_Action, threading.Lock] | None] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(self._asked,), name="headway-timeout-writer", daemon=True).start()

    def __call__(self, action: _Action) -> bool:
        """Run an action and return whether it has finished in time.

        Behind an action that hangs it is queued, and the call returns at once.
        """
        return not self._ended and self._wait(self._ask(action))

    def begin(self, action: _Action) -> bool:
        """Queue an action, wait for the previous one begun here instead, and return whether that has finished.

        Switching to the thread and back takes as long as many writes, so the wait overlaps with other work.
        """
        self._restart_after_fork()
        is_done = self._begun is None or self._wait(self._begun)
        self._begun = None if self._ended else self._ask(action)
        return is_done

    def _wait(self, done: threading.Lock) -> bool:
        began = time.monotonic()
        if self.late_seconds:
            return not done.locked()
        if done.acquire(timeout=_SECONDS):
            return True
        self._late = done
        self._late_since = began
        return False

    @property
    def late_seconds(self) -> float:
        """Seconds since the start of an action that has exceeded its timeout and still runs; 0 when there is none."""
        return time.monotonic() - self._late_since if self._late is not None and self._late.locked() else 0.0

    def end(self, action: _Action) -> bool:
        """Run a last action with a longer timeout, and return whether it has finished. Call this once."""
        done = self._ask(action)
        self._asked.put(None)
        self._ended = True
        return done.acquire(timeout=_END_SECONDS)

    def _restart_after_fork(self) -> None:
        """Start a thread in a forked copy of the process: a fork copies no threads."""
        if self._pid != os.getpid():
            self._start()

    def _ask(self, action: _Action) -> threading.Lock:
        """Queue an action; return a lock that is released when it has finished."""
        self._restart_after_fork()
        done = threading.Lock()
        done.acquire()
        self._asked.put((action, done))
        return done


def _work(asked: queue.SimpleQueue[tuple[_Action, threading.Lock] | None]) -> None:
    for action, done in iter(asked.get, None):
        with suppress(OSError):
            action()
        done.release()


class TimeoutLog:
    """A log file whose lines wait in memory while its disk hangs, and are lost if the disk is full.

    Args:
        file: The unbuffered file.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._writer = TimeoutWriter()

    def write(self, line: bytes) -> None:
        """Append a line."""
        self._writer(partial(self._file.write, line))

    def close(self) -> None:
        """Close the file after the lines that wait."""
        self._writer.end(self._file.close)
