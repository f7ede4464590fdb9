"""Signals, taken for a while and handed back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

#: What asks a command to stop, besides Ctrl-C, which raises an error of its own: a scheduler's notices, and a terminal
#: that is closed.
TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
#: What asks a run to stop.
STOP_SIGNALS = (*TERMINATION_SIGNALS, signal.SIGINT)

#: Signals whose handler has raised an error that nobody has told of yet. Where errors are ignored (by Python in a
#: finalizer and in the callback of a weak reference, of which every import has one; by pydantic while it serialises)
#: that would be the last of them.
pending_signals: list[int] = []


@contextmanager
def handled(numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[dict[int, Any]]:
    """Handle signals in a block, and give what handled them before. SIGHUP that is ignored stays so, as `nohup` wants.

    Python runs handlers in the main thread only; in another thread signals keep their meaning, and nothing is given.
    """
    if threading.current_thread() is not threading.main_thread():
        yield {}
        return
    before = {number: signal.signal(number, handler) for number in unignored(numbers)}
    try:
        yield before
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier or signal.SIG_DFL)  # None: it was not installed by Python


def unignored(numbers: Iterable[int]) -> list[int]:
    """The same without a SIGHUP that is ignored."""
    spared = signal.SIGHUP if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else None
    return [number for number in numbers if number != spared]


def reset(numbers: Iterable[int]) -> None:
    """Leave signals to a copy of this process as a program that is started finds them: without handlers, and SIGHUP
    ignored if it is here."""
    for number in unignored(numbers):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Keep signals that ask to stop until the end of a block: for steps that must be taken together."""
    came: list[int] = []
    try:
        with handled(STOP_SIGNALS, lambda number, frame: came.append(number)):
            yield
    finally:
        for number in came:
            signal.raise_signal(number)
