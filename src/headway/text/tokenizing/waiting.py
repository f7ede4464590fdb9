"""A status line for work that does not report its progress."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from headway.core.console import notice, show_live
from headway.core.format import format_seconds

# Seconds until the line is first shown; then between updates on a terminal, and elsewhere.
_FIRST = 0.5
_LIVE = 1.0
_LOGGED = 10.0


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Show what is being done, and for how long, for the duration of a block; a short block shows nothing."""
    ended = threading.Event()
    thread = threading.Thread(target=_show_elapsed, args=(what, ended), name="headway-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _show_elapsed(what: str, ended: threading.Event) -> None:
    started = time.monotonic()
    pause = _FIRST
    while not ended.wait(pause):
        live = sys.stderr.isatty()
        show, pause = (show_live, _LIVE) if live else (notice, _LOGGED)
        show(f"{what}: {format_seconds(time.monotonic() - started)} so far")
    show_live("")
