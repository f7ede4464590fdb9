"""The supervisor: owns a run directory, has attempts made at the run, watches them, and begins the next one.

It loads what workers need (`leader_process.load_ahead`), is copied (`fork`) into the first process of every attempt,
and trains nothing itself: what was loaded once lies in memory once, and the next attempt loads nothing. It does
everything in one thread, since a process with others cannot be copied, with a look every tenth of a second.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from dataclasses import replace
from types import FrameType

from headway.config import Config
from headway.core.alerts import Alerts, alerting
from headway.core.console import write_log
from headway.core.errors import INTERRUPTED, Preempted, error_with
from headway.core.process_table import has_one_thread
from headway.core.signals import STOP_SIGNALS, handled
from headway.core.waiting import wait_until
from headway.runs.ownership import OwnerLock, wait_for_dead_machine, wait_for_orphaned_writers
from headway.session.attempt import RunOptions, WorkerDied
from headway.supervisor.attempt_client import has_data, load_ahead
from headway.supervisor.attempt_monitor import AttemptMonitor, newest_checkpoint
from headway.supervisor.processes import adopt_orphans
from headway.supervisor.restart_policy import Budget, Decision, Ending
from headway.supervisor.worker_pool import WorkerPool

#: A look between attempts.
_POLL_SECONDS = 0.1
#: From when on loading what workers need takes so long that somebody will want to know why.
_LONG_SECONDS = 55.0
#: For a thread of the C library that has been told to end.
_THREAD_SECONDS = 1.0


def supervise(config: Config, options: RunOptions, *, own_process: bool) -> None:
    """Train, and go on by itself whatever dies.

    Args:
        own_process: This process does nothing else: all its children belong to the run.

    Raises:
        HeadwayError: what has ended the run, or the budget of failures.
        KeyboardInterrupt: a second Ctrl-C, when no worker is left.
    """
    _Supervisor(config, options, own_process).run()


class _Supervisor:
    def __init__(self, config: Config, options: RunOptions, own_process: bool) -> None:
        self._config, self._wishes, self._own_process = config, options, own_process
        self._budget, self._crew = Budget(config.supervise), WorkerPool(config, os.environ.get("CUDA_VISIBLE_DEVICES"))
        self._signals: list[int] = []
        self._lock: OwnerLock | None = None
        self._alerts: Alerts | None = None
        self._restarts = 0

    def run(self) -> None:
        if self._own_process:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, no child's end can be known
            adopt_orphans()
        told = alerting(self._config.telemetry.alert, self._config.run_directory)
        with handled(STOP_SIGNALS, self._note), told as self._alerts:
            self._wait_for_the_dead()
            self._load_ahead()
            try:
                while (decision := self._next()).goes_on:
                    self._restarts += 1
                    self._wishes = RunOptions(accept_changes=True)
                    self._pause(decision.delay_seconds)
            finally:
                if self._lock is not None:
                    self._lock.release()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _wait_for_the_dead(self) -> None:
        """For what is left of a command that was killed, or whose machine was."""
        wait_for_dead_machine(self._config.run_directory, lambda: self._signals)
        if not self._wishes.restart:
            wait_for_orphaned_writers(self._config.run_directory, lambda: self._signals)
        self._heed("before the first attempt")

    def _load_ahead(self) -> None:
        """What is missing, the first attempt says when it does without this. Nobody watches over this process: where a
        library does not come, as from a mount that hangs, the stack tells of it."""
        if not (self._own_process and self._config.supervise.load_ahead and has_data(self._config)):
            return
        faulthandler.dump_traceback_later(_LONG_SECONDS, exit=False)
        try:
            load_ahead(self._config)
        except Exception as error:
            write_log(f"what workers need cannot be loaded ahead: {type(error).__name__}: {error}")
        finally:
            faulthandler.cancel_dump_traceback_later()
            # Its thread has told that it ends, and does so a moment later; until then this process cannot be copied.
            wait_until(has_one_thread, _THREAD_SECONDS, 0.001)
        self._heed("before the first attempt")

    def _pause(self, seconds: float) -> None:
        """Between attempts; a signal ends it, and the run."""
        wait_until(lambda: self._signals, seconds, _POLL_SECONDS)
        self._heed("between two attempts")

    def _heed(self, when: str) -> None:
        if self._signals:
            raise Preempted(f"stopped by {self._signal} {when}", fix="run the same command again")

    def _next(self) -> Decision:
        """One attempt; what has ended the run is raised."""
        parallel = self._config.parallel.model_copy(update={"workers": self._crew.size})
        config = self._config.model_copy(update={"parallel": parallel})
        has_begun = self._alerts.open_file if self._alerts is not None else lambda: None
        attempt = AttemptMonitor(config, self._wishes, self._crew, self._signals, self._own_process, has_begun)
        if self._restarts:
            attempt.begin_again(self._lock, self._restarts)
        try:
            ending = attempt.make(self._restarts, self._lock)
        finally:
            self._lock, self._config = attempt.lock or self._lock, attempt.config
        if attempt.record is None:  # it was finished before, or something spoke against it
            decision = Decision(False, ending.what)
        elif attempt.has_made_room and ending.kind == "preempted" and not self._signals:
            self._crew.grow(newest_checkpoint(self._config.run_directory))
            decision = Decision(True, f"to go on with {self._crew.size} workers again")
        else:
            decision = self._decide(ending)
        stopped = bool(self._signals) and decision.goes_on
        if stopped:
            decision = Decision(False, f"{self._signal} came")
        attempt.conclude(ending, decision)
        if not decision.goes_on:
            self._end(self._stopped(ending) if stopped else ending, decision)
        return decision

    @property
    def _signal(self) -> str:
        return signal.Signals(self._signals[0]).name

    def _stopped(self, ending: Ending) -> Ending:
        """How the command ends when it was told to stop and the attempt had failed, or fails over that: as it does
        between two attempts, whose next one does not begin."""
        if ending.kind == "preempted":
            return ending
        if self._signals.count(signal.SIGINT) > 1:
            return replace(ending, exit_code=INTERRUPTED)
        what = f"{ending.what}; stopped by {self._signal} before the next attempt"
        return Ending("preempted", what, Preempted.exit_code, ending.where, "run the same command again")

    def _decide(self, ending: Ending) -> Decision:
        newest = newest_checkpoint(self._config.run_directory)
        # First, since a worker that goes for good fails no more; and a fault that follows it may be its machine's and
        # no bug: with fewer workers it will be seen.
        if (why := self._crew.lose(ending, newest)) is not None:
            return Decision(True, why)
        return self._budget.decide(ending, newest)

    def _end(self, ending: Ending, decision: Decision) -> None:
        if ending.exit_code == INTERRUPTED:
            raise KeyboardInterrupt
        if ending.kind == "finished":
            return
        what, fix = ending.what, ending.fix
        if decision.is_bug:
            what = f"{what}: {decision.why}\n" + "\n".join(f"    {frame}" for frame in ending.frames)
            fix = "mend it; then the same command goes on from the newest checkpoint"
        elif self._restarts and ending.exit_code == 1:
            what = f"{what}; {decision.why}"
        kind = error_with(ending.exit_code)
        if kind is not None:
            raise kind(what, where=ending.where, fix=fix)
        error = WorkerDied(what, where=ending.where, fix=fix)
        error.exit_code = ending.exit_code
        raise error
