"""A worker process: `python -m headway.run.supervisor.worker RUN_DIRECTORY`, started by the local launcher."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from headway.core.console import redact_streams, say
from headway.core.coordination.heartbeat import open_heartbeat
from headway.core.credentials.secrets import redact
from headway.core.errors import CheckpointError, HeadwayError, explain_refusal, fix_for
from headway.core.files.atomic import append_json_line, write_json
from headway.core.process.exit import die_with_parent, end, exit_process
from headway.run.directory.run_directory import attempt_folder, worker_log
from headway.run.supervisor.error_report import ErrorReport

#: Names a file in memory for errors that cannot be written to the run's disk; the starting process reads it.
SPARE_VARIABLE = "HEADWAY_REASONS_FILE"

#: Kept open: the signal handler holds only its file number.
_stacks: IO[str] | None = None


def main() -> None:
    """Train as one worker; an error goes to `attempts/NNN/error-<rank>.json`, which the launcher reads."""
    begin_process()
    run = Path(sys.argv[1])
    number = int(os.environ["HEADWAY_ATTEMPT"])
    rank = int(os.environ["RANK"])
    folder = attempt_folder(run, number)
    if rank > 0:
        keep_log(worker_log(folder, rank))
    with reasons_in(folder, rank):
        report_to(folder, rank)
        from headway.run.session.session import run_worker  # loads PyTorch

        run_worker(folder / "config.yaml")
    exit_process(0)


@contextmanager
def reasons_in(folder: Path, rank: int) -> Iterator[None]:
    """End this process with an exit code on an error, and write `error-<rank>.json` for `most_telling_report`."""
    try:
        yield
    except HeadwayError as error:
        if rank > 0:
            say(error.render())
        _report(folder, ErrorReport.of(error, rank))
        exit_process(error.exit_code)
    except Exception as error:
        if (explained := explain_refusal(error, CheckpointError, str(folder))) is not None:
            say(explained.render())
            _report(folder, ErrorReport.of(explained, rank))
            exit_process(explained.exit_code)
        text = redact(traceback.format_exc().rstrip())
        say(text)
        if _stacks is not None:
            with suppress(OSError):  # a full disk must not hide what went wrong
                _stacks.write(f"{text}\n")
                _stacks.flush()
        # Often this error only shows that another worker is gone. The first worker that ends has all others stopped,
        # so give the one that met the cause time to report it.
        time.sleep(1.0)
        _report(folder, ErrorReport.of(error, rank))
        exit_process(1)


def keep_log(path: Path) -> None:
    """Send everything this process prints, native libraries included, to its log; the first worker has the terminal."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())


def report_to(folder: Path, rank: int) -> None:
    """Let the supervisor watch this worker, and request its stack at any time.

    A signal handler in C writes the stack without the interpreter's lock, so a thread that holds the lock forever
    shows, too. Processes that do not handle SIGURG (yet) ignore it, so a request does no harm.

    Raises:
        HeadwayError: the files for that cannot be created; the supervisor would wait for them in vain.
    """
    global _stacks
    try:
        open_heartbeat(folder / f"heartbeat-{rank}")
        _stacks = (folder / f"stack-{rank}.txt").open("w", encoding="utf-8")
    except OSError as error:
        raise HeadwayError(
            f"worker {rank} cannot be watched: {error.strerror or error}",
            where=error.filename or str(folder),
            fix=fix_for(error, "free space on its disk, or check its permissions; then run the same command again"),
        ) from error
    faulthandler.enable(_stacks, all_threads=True)
    faulthandler.register(signal.SIGURG, _stacks, all_threads=True)


def _report(folder: Path, report: ErrorReport) -> None:
    try:
        write_json(folder / f"error-{report.rank}.json", report.record())
    except OSError as error:
        if spare := os.environ.get(SPARE_VARIABLE):  # in memory, in case the run's disk has failed
            with suppress(OSError):
                if report.rank:  # the agent reads at the first end, and worker 0 says most
                    time.sleep(1.0)
                append_json_line(Path(spare), report.record())
                return
        say(f"worker {report.rank} cannot record its error: {error}: {report}")


def begin_process() -> None:
    """Set up a separate process that ends by `exit_process`; call it first."""
    atexit.register(end)
    redact_streams()
    die_with_parent()


if __name__ == "__main__":
    main()
