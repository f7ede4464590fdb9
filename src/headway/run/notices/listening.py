"""Listening for notices around a worker, with stop signals deferred until a notice is acknowledged."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from headway.config import PreemptionConfig
from headway.core.errors import Preempted
from headway.core.process.signals import STOP_SIGNALS, handled
from headway.run.notices import watching_for


@contextmanager
def listening(attempt: Path, config: PreemptionConfig) -> Iterator[None]:
    """Listen for notices in one worker of several.

    When a worker exits, the agent ends the others by SIGTERM, so stop signals are deferred at the end of the block.

    Args:
        attempt: The attempt's folder.
        config: The config's `preemption`.
    """
    with ExitStack() as stack:
        begin_deferring = stack.enter_context(deferring_stop_signals())
        stack.enter_context(watching_for(attempt, config))
        stack.callback(begin_deferring)
        yield


@contextmanager
def deferring_stop_signals() -> Iterator[Callable[[], object]]:
    """Defer stop signals from the moment that the yielded function is called to the end of the block.

    Under torchrun and the local agent, the exit of the first worker makes the agent send SIGTERM to all others. Without
    deferral, that would kill this process during its last actions: the record of its end, the answer to a notice. If
    the attempt is preempted, deferred signals are dropped, since the process ends anyway.
    """
    came: list[int] = []
    try:
        with ExitStack() as stack:
            yield lambda: stack.enter_context(handled(STOP_SIGNALS, lambda number, frame: came.append(number)))
    except Preempted:
        came.clear()
        raise
    finally:
        for number in came:
            signal.raise_signal(number)
