"""Writing to a disk that may hang, for who must not hang with it."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import IO

#: So long a write is waited for. It takes microseconds, and a busy disk is not to be taken for one that hangs.
_SECONDS = 1.0
#: The same at the end, when what is not written by then is lost.
_END_SECONDS = 10.0

_Action = Callable[[], object]


class TimeoutWriter:
    """Has things done one after the other, in a thread of its own, and waits for each, but not for long.

    A call of the kernel that waits for a disk can neither be given a time limit nor be given up. Errors of the disk are
    passed over: who wants to know them catches them in what is done, which must not raise others.
    """

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._pid, self._ended = os.getpid(), False
        self._late: threading.Lock | None = None
        self._late_since = 0.0
        self._begun: threading.Lock | None = None
        self._asked: queue.SimpleQueue[tuple[_Action, threading.Lock] | None] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(self._asked,), name="headway-patience", daemon=True).start()

    def __call__(self, action: _Action) -> bool:
        """Whether it has been done. Behind what hangs it is not waited for, and done when its turn comes."""
        return not self._ended and self._wait(self._ask(action))

    def begin(self, action: _Action) -> bool:
        """Have it done, and wait for what was begun before instead; whether that has been done. To wake a thread and to
        be woken by it takes as long as many a write."""
        self._be_of_this_process()
        is_done = self._begun is None or self._wait(self._begun)
        self._begun = None if self._ended else self._ask(action)
        return is_done

    def _wait(self, done: threading.Lock) -> bool:
        began = time.monotonic()
        if self.late_seconds:
            return not done.locked()
        if done.acquire(timeout=_SECONDS):
            return True
        self._late, self._late_since = done, began
        return False

    @property
    def late_seconds(self) -> float:
        """For how long something has been under way that is waited for no more; 0 when there is nothing."""
        return time.monotonic() - self._late_since if self._late is not None and self._late.locked() else 0.0

    def end(self, action: _Action) -> bool:
        """Have one thing done as the last one, and wait longer for it; whether it has been done. To be called once."""
        done = self._ask(action)
        self._asked.put(None)
        self._ended = True
        return done.acquire(timeout=_END_SECONDS)

    def _be_of_this_process(self) -> None:
        """A copy of a process has no copy of its thread, which does what was asked before."""
        if self._pid != os.getpid():
            self._start()

    def _ask(self, action: _Action) -> threading.Lock:
        """Returns what is unlocked when it has been done."""
        self._be_of_this_process()
        done = threading.Lock()
        done.acquire()
        self._asked.put((action, done))
        return done


def _work(asked: queue.SimpleQueue[tuple[_Action, threading.Lock] | None]) -> None:
    for action, done in iter(asked.get, None):
        with suppress(OSError):
            action()
        done.release()


class PatientLog:
    """A log file whose lines wait in memory while its disk hangs, and are lost where that is full.

    Args:
        file: Unbuffered.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._patiently = TimeoutWriter()

    def write(self, line: bytes) -> None:
        """Append a line."""
        self._patiently(partial(self._file.write, line))

    def close(self) -> None:
        """Close the file, behind the lines that wait."""
        self._patiently.end(self._file.close)
