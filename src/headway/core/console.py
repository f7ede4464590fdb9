"""What people see: notices, warnings, and progress with an ETA.

Notices and warnings are records of the standard library's logger `headway`, with this console as its handler:
`logging.getLogger("headway").addHandler(...)` lets any other handler listen, and its level and filters hold.

Everything goes to standard error, so that standard output holds only results (`--json`, generated text). Workers other
than the first are silent; their full logs are under the attempt's folder.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING

from headway.core.format import format_bytes, format_count, format_seconds, printable
from headway.core.secrets import redact
from headway.core.timeout_writer import PatientLog

if TYPE_CHECKING:
    import logging

    from typing_extensions import Buffer

_CLEAR = "\r\x1b[2K"
_WARNING = "warning: "
_LINES = "\n\t"
#: Invisible, and part of words in Persian and of pictures of several signs.
_JOINERS = "\u200c\u200d"

_log: IO[bytes] | PatientLog | None = None
_receiver: Callable[[str, bool], None] | None = None
_alert: Callable[[str], None] | None = None
_live = ""
_exact = False


@contextmanager
def log_to(path: Path, patiently: bool = False) -> Iterator[None]:
    """Also write notices and warnings to a file, for the length of a block; a full disk costs the log and no more.

    Args:
        patiently: Nor does a disk that hangs. That takes a thread, which a process that is to be copied cannot have.
    """
    global _log
    with ExitStack() as stack:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("ab", buffering=0)  # nothing is left to be written when it is closed
            _log = PatientLog(file) if patiently else file
            stack.callback(_log.close)
        try:
            yield
        finally:
            _log = None


def hand_over(receiver: Callable[[str, bool], None]) -> None:
    """Give lines to somebody else from now on: two processes on one terminal would spoil each other's live line.

    Args:
        receiver: Takes a line, and whether it is for the log file alone.
    """
    global _receiver
    _receiver = receiver


@contextmanager
def alert_with(tell: Callable[[str], None]) -> Iterator[None]:
    """Tell warnings to somebody who does not look at the screen too, for the length of a block (`core.alerts`)."""
    global _alert
    before, _alert = _alert, tell
    try:
        yield
    finally:
        _alert = before


def alert(text: str) -> None:
    """Tell what nobody should learn by chance, besides where it is said."""
    if _alert is not None:
        _alert(redact(text))


def is_first_worker() -> bool:
    """Whether this process speaks for the run (rank 0, or no distributed run at all: a rank is one among several)."""
    return os.environ.get("RANK", "0") == "0" or os.environ.get("WORLD_SIZE", "1") == "1"


@cache
def logger() -> logging.Logger:
    """Return the logger `headway`, with the console as its handler."""
    import logging  # here: a command that prints a result and no notice does without it

    class Console(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(f"{_WARNING if record.levelno >= logging.WARNING else ''}{record.getMessage()}")

    found = logging.getLogger("headway")
    found.addHandler(Console())
    if found.level == logging.NOTSET:
        found.setLevel(logging.INFO)
    found.propagate = False  # a handler of the root logger would print every line a second time
    return found


def notice(text: str) -> None:
    """Log one line of information; the first worker speaks for all."""
    if is_first_worker():
        logger().info("%s", redact(text))


def warning(text: str) -> None:
    """Log one line that a person should act on sooner or later; every worker may do so."""
    logger().warning("%s", redact(text))


def write_log(text: str) -> None:
    """One line for the log file alone, if there is one (`log_to`)."""
    text = _shown(text)
    if _receiver is not None:
        _receiver(text, True)
    if _log is not None:
        with suppress(OSError):  # what is said must not end who says it
            _log.write(f"{text}\n".encode())


class ResultLost(OSError):
    """Standard output does not take what is printed."""


class _Unbuffered(io.BufferedWriter):
    """A stream that writes at once and all that it is given.

    Under PYTHONUNBUFFERED text goes straight to the file, and Python does not look how much of it a disk has taken that
    becomes full meanwhile: the rest would be missing, and nobody would know.
    """

    def write(self, data: Buffer, /) -> int:
        count = super().write(data)
        self.flush()
        return count


class _Redacted(io.TextIOWrapper):
    """A standard stream that redacts whatever Python code prints on it, a library's warning or a traceback too."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        # As standard error has it: what a locale cannot write is no reason to lose a result.
        errors = "backslashreplace" if stream.errors == "strict" else stream.errors
        by_line, through = stream.line_buffering, stream.write_through
        buffer = _Unbuffered(stream.buffer) if isinstance(stream.buffer, io.RawIOBase) else stream.buffer
        super().__init__(buffer, stream.encoding, errors, line_buffering=by_line, write_through=through)
        self._stream = stream  # it closes what is below both when it goes

    def write(self, text: str) -> int:
        super().write(redact(text))
        return len(text)


class _Results(_Redacted):
    """Standard output whose errors can be told from those of files, which have the same type and no name either."""

    def write(self, text: str) -> int:
        try:
            return io.TextIOWrapper.write(self, text) if _exact else super().write(text)
        except OSError as error:
            raise ResultLost(error.errno, error.strerror) from error

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise ResultLost(error.errno, error.strerror) from error


def open_streams() -> None:
    """Standard streams that can be written to.

    Gives a process that was started without some of its streams (`2>&-`, a daemon's) ones that lead nowhere: else the
    next file that is opened would be taken for them, and get what is printed.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: its own
            os.set_inheritable(descriptor, True)
            stream = os.fdopen(descriptor, "r" if name == "stdin" else "w", encoding="utf-8", closefd=False)
            setattr(sys, name, stream)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _Results(sys.stdout)
    redact_streams()


def redact_streams() -> None:
    """Redact what Python code of this process prints from now on, for processes whose output becomes a log."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not isinstance(stream, _Redacted):
            setattr(sys, name, _Redacted(stream))


@contextmanager
def exact_results() -> Iterator[None]:
    """Print results as they are for the length of a block, for documents: their text is data, whatever it holds."""
    global _exact
    before, _exact = _exact, True
    try:
        yield
    finally:
        _exact = before


def settle_streams() -> OSError | None:
    """Write what is left for standard output and error; what they do not take is dropped, since Python would try it
    again at its exit and end with another exit code.

    Returns:
        What is wrong with standard output, if results are lost.
    """
    lost = None
    for stream in (sys.stderr, sys.stdout):
        try:
            stream.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            lost = error if stream is sys.stdout else None
    return lost


def print_line(text: str = "", end: str = "\n") -> None:
    """Print a line of results on standard output. What would steer a terminal or begin another line is spelled out, for
    much of it was written by others."""
    sys.stdout.write(printable(text) + end)


def print_lines(text: str, end: str = "\n") -> None:
    """Print several lines as `print_line` does one."""
    sys.stdout.write(printable(text, keep=_LINES) + end)


def print_text(text: str) -> None:
    """Print text that is a result itself: exactly, so that other programs can go on with it, but not on a terminal,
    which it could steer."""
    sys.stdout.write(printable(text, keep=_LINES + _JOINERS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def show_live(text: str) -> None:
    """Replace the live line at the bottom of the terminal; notices appear above it. An empty text takes it away.

    Without a terminal, and on workers other than the first, this does nothing.
    """
    global _live
    if is_first_worker() and sys.stderr.isatty() and (text or _live):
        _live = printable(redact(text))
        _write(_CLEAR + _fitted(_live))


def clear_line() -> None:
    """Take away the live line of another process that cannot do it any more."""
    if sys.stderr.isatty():
        _write(_CLEAR)


def _fitted(text: str) -> str:
    """Cut to the terminal's width: a live line that wraps could not be cleared again."""
    width = shutil.get_terminal_size().columns - 1
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def say(text: str) -> None:
    """One line, from whom it was handed over (`hand_over`). What would steer a terminal is spelled out."""
    text = _shown(text)
    if _receiver is not None:
        _receiver(text, False)
        return
    # One write, so that a notice from another thread does not end up inside the live line.
    _write(f"{_CLEAR}{text}\n{_fitted(_live)}" if _live else f"{text}\n")
    write_log(text)
    if text.startswith(_WARNING):
        alert(text.removeprefix(_WARNING))


def _shown(text: str) -> str:
    """Lines without credentials, and without what would steer a terminal."""
    return printable(redact(text), keep=_LINES)


def _write(text: str) -> None:
    # A run does not end because its onlooker did: `headway train 2>&1 | head`, a terminal that was closed over a run in
    # the background, a log on a full disk.
    with suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


@dataclass
class Progress:
    """A live line on a terminal, a plain line every `log_seconds` elsewhere.

    `total` may be None when the end is unknown; then no ETA is shown. The unit "B" is shown as KiB, MiB, ...
    """

    label: str
    total: float | None = None
    unit: str = ""
    log_seconds: float = 10.0
    done: float = 0.0
    _start: float = field(default_factory=time.monotonic)
    _shown: float = 0.0

    def advance(self, amount: float = 1.0) -> None:
        """Count `amount` more units as done and show it when due."""
        self.done += amount
        now = time.monotonic()
        live = sys.stderr.isatty()
        if now - self._shown >= (0.1 if live else self.log_seconds) and now - self._start > 0.5:
            self._shown = now
            self._show(live)

    def skip(self, amount: float) -> None:
        """Take `amount` units out of the total: there is nothing to do for them."""
        if self.total is not None:
            self.total -= amount

    def _show(self, live: bool) -> None:
        text = f"{self.label}: {self.describe()}"
        if live:
            show_live(text)
        else:
            notice(text)

    def describe(self) -> str:
        """The progress in words: done, total, rate, ETA."""
        seconds = max(time.monotonic() - self._start, 1e-9)
        rate = self.done / seconds
        amount, unit = (format_bytes, "") if self.unit == "B" else (format_count, f" {self.unit}".rstrip())
        of = f" of {amount(self.total)}" if self.total is not None else ""
        parts = [f"{amount(self.done)}{of}{unit}", f"{amount(rate)}{unit}/s"]
        if self.total is not None and rate > 0 and self.done < self.total:
            parts.append(f"eta {format_seconds((self.total - self.done) / rate)}")
        return " · ".join(parts)

    def finish(self) -> float:
        """Clear the live line; returns the seconds it took."""
        if self._shown:
            show_live("")
        return time.monotonic() - self._start


@contextmanager
def progress(label: str, total: float | None = None, unit: str = "") -> Iterator[Progress]:
    """Show progress for the length of a block."""
    bar = Progress(label, total, unit)
    try:
        yield bar
    finally:
        bar.finish()
