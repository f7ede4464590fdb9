"""Heartbeats: a worker reports to its supervisor what it is doing, through a small page of shared memory.

A beat is a few stores to memory: no system call, no lock, nothing that blocks. The supervisor can read the page
whatever the worker is stuck in. A beat takes about 2 microseconds (CPython 3.11). Without a file (`open_heartbeat`) it
takes 1, for the fault point.

On Linux the page lies in no file system: its path is a link to a file in the worker's memory. On a disk that hangs a
store could block, and on a disk that breaks SIGBUS would end the worker. On other systems the page is a mapped file.
Where files cannot be mapped (some FUSE and 9p mounts), a beat is a write.

Times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol

from headway.core.files.foreign import open_regular, read_bytes
from headway.core.files.locks import is_at
from headway.core.files.scratch import file_in_memory
from headway.core.process.faults import fault_point

_LAYOUT = struct.Struct("<8sqqqqqqqqqqqqqqq48s48s")
_MAGIC = b"HWBEAT3\0"
_FILE_BYTES = 4096


class Phase(IntEnum):
    """The phase that a worker is in."""

    START = 0
    DATA = 1
    COMPUTE = 2
    REDUCE = 3
    UPDATE = 4
    RECORD = 5
    EVALUATION = 6
    CHECKPOINT = 7
    END = 8
    BACKWARD = 9
    """Only where it is separate from the forward pass: stages of a pipeline alternate between the two."""

    def __str__(self) -> str:
        return _WORDS[self]


_WORDS = ("starting", "waiting for data", "forward and backward", "summing gradients", "update", "recording",
          "evaluation", "checkpoint", "ending", "backward")  # fmt: skip

#: The phases as fault points, computed once: reading an enum member's name costs half a microsecond.
_POINTS = tuple(phase.name.lower() for phase in Phase)

#: Phases whose time counts as the worker's own, apart from its waits for other workers. REDUCE is not among them: on a
#: GPU the wait for the sum of gradients falls into whatever phase follows.
_OF_A_STEP = frozenset((Phase.DATA, Phase.COMPUTE, Phase.BACKWARD, Phase.UPDATE, Phase.RECORD))


class Exchange(NamedTuple):
    """An exchange with other workers, as marked by `exchanging`."""

    number: int
    """Count of this worker in this attempt, from 1; 0 for none."""
    name: str

    def __str__(self) -> str:
        return f"{self.number} ({self.name})"


_NO_EXCHANGE = Exchange(0, "")


@dataclass(frozen=True)
class Reading:
    """A snapshot of a worker's page."""

    pid: int
    phase: Phase
    step: int
    """Finished steps."""
    beat_seconds: float
    """Time of the last beat."""
    phase_seconds: float
    """Time at which the phase began."""
    collectives: int
    """Number of begun exchanges among all workers; workers with equal numbers are in the same exchange."""
    waits_for: str
    """Name of the exchange in progress; empty between exchanges."""
    own_seconds: float
    """Time spent in steps so far, without waits for other workers."""
    data_seconds: float
    """Part of `own_seconds` that was spent waiting for data."""
    first_step: int
    """Finished steps when this worker started; -1 until it reports them."""
    steps_seconds: float
    """Time at which the newest step finished; 0 before the first."""
    begun: Exchange = _NO_EXCHANGE
    """The last exchange that it began, with all or some workers."""
    finished: Exchange = _NO_EXCHANGE
    """The last exchange that it finished; one that ended in an error does not count."""
    failed_saves: int = 0
    """Checkpoints that could not be saved in this attempt. Only the first worker counts them."""
    failed_saves_in_row: int = 0
    """Those since the last one that was saved."""

    @property
    def has_finished_a_step(self) -> bool:
        """Whether the worker has finished a step in this attempt.

        The step's number does not show it: a rollback may go back to before the first step of the attempt.
        """
        return self.steps_seconds > 0


class Heartbeat:
    """The worker's side of the page.

    Args:
        path: Path of the page; an old one is replaced.

    Raises:
        OSError: it cannot be created.
    """

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._page = _page_in_memory(path) or _page_on_disk(path)
        now = time.monotonic_ns()
        self._pid = os.getpid()  # kept, since a beat makes no system call
        self._phase = Phase.START
        self._step = 0
        self._first_step = -1
        self._phase_ns = self._mark_ns = now
        self._collectives = self._begun = self._finished = 0
        self._waits = False
        self._begun_name = b""
        self._finished_name = b""
        self._own_ns = self._data_ns = self._steps_ns = 0
        self._failed_saves = self._failed_saves_in_row = 0
        self._write(now)

    def beat(self, phase: Phase, step: int | None = None) -> None:
        """Report the phase, and the number of finished steps if it changed."""
        now = time.monotonic_ns()
        self._count(now)
        if phase != self._phase:
            self._phase = phase
            self._phase_ns = now
        if step is not None:
            if self._first_step < 0:
                self._first_step = step
            elif step > self._step:
                self._steps_ns = now
            self._step = step
        self._write(now)

    def count_failed_saves(self, total: int, in_row: int) -> None:
        """Report how many saves have failed, in this attempt and since the last one that succeeded."""
        self._failed_saves = total
        self._failed_saves_in_row = in_row
        self.beat(self._phase)

    def begin(self, exchange: str, everyone: bool) -> None:
        """Report that this worker begins an exchange, with all workers or with some."""
        now = time.monotonic_ns()
        self._count(now)
        self._collectives += everyone
        self._begun += 1
        self._waits, self._begun_name = True, exchange.encode()[:48]
        self._write(now)

    def end(self, finished: bool = True) -> None:
        """Report that the exchange has finished, or has ended in an error."""
        self._mark_ns = now = time.monotonic_ns()
        self._waits = False
        if finished:
            self._finished = self._begun
            self._finished_name = self._begun_name
        self._write(now)

    @property
    def step(self) -> int:
        """Finished steps."""
        return self._step

    @property
    def phase(self) -> Phase:
        """The phase that was reported last."""
        return self._phase

    def _count(self, now: int) -> None:
        if self._phase in _OF_A_STEP and not self._waits:
            self._own_ns += now - self._mark_ns
            if self._phase == Phase.DATA:
                self._data_ns += now - self._mark_ns
        self._mark_ns = now

    def _write(self, now: int) -> None:
        # Not `pack_into`, which zeroes the target first: to a supervisor that reads zeros, the worker would look silent
        # since the start of the machine. This way a reader finds either the old or the new numbers.
        self._page[: _LAYOUT.size] = _LAYOUT.pack(
            _MAGIC, self._pid, self._phase, self._step, now, self._phase_ns, self._collectives,
            self._own_ns, self._data_ns, self._first_step, self._steps_ns,
            self._begun, self._finished, self._waits, self._failed_saves, self._failed_saves_in_row,
            self._begun_name, self._finished_name,
        )  # fmt: skip


def _page_in_memory(path: Path) -> mmap.mmap | None:
    """Create a page in memory and a link to it, which dangles once this process has ended.

    Returns:
        None where such a page or such a link cannot be created.
    """
    made = file_in_memory("headway-heartbeat")
    if made is None:
        return None
    file, target = made
    try:
        os.ftruncate(file, _FILE_BYTES)
        page = mmap.mmap(file, _FILE_BYTES)
        path.symlink_to(target)
        if not is_at(path, file):  # on a mount without symbolic links (nosymfollow)
            raise OSError
    except OSError:
        path.unlink(missing_ok=True)
        os.close(file)
        return None
    return page


def _page_on_disk(path: Path) -> mmap.mmap | _WrittenPage:
    """Map a file as the page. Its bytes are written first: without space on the disk, a store would raise SIGBUS."""
    path.write_bytes(bytes(_FILE_BYTES))
    with path.open("r+b") as file:
        try:
            return mmap.mmap(file.fileno(), _FILE_BYTES)
        except OSError:
            return _WrittenPage(path)


class _WrittenPage:
    """A substitute for a page that cannot be mapped: every beat is a write."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)

    def __setitem__(self, place: slice, content: bytes) -> None:
        with suppress(OSError):  # a lost beat does no harm: the supervisor reacts to long silence only
            os.pwrite(self._file, content, place.start or 0)


def read_heartbeat(page: Path | int) -> Reading | None:
    """Read a worker's page, on the supervisor's side; None when there is no page, or no beat in it yet.

    Args:
        page: Its path, or a descriptor, which stays readable after the worker has ended.
    """
    try:
        content = os.pread(page, _LAYOUT.size, 0) if isinstance(page, int) else read_bytes(page)[: _LAYOUT.size]
        magic, pid, phase, step, beat, since, collectives, own, data, first, steps, *exchanges = _LAYOUT.unpack(content)
    except (OSError, struct.error):
        return None
    if magic != _MAGIC or not 0 <= phase < len(_WORDS):
        return None
    begun, finished, waits, failed_saves, failed_in_row, begun_name, finished_name = exchanges
    last = Exchange(begun, _text(begun_name))
    return Reading(
        pid=pid,
        phase=Phase(phase),
        step=step,
        beat_seconds=beat / 1e9,
        phase_seconds=since / 1e9,
        collectives=collectives,
        waits_for=last.name if waits else "",
        own_seconds=own / 1e9,
        data_seconds=data / 1e9,
        first_step=first,
        steps_seconds=steps / 1e9,
        begun=last,
        finished=Exchange(finished, _text(finished_name)),
        failed_saves=failed_saves,
        failed_saves_in_row=failed_in_row,
    )


def why_unreadable(page: Path) -> str:
    """Return why an existing page cannot be opened, as the end of a sentence; empty if it can."""
    try:
        if os.path.lexists(page):
            open_regular(page).close()
    except OSError as error:
        return f"; its heartbeat cannot be opened ({error.strerror or error}: {page})"
    return ""


def _text(name: bytes) -> str:
    return name.rstrip(b"\0").decode(errors="replace")


class Observer(Protocol):
    """Receives the beats within the worker itself, for profiles."""

    def phase(self, phase: Phase) -> None:
        """Handle the begin of a phase, which ends the previous one; an equal phase counts as a new one."""
        ...

    def waits(self, exchange: str) -> None:
        """Handle the begin of a wait for other workers."""
        ...

    def goes_on(self) -> None:
        """Handle the end of a wait for other workers."""
        ...


_heartbeat: Heartbeat | None = None
_observer: Observer | None = None
_step = 0


def open_heartbeat(path: Path) -> None:
    """Write the beats of this process to a page at this path from now on.

    Raises:
        OSError: it cannot be created.
    """
    global _heartbeat
    _heartbeat = Heartbeat(path)


def observe(observer: Observer | None) -> None:
    """Set the observer of this process's beats; None removes it. Without one a beat costs one comparison more."""
    global _observer
    _observer = observer


def beat(phase: Phase, step: int | None = None) -> None:
    """Report that this process is alive and in a phase; `step` is the number of finished steps.

    A phase is also a fault point, addressed by its name and that number: `kill@backward=7:2` is the second micro-batch
    of the step after the seventh.
    """
    global _step
    _step = _step if step is None else step
    if _heartbeat is not None:
        _heartbeat.beat(phase, step)
    if _observer is not None:
        _observer.phase(phase)
    fault_point(_POINTS[phase], _step)


def keep_beating() -> None:
    """Report that this process is alive, in the last phase, and waits for something that makes progress."""
    if _heartbeat is not None:
        _heartbeat.beat(_heartbeat.phase)


def report_failed_saves(total: int, in_row: int) -> None:
    """Report failed saves to readers of this process's page, which need no disk for it; nothing without a page."""
    if _heartbeat is not None:
        _heartbeat.count_failed_saves(total, in_row)


def current_step() -> int | None:
    """Return the number of finished steps as last reported; None when this process has no heartbeat."""
    return None if _heartbeat is None else _heartbeat.step


class exchanging:
    """Marks a block in which this worker waits for others. A class, since a generator would cost five times as much.

    Args:
        name: Name of the exchange.
        everyone: All workers take part, each as often as the others.
        observed: Report the wait to the observer. False where the worker also waits for its own device, which computes.
    """

    __slots__ = ("_everyone", "_name", "_observed")

    def __init__(self, name: str, everyone: bool = False, observed: bool = True) -> None:
        self._name = name
        self._everyone = everyone
        self._observed = observed

    def __enter__(self) -> None:
        if _heartbeat is not None:
            _heartbeat.begin(self._name, self._everyone)
        if _observer is not None and self._observed:
            _observer.waits(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _observer is not None and self._observed:
            _observer.goes_on()
        if _heartbeat is not None:
            _heartbeat.end(finished=kind is None)
