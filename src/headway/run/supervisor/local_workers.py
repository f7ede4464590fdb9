"""Worker processes on this machine: started, waited for and ended together.

PyTorch's elastic agent does this, too. But it listens on two ports of every interface, and unpickles data from its
rendezvous and from files of the temporary folder. Here the workers meet in a file in the memory of the process that
starts them, which only this user's processes can open.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.core.coordination.launched import RENDEZVOUS_VARIABLE, THREADS_VARIABLE, MachinePart, most_threads
from headway.core.files.foreign import read_json_lines
from headway.core.files.scratch import file_in_memory
from headway.core.process.command import module_command
from headway.core.process.signals import STOP_SIGNALS, handled, reset
from headway.core.process.tree import can_be_copied
from headway.core.process.variables import ONE_THREAD, with_variables
from headway.run.supervisor.worker import SPARE_VARIABLE

#: The time between looks at the workers, and the time that they may take to end when they are asked to.
_POLL_SECONDS = 0.05
_END_SECONDS = 30.0


@dataclass(frozen=True)
class WorkerEnd:
    """How a worker ended by itself."""

    rank: int
    code: int
    """The exit code, negative for a signal."""


class WorkersFailed(Exception):
    """A worker ended with an error, and the others were ended because of it.

    Args:
        ends: The ends seen so far, in that order.
        records: Errors that workers could not write to the run's disk.
    """

    def __init__(self, ends: list[WorkerEnd], records: list[dict[str, Any]]) -> None:
        self.ends = ends
        self.records = records
        super().__init__(f"worker {self.first.rank} ended with {self.first.code}")

    @property
    def killed(self) -> WorkerEnd | None:
        """The end of the first worker that was killed from outside, not by its own error or by this process."""
        return next((end for end in self.ends if end.code < 0), None)

    @property
    def first(self) -> WorkerEnd:
        """The most informative end: that of a killed worker, or the first one seen."""
        return self.killed or self.ends[0]


class WorkersStopped(Exception):
    """This process received a stop signal, and passed it on to the workers."""

    def __init__(self, number: signal.Signals) -> None:
        self.signal = number
        super().__init__(f"stopped by {number.name}")


@dataclass(frozen=True)
class _Process:
    """A worker process, however it was started."""

    pid: int
    poll: Callable[[], int | None]
    """Returns its exit code, negative for a signal; None while it runs."""


@dataclass
class _Workers:
    """The started workers, by rank."""

    first_rank: int = 0
    processes: list[_Process] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)

    def look(self) -> list[WorkerEnd]:
        """Return the ends that were not seen before."""
        running = [(rank, process) for rank, process in self._ranked() if rank not in self.codes]
        ends = [WorkerEnd(rank, code) for rank, process in running if (code := process.poll()) is not None]
        self.codes.update({end.rank: end.code for end in ends})
        return ends

    def _ranked(self) -> Iterable[tuple[int, _Process]]:
        return enumerate(self.processes, self.first_rank)

    @property
    def all_ended(self) -> bool:
        return len(self.codes) == len(self.processes)

    def end(self, number: signal.Signals) -> None:
        """Send a signal to the running workers, and kill those that still run half a minute later."""
        for then, seconds in ((number, _END_SECONDS), (signal.SIGKILL, _END_SECONDS)):
            self.look()
            for rank, process in self._ranked():
                if rank not in self.codes:  # its process number is not reused until its end is seen here
                    os.kill(process.pid, then)
            until = time.monotonic() + seconds
            while not self.all_ended and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
                self.look()


def start_workers(
    workers: int,
    folder: Path,
    variables: Mapping[str, str],
    module: str,
    *arguments: str,
    load: Callable[[], object] = lambda: None,
    ends_workers_on: Iterable[signal.Signals] = STOP_SIGNALS,
    part: MachinePart | None = None,
) -> None:
    """Run a module's `main` in several worker processes, and wait for all of them.

    Where that is safe, the workers are copies of this process, which loads PyTorch once for all of them. Otherwise they
    are separate programs with the module path of this process.

    Args:
        folder: For files that the processes share, where these cannot be in memory.
        variables: Added to the environment of the processes.
        load: Called in a process that will be copied, to load what all copies need.
        ends_workers_on: Signals that are passed on to the processes; those that still run 30 s later are killed.
        part: The workers are only some of all, since other machines have workers, too.

    Raises:
        WorkersFailed: a process ended with an error; the others were ended.
        WorkersStopped: this process received a stop signal, and passed it on.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it were ignored, the ends of children would be lost
    with with_variables(ONE_THREAD):
        importlib.import_module(module)
        copied = can_be_copied()
        if copied:
            load()
    gc.freeze()  # a collection in a copy would write to these pages, and so duplicate them
    received: list[int] = []
    with (
        _shared_file(folder, "rendezvous") as rendezvous,
        _shared_file(folder, "reasons") as reasons,
        # Before the first worker exists: a signal must not arrive while its number is unknown.
        handled((signal.SIGQUIT, *ends_workers_on), lambda number, frame: received.append(number)),
    ):
        # Workers set their own number of threads; this keeps libraries from starting one per core until then.
        common = {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            THREADS_VARIABLE: os.environ.get(THREADS_VARIABLE, os.environ.get("OMP_NUM_THREADS", "")),
            "WORLD_SIZE": str(workers),
            "LOCAL_WORLD_SIZE": str(workers),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),  # as torchrun
            **({RENDEZVOUS_VARIABLE: str(rendezvous)} if part is None else part.worker_variables()),
            SPARE_VARIABLE: str(reasons),
            **variables,
        }
        first = part.first_rank if part is not None else 0
        started = _Workers(first)
        try:
            for rank in range(workers):
                environment = {**common, "RANK": str(first + rank), "LOCAL_RANK": str(rank)}
                start = _start_copy if copied else _start_program
                started.processes.append(start(environment, module, arguments))
            ends = _wait(started, received)
        except BaseException:
            started.end(signal.SIGTERM)
            raise
        if received:
            stop = signal.Signals(received[0])
            started.end(stop)
            raise WorkersStopped(stop)
        if ends:
            started.end(signal.SIGTERM)
            raise WorkersFailed(ends, list(read_json_lines(reasons)))


def _wait(started: _Workers, received: list[int]) -> list[WorkerEnd]:
    """Wait until all workers have ended, one has failed, or a signal received; return the failures."""
    while not received and not started.all_ended:
        if ends := [end for end in started.look() if end.code]:
            return ends
        if not started.all_ended:
            time.sleep(_POLL_SECONDS)
    return []


def _start_copy(environment: Mapping[str, str], module: str, arguments: tuple[str, ...]) -> _Process:
    # By `fork`: nothing is pickled, and no semaphore is created.
    process = multiprocessing.get_context("fork").Process(target=_run_copy, args=(environment, module, arguments))
    process.start()
    assert process.pid is not None, "it was started"
    return _Process(process.pid, lambda: process.exitcode)


def _start_program(environment: Mapping[str, str], module: str, arguments: tuple[str, ...]) -> _Process:
    command = module_command(module, *arguments)
    process = subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True)
    return _Process(process.pid, process.poll)


def _run_copy(environment: Mapping[str, str], module: str, arguments: tuple[str, ...]) -> None:
    """Do what an interpreter does that is started for the module, in a session of its own."""
    os.setsid()
    reset((*STOP_SIGNALS, signal.SIGQUIT))  # drop the handlers of the process that was copied
    os.environ.update(environment)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(most_threads() or 1)  # a separate program reads OMP_NUM_THREADS at its start
    sys.argv = [module, *arguments]
    importlib.import_module(module).main()


@contextmanager
def _shared_file(folder: Path, name: str) -> Iterator[Path]:
    """Create an empty file that workers can read and write, in memory where possible."""
    made = file_in_memory(f"headway-{name}")
    if made is not None:
        descriptor, path = made
        try:
            yield path
        finally:
            os.close(descriptor)
        return
    path = folder / f".{name}-{os.getpid()}"
    path.touch(mode=0o600)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
