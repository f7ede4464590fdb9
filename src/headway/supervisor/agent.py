"""An attempt with several workers on this machine, from the process that starts them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from headway.config import Config
from headway.core.errors import HeadwayError, Preempted
from headway.core.signals import STOP_SIGNALS, handled
from headway.runs.run_directory import Attempt
from headway.session.attempt import ATTEMPT_VARIABLE, WorkerDied, with_variables
from headway.supervisor.local_workers import ONE_THREAD, WorkersFailed, WorkersStopped, start_workers
from headway.supervisor.watchdog import in_words
from headway.supervisor.worker import first_record


def run_agent(config: Config, attempt: Attempt) -> None:
    """Train with `parallel.workers` processes and wait for them.

    Raises:
        HeadwayError: what ended the attempt, as told by the worker that met it.
    """
    try:
        with _left_to_supervisor():
            start_workers(
                config.parallel.workers,
                attempt.directory,
                {ATTEMPT_VARIABLE: str(attempt.number)},
                "headway.supervisor.worker",
                str(config.run_directory),
                load=load_training,
                ends_workers_on=(),
            )
    except WorkersFailed as error:
        told = _told(attempt, error.records)
        # Whom another worker's death has made crash has less to tell than that death.
        if told is None or (told.exit_code == 1 and error.killed):
            raise _died(error, attempt) from None
        raise told from None
    except WorkersStopped as error:  # SIGQUIT, which asks for no more than an end
        stopped = Preempted(str(error), fix="run the same command again")
        raise _told(attempt) or stopped from None


@contextmanager
def _left_to_supervisor() -> Iterator[None]:
    """Have the supervisor answer signals to stop, which schedulers send to all processes of a job: it gives workers the
    time that their saves take, the agent half a minute. Ctrl-C reaches it too, and twice would mean something else."""

    def tell(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT:
            os.kill(os.getppid(), number)

    with handled(STOP_SIGNALS, tell):
        yield


def load_training() -> None:
    """Load what a worker needs, PyTorch and all, into a process that is to be copied."""
    with with_variables(ONE_THREAD):
        import headway.session.session
        import headway.training.task  # noqa: F401


def _told(attempt: Attempt, spare: Iterable[Mapping[str, Any]] = ()) -> HeadwayError | None:
    """The error that a worker reported."""
    first = first_record(attempt.directory, spare)
    if first is None:
        return None
    told = WorkerDied(first["what"], where=first["where"] or str(attempt.worker_log(first["rank"])), fix=first["fix"])
    told.exit_code = first["exit_code"]
    told.record = first
    return told


def _died(error: WorkersFailed, attempt: Attempt) -> WorkerDied:
    rank, code = error.first.rank, error.first.code
    died = WorkerDied(
        f"worker {rank} died ({in_words(code)})",
        where=str(attempt.worker_log(rank)),
        fix="run the same command again: it goes on from the newest checkpoint",
    )
    # On a full disk a worker cannot leave its reason, but its exit code is one.
    died.exit_code = max(1, *(end.code for end in error.ends))
    died.record = {"rank": rank, "signal": -code if code < 0 else None}
    return died
