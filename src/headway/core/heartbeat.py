"""What a worker is doing, told to its supervisor through a small file that both have in memory.

A beat is a few stores to memory: no system call, no lock, nothing that waits. The supervisor reads the same page
whatever the worker is stuck in. A beat takes about 2 microseconds (CPython 3.11), and 1 without a file
(`open_heartbeat`): that is the look for an ordered fault.

On Linux the page is in no file system: at its path is a link to a file in the worker's memory. A disk that hangs would
have a store wait for it, and one that breaks would end the worker by SIGBUS. Elsewhere it is a file there, and where
files cannot be shared in memory (some FUSE and 9p mounts), a beat is a write.

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

from headway.core.faults import fault_point
from headway.core.files import file_in_memory, is_at
from headway.core.foreign import open_regular, read_bytes

_LAYOUT = struct.Struct("<8sqqqqqqqqqqqqq48s48s")
_MAGIC = b"HWBEAT2\0"
_FILE_BYTES = 4096


class Phase(IntEnum):
    """What a worker does."""

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
    """Only where it can be told from the forward pass: stages of a pipeline go to and fro between the two."""

    def __str__(self) -> str:
        return _WORDS[self]


_WORDS = ("starting", "waiting for data", "forward and backward", "summing gradients", "update", "recording",
          "evaluation", "checkpoint", "ending", "backward")  # fmt: skip

#: The phases as fault points; a member's name is worked out at every look, for half a microsecond.
_POINTS = tuple(phase.name.lower() for phase in Phase)

#: Phases whose time is the worker's own, less what it waits for others. On a GPU the sum of gradients is waited for by
#: whatever comes after it, so that phase is nobody's own.
_OF_A_STEP = frozenset((Phase.DATA, Phase.COMPUTE, Phase.BACKWARD, Phase.UPDATE, Phase.RECORD))


class Exchange(NamedTuple):
    """One of those that a worker has marked by `exchanging`."""

    number: int
    """From 1, as this worker counts them in this attempt; 0 for none."""
    name: str

    def __str__(self) -> str:
        return f"{self.number} ({self.name})"


_NO_EXCHANGE = Exchange(0, "")


@dataclass(frozen=True)
class Reading:
    """A worker's page as it was at one moment."""

    pid: int
    phase: Phase
    step: int
    """Finished steps."""
    beat_seconds: float
    """When the last beat was."""
    phase_seconds: float
    """When the phase began."""
    collectives: int
    """Exchanges of all workers that were begun; equal numbers are the same exchange."""
    waits_for: str
    """The exchange that goes on; empty between exchanges."""
    own_seconds: float
    """Spent so far in steps without waiting for others."""
    data_seconds: float
    """The part of `own_seconds` in which it waited for data."""
    first_step: int
    """Finished steps when this worker began; -1 before it knows."""
    steps_seconds: float
    """When the newest step was finished; 0 before the first."""
    begun: Exchange = _NO_EXCHANGE
    """The last exchange that it began, with all workers or some."""
    finished: Exchange = _NO_EXCHANGE
    """The last one that it finished; one that an error has ended is not."""

    @property
    def has_finished_a_step(self) -> bool:
        """In this attempt. Not told from the step's number, which a rollback may take to before the attempt's first."""
        return self.steps_seconds > 0


class Heartbeat:
    """The worker's side.

    Args:
        path: Where it is found; made anew.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._page = _page_in_memory(path) or _page_on_disk(path)
        now = time.monotonic_ns()
        self._pid = os.getpid()  # a system call, and a beat makes none
        self._phase, self._step, self._first_step = Phase.START, 0, -1
        self._phase_ns = self._mark_ns = now
        self._collectives = self._begun = self._finished = 0
        self._waits, self._begun_name, self._finished_name = False, b"", b""
        self._own_ns = self._data_ns = self._steps_ns = 0
        self._write(now)

    def beat(self, phase: Phase, step: int | None = None) -> None:
        """Still alive, in a phase; with the number of finished steps where that is news."""
        now = time.monotonic_ns()
        self._count(now)
        if phase != self._phase:
            self._phase, self._phase_ns = phase, now
        if step is not None:
            if self._first_step < 0:
                self._first_step = step
            elif step > self._step:
                self._steps_ns = now
            self._step = step
        self._write(now)

    def begin(self, exchange: str, everyone: bool) -> None:
        """About to wait for other workers, or for all of them."""
        now = time.monotonic_ns()
        self._count(now)
        self._collectives += everyone
        self._begun += 1
        self._waits, self._begun_name = True, exchange.encode()[:48]
        self._write(now)

    def end(self, finished: bool = True) -> None:
        """They have come, or the exchange has ended in an error."""
        self._mark_ns = now = time.monotonic_ns()
        self._waits = False
        if finished:
            self._finished, self._finished_name = self._begun, self._begun_name
        self._write(now)

    @property
    def step(self) -> int:
        """Finished steps."""
        return self._step

    @property
    def phase(self) -> Phase:
        """As last told."""
        return self._phase

    def _count(self, now: int) -> None:
        if self._phase in _OF_A_STEP and not self._waits:
            self._own_ns += now - self._mark_ns
            if self._phase == Phase.DATA:
                self._data_ns += now - self._mark_ns
        self._mark_ns = now

    def _write(self, now: int) -> None:
        # Not `pack_into`, which fills the place with zeros first: a supervisor that reads them takes the worker for one
        # that has been silent since the machine started. So a reader finds every number as it was or as it is.
        self._page[: _LAYOUT.size] = _LAYOUT.pack(
            _MAGIC, self._pid, self._phase, self._step, now, self._phase_ns, self._collectives,
            self._own_ns, self._data_ns, self._first_step, self._steps_ns,
            self._begun, self._finished, self._waits, self._begun_name, self._finished_name,
        )  # fmt: skip


def _page_in_memory(path: Path) -> mmap.mmap | None:
    """A page that no disk has, and a link to it, which leads nowhere once this process is gone; None where such a page
    or such a link cannot be made."""
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
    """Its bytes are really written, since a page without a place on a full disk would end the process at a store."""
    path.write_bytes(bytes(_FILE_BYTES))
    with path.open("r+b") as file:
        try:
            return mmap.mmap(file.fileno(), _FILE_BYTES)
        except OSError:
            return _WrittenPage(path)


class _WrittenPage:
    """Stands for a page that cannot be shared in memory."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)

    def __setitem__(self, place: slice, content: bytes) -> None:
        with suppress(OSError):  # one that is lost does no harm; the supervisor judges a worker's silence
            os.pwrite(self._file, content, place.start or 0)


def read_heartbeat(page: Path | int) -> Reading | None:
    """The supervisor's side; None when there is no page, or no beat in it yet.

    Args:
        page: Its path, or a descriptor, which can be read when the worker is gone, too.
    """
    try:
        content = os.pread(page, _LAYOUT.size, 0) if isinstance(page, int) else read_bytes(page)[: _LAYOUT.size]
        magic, pid, phase, step, beat, since, collectives, own, data, first, steps, *exchanges = _LAYOUT.unpack(content)
    except (OSError, struct.error):
        return None
    if magic != _MAGIC or not 0 <= phase < len(_WORDS):
        return None
    begun, finished, waits, begun_name, finished_name = exchanges
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
    )


def why_unreadable(page: Path) -> str:
    """What keeps who asks from a page that is there, as the end of a sentence; empty where nothing does."""
    try:
        if os.path.lexists(page):
            open_regular(page).close()
    except OSError as error:
        return f"; its heartbeat cannot be opened ({error.strerror or error}: {page})"
    return ""


def _text(name: bytes) -> str:
    return name.rstrip(b"\0").decode(errors="replace")


class Observer(Protocol):
    """Hears in the worker itself what it does, as a profile wants to know."""

    def phase(self, phase: Phase) -> None:
        """A phase begins, and the one before has ended; the same one again is a new one."""
        ...

    def waits(self, exchange: str) -> None:
        """It waits for other workers from now on."""
        ...

    def goes_on(self) -> None:
        """They have come."""
        ...


_heartbeat: Heartbeat | None = None
_observer: Observer | None = None
_step = 0


def open_heartbeat(path: Path) -> None:
    """Tell from now on what this process does, in this file.

    Raises:
        OSError: it cannot be made.
    """
    global _heartbeat
    _heartbeat = Heartbeat(path)


def observe(observer: Observer | None) -> None:
    """Tell an observer from now on, or nobody. Without one that costs a comparison per beat."""
    global _observer
    _observer = observer


def beat(phase: Phase, step: int | None = None) -> None:
    """Still alive, in a phase; `step` is the number of finished steps.

    A phase is a fault point too, addressed by its name and that number: `kill@backward=7:2` is the second micro-batch
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
    """Still alive, in the phase that was told last, and waiting for something that gets on."""
    if _heartbeat is not None:
        _heartbeat.beat(_heartbeat.phase)


def current_step() -> int | None:
    """Finished steps, as last told; None when nobody is told."""
    return None if _heartbeat is None else _heartbeat.step


class exchanging:
    """Marks a block in which this worker waits for others. A class, since a generator would cost five times as much.

    Args:
        name: Of the exchange, in words.
        everyone: All workers take part, each as often as the others.
        observed: An observer is told. Not where the worker waits for its own device too, which is at work meanwhile.
    """

    __slots__ = ("_everyone", "_name", "_observed")

    def __init__(self, name: str, everyone: bool = False, observed: bool = True) -> None:
        self._name, self._everyone, self._observed = name, everyone, observed

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
