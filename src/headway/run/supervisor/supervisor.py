"""The supervisor: owns a run directory, starts attempts at the run, watches them, and begins the next one.

It loads what workers need (`attempt_client.load_ahead`), is copied (`fork`) into the first process of every attempt,
and trains nothing itself. So the loaded modules are in memory once, and the next attempt loads nothing. It uses a
single thread, since a process with several cannot be copied, and looks at the attempt every tenth of a second.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

from headway.config import Config
from headway.core.alerts import Alerts, alerting
from headway.core.console import say, write_log
from headway.core.errors import INTERRUPTED, Preempted, error_with
from headway.core.process.signals import STOP_SIGNALS, handled
from headway.core.process.table import has_one_thread
from headway.core.process.tree import adopt_orphans
from headway.core.process.waiting import wait_until
from headway.core.startup.early_stop import take_early_signals
from headway.run.directory.account import stopped_by_budget
from headway.run.directory.cancel import check_not_cancelled, forget_cancel
from headway.run.directory.ownership import OwnerLock, wait_for_dead_machine, wait_for_orphaned_writers
from headway.run.session.attempt import RunOptions, has_data
from headway.run.supervisor.attempt_client import load_ahead
from headway.run.supervisor.attempt_monitor import AttemptMonitor, AttemptSurroundings
from headway.run.supervisor.error_report import WorkerDied
from headway.run.supervisor.follower_process import FollowerProcess
from headway.run.supervisor.machines.attempt_machines import AttemptMachines
from headway.run.supervisor.machines.run_machines import RunMachines
from headway.run.supervisor.restart_policy import AttemptOutcome, Decision, RestartPolicy, newest_checkpoint
from headway.run.supervisor.worker_pool import WorkerPool

#: Time between looks while it waits between attempts.
_POLL_SECONDS = 0.1
#: Time between looks for a request to cancel the run; while an attempt runs, its workers look.
_ASK_SECONDS = 1.0
#: Loading that takes longer than this is reported.
_LONG_SECONDS = 55.0
#: How long a thread of the C library may take to end.
_THREAD_SECONDS = 1.0


def supervise(
    config: Config,
    options: RunOptions,
    *,
    own_process: bool,
    finished: Callable[[], object] | None = None,
    machines: RunMachines | None = None,
) -> None:
    """Train, and continue after failures and preemptions.

    Args:
        config: Resolved.
        options: What to do about a run directory that exists.
        own_process: This process does nothing else: all its children belong to the run.
        finished: Called when the run has finished, before trackers get the last of it.
        machines: The other machines of the run; None for a run on one.

    Raises:
        HeadwayError: the error that ended the run, or it failed more often than `supervise.max_failures` allows.
        KeyboardInterrupt: a second Ctrl-C, when no worker is left.
    """
    _Supervisor(config, options, own_process, machines).run(finished)


@contextmanager
def _reporting_long_loading(thread_seconds: float) -> Iterator[None]:
    """Report a block that takes long in one line, with its stack in a file.

    The stack comes from a thread in C, which needs no lock of the interpreter: a library that hangs while it is loaded
    may hold it forever. So the line must come from another process, which reads the stack from a pipe.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(writer)
            _report_stack(reader)
        finally:
            os._exit(0)  # the frames above belong to the supervisor
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        faulthandler.dump_traceback_later(_LONG_SECONDS, exit=False, file=pipe)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            # The thread of `faulthandler` was asked to end, and takes a moment; until then this process cannot be
            # copied.
            wait_until(has_one_thread, thread_seconds, 0.001)
    os.waitpid(pid, 0)


def _report_stack(reader: int) -> None:
    """Copy a stack from a pipe to a file, and name the file once; return when the other end is closed."""
    stack = None
    while block := os.read(reader, 4096):
        if stack is None:
            stack, name = tempfile.mkstemp(prefix="headway-loading-", suffix=".txt")
            say(f"loading PyTorch takes more than {_LONG_SECONDS:.0f} s, as from a slow disk; where it is: {name}")
        os.write(stack, block)


class StopRequests:
    """The stop signals that a command has received, those from before this was made included.

    Args:
        run: The run directory.
        machines: The other machines of the run; None for a run on one.
    """

    def __init__(self, run: Path, machines: RunMachines | None) -> None:
        self._run = run
        self._machines = machines
        self._asked_at = 0.0
        self.signals: list[int] = []
        for number in take_early_signals():
            self.record(number, None)

    def record(self, number: int, frame: FrameType | None) -> None:
        """Record a signal: a handler of signals."""
        if self._machines is None:
            self.signals.append(number)
        else:
            self._machines.add_signal(self.signals, number)

    def hear(self) -> list[int]:
        """Return the signals of all machines so far."""
        return self.signals if self._machines is None else self._machines.hear(self.signals)

    def check_not_cancelled(self) -> None:
        """Check that no process has cancelled the run, about once a second.

        Raises:
            Cancelled: it was cancelled.
        """
        now = time.monotonic()
        if now - self._asked_at >= _ASK_SECONDS:
            self._asked_at = now
            check_not_cancelled(self._run)

    def error(self, when: str) -> Preempted:
        """Return the error of a command that a signal stops while no attempt runs."""
        return Preempted(f"stopped by {self.name} {when}", fix="run the same command again")

    @property
    def name(self) -> str:
        """The name of the first signal."""
        return signal.Signals(self.signals[0]).name


class _Supervisor:
    def __init__(
        self, config: Config, options: RunOptions, own_process: bool, machines: RunMachines | None = None
    ) -> None:
        self._machines = machines
        self._config = config
        self._options = options
        self._own_process = own_process
        self._restart_policy = RestartPolicy(config.supervise)
        self._pool = WorkerPool(config, os.environ.get("CUDA_VISIBLE_DEVICES"))
        self._stops = StopRequests(config.run_directory, machines)
        self._lock: OwnerLock | None = None
        self._follower = FollowerProcess(config)
        self._restarts = 0

    def run(self, finished: Callable[[], object] | None) -> None:
        if self._own_process:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it were ignored, the ends of children would be lost
            adopt_orphans()
        alerting_block = alerting(self._config.telemetry.alert, self._config.run_directory)
        with handled(STOP_SIGNALS, self._stops.record), alerting_block as alerts:
            self._wait_for_dead_owners()
            forget_cancel(self._config.run_directory)
            self._load_ahead()
            try:
                while (decision := self._next(alerts)).continues:
                    self._restarts += 1
                    self._options = RunOptions(accept_changes=True)
                    self._pause(decision.delay_seconds)
                if finished is not None:
                    finished()
            finally:
                if self._lock is not None:
                    self._lock.release()
                self._finish_following()

    def _finish_following(self) -> None:
        """Give trackers some time for the last steps; a further signal ends that."""
        signals = self._stops.signals
        came = len(signals)
        self._follower.finish(came > 0, lambda: len(signals) > came)

    def _wait_for_dead_owners(self) -> None:
        """Wait for what is left of a command that was killed, or whose machine died."""
        wait_for_dead_machine(self._config.run_directory, lambda: self._stops.signals)
        if not self._options.restart:
            wait_for_orphaned_writers(self._config.run_directory, lambda: self._stops.signals)
        self._check_signals("before the first attempt")

    def _load_ahead(self) -> None:
        """Load what workers need. The first attempt reports what is missing.

        Nothing watches this process: if a library does not load, as from a mount that hangs, only the stack shows it.
        """
        # Without data the attempt ends with an error, and no further one would use what is loaded here.
        if not (self._own_process and self._config.supervise.load_ahead and has_data(self._config)):
            return
        with _reporting_long_loading(_THREAD_SECONDS if self._machines is None else 0.0):
            try:
                load_ahead(self._config)
            except Exception as error:
                write_log(f"what workers need cannot be loaded ahead: {type(error).__name__}: {error}")
        self._check_signals("before the first attempt")

    def _pause(self, seconds: float) -> None:
        """Wait between attempts. A signal ends the wait, and the run."""
        wait_until(self._is_stopped, seconds, _POLL_SECONDS)
        self._check_signals("between two attempts")

    def _hear(self) -> list[int]:
        """Return the signals of all machines so far, and show that this run lives."""
        if self._lock is not None:
            self._lock.renew()
        return self._stops.hear()

    def _is_stopped(self) -> bool:
        """Return whether a signal has come; a cancelled run ends here."""
        self._follower.tend()
        self._stops.check_not_cancelled()
        return bool(self._hear())

    def _check_signals(self, when: str) -> None:
        if self._hear():
            raise self._stops.error(when)

    def _next(self, alerts: Alerts | None) -> Decision:
        """Make one attempt and decide what follows; raise the error that ends the run."""
        machines_now = self._assemble()
        if machines_now is None:
            return Decision(False, "finished")
        config = self._config.model_copy(update={"parallel": self._pool.parallel_of(len(machines_now) + 1)})

        def begin() -> None:
            if alerts is not None:
                alerts.open_file()
            self._follower.begin()

        around = AttemptSurroundings(
            self._pool,
            self._stops.signals,
            self._own_process,
            machines=machines_now,
            follower=self._follower,
            on_begin=begin,
            can_grow=lambda: self._machines is not None and self._machines.can_grow(len(machines_now) + 1),
            hear=self._hear,
        )
        attempt = AttemptMonitor(config, self._options, around, lock=self._lock, restarts=self._restarts)
        if self._restarts:
            attempt.begin_again()
        try:
            outcome = attempt.run()
        finally:
            self._lock = attempt.journal.lock
            self._config = attempt.config
        if not attempt.has_begun:  # the run was already finished, or a check failed
            decision = Decision(False, outcome.what)
        elif attempt.stopped_to_grow and outcome.kind == "preempted" and not self._stops.signals:
            decision = self._grow()
        else:
            decision = self._decide(outcome)
        stopped = bool(self._stops.signals) and decision.continues
        if stopped:
            decision = Decision(False, f"{self._stops.name} came")
        attempt.record_outcome(outcome, decision)
        if not decision.continues:
            self._end(self._stopped(outcome) if stopped else outcome, decision, attempt.has_begun)
        return decision

    def _grow(self) -> Decision:
        """Decide to continue with more machines, or with all workers of the only one."""
        if self._machines is not None:
            return Decision(True, "to continue with more machines")
        self._pool.grow(newest_checkpoint(self._config.run_directory))
        return Decision(True, f"to continue with {self._pool.size} workers again")

    def _assemble(self) -> AttemptMachines | None:
        """Return the machines of the next attempt, once they are there; None if the run was finished before."""
        if self._machines is None:
            return AttemptMachines()

        def look() -> None:
            self._follower.tend()
            self._stops.check_not_cancelled()
            self._check_signals("while it waited for other machines")

        return self._machines.assemble(look, self._options.restart)

    def _stopped(self, outcome: AttemptOutcome) -> AttemptOutcome:
        """Return how the command ends when it is stopped and the attempt has failed, perhaps because of that.

        It ends as between two attempts, whose next one does not begin.
        """
        if outcome.kind == "preempted":
            return outcome
        if self._stops.signals.count(signal.SIGINT) > 1:
            return replace(outcome, exit_code=INTERRUPTED)
        what = f"{outcome.what}; stopped by {self._stops.name} before the next attempt"
        return AttemptOutcome("preempted", what, Preempted.exit_code, outcome.where, "run the same command again")

    def _decide(self, outcome: AttemptOutcome) -> Decision:
        newest = newest_checkpoint(self._config.run_directory)
        # First, since a permanently lost worker fails no more. A fault that follows may be due to its machine rather
        # than a bug: fewer workers will show that.
        if (why := self._pool.shrink(outcome, newest)) is not None:
            return Decision(True, why)
        return self._restart_policy.decide(outcome, newest)

    def _end(self, outcome: AttemptOutcome, decision: Decision, has_run: bool) -> None:
        """End the command as an attempt has ended, or as a check before it has."""
        if outcome.exit_code == INTERRUPTED:
            raise KeyboardInterrupt
        if outcome.kind == "finished":
            return
        if outcome.kind == "budget" and has_run:
            raise stopped_by_budget(self._config, outcome.what)
        what = outcome.what
        fix = outcome.fix
        if decision.is_bug:
            what = f"{what}: {decision.why}\n" + "\n".join(f"    {frame}" for frame in outcome.frames)
            fix = "fix it; then the same command continues from the newest checkpoint"
        elif self._restarts and outcome.exit_code == 1:
            what = f"{what}; {decision.why}"
        kind = error_with(outcome.exit_code)
        if kind is not None:
            raise kind(what, where=outcome.where, fix=fix)
        error = WorkerDied(what, where=outcome.where, fix=fix)
        error.exit_code = outcome.exit_code
        raise error
