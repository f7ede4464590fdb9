"""Stop signals that come while `headway train` is still being imported.

Their default action would end the process by the signal, which a scheduler takes for a failure (Slurm does not requeue
a job that ended with 143). This module imports nothing that takes time.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from headway.core.coordination.launch_variables import MACHINES, NODE

_PREEMPTED = 75
#: Variables that show that other machines wait for this one.
_SEVERAL = (NODE, MACHINES, "JOB_COMPLETION_INDEX")

_came: list[int] = []
_defers = False


def answer_early_signals(words: list[str]) -> None:
    """Have stop signals end this process with 75, if it is about to train and has the default handlers.

    One of several machines only notes the first signal, since the others must hear of it.

    Args:
        words: The command line.
    """
    global _defers
    if words[:1] != ["train"] or "LOCAL_RANK" in os.environ:  # torchrun answers for its workers
        return
    steps = os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1" and "SLURM_PROCID" in os.environ
    options = any(word.partition("=")[0] in ("--machines", "--node", "--lead") for word in words)
    _defers = steps or options or any(name in os.environ for name in _SEVERAL)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _answer)


def take_early_signals() -> list[int]:
    """Return the signals that were noted, once."""
    global _came
    came = _came
    _came = []
    return came


def _answer(number: int, frame: FrameType | None) -> None:
    if _defers and not _came:
        _came.append(number)
        return
    name = signal.Signals(number).name
    text = f"error: stopped by {name} while no attempt was running\n  fix:   run the same command again\n"
    try:
        sys.stderr.flush()
        os.write(2, text.encode())
    finally:
        os._exit(_PREEMPTED)  # nothing is open that this process would have to close
