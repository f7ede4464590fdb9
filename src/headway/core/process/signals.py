"""Signal handlers that are installed for a block and then restored."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

#: Signals that ask a command to stop: notices of a scheduler, and a terminal that is closed. Ctrl-C is not among them,
#: since it raises an error of its own.
TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
#: Signals that ask a run to stop.
STOP_SIGNALS = (*TERMINATION_SIGNALS, signal.SIGINT)

#: Signals whose handler has raised an error that is not reported yet. The error may get lost: Python ignores errors in
#: finalizers and in callbacks of weak references (every import has one), and pydantic ignores them while it serialises.
pending_signals: list[int] = []


@contextmanager
def handled(numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[dict[int, Any]]:
    """Handle signals in a block; yield the previous handlers. An ignored SIGHUP stays ignored, as `nohup` requires.

    Python runs handlers in the main thread only. In another thread this changes nothing and yields an empty mapping.
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
    """Return the signals without SIGHUP if that is ignored."""
    spared = signal.SIGHUP if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else None
    return [number for number in numbers if number != spared]


def reset(numbers: Iterable[int]) -> None:
    """Reset signals in a forked copy of this process to the state of a new program.

    Handlers are removed; SIGHUP stays ignored if it is ignored here.
    """
    for number in unignored(numbers):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Defer signals that ask to stop until the end of a block, for steps that must not be interrupted."""
    came: list[int] = []
    try:
        with handled(STOP_SIGNALS, lambda number, frame: came.append(number)):
            yield
    finally:
        for number in came:
            signal.raise_signal(number)
