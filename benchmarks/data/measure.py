"""Running other programs as whole processes: wall time, processor time, and the memory of all their processes."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Measured:
    """What one process, with all that it started, took."""

    status: int
    seconds: float
    """Wall time from before the process exists until it is gone."""
    user: float
    """Processor seconds of it and of all its descendants."""
    system: float
    peak_rss: int | None
    """Largest sum of resident bytes over all its processes, when that was sampled. Pages that processes share count
    once for each, so it is an upper bound."""
    output: str
    """What it said, both streams."""


def run(
    command: Sequence[str],
    *,
    log: Path,
    environment: Mapping[str, str] | None = None,
    sample_every: float | None = None,
    limit: float = 3600.0,
) -> Measured:
    """Run a command to its end in a process group of its own.

    Args:
        command: Program and arguments.
        log: File for what it says.
        environment: Added to this process's.
        sample_every: Seconds between looks at its memory; None when only time is wanted, so that nothing disturbs it.
        limit: Seconds after which the whole group is killed.
    """
    _adopt_orphans()
    with log.open("wb") as stream:
        os.sync()  # what others left to be written is not this one's work
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.perf_counter()
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            # An installed package has bytecode: the first run, which is not timed, writes it.
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "", **(environment or {})},
            start_new_session=True,
        )
        sampler = _Sampler(child.pid, sample_every) if sample_every else None
        timer = threading.Timer(limit, _kill_group, [child.pid])
        timer.start()
        try:
            status = child.wait()
        except BaseException:
            _kill_group(child.pid)
            raise
        finally:
            timer.cancel()
        seconds = time.perf_counter() - started
    peak = sampler.stop() if sampler else None
    _wait_for_orphans(child.pid)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    return Measured(status, seconds, user, system, peak, log.read_text("utf-8", "replace"))


def _adopt_orphans() -> None:
    """Processes whose parent ends become ours (prctl(2), PR_SET_CHILD_SUBREAPER), so that their time is counted."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def _wait_for_orphans(group: int) -> None:
    """Let helpers that a process leaves behind (trackers of multiprocessing) end, and end those that do not."""
    deadline = time.monotonic() + 5
    with suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.01)
        _kill_group(group)
        os.waitpid(-1, 0)


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


class _Sampler:
    """Watches the memory of a process and of all its descendants, in a thread."""

    def __init__(self, pid: int, every: float) -> None:
        self._process, self._every = psutil.Process(pid), every
        self._peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(self._every):
            try:
                family = [self._process, *self._process.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            self._peak = max(self._peak, sum(map(_resident, family)))

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return self._peak


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0
