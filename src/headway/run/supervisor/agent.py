"""The agent of an attempt: the process that starts several workers on this machine and waits for them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

from headway.config import Config
from headway.core.coordination.launched import MachinePart
from headway.core.errors import HeadwayError, Preempted
from headway.core.process.signals import STOP_SIGNALS, handled
from headway.core.process.variables import ONE_THREAD, with_variables
from headway.core.startup.loading import without_collecting
from headway.run.directory.run_directory import Attempt
from headway.run.session.attempt import ATTEMPT_VARIABLE
from headway.run.supervisor.error_report import ErrorReport, WorkerDied, most_telling_report
from headway.run.supervisor.local_workers import WorkersFailed, WorkersStopped, start_workers
from headway.run.supervisor.watchdog import in_words


def run_agent(config: Config, attempt: Attempt) -> None:
    """Train with `parallel.workers` processes and wait for them.

    Raises:
        HeadwayError: the error that ended the attempt, as reported by the worker that met it.
    """
    try:
        with _leave_signals_to_supervisor():
            start_workers(
                config.parallel.workers,
                attempt.directory,
                {ATTEMPT_VARIABLE: str(attempt.number)},
                "headway.run.supervisor.worker",
                str(config.run_directory),
                load=load_training,
                ends_workers_on=(),
                part=MachinePart.take(),
            )
    except WorkersFailed as error:
        reported = _reported_error(attempt, error.records)
        # A worker that crashed because another one died says less than that death.
        if reported is None or (reported.exit_code == 1 and error.killed):
            raise _died(error, attempt) from None
        raise reported from None
    except WorkersStopped as error:  # by SIGQUIT, which asks to end without saving
        stopped = Preempted(str(error), fix="run the same command again")
        raise _reported_error(attempt) or stopped from None


@contextmanager
def _leave_signals_to_supervisor() -> Iterator[None]:
    """Leave the answer to stop signals to the supervisor.

    Schedulers send such signals to all processes of a job. The supervisor gives workers the time that their saves take;
    the agent would give them half a minute. Ctrl-C reaches the supervisor, too, and must not arrive twice.
    """

    def forward(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT:
            os.kill(os.getppid(), number)

    with handled(STOP_SIGNALS, forward):
        yield


def load_training() -> None:
    """Load what a worker needs, PyTorch included, into a process that will be copied."""
    with with_variables(ONE_THREAD), without_collecting():
        import headway.run.session.session  # noqa: F401


def _reported_error(attempt: Attempt, spare: Iterable[Mapping[str, Any]] = ()) -> HeadwayError | None:
    """Return the error that a worker reported; None without one."""
    report = most_telling_report(attempt.directory, spare)
    if report is None:
        return None
    where = report.where or str(attempt.worker_log(report.rank or 0))
    error = WorkerDied(report.what, where=where, fix=report.fix)
    error.exit_code = report.exit_code
    error.report = report
    return error


def _died(error: WorkersFailed, attempt: Attempt) -> WorkerDied:
    rank = error.first.rank
    code = error.first.code
    died = WorkerDied(
        f"worker {rank} died ({in_words(code)})",
        where=str(attempt.worker_log(rank)),
        fix="run the same command again: it continues from the newest checkpoint",
    )
    # On a full disk a worker cannot write its error, but its exit code tells the kind.
    died.exit_code = max(1, *(end.code for end in error.ends))
    died.report = replace(ErrorReport.of(died, rank), signal=-code if code < 0 else None)
    return died
