"""One attempt as the supervisor sees it: begin, watch, end, record."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from headway.checkpoint.save.writer_locks import mark_lost, wait_for_writers
from headway.config import Config
from headway.core.console import warning
from headway.core.coordination.heartbeat import Phase
from headway.core.coordination.preemption_board import SIGNAL_KEY, posted
from headway.core.format import format_seconds
from headway.core.process.faults import RESTARTS_VARIABLE
from headway.core.process.tree import GRACE_SECONDS, end_all, reap_orphans
from headway.run.directory.ownership import OwnerLock
from headway.run.session.attempt import RunOptions
from headway.run.supervisor.attempt_client import AttemptProcess
from headway.run.supervisor.attempt_journal import AttemptJournal
from headway.run.supervisor.diagnose import SAVED_KINDS, Evidence, last_exchange
from headway.run.supervisor.error_report import ErrorReport
from headway.run.supervisor.follower_process import FollowerProcess
from headway.run.supervisor.machines.attempt_machines import AttemptMachines, MachineEnd, most_telling
from headway.run.supervisor.machines.members import Member
from headway.run.supervisor.messages import AttemptMessage, Begun, Done, Examined, with_settled
from headway.run.supervisor.restart_policy import AttemptOutcome, Decision
from headway.run.supervisor.watchdog import Finding, Watchdog
from headway.run.supervisor.worker_control import GROW_SIGNAL, WorkerControl
from headway.run.supervisor.worker_pool import WorkerPool
from headway.run.supervisor.worker_status import WorkerStatuses

_POLL_SECONDS = 0.1
_LOOK_SECONDS = 0.2
#: The time between looks while workers begin: of one that dies at once, only the last look tells anything.
_BEGIN_SECONDS = 0.02
#: Time limits: for the agent to report a dead worker, for workers after a second Ctrl-C.
_REPORT_SECONDS = 4.0
_GIVE_UP_SECONDS = 5.0
#: How long machines may take to save after the first of them has.
_SAVE_SECONDS = 30.0
#: How long the agent may take to notice a worker's death before the others are killed: their own errors are noise. And
#: how long those may take to write their stacks, on a machine that has no processor for them.
_HURRY_SECONDS = 0.4
_LATE_STACK_SECONDS = 1.2


@dataclass(frozen=True)
class AttemptSurroundings:
    """What an attempt has around it, which the supervisor keeps."""

    pool: WorkerPool
    signals: list[int]
    """Signals to stop that have come, in order; more are added meanwhile."""
    own_process: bool
    """Whether all children of this process belong to the run."""
    machines: AttemptMachines = field(default_factory=AttemptMachines)
    """The other machines that take part."""
    follower: FollowerProcess | None = None
    """Sends the run to trackers; it is tended by the attempt, and is no part of it."""
    on_begin: Callable[[], None] = lambda: None
    """Called when the attempt's folder exists."""
    can_grow: Callable[[], bool] = lambda: False
    """Returns whether more machines are there than take part, and the run can use them."""
    hear: Callable[[], object] = lambda: None
    """Adds signals that other machines have received."""


@dataclass
class _WaitForSave:
    """A wait for a checkpoint that is still being written when the workers have ended."""

    why: str = "workers are gone"
    """How they ended."""
    since: float = math.inf
    reported: bool = False


class AttemptMonitor:
    """One attempt, as the supervisor sees it.

        run()               starts the attempt process, then looks at it several times a second:
          |                 its messages, signals to pass on, heartbeats for the watchdog
          |-- Examined -->  the attempt owns the run directory, and its workers may train (`AttemptJournal.begin`;
          |                 of a further attempt, begin_again() has done so before)
          |-- its end, or a finding of the watchdog ---> AttemptOutcome
          |
        all processes are ended; a checkpoint that is being written may be finished first
          |
        record_outcome()    writes attempt.json

    Args:
        config: Resolved.
        options: What to do about a run directory that exists.
        around: What is around it.
        lock: That of the attempt before; None before the first.
        restarts: Earlier attempts of this command.
    """

    def __init__(
        self,
        config: Config,
        options: RunOptions,
        around: AttemptSurroundings,
        *,
        lock: OwnerLock | None = None,
        restarts: int = 0,
    ) -> None:
        self.config = config
        self._options = options
        self._around = around
        self.journal = AttemptJournal(options, around.machines, lock=lock, restarts=restarts, on_begin=around.on_begin)
        self.workers = WorkerStatuses(config.parallel.all_workers, range(config.parallel.workers))
        self.control = WorkerControl(self.workers, around.machines, around.signals)
        compiles = config.train.compile is not False
        self.watchdog = Watchdog(config.supervise, compiles, config.parallel.timeout_seconds)
        self._is_done = False
        self._reported: ErrorReport | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the attempt owns the run directory."""
        return self.journal.attempt is not None

    @property
    def stopped_to_grow(self) -> bool:
        """Whether workers were asked to stop only for an attempt with more of them."""
        attempt = self.journal.attempt
        if not self.control.asked_to_grow or attempt is None:
            return False
        stops = (notice for notice in posted(attempt.directory) if notice["wish"] == "stop")
        return all((notice["key"], notice["what"]) == (SIGNAL_KEY, GROW_SIGNAL.name) for notice in stops)

    def begin_again(self) -> None:
        """Begin a further attempt before its processes start."""
        self.journal.begin_again(self.config)

    def run(self) -> AttemptOutcome:
        """Start the workers and wait for their end. On return, no process of the attempt is left."""
        around = self._around
        attempt = self.journal.attempt
        environment = {RESTARTS_VARIABLE: str(self.journal.restarts), **around.machines.variables()}
        if around.pool.devices is not None and self.config.train.device in ("auto", "cuda"):
            environment["CUDA_VISIBLE_DEVICES"] = around.pool.devices
        number = None if attempt is None else attempt.number
        with around.machines.pausing():
            process = AttemptProcess(self.config, self._options, environment, around.own_process, number)
        wait = _WaitForSave()
        try:
            if attempt is not None:
                around.machines.begin(self.config, attempt, self.journal.restarts)
            outcome = self.watch(process)
            wait.why = outcome.what
            return outcome
        finally:
            self._end(process, wait)

    def _end(self, process: AttemptProcess, wait: _WaitForSave) -> None:
        """End all processes of the attempt, on all machines."""
        self.look()
        self._around.machines.end()
        sessions = {process.pid, *self.workers.sessions}
        follower = self._around.follower
        spared = () if follower is None else follower.pids
        descendants_of = os.getpid() if self._around.own_process else None
        left = end_all(sessions, descendants_of, partial(self._is_still_saving, wait), spared)
        process.wait(_GIVE_UP_SECONDS)
        process.channel.end.close()
        self.workers.close()
        self._around.machines.wait_for_end(self.journal.renew_lease)
        if left:
            warning(f"processes {left} of this attempt do not end; they can no longer publish anything")

    def _is_still_saving(self, wait: _WaitForSave) -> bool:
        """Return whether a checkpoint is being written that the next attempt can begin from.

        If that takes seconds, report it once.
        """
        self.journal.renew_lease()
        if not self.has_begun or wait_for_writers(self.config.run_directory, 0.0):
            return False
        now = time.monotonic()
        wait.since = min(wait.since, now)
        if now - wait.since < GRACE_SECONDS:
            return True
        if self.evidence.interrupted:
            return False
        if not wait.reported:
            wait.reported = True
            self.journal.say(f"{wait.why}; waiting for the checkpoint that is still being written")
        return True

    def record_outcome(self, outcome: AttemptOutcome, decision: Decision) -> None:
        """Record why the attempt ended, and report it when the run continues."""
        signals = self._around.signals
        stopped_by = {"stopped_by": signal.Signals(signals[0]).name} if signals else {}
        self.journal.finish(outcome, decision, stopped_by)

    def watch(self, process: AttemptProcess) -> AttemptOutcome:
        """Look at the attempt until it is over, and return how it ended."""
        machines = self._around.machines
        start = time.monotonic()
        start_by = start + self.config.supervise.start_seconds
        late_at = start + self.watchdog.start_patience_seconds
        look_at = 0.0
        first_end_at = math.inf
        found: Finding | None = None
        found_at = 0.0
        while True:
            has_ended = self._listen(process)
            machines.look()
            now = time.monotonic()

            # All have ended, or a machine is lost. Workers of other machines follow by themselves, or wait in vain for
            # those that have ended.
            if self.has_begun and (lost := machines.lost()) is not None:
                return self.explain_loss(*lost)
            if has_ended and (machines.all_ended or not self.has_begun):
                return self.explain_end(process, found)
            if has_ended or machines.ends:
                first_end_at = min(first_end_at, now)
                if now - first_end_at > self._patience_seconds(process):
                    return self.explain_end(process, found)

            # Signals, and what is to be done a few times a second.
            self._around.hear()
            self.pass_signals_on(process)
            self.journal.renew_lease()
            if now < look_at:
                continue
            look_at = now + _LOOK_SECONDS
            self._do_chores(process)

            # Workers that do not begin.
            if self.workers.missing and now > late_at:
                late_at = math.inf
                self._warn_of_late_start(process)
            if self.workers.missing and now > start_by:
                return self.workers.not_begun(self.config.supervise.start_seconds, self._folder)

            # Workers that die, hang or are slow. One that waits for workers that have ended regularly is not hung; for
            # one that was killed there is more to do.
            if found is None and (math.isinf(first_end_at) or any(end.signal for end in self._ends(process))):
                found = self.judge(now)
                found_at = now
            if found is not None and (found.kind != "died" or now > found_at + _REPORT_SECONDS):
                return self.evidence.blame(found)
            if found is not None and now > found_at + self._hurry_seconds:
                self.control.kill(self._begun_folder)

    def _listen(self, process: AttemptProcess) -> bool:
        """Take what the attempt process says, and return whether it has ended; then it has said all."""
        begins = self.has_begun and bool(self.workers.missing)
        for message in process.listen(_BEGIN_SECONDS if begins else _POLL_SECONDS):
            self.take(message, process)
        has_ended = process.poll() is not None
        if has_ended:
            for message in process.listen(0.0):
                self.take(message, process)
        if begins or has_ended:  # the last heartbeats may tell why workers ended
            self.look()
        return has_ended

    def take(self, message: AttemptMessage, process: AttemptProcess) -> None:
        """Take a message of the attempt process."""
        match message:
            case Done():
                self._is_done = True
            case ErrorReport():
                self._reported = message
            case Examined(settled):
                self.config = with_settled(self.config, settled)
                attempt = self.journal.begin(self.config, process.started)
                process.channel.send(Begun(attempt.number))
                self._around.machines.begin(self.config, attempt, self.journal.restarts)

    def _do_chores(self, process: AttemptProcess) -> None:
        self.look()
        if self._around.follower is not None:
            self._around.follower.tend()
        if self._around.own_process:
            reap_orphans(process.pid)
        self._ask_to_grow()

    @property
    def _folder(self) -> Path | None:
        """The attempt's folder; None before it has begun."""
        return None if self.journal.attempt is None else self.journal.attempt.directory

    @property
    def _begun_folder(self) -> Path:
        assert self._folder is not None, "begun"
        return self._folder

    def look(self) -> None:
        """Take what is new of the workers."""
        if self._folder is not None:
            self.control.look(self._folder)

    def _warn_of_late_start(self, process: AttemptProcess) -> None:
        """Warn that workers are late. They may take long to begin, and a hang would stay unnoticed for as long."""
        seconds = self.watchdog.start_patience_seconds
        what = self.workers.late(seconds, process.pid, self.has_begun)
        limit = format_seconds(self.config.supervise.start_seconds)
        self.journal.warn(self.workers.missing[0], what, f"{what}; that may take {limit}")

    def judge(self, now: float) -> Finding | None:
        """Return what ends the attempt, and ask for the stacks that explain it; warn of what does not end it."""
        found = self.watchdog.look(now, self.workers.readings, self.workers.states)
        if found is None:
            return None
        if found.kind == "died":
            return self._report_death(found)
        if found.kind == "waits" or (found.kind == "slow" and self.config.supervise.slow_worker == "warn"):
            self._warn_of(found)
            return None
        self.control.write_stacks(self._begun_folder, list(self.workers.readings), wake=True)
        return found

    def _report_death(self, found: Finding) -> Finding | None:
        """Report a worker that has died; None after a stop signal, when workers may end in any way."""
        if self._around.signals:
            return None
        others = "; the others are ended" if self.config.parallel.all_workers > 1 else ""
        self.journal.say(f"worker {found.rank} {found.what}{others}")
        # Messages of the agent must be heard meanwhile, so the loop waits for these stacks, not this call.
        ranks = [rank for rank in self.workers.readings if rank != found.rank]
        self.control.write_stacks(self._begun_folder, ranks, seconds=0.0)
        return found

    def _warn_of(self, found: Finding) -> None:
        reading = self.workers.readings[found.rank]
        # A worker that may wait for a hanging disk must not wait for it in a signal handler, where it can give nothing
        # up.
        if found.kind == "slow" or reading.phase not in (Phase.CHECKPOINT, Phase.END):
            self.control.write_stacks(self._begun_folder, [found.rank])
        what = found.what + last_exchange(reading)
        self.journal.warn(found.rank, what, f"worker {found.rank} {what}")

    @property
    def _hurry_seconds(self) -> float:
        """How long after a death the remaining workers are killed."""
        return _LATE_STACK_SECONDS if self.control.are_stacks_missing(self._begun_folder) else _HURRY_SECONDS

    def _ask_to_grow(self) -> None:
        """Ask workers to save and stop, when it is time to try with all of them again."""
        readings = self.workers.readings.values()
        at_steps = bool(readings) and all(reading.has_finished_a_step for reading in readings)
        if self.control.asked_to_grow or self._around.signals or not at_steps:
            return
        more_machines = self._around.can_grow()
        if more_machines or self._around.pool.may_grow:
            more = "more machines" if more_machines else "all of them again"
            self.journal.say(f"asking workers to save, to continue with {more}")
            self.control.ask_to_grow()

    def pass_signals_on(self, process: AttemptProcess) -> None:
        """Pass signals on; after a second Ctrl-C, end the attempt at once."""
        self.control.pass_signals_on(process, self._folder)
        if self.evidence.interrupted:
            process.wait(_GIVE_UP_SECONDS)
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)

    @property
    def evidence(self) -> Evidence:
        """What is known of the attempt now."""
        around = self._around
        return Evidence(
            self.config, self.journal.attempt, self.workers.readings, around.signals, around.machines.host_of
        )

    def explain_loss(self, member: Member, why: str, ranks: range) -> AttemptOutcome:
        """Return the outcome of an attempt of which a machine is lost, whose part of a checkpoint may never come."""
        mark_lost(self.config.run_directory, ranks)
        return self.evidence.explain_loss(member, why, ranks.start)

    def explain_end(self, process: AttemptProcess, found: Finding | None) -> AttemptOutcome:
        """Return the outcome that the ends of the attempt processes show."""
        return self.evidence.explain_end(most_telling(self._ends(process), found), found)

    def _patience_seconds(self, process: AttemptProcess) -> float:
        """Return how long the machines may take to end after the first of them has."""
        worst = most_telling(self._ends(process), None)
        if worst.is_good:
            return self.config.supervise.save_seconds
        return _SAVE_SECONDS if worst.code in SAVED_KINDS else _REPORT_SECONDS

    def _ends(self, process: AttemptProcess) -> list[MachineEnd]:
        """Return the ends of the machines whose workers have ended."""
        ends = list(self._around.machines.ends.values())
        if process.code is not None:
            ends.append(MachineEnd(process.code, self._is_done, self._reported, killed_here=self.control.killed))
        return ends
