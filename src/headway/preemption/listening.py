"""An ear for notices around a worker, and signals that wait until what is heard is answered."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from headway.config import PreemptionConfig
from headway.core.errors import Preempted
from headway.core.signals import STOP_SIGNALS, handled
from headway.preemption import watching_for


@contextmanager
def listening(attempt: Path, config: PreemptionConfig) -> Iterator[None]:
    """Listen for notices in a worker among others, which have the agent end the rest by SIGTERM when they leave first.

    Args:
        attempt: The attempt's folder.
    """
    with ExitStack() as stack:
        hold = stack.enter_context(holding())
        stack.enter_context(watching_for(attempt, config))
        stack.callback(hold)
        yield


@contextmanager
def holding() -> Iterator[Callable[[], object]]:
    """Keep signals to stop from a moment in a block, which is told by a call, to its end.

    Under torchrun and the local agent they would kill this process over what it does last (the record of its end, the
    answer to a notice): the first worker that leaves has the agent send them to all others. Where the attempt is
    preempted they ask for no more than that.
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
