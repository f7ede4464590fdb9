"""One attempt as the supervisor sees it: begin, watch, end, record."""

from __future__ import annotations

import math
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headway.checkpoint.save.writer_locks import mark_lost, wait_for_writers
from headway.config import Config
from headway.core.console import alert, clear_line, notice, warning
from headway.core.coordination.heartbeat import Phase
from headway.core.coordination.outcomes import BUDGET_REACHED, CANCELLED, FINISHED, PREEMPTED
from headway.core.coordination.preemption_board import SIGNAL_KEY, posted
from headway.core.errors import INTERRUPTED, CheckpointError, fix_for
from headway.core.format import format_seconds
from headway.core.machine.system import host_name
from headway.core.process.faults import RESTARTS_VARIABLE
from headway.run.directory.ownership import OwnerLock
from headway.run.directory.run_directory import IDENTITY_KEY, RESTARTS_KEY, Attempt, RunDirectory, command_line
from headway.run.session.attempt import (
    RunOptions,
    note_restart,
    prepare_run_directory,
    price_facts,
    write_config,
)
from headway.run.session.completed import with_settled
from headway.run.supervisor.attempt_client import AttemptProcess
from headway.run.supervisor.diagnose import SAVED_KINDS, Evidence, last_exchange
from headway.run.supervisor.error_report import ErrorReport
from headway.run.supervisor.follower_process import FollowerProcess
from headway.run.supervisor.log import SupervisorLog
from headway.run.supervisor.machines.roster import Member
from headway.run.supervisor.machines.team import MachineEnd, Team, most_telling
from headway.run.supervisor.messages import AttemptMessage, Begun, Done, Examined
from headway.run.supervisor.processes import GRACE_SECONDS, ask_for_stacks, end_all, file_size, reap_orphans
from headway.run.supervisor.restart_policy import AttemptOutcome, Decision
from headway.run.supervisor.watchdog import Finding, Watchdog
from headway.run.supervisor.worker_pool import WorkerPool
from headway.run.supervisor.worker_status import WorkerStatuses

_POLL_SECONDS, _LOOK_SECONDS = 0.1, 0.2
#: The time between looks while workers begin: of one that dies at once, only the last look tells anything.
_BEGIN_SECONDS = 0.02
#: Asks workers to save and stop, so that the next attempt can have more of them.
_GROW_SIGNAL = signal.SIGUSR1
#: Time limits: for the agent to report a dead worker, for stacks to be written, for workers after a second Ctrl-C.
_REPORT_SECONDS, _STACK_SECONDS, _GIVE_UP_SECONDS = 4.0, 2.0, 5.0
#: How long machines may take to save after the first of them has.
_SAVE_SECONDS = 30.0
#: How long the agent may take to notice a worker's death before the others are killed: their own errors are noise. And
#: how long those may take to write their stacks, on a machine that has no processor for them.
_HURRY_SECONDS, _LATE_STACK_SECONDS = 0.4, 1.2
#: Kinds of outcomes whose record is a word that `telemetry.record` knows; others are recorded by what happened.
_OUTCOMES = {"finished": FINISHED, "preempted": PREEMPTED, "budget": BUDGET_REACHED, "cancelled": CANCELLED}


@dataclass
class _WaitForSave:
    """A wait for a checkpoint that is still being written when the workers have ended."""

    why: str = "workers are gone"
    """How they ended."""
    since: float = math.inf
    reported: bool = False


class AttemptMonitor:
    """One attempt, as the supervisor sees it.

        make()              starts the attempt process, then looks at it several times a second:
          |                 its messages, signals to pass on, heartbeats for the watchdog
          |-- "ready" --->  begin(): the attempt owns the run directory, and its workers may train
          |                 (begin_again() has done so before make(), in a further attempt)
          |-- its end, or a finding of the watchdog ---> AttemptOutcome
          |
        all processes are ended; a checkpoint that is being written may be finished first
          |
        record_outcome()    writes attempt.json

    Args:
        has_begun: Called when the attempt's folder exists.
        follower: What sends the run to trackers; it is tended here, and is no part of the attempt.
        team: The other machines that take part.
        hear: Adds signals that other machines have received.
        can_grow: Returns whether more machines are there than take part, and the run can use them.
    """

    def __init__(
        self,
        config: Config,
        options: RunOptions,
        pool: WorkerPool,
        signals: list[int],
        own_process: bool,
        *,
        has_begun: Callable[[], None] = lambda: None,
        follower: FollowerProcess | None = None,
        team: Team | None = None,
        can_grow: Callable[[], bool] = lambda: False,
        hear: Callable[[], object] = lambda: None,
    ) -> None:
        self.config, self._options, self._own_process = config, options, own_process
        self._signals, self._passed_on, self._has_begun = signals, 0, has_begun
        self._follower = follower
        self._pool, compiles = pool, config.train.compile is not False
        # Not `or`: a team of the lead alone is empty, and still has to be paused.
        self._team = Team() if team is None else team
        self._can_grow, self._hear = can_grow, hear
        self._watchdog = Watchdog(config.supervise, compiles, config.parallel.timeout_seconds)
        self.grows = False
        """Whether workers were asked to stop for an attempt with more of them."""
        self._restarts = 0
        self.record: Attempt | None = None
        self._log: SupervisorLog | None = None
        self.lock: OwnerLock | None = None
        self._reported: ErrorReport | None = None
        self._done = False
        self._workers = WorkerStatuses(config.parallel.all_workers, range(config.parallel.workers))
        self._facts: dict[str, Any] = {}
        self._killed: set[int] = set()

    def begin(self, lock: OwnerLock | None, started: float | None = None, restarts: int = 0) -> Attempt:
        """Take the run directory: from here on, processes of earlier attempts cannot publish anything."""
        run = prepare_run_directory(self.config, self._options) if not lock else RunDirectory(self.config.run_directory)
        self.lock = lock or run.claim()
        parallel = self.config.parallel
        facts: dict[str, Any] = {
            "workers": parallel.all_workers,
            RESTARTS_KEY: restarts,
            **price_facts(self.config),
        }
        if parallel.machines > 1:
            facts["machines"] = [host_name(), *(member.host for member in self._team.members)]
        if self._team.identity is not None:
            facts[IDENTITY_KEY] = self._team.identity
        self.record = run.begin_attempt(command_line(), self.lock, started, **facts)
        self._log = SupervisorLog(self.record.directory / "supervisor.log")
        self._has_begun()
        note_restart(run.path, self.config, self._options)
        return self.record

    @property
    def stopped_to_grow(self) -> bool:
        """Whether workers were asked to stop only for an attempt with more of them."""
        if not self.grows or self.record is None:
            return False
        stops = (notice for notice in posted(self.record.directory) if notice["wish"] == "stop")
        return all((notice["key"], notice["what"]) == (SIGNAL_KEY, _GROW_SIGNAL.name) for notice in stops)

    def begin_again(self, lock: OwnerLock | None, restarts: int) -> None:
        """Begin a further attempt, whose record repeats what the one before has established."""
        attempt = self.begin(lock, restarts=restarts)
        has_config = (attempt.run / "config.yaml").exists()
        try:
            write_config(self.config, attempt.directory, *(() if has_config else (attempt.run,)))
        except OSError as error:
            why = f"the config cannot be written: {error.strerror or error}"
            attempt.finish(f"failed to start: {why}", CheckpointError.exit_code)
            where = str(error.filename or attempt.directory)
            fix = fix_for(error, "make room there; then run the same command again")
            raise CheckpointError(why, where=where, fix=fix) from error
        with suppress(OSError):  # absent if the attempt before ended while it began; informative only
            shutil.copy(attempt.run / "run.json", attempt.directory)

    def make(self, restarts: int, lock: OwnerLock | None) -> AttemptOutcome:
        """Start the workers and wait for their end. On return, no process of the attempt is left."""
        number = self.record.number if self.record is not None else None
        self._restarts = restarts
        environment = {RESTARTS_VARIABLE: str(restarts), **self._team.variables()}
        if self._pool.devices is not None and self.config.train.device in ("auto", "cuda"):
            environment["CUDA_VISIBLE_DEVICES"] = self._pool.devices
        with self._team.pausing():
            process = AttemptProcess(self.config, self._options, environment, self._own_process, number)
        wait = _WaitForSave()
        try:
            if self.record is not None:
                self._team.begin(self.config, self.record, restarts)
            outcome = self._watch(process, lock)
            wait.why = outcome.what
            return outcome
        finally:
            self._look()
            self._team.end()
            sessions = {process.pid, *self._workers.sessions}
            spared = self._follower.pids if self._follower is not None else ()
            children_of = os.getpid() if self._own_process else None
            left = end_all(sessions, children_of, partial(self._still_saving, wait), spared)
            process.wait(_GIVE_UP_SECONDS)
            process.channel.end.close()
            self._workers.close()
            self._team.wait_for_end(self._renew_lease)
            if left:
                warning(f"processes {left} of this attempt do not end; they can no longer publish anything")

    def _still_saving(self, wait: _WaitForSave) -> bool:
        """Return whether a checkpoint is being written that the next attempt can begin from.

        If that takes seconds, report it once.
        """
        self._renew_lease()
        if self.record is None or wait_for_writers(self.config.run_directory, 0.0):
            return False
        now = time.monotonic()
        wait.since = min(wait.since, now)
        if now - wait.since < GRACE_SECONDS:
            return True
        if self._evidence.interrupted:
            return False
        if not wait.reported:
            wait.reported = True
            self._say(f"{wait.why}; waiting for the checkpoint that is still being written")
        return True

    def record_outcome(self, outcome: AttemptOutcome, decision: Decision) -> None:
        """Record why the attempt ended, and report it when the run continues."""
        if self.record is None:
            return
        text = _OUTCOMES.get(outcome.kind, outcome.what)
        facts = {**outcome.record(), **self._facts, "decision": decision.why}
        if self._signals:
            facts["stopped_by"] = signal.Signals(self._signals[0]).name
        if decision.continues:
            after = f" in {decision.delay_seconds:.0f} s" if decision.delay_seconds else ""
            self._say(
                f"attempt {self.record.number} ended: {outcome.what} ({decision.why});"
                f" the next one begins{after}, from the newest checkpoint"
            )
        if outcome.kind not in _OUTCOMES and outcome.exit_code != INTERRUPTED:
            alert(f"attempt {self.record.number} ended: {outcome.what} ({decision.why})")
        with suppress(OSError):  # on a broken disk the files stay
            self._remove_leftovers(self.record.directory)
        self.record.finish(text, outcome.exit_code, **facts)

    def _remove_leftovers(self, folder: Path) -> None:
        """Remove files without a further use: links to heartbeat pages, and empty stacks."""
        for path in folder.glob("heartbeat-*"):
            path.unlink()
        for path in folder.glob("stack-*.txt"):
            if not path.stat().st_size:
                path.unlink()

    def _watch(self, process: AttemptProcess, lock: OwnerLock | None) -> AttemptOutcome:
        look_at, found, found_at, ended_at = 0.0, None, 0.0, math.inf
        start_by = time.monotonic() + self.config.supervise.start_seconds
        late_at = time.monotonic() + self._watchdog.start_patience_seconds
        while True:
            begins = self.record is not None and bool(self._workers.missing)
            for message in process.listen(_BEGIN_SECONDS if begins else _POLL_SECONDS):
                self._handle(message, process, lock)
            if begins:
                self._look()
            has_ended, now = process.poll() is not None, time.monotonic()
            if has_ended:
                for message in process.listen(0.0):
                    self._handle(message, process, lock)
                self._look()
            self._team.look()
            if (lost := self._team.lost()) is not None and self.record is not None:
                return self._lost(*lost)
            if has_ended and (self._team.all_ended or self.record is None):
                return self._ended(process, found)
            if has_ended or self._team.ends:
                # The workers of the other machines follow by themselves, or wait in vain for those that have ended.
                ended_at = min(ended_at, now)
                if now - ended_at > self._patience_seconds(process):
                    return self._ended(process, found)
            self._hear()
            self._pass_on(process)
            self._renew_lease()
            if now < look_at:
                continue
            look_at = now + _LOOK_SECONDS
            self._look()
            if self._follower is not None:
                self._follower.tend()
            if self._own_process:
                reap_orphans(process.pid)
            self._ask_to_grow()
            if now > late_at and self._workers.missing:
                late_at = math.inf
                self._warn_of_late_start(process)
            if now > start_by and self._workers.missing:
                folder = self.record.directory if self.record is not None else None
                return self._workers.not_begun(self.config.supervise.start_seconds, folder)
            # Who waits for workers that have ended regularly is not hung; for one that was killed there is more to do.
            if found is None and (math.isinf(ended_at) or any(end.signal for end in self._ends(process))):
                found = self._judge(now)
                found_at = now
                if found is not None and found.kind == "died":
                    others = "; the others are ended" if self.config.parallel.all_workers > 1 else ""
                    self._say(f"worker {found.rank} {found.what}{others}")
                    # Messages of the agent must be heard meanwhile, so `_hurry` waits for these stacks, not this call.
                    self._write_stacks([rank for rank in self._workers.readings if rank != found.rank], seconds=0.0)
            if found is not None and (found.kind != "died" or now > found_at + _REPORT_SECONDS):
                return self._evidence.blame(found)
            if found is not None and now > found_at + (_LATE_STACK_SECONDS if self._stacks_missing else _HURRY_SECONDS):
                self._hurry()

    def _handle(self, message: AttemptMessage, process: AttemptProcess, lock: OwnerLock | None) -> None:
        match message:
            case Done():
                self._done = True
            case ErrorReport():
                self._reported = message
            case Examined(settled):
                self.config = with_settled(self.config, settled)
                record = self.begin(lock, process.started)
                process.channel.send(Begun(record.number))
                self._team.begin(self.config, record, self._restarts)

    def _renew_lease(self) -> None:
        if self.lock is not None:
            self.lock.renew()

    def _look(self) -> None:
        if self.record is not None:
            self._workers.look(self.record.directory)
            self._workers.add(self._team.readings, self._team.states)

    def _warn_of_late_start(self, process: AttemptProcess) -> None:
        """Warn that workers are late. They may take long to begin, and a hang would stay unnoticed for as long."""
        seconds = self._watchdog.start_patience_seconds
        what = self._workers.late(seconds, process.pid, self.record is not None)
        self._say(f"warning: {what}; that may take {format_seconds(self.config.supervise.start_seconds)}")
        self._facts.setdefault("warnings", []).append({"rank": self._workers.missing[0], "what": what})

    def _judge(self, now: float) -> Finding | None:
        found = self._watchdog.look(now, self._workers.readings, self._workers.states)
        if found is None or found.kind == "died":
            return None if self._signals else found  # after a stop signal they may end in any way
        if found.kind == "waits" or (found.kind == "slow" and self.config.supervise.slow_worker == "warn"):
            reading = self._workers.readings[found.rank]
            # A worker that may wait for a hanging disk must not wait for it in a signal handler, where it can give
            # nothing up.
            if found.kind == "slow" or reading.phase not in (Phase.CHECKPOINT, Phase.END):
                self._write_stacks([found.rank])
            what = found.what + last_exchange(reading)
            self._say(f"warning: worker {found.rank} {what}")
            self._facts.setdefault("warnings", []).append({"rank": found.rank, "what": what})
            return None
        self._write_stacks(list(self._workers.readings), wake=True)
        return found

    @property
    def _at_steps(self) -> bool:
        """Whether every worker has done a step of this attempt."""
        readings = self._workers.readings.values()
        return bool(readings) and all(reading.has_finished_a_step for reading in readings)

    def _ask_to_grow(self) -> None:
        """Ask workers to save and stop at the next step, when it is time to try with all of them again."""
        if self.grows or not self._at_steps or self._signals or not (self._pool.may_grow or self._can_grow()):
            return
        self.grows = True
        more = "more machines" if self._can_grow() else "all of them again"
        self._say(f"asking workers to save, to continue with {more}")
        self._team.signal(_GROW_SIGNAL)
        for pid in self._workers.alive.values():
            with suppress(ProcessLookupError):
                os.kill(pid, _GROW_SIGNAL)

    def _hurry(self) -> None:
        """Kill the remaining workers, so that the agent reports at once instead of waiting half a minute for them."""
        self._team.signal(signal.SIGKILL)
        self._look()  # those that have died by now are not killed here
        for rank, pid in self._workers.alive.items():
            self._killed.add(rank)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _say(self, text: str) -> None:
        clear_line()
        notice(text)  # first, because an alert may follow it
        if self._log is not None:
            self._log.write(text)

    def _write_stacks(self, ranks: list[int], wake: bool = False, seconds: float = _STACK_SECONDS) -> None:
        """Have workers write their stacks to `stack-<rank>.txt`; stopped ones are continued for that if `wake`."""
        assert self.record is not None, "begun"
        self._team.write_stacks(ranks, wake)
        going, stopped = self._workers.stack_files(self.record.directory, ranks)
        ask_for_stacks(going, seconds)
        if wake:
            ask_for_stacks(stopped, _STACK_SECONDS, stopped=True)

    @property
    def _stacks_missing(self) -> bool:
        """Return whether a living worker of this machine has yet to write its stack; it may wait for a processor."""
        assert self.record is not None, "begun"
        files, _ = self._workers.stack_files(self.record.directory, self._workers.readings)
        return any(file_size(path) == 0 for path in files.values())

    def _pass_on(self, process: AttemptProcess) -> None:
        """Pass signals on to workers, which save and end with exit code 75."""
        several = self.config.parallel.all_workers > 1
        for number in self._signals[self._passed_on :]:
            self._passed_on += 1
            if several and not self._workers.alive:
                self._look()  # they may have begun since the last look
            targets = list(self._workers.alive.values()) if several else [process.pid]
            if not self._workers.readings and not targets and process.poll() is None:
                # An agent whose workers have not begun has nothing to save. Once they are gone, it reports why.
                targets, number = [process.pid], signal.SIGKILL
            for pid in targets:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            self._team.signal(number)
        if self._evidence.interrupted:
            process.wait(_GIVE_UP_SECONDS)
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)

    @property
    def _evidence(self) -> Evidence:
        """Return what is known of the attempt now."""
        return Evidence(self.config, self.record, self._workers.readings, self._signals, self._team.host_of)

    def _lost(self, member: Member, why: str, ranks: range) -> AttemptOutcome:
        """Return the outcome of an attempt of which a machine is lost, whose part of a checkpoint may never come."""
        mark_lost(self.config.run_directory, ranks)
        return self._evidence.explain_loss(member, why, ranks.start)

    def _ended(self, process: AttemptProcess, found: Finding | None) -> AttemptOutcome:
        """Return the outcome that the ends of the attempt processes show."""
        return self._evidence.explain_end(self._worst_end(process, found), found)

    def _patience_seconds(self, process: AttemptProcess) -> float:
        """Return how long the machines may take to end after the first of them has."""
        worst = self._worst_end(process, None)
        if worst.is_good:
            return self.config.supervise.save_seconds
        return _SAVE_SECONDS if worst.code in SAVED_KINDS else _REPORT_SECONDS

    def _worst_end(self, process: AttemptProcess, found: Finding | None) -> MachineEnd:
        """Return the end of the workers of a machine that says most about why the attempt has ended."""
        return most_telling(self._ends(process), found)

    def _ends(self, process: AttemptProcess) -> list[MachineEnd]:
        """Return the ends of the machines whose workers have ended."""
        ends = list(self._team.ends.values())
        if process.code is not None:
            ends.append(MachineEnd(process.code, self._done, self._reported, killed_here=self._killed))
        return ends
