"""Several workers on this machine, through PyTorch's elastic agent."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from headway.config import Config
from headway.core.errors import HeadwayError, Preempted
from headway.core.garbage import pause_collection, resume_collection
from headway.core.module_command import module_command
from headway.core.signals import STOPPING, handled, reset, unignored
from headway.launch.attempt import ATTEMPT_VARIABLE, WorkerDied, with_variables
from headway.launch.worker import RECORD_KEY, first_record
from headway.supervise.processes import can_be_copied
from headway.supervise.run_directory import Attempt
from headway.supervise.watchdog import in_words

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

#: Keeps NumPy from starting threads when it is loaded: a process with threads cannot be copied.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}


def run_agent(config: Config, attempt: Attempt) -> None:
    """Train with `parallel.workers` processes and wait for them.

    Raises:
        HeadwayError: what ended the attempt, as told by the worker that met it.
    """
    load_agent()
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        with _left_to_supervisor():
            start_workers(
                config.parallel.workers,
                f"{config.name}-{attempt.number}",
                {ATTEMPT_VARIABLE: str(attempt.number)},
                "headway.launch.worker",
                str(config.run_directory),
                ends_workers_on=(),
            )
    except ChildFailedError as error:
        told = _told(attempt, error)
        # Whom another worker's death has made crash has less to tell than that death.
        if told is None or (told.exit_code == 1 and first_killed(error)):
            raise _died(error, attempt) from None
        raise told from None
    except SignalException as error:  # SIGQUIT, which asks for no more than an end
        stopped = Preempted(f"stopped by {error.sigval.name}", fix="run the same command again")
        raise _told(attempt) or stopped from None


@contextmanager
def _left_to_supervisor() -> Iterator[None]:
    """Have the supervisor answer signals to stop, which schedulers send to all processes of a job: it gives workers the
    time that their saves take, the agent half a minute. Ctrl-C reaches it too, and twice would mean something else."""

    def tell(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT:
            os.kill(os.getppid(), number)

    with handled(STOPPING, tell):
        yield


def load_training() -> None:
    """Load what a worker needs, PyTorch and all, into a process that is to be copied."""
    with with_variables(ONE_THREAD):
        import headway.launch.session
        import headway.training.task  # noqa: F401


def load_agent() -> None:
    """Load PyTorch's elastic agent, and keep it quiet: what it logs of a worker's end is told better by its supervisor,
    and to format its first line it loads PyTorch's compiler, while nobody trains."""
    with with_variables(ONE_THREAD):
        import torch.distributed.launcher.api  # noqa: F401
    if "LOGLEVEL" not in os.environ:  # by which people ask it for more
        for name in list(logging.root.manager.loggerDict):
            if name.startswith(("torch.distributed.elastic.", "torch.multiprocessing.")):
                logging.getLogger(name).setLevel(logging.CRITICAL)


def start_workers(
    workers: int,
    run_id: str,
    variables: Mapping[str, str],
    module: str,
    *arguments: str,
    trains: bool = True,
    ends_workers_on: Iterable[signal.Signals] = STOPPING,
) -> None:
    """Run a module's `main` in so many processes that know of each other, and wait for all of them.

    Where that is safe they are copies of this process, which loads PyTorch once for all of them, else
    programs of their own, which find modules where this process does.

    Args:
        variables: Added to the environment of the processes.
        trains: The module will train, so a process that is to be copied loads what that takes.
        ends_workers_on: Signals that the agent passes on to the processes, to kill those that are there 30 s later.

    Raises:
        ChildFailedError: a process ended with an error; the others have been stopped.
        SignalException: this process was told to stop, and has told the others.
    """
    pause_collection()
    load_agent()
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with with_variables(ONE_THREAD):
        importlib.import_module(module)
    copied = can_be_copied()
    if copied and trains:
        load_training()  # once, for all workers
    resume_collection()
    # Workers set their own number of threads; this keeps libraries from starting one per core until then.
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    # The agent wants a folder for its own files; workers keep their logs themselves.
    with (
        with_variables({**variables, "OMP_NUM_THREADS": threads}),
        tempfile.TemporaryDirectory(prefix="headway-agent-") as scratch,
    ):
        handles = unignored((signal.SIGQUIT, *ends_workers_on))
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers,
            run_id=run_id,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
            signals_to_handle=",".join(signal.Signals(number).name for number in handles),
            start_method="fork",  # of functions; programs are started as such
        )
        if copied:
            elastic_launch(launch, _run_copy)(module, *arguments)
        else:
            program, *rest = module_command(module, *arguments)
            elastic_launch(launch, program)(*rest)


def _run_copy(module: str, *arguments: str) -> None:
    """What a copy of the agent does: the same as a Python that is started for it, in a session of its own."""
    os.setsid()
    reset((*STOPPING, signal.SIGQUIT))  # the agent's handlers are not its own
    # A program would have read this when it began.
    sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.argv = [module, *arguments]
    importlib.import_module(module).main()


def first_killed(error: ChildFailedError) -> tuple[int, ProcessFailure] | None:
    """Rank and end of the first worker that somebody else has killed: neither its own error, nor the agent, which ends
    those that are left by SIGTERM."""
    killed = [(r, f) for r, f in error.failures.items() if f.exitcode < 0 and f.exitcode != -signal.SIGTERM]
    return min(killed, key=lambda end: end[1].timestamp, default=None)


def _told(attempt: Attempt, error: ChildFailedError | None = None) -> HeadwayError | None:
    """The error that a worker reported."""
    found = [failure.error_file_data for failure in error.failures.values()] if error is not None else []
    spare = [data[RECORD_KEY] for data in found if isinstance(data, dict) and RECORD_KEY in data]
    first = first_record(attempt.directory, spare)
    if first is None:
        return None
    told = WorkerDied(first["what"], where=first["where"] or str(attempt.worker_log(first["rank"])), fix=first["fix"])
    told.exit_code = first["exit_code"]
    told.record = first
    return told


def _died(error: ChildFailedError, attempt: Attempt) -> WorkerDied:
    rank, failure = first_killed(error) or error.get_first_failure()
    how = in_words(failure.exitcode)
    died = WorkerDied(
        f"worker {rank} died ({how})",
        where=str(attempt.worker_log(rank)),
        fix="run the same command again: it goes on from the newest checkpoint",
    )
    # On a full disk a worker cannot leave its reason, but its exit code is one.
    died.exit_code = max(1, *(failure.exitcode for failure in error.failures.values()))
    died.record = {"rank": rank, "signal": -failure.exitcode if failure.exitcode < 0 else None}
    return died
