"""Processes that read and decode samples ahead, each named and replaced when it dies or hangs.

They are copies of the process that trains (`fork`), so nothing of a dataset has to be pickled. Jobs go round by turns,
and results come back in the order of the jobs; tensors come through shared memory. A job says which rows, by numbers,
so it can be given to another process again.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import signal
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import torch
import torch.multiprocessing  # lets connections send tensors through shared memory

from headway.core.console import warning
from headway.core.errors import DataError, HeadwayError
from headway.core.process.exit import die_with_parent
from headway.core.process.signals import STOP_SIGNALS, reset

#: Jobs that each process has at a time: one that it does, and one that is next.
_AHEAD = 2
#: A job is given to so many processes. More that die or hang over it are not by chance.
_TRIES = 2
_LOOK_SECONDS = 0.2

#: (job, function to call with the row of each sample before it is read) -> micro-batch
Read = Callable[[Any, Callable[[int], None]], Any]


@dataclass(frozen=True)
class _Failed:
    """An error that a process has met, in words: errors of others' classes may not survive the way."""

    what: str
    where: str | None
    fix: str | None
    is_data: bool
    trace: str


@dataclass
class _Process:
    """One of the processes, as the training process knows it."""

    number: int
    process: Any
    end: Connection
    jobs: deque[Any] = field(default_factory=deque)
    """What it was given, and has not answered."""


class DecodingProcesses:
    """Reads jobs with several processes; use it in a `with` block, at whose end they are gone.

    Args:
        read: What a process does.
        count: Number of processes.
        patience_seconds: How long one may take for a sample.
    """

    def __init__(self, read: Read, count: int, patience_seconds: float) -> None:
        self._read = read
        self._patience = patience_seconds
        self._context = multiprocessing.get_context("fork")
        # In memory that all share, without locks: the row that each reads (-1: none), and since when.
        self._rows = self._context.RawArray("q", [-1] * count)
        self._since = self._context.RawArray("d", count)
        self._tries: Counter[Hashable] = Counter()
        self._processes: list[_Process] = []
        for number in range(count):
            self._processes.append(self._start(number))

    def read(self, jobs: Iterable[Any]) -> Iterator[Any]:
        """Yield the results of jobs, in their order.

        Raises:
            DataError: a sample cannot be read, or ends every process that reads it.
        """
        waiting = iter(jobs)
        turns = cycle(range(len(self._processes)))
        given = deque[int]()
        for job in islice(waiting, _AHEAD * len(self._processes)):
            given.append(self._give(next(turns), job))
        while given:
            result = self._answer(given.popleft())
            for job in islice(waiting, 1):
                given.append(self._give(next(turns), job))
            yield result

    def _give(self, number: int, job: Any) -> int:
        process = self._processes[number]
        if not process.jobs:
            self._since[number] = time.monotonic()
        process.jobs.append(job)
        with suppress(OSError):  # it is gone, which shows when its answer is waited for
            process.end.send(job)
        return number

    def _answer(self, number: int) -> Any:
        """Wait for the answer to the oldest job of a process; replace the process if none comes."""
        while True:
            process = self._processes[number]
            try:
                if process.end.poll(_LOOK_SECONDS):
                    result = process.end.recv()
                    self._tries.pop(process.jobs.popleft(), None)
                    break
                if time.monotonic() - self._since[number] < self._patience:
                    continue
                how = f"has read for {self._patience:g} s"
            except (EOFError, OSError):
                process.process.join(_LOOK_SECONDS)
                code = process.process.exitcode
                how = f"died (signal {-code})" if code and code < 0 else f"died (exit code {code})"
            self._replace(process, how)
        if not isinstance(result, _Failed):
            return result
        kind = DataError if result.is_data else HeadwayError
        raise kind(result.what, where=result.where, fix=result.fix) from RuntimeError(f"\n{result.trace}")

    def _replace(self, process: _Process, how: str) -> None:
        """Start another process in the place of one, with the same jobs.

        Raises:
            DataError: too many have ended over this job.
        """
        row = self._rows[process.number]
        number = process.number
        over = "between two items" if row < 0 else f"over item {row} of the dataset"
        self._end(process)
        job = process.jobs[0]
        self._tries[job] += 1
        if self._tries[job] >= _TRIES:
            raise DataError(
                f"data process {number} {how} {over}, as the one before it did",
                where=over if row < 0 else f"item {row}",
                fix="repair or leave out that item; supervise.data_seconds says how long one may take (a third of it)",
            )
        warning(f"data process {number} (PID {process.process.pid}) {how} {over}; it is replaced")
        self._rows[number] = -1
        again = self._processes[number] = self._start(number)
        for one in process.jobs:
            self._give(number, one)
        assert again.jobs, "it has the jobs of the one before"

    def _start(self, number: int) -> _Process:
        self._since[number] = time.monotonic()
        ours, theirs = self._context.Pipe()
        others = [one.end for one in self._processes if one.number != number]
        process = self._context.Process(
            target=self._serve, args=(number, theirs, [ours, *others]), name=f"headway-data-{number}", daemon=True
        )
        process.start()
        theirs.close()
        return _Process(number, process, ours)

    def _serve(self, number: int, end: Connection, others: list[Connection]) -> None:
        """Do jobs until the other end is closed; runs in the process."""
        die_with_parent()
        reset((*STOP_SIGNALS, signal.SIGQUIT))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal
        torch.set_num_threads(1)
        for other in others:  # so that they close with the process that trains
            other.close()

        def begin(row: int) -> None:
            self._since[number] = time.monotonic()
            self._rows[number] = row

        while True:
            try:
                job = end.recv()
            except EOFError:
                return
            self._since[number] = time.monotonic()
            try:
                result = self._read(job, begin)
            except BaseException as error:
                result = _failure(error, self._rows[number])
            self._rows[number] = -1
            end.send(result)

    def _end(self, process: _Process) -> None:
        process.process.kill()
        process.process.join()
        process.end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            self._end(process)


def _failure(error: BaseException, row: int) -> _Failed:
    trace = traceback.format_exc()
    if isinstance(error, HeadwayError):
        return _Failed(error.what, error.where, error.fix, isinstance(error, DataError), trace)
    return _Failed(f"item {row} cannot be read: {type(error).__name__}: {error}", f"item {row}", None, False, trace)
