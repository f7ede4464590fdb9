"""What people see: notices, warnings, and progress with an ETA.

Everything goes to standard error, so that standard output holds only results (`--json`, generated text). Workers other
than the first are silent; their full logs are under the attempt's folder.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from headway.core.format import format_count, format_seconds


def is_first_worker() -> bool:
    """Whether this process speaks for the run (rank 0, or no distributed run at all)."""
    return os.environ.get("RANK", "0") == "0"


def notice(text: str) -> None:
    """One line of information."""
    if is_first_worker():
        print(text, file=sys.stderr, flush=True)


def warning(text: str) -> None:
    """One line that a person should act on sooner or later; every worker may say it."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


@dataclass
class Progress:
    """A live line on a terminal, a plain line every `log_seconds` elsewhere.

    `total` may be None when the end is unknown; then no ETA is shown.
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

    def _show(self, live: bool) -> None:
        if not is_first_worker():
            return
        text = f"{self.label}: {self.describe()}"
        if live:
            sys.stderr.write(f"\r\x1b[2K{text}")
            sys.stderr.flush()
        else:
            notice(text)

    def describe(self) -> str:
        """The progress in words: done, total, rate, ETA."""
        seconds = max(time.monotonic() - self._start, 1e-9)
        rate = self.done / seconds
        of = f" of {format_count(self.total)}" if self.total is not None else ""
        parts = [f"{format_count(self.done)}{of} {self.unit}".strip(), f"{format_count(rate)} {self.unit}/s"]
        if self.total is not None and rate > 0 and self.done < self.total:
            parts.append(f"eta {format_seconds((self.total - self.done) / rate)}")
        return " · ".join(parts)

    def finish(self) -> float:
        """Clear the live line; returns the seconds it took."""
        if sys.stderr.isatty() and self._shown and is_first_worker():
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
        return time.monotonic() - self._start


@contextmanager
def progress(label: str, total: float | None = None, unit: str = "") -> Iterator[Progress]:
    """Show progress for the length of a block."""
    bar = Progress(label, total, unit)
    try:
        yield bar
    finally:
        bar.finish()
