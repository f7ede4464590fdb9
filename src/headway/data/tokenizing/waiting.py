"""A line for work that tells nothing while it is done."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from headway.core.console import notice, show_live
from headway.core.format import format_seconds

# Seconds until the line is first shown, and from then on, on a terminal and elsewhere.
_FIRST, _LIVE, _LOGGED = 0.5, 1.0, 10.0


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Say what is being done, and for how long it has been, for the length of a block; nothing when it is short."""
    ended = threading.Event()
    teller = threading.Thread(target=_tell, args=(what, ended), name="headway-waiting", daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()


def _tell(what: str, ended: threading.Event) -> None:
    started, pause = time.monotonic(), _FIRST
    while not ended.wait(pause):
        live = sys.stderr.isatty()
        say, pause = (show_live, _LIVE) if live else (notice, _LOGGED)
        say(f"{what}: {format_seconds(time.monotonic() - started)} so far")
    show_live("")
