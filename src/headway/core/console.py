"""Output for people: notices, warnings, and progress with an ETA.

Notices and warnings are records of the standard library's logger `headway`, with this console as its handler:
`logging.getLogger("headway").addHandler(...)` lets any other handler listen, and its level and filters hold.

Everything goes to standard error, so that standard output holds only results (`--json`, generated text). Workers other
than the first are silent; their full logs are under the attempt's folder.
"""

from __future__ import annotations

import io
import logging
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

from headway.core.credentials.secrets import redact
from headway.core.files.timeout_writer import TimeoutLog
from headway.core.format import format_bytes, format_count, format_seconds, printable

if TYPE_CHECKING:
    from typing_extensions import Buffer

_CLEAR = "\r\x1b[2K"
_WARNING = "warning: "
_LINES = "\n\t"
#: Invisible, and part of words in Persian and of pictures of several signs.
_JOINERS = "\u200c\u200d"
#: Set while a notebook shows the run as a table; workers are processes of their own.
TABLE_VARIABLE = "HEADWAY_TABLE"

_log: IO[bytes] | TimeoutLog | None = None
_receiver: Callable[[str, bool], None] | None = None
_alert: Callable[[str], None] | None = None
_live = ""
_exact = False


@contextmanager
def log_to(path: Path, tolerate_hangs: bool = False) -> Iterator[None]:
    """Also write notices and warnings to a file, for the length of a block. On a full disk only the log is lost.

    Args:
        path: The log file.
        tolerate_hangs: Continue when the disk hangs, too. This needs a thread, so the process must not fork.
    """
    global _log
    with ExitStack() as stack:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("ab", buffering=0)  # unbuffered: closing it has nothing left to write
            _log = TimeoutLog(file) if tolerate_hangs else file
            stack.callback(_log.close)
        try:
            yield
        finally:
            _log = None


def hand_over(receiver: Callable[[str, bool], None]) -> None:
    """Pass lines to another process from now on: two writers on one terminal would garble each other's live line.

    Args:
        receiver: Called with a line and with whether it is for the log file only.
    """
    global _receiver
    _receiver = receiver


@contextmanager
def alert_with(tell: Callable[[str], None]) -> Iterator[None]:
    """Also pass warnings to an alert function, for the length of a block (`core.alerts`)."""
    global _alert
    before = _alert
    _alert = tell
    try:
        yield
    finally:
        _alert = before


def alert(text: str) -> None:
    """Send a text as an alert; it is not printed here."""
    if _alert is not None:
        _alert(redact(text))


def is_first_worker() -> bool:
    """Return whether this process prints for the run: rank 0, or the only process of its run."""
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
    """Log one line of information, on the first worker only."""
    if is_first_worker():
        logger().info("%s", redact(text))


def warning(text: str) -> None:
    """Log one line that a person should act on sooner or later; every worker logs its own."""
    logger().warning("%s", redact(text))


def write_log(text: str) -> None:
    """Write one line to the log file only, if there is one (`log_to`)."""
    text = _shown(text)
    if _receiver is not None:
        _receiver(text, True)
    if _log is not None:
        with suppress(OSError):  # a failed log line must not end the process
            _log.write(f"{text}\n".encode())


class ResultLost(OSError):
    """Standard output cannot be written; results are lost."""


class _Unbuffered(io.BufferedWriter):
    """A stream that writes immediately and completely.

    Under PYTHONUNBUFFERED text goes straight to the file, and Python ignores how much of it was written. On a disk that
    becomes full, the rest would be lost without an error.
    """

    def write(self, data: Buffer, /) -> int:
        count = super().write(data)
        self.flush()
        return count


class _Redacted(io.TextIOWrapper):
    """A standard stream that redacts everything Python code prints, also warnings of libraries and tracebacks."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        # As standard error does: a character that the locale cannot encode must not lose a result.
        errors = "backslashreplace" if stream.errors == "strict" else stream.errors
        by_line = stream.line_buffering
        through = stream.write_through
        buffer = _Unbuffered(stream.buffer) if isinstance(stream.buffer, io.RawIOBase) else stream.buffer
        super().__init__(buffer, stream.encoding, errors, line_buffering=by_line, write_through=through)
        self._stream = stream  # keeps it alive: its finalizer would close the buffer that both share

    def write(self, text: str) -> int:
        super().write(redact(text))
        return len(text)


class _Results(_Redacted):
    """Standard output that raises its own error type: a plain `OSError` could come from any file."""

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
    """Make sure that all standard streams are open, and redact what is printed on them.

    A process may be started without some of its streams (`2>&-`, a daemon). They are opened on the null device;
    otherwise the next file to be opened would get their number, and receive what is printed.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest free number: the missing stream's own
            os.set_inheritable(descriptor, True)
            stream = os.fdopen(descriptor, "r" if name == "stdin" else "w", encoding="utf-8", closefd=False)
            setattr(sys, name, stream)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _Results(sys.stdout)
    redact_streams()


def redact_streams() -> None:
    """Redact what Python code of this process prints from now on; for processes whose output goes to a log."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not isinstance(stream, _Redacted):
            setattr(sys, name, _Redacted(stream))


@contextmanager
def exact_results() -> Iterator[None]:
    """Print results without redaction for the length of a block; for documents, whose text is data."""
    global _exact
    before = _exact
    _exact = True
    try:
        yield
    finally:
        _exact = before


def flush_streams() -> OSError | None:
    """Flush standard output and error, and drop what cannot be written.

    Python would try to write the rest again at its exit, fail, and change the exit code.

    Returns:
        The error of standard output, if results are lost.
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
    """Print a line of results on standard output.

    Control characters and line breaks are escaped, since much of the text comes from untrusted files.
    """
    sys.stdout.write(printable(text) + end)


def print_lines(text: str, end: str = "\n") -> None:
    """Print several lines of results; like `print_line`, but line breaks and tabs are kept."""
    sys.stdout.write(printable(text, keep=_LINES) + end)


def print_text(text: str) -> None:
    """Print text that is itself the result.

    It is printed unchanged for other programs; on a terminal, control characters are escaped.
    """
    sys.stdout.write(printable(text, keep=_LINES + _JOINERS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def print_prompt(text: str) -> None:
    """Print a text that the result continues, as `print_text` does; on a terminal, its end shows.

    It is bold there. Where there are no styles (`NO_COLOR`, `TERM=dumb`), a bar marks its end.
    """
    is_marked = bool(text) and sys.stdout.isatty()
    is_plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    before, after = ("", "|") if is_plain else ("\x1b[1m", "\x1b[0m")
    if is_marked:
        sys.stdout.write(before)
    print_text(text)
    if is_marked:
        sys.stdout.write(after)
        sys.stdout.flush()


def show_live(text: str) -> None:
    """Replace the live line at the bottom of the terminal; notices appear above it. An empty text removes it.

    Without a terminal, and on workers other than the first, this does nothing.
    """
    global _live
    if is_first_worker() and sys.stderr.isatty() and (text or _live):
        _live = printable(redact(text))
        _write(_CLEAR + _fitted(_live))


def has_table() -> bool:
    """Return whether a notebook shows steps and evaluations in a table, so that no line needs to."""
    return TABLE_VARIABLE in os.environ


def clear_line() -> None:
    """Clear the live line of a process that has ended without doing so."""
    if sys.stderr.isatty():
        _write(_CLEAR)


def _fitted(text: str) -> str:
    """Cut a line to the terminal's width: a live line that wraps could not be cleared again."""
    width = shutil.get_terminal_size().columns - 1
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def say(text: str) -> None:
    """Print one line, or pass it to the receiver of `hand_over`. Control characters are escaped."""
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
    """Redact credentials and escape control characters."""
    return printable(redact(text), keep=_LINES)


def _write(text: str) -> None:
    # A run must survive the loss of its output: `headway train 2>&1 | head`, the closed terminal of a run in the
    # background, a log on a full disk.
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
            text = f"{self.label}: {self.describe()}"
            if live:
                show_live(text)
            else:
                notice(text)

    def skip(self, amount: float) -> None:
        """Subtract `amount` units from the total: they need no work."""
        if self.total is not None:
            self.total -= amount

    def describe(self) -> str:
        """Return the progress as text: done, total, rate, ETA."""
        seconds = max(time.monotonic() - self._start, 1e-9)
        rate = self.done / seconds
        amount, unit = (format_bytes, "") if self.unit == "B" else (format_count, f" {self.unit}".rstrip())
        of = f" of {amount(self.total)}" if self.total is not None else ""
        parts = [f"{amount(self.done)}{of}{unit}", f"{amount(rate)}{unit}/s"]
        if self.total is not None and rate > 0 and self.done < self.total:
            parts.append(f"eta {format_seconds((self.total - self.done) / rate)}")
        return " · ".join(parts)

    def finish(self) -> float:
        """Clear the live line and return the seconds since the start."""
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
