"""The run of a trial: a command that holds a lock as long as it lives, what it has recorded, and how it has ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from headway.checkpoint.format.folders import checkpoint_folders, discard, pruning
from headway.core.console import warning
from headway.core.coordination.outcomes import BUDGET_REACHED, CANCELLED, FINISHED, PREEMPTED
from headway.core.coordination.owner import read_owner
from headway.core.coordination.preemption_board import Notice, post
from headway.core.errors import BudgetReached, CheckpointError, ConfigError, DataError, DivergedError
from headway.core.files.locks import is_locked, lock_file
from headway.core.process.command import module_command
from headway.core.process.signals import defer_signals
from headway.core.process.waiting import wait_until
from headway.run.directory.cancel import request_cancel
from headway.run.directory.run_directory import LAUNCH_FILE, RunDirectory, attempt_folder
from headway.telemetry.metrics import FILE_NAME, Metrics
from headway.telemetry.record import RUNNING, Run
from headway.telemetry.tail import JsonLinesTail

#: `Notice.source` of a study.
SOURCE = "tune"
LOCAL = "local"
#: How long processes that a run has left behind, as those that upload, may hold its lock.
_STRAGGLER_SECONDS = 60.0
_LOG_BYTES = 4000

Kind = Literal["complete", "diverged", "budget", "infeasible", "failed", "cancelled", "interrupted"]
#: Exit codes that another start would meet again.
_KINDS: Mapping[int, Kind] = {
    0: "complete",
    BudgetReached.exit_code: "budget",
    DivergedError.exit_code: "diverged",
    DataError.exit_code: "failed",
    CheckpointError.exit_code: "failed",
    1: "failed",
}


@dataclass(frozen=True)
class Ending:
    """How the command of a trial has ended."""

    kind: Kind
    why: str = ""


class HeldCommand:
    """A command that inherits a lock, by which a study that is resumed knows that it still runs.

    Args:
        lock: The file that is locked.
    """

    def __init__(self, lock: Path) -> None:
        self._lock = lock
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, command: Sequence[str], log: Path, folder: Path, variables: Mapping[str, str]) -> None:
        """Start the command in a folder, with its output appended to a file."""
        wait_until(lambda: not is_locked(self._lock), _STRAGGLER_SECONDS)
        environment = {**os.environ, **variables}
        with suppress(BlockingIOError), lock_file(self._lock) as lock, log.open("ab") as output, defer_signals():
            os.set_inheritable(lock.fileno(), True)
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=folder,
                env=environment,
                pass_fds=[lock.fileno()],
                start_new_session=True,
            )

    @property
    def runs(self) -> bool:
        """Whether the command runs, started here or by a process that is gone."""
        return is_locked(self._lock) if self._process is None else self._process.poll() is None

    @property
    def code(self) -> int | None:
        """The exit code; None if it runs, or was started by another process."""
        return None if self._process is None else self._process.poll()

    def terminate(self) -> None:
        """Ask the command to end, if it was started here."""
        if self._process is not None:
            self._process.terminate()


class HistoryReader:
    """Reads a run's metrics as they grow.

    Args:
        run: The run directory.
    """

    def __init__(self, run: Path) -> None:
        self._tail = JsonLinesTail(run / FILE_NAME)
        self.metrics = Metrics()

    def refresh(self) -> bool:
        """Read what is new, and return whether there was anything."""
        is_new = False
        with suppress(OSError):
            for begins, records in self._tail.read():
                is_new = True
                if begins:
                    self.metrics = Metrics()
                for record in records:
                    self.metrics.add(record)
        return is_new


class TrialRun:
    """One trial that runs.

    Args:
        number: Its number.
        run: Its run directory.
        launcher: `local`, or the target of `headway launch`.
    """

    def __init__(self, number: int, run: Path, launcher: str) -> None:
        self.number = number
        self.path = run
        self._launcher = launcher
        self.command = HeldCommand(run.with_name(f".{run.name}.lock"))
        self.history = HistoryReader(run)
        self.began = time.time()
        self.restarts = 0
        self.step_at_start = 0
        self._asked: object = None

    def start(self, base: Path, words: Sequence[str], log: Path, folder: Path, devices: str | None) -> None:
        """Start the run, or continue it from where it is.

        Args:
            base: The study's base config.
            words: The trial's overrides.
            log: The file for what the command prints.
            folder: The folder in which the study was started.
            devices: Value of CUDA_VISIBLE_DEVICES, if trials share a machine with GPUs.
        """
        if self._launcher == LOCAL:
            command = module_command("headway", "train", str(base), *words)
        elif (self.path / LAUNCH_FILE).exists() and self.outcome == RUNNING:
            command = module_command("headway", "launch", "wait", str(self.path))
        else:
            command = module_command(
                "headway", "launch", "run", str(base), *words, "--on", self._launcher, "--wait", "--yes"
            )
        self.history.refresh()
        self.step_at_start = self.history.metrics.last_step
        self._asked = None
        self.command.start(command, log, folder, {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices})

    @cached_property
    def total_steps(self) -> int:
        """The number of steps of the run, which has begun."""
        return Run(self.path).total_steps or 0

    @property
    def outcome(self) -> str:
        """How the newest attempt has ended, or that it runs."""
        return Run(self.path).outcome

    def give_up(self, why: str) -> None:
        """Have the run saved and ended for good, as `headway runs cancel` does."""
        if not self._is_new_attempt("give up"):
            return
        if self._launcher != LOCAL:
            self._remove_job()
            return
        with suppress(CheckpointError):
            request_cancel(self.path, why)

    def pause(self, why: str) -> None:
        """Have the run saved and stopped, to go on later; called again until the run has ended."""
        if not self._is_new_attempt("pause"):
            return
        owner = read_owner(self.path)
        if self._launcher != LOCAL:
            self._remove_job()
        elif owner is None:
            self.command.terminate()  # it has not begun its first attempt
        else:
            with suppress(OSError):
                post(attempt_folder(self.path, owner.attempt), Notice(SOURCE, why))

    def _is_new_attempt(self, verb: str) -> bool:
        """Return whether this attempt was not asked yet."""
        owner = read_owner(self.path)
        asked = (verb, None if owner is None else owner.attempt)
        is_new = asked != self._asked
        self._asked = asked
        return is_new

    def _remove_job(self) -> None:
        command = module_command("headway", "launch", "cancel", str(self.path), "--yes")
        done = subprocess.run(command, stdout=sys.stderr, check=False)
        if done.returncode:
            warning(f"the job of {self.path} could not be cancelled (exit code {done.returncode})")

    def ending(self, log: Path) -> Ending:
        """Return how the command has ended, by its exit code, or by the run's record if another process started it."""
        code = self.command.code
        attempts = Run(self.path).attempts
        newest = attempts[-1] if attempts else None
        outcome = None if newest is None else newest.outcome
        if outcome == FINISHED and code in (None, 0):
            return Ending("complete")
        if outcome == CANCELLED:
            return Ending("cancelled", "it was cancelled by hand")
        if outcome in (PREEMPTED, BUDGET_REACHED) and code is None:
            return Ending("interrupted" if outcome == PREEMPTED else "budget")
        if newest is not None and (code is None or (self._launcher != LOCAL and code)):
            code = newest.exit_code  # the command on this machine only waits for a job
        if code == ConfigError.exit_code and not self.history.metrics.last_step:
            return Ending("infeasible", error_in(log))
        if code is None or code not in (*_KINDS, ConfigError.exit_code):
            return Ending("interrupted", f"ended with exit code {code}")
        kind = _KINDS.get(code, "failed")
        return Ending(kind, "" if kind == "complete" else error_in(log))

    @property
    def spent_usd(self) -> float:
        """What it has spent until now, as far as a price is known."""
        metrics = self.history.metrics
        recorded = metrics.last("time")
        spent = metrics.last("cost/spent_usd") or 0.0
        if recorded is None:
            return spent
        return spent + self.usd_per_hour * max(0.0, time.time() - max(recorded, self.began)) / 3600

    @property
    def usd_per_hour(self) -> float:
        """The price of its machines; 0 if it is unknown."""
        return self.history.metrics.last("cost/usd_per_hour") or 0.0


def remove_checkpoints(run: Path) -> None:
    """Remove all checkpoints of a run that has ended, unless a process owns it."""
    folder = run / "checkpoints"
    if not folder.is_dir() or not checkpoint_folders(folder):
        return
    try:
        lock = RunDirectory(run).claim()
    except CheckpointError:
        return
    try:
        with pruning(folder):
            for one in checkpoint_folders(folder).values():
                discard(one)
    except OSError as error:
        warning(f"the checkpoints of {run} cannot be removed: {error.strerror}")
    finally:
        lock.release()


def error_in(log: Path) -> str:
    """Return the last error that a command has printed in three lines, as one; its last line where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    starts = [index for index, line in enumerate(lines) if line.startswith("error: ")]
    if not starts:
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
    found = [line.strip() for line in lines[starts[-1] : starts[-1] + 3]]
    return "; ".join(found).removeprefix("error: ")
