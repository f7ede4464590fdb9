"""A node process: runs the workers of one machine, as the lead says.

It decides nothing. It ends its workers when the lead says so, or says nothing; then it tries to reach the lead again,
and gives up after a time with exit code 75, so that the scheduler starts all machines again.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from headway.checkpoint.save.writer_locks import wait_for_writers
from headway.config import Config
from headway.core.console import notice, warning
from headway.core.coordination.owner import Owner
from headway.core.errors import CheckpointError, HeadwayError, Preempted
from headway.core.format import format_seconds
from headway.core.machine.system import host_name
from headway.core.process.faults import RESTARTS_VARIABLE
from headway.core.process.signals import STOP_SIGNALS, handled
from headway.core.process.tree import adopt_orphans, ask_for_stacks, end_all, reap_orphans
from headway.core.process.waiting import VISIBILITY_TIMEOUT, wait_until
from headway.core.startup.early_stop import take_early_signals
from headway.core.version import __version__
from headway.run.directory.run_directory import Attempt, RunDirectory
from headway.run.session.attempt import RunOptions, write_config
from headway.run.supervisor.attempt_client import AttemptProcess, load_ahead
from headway.run.supervisor.error_report import ErrorReport
from headway.run.supervisor.machines.differences import describe_machine
from headway.run.supervisor.machines.ending import EndWithoutLead, raise_end
from headway.run.supervisor.machines.interfaces import interface_of
from headway.run.supervisor.machines.lead_connection import LeadConnection
from headway.run.supervisor.machines.machine_role import MachineRole, Membership
from headway.run.supervisor.machines.messages import (
    AttemptEnded,
    BeginAttempt,
    EndAttempt,
    Hello,
    LookForFile,
    MachineMessage,
    RunEnd,
    SignalReceived,
    SignalWorkers,
    Spare,
    WorkerReadings,
    WorkersEnded,
    WriteStacks,
)
from headway.run.supervisor.machines.shared_disk import look_for_file, own_folder
from headway.run.supervisor.messages import AttemptMessage, Done
from headway.run.supervisor.worker_status import WorkerStatuses

_POLL_SECONDS = 0.05
_LOOK_SECONDS = 0.2
_STACK_SECONDS = 2.0
_GIVE_UP_SECONDS = 5.0
#: How long a machine that was asked to stop before it had joined tries to tell the lead.
_FIRST_SECONDS = 15.0
_AGAIN = "run the same command again on all machines"


def run_node(config: Config, membership: Membership, options: RunOptions, *, own_process: bool) -> None:
    """Run this machine's workers until the run is over.

    Args:
        config: Resolved.
        membership: The role of this machine, which is not the lead's.
        options: Whether an earlier run of this name counts.
        own_process: This process does nothing else.

    Raises:
        HeadwayError: with the exit code of the run, or because the lead is gone.
        KeyboardInterrupt: Ctrl-C ended the run, or came twice without the lead, or three times.
    """
    _Node(config, membership, own_process, starts_over=options.restart).run()


class _Node:
    def __init__(self, config: Config, membership: Membership, own_process: bool, *, starts_over: bool = False) -> None:
        self._config = config
        self._role = membership.role
        self._own_process = own_process
        self._end_without_lead = None if starts_over else EndWithoutLead(config, membership.identity)
        self._hello = Hello(
            node=membership.role.number,
            process=secrets.token_hex(8),
            host=host_name(),
            workers=config.parallel.workers,
            version=__version__,
            identity=membership.identity,
            computes=membership.computes,
            machine=describe_machine(),
        )
        self._signals: list[int] = take_early_signals()
        self._began = time.monotonic()
        self._passed_on = 0
        self._attempt: _NodeAttempt | None = None

    def run(self) -> None:
        if self._own_process:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it were ignored, the ends of children would be lost
            adopt_orphans()
        with handled(STOP_SIGNALS, self._record_signal):
            lead = LeadConnection(self._role, self._hello, self._config.supervise.lost_seconds)
            try:
                if self._own_process and self._config.supervise.load_ahead:
                    self._load_ahead()
                self._serve(lead)
            finally:
                self._end_attempt(lead)
                lead.close()

    def _record_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _load_ahead(self) -> None:
        try:
            load_ahead(self._config)
        except Exception as error:  # the first attempt reports what is missing
            warning(f"what workers need cannot be loaded ahead: {type(error).__name__}: {error}")

    def _serve(self, lead: LeadConnection) -> None:
        session = 0
        while True:
            is_up = lead.status.is_up  # looked at first: what came before it was lost is taken below
            for message in lead.take():
                if isinstance(message, RunEnd):
                    self._end_attempt(lead)
                    raise_end(message)
                    return
                self._handle(message, lead)
            if is_up and lead.status.session != session:
                session = lead.status.session
                notice(f"machine {self._role.number} has joined the lead at {self._role.host}:{self._role.port}")
            elif not is_up:
                if self._wait_for_lead(lead):
                    return
                session = 0 if lead.status.session == session else session
            self._pass_on(lead)
            if self._attempt is not None:
                self._attempt.look(lead)
            else:
                time.sleep(_POLL_SECONDS)

    def _wait_for_lead(self, lead: LeadConnection) -> bool:
        """End the workers, since no one supervises them, and give up after a time.

        Returns:
            Whether the run is finished.
        """
        lead.status.check_refused(self._role)
        if self._attempt is not None:
            notice(f"the lead is lost: {lead.status.why}; the workers of this machine are ended")
            self._end_attempt(lead)
        gone = time.monotonic() - lead.status.lost_at
        if self._signals and (lead.status.session or time.monotonic() - self._began > _FIRST_SECONDS):
            self._check_interrupted(1)
            raise Preempted(f"stopped by {signal.Signals(self._signals[0]).name} without the lead", fix=_AGAIN)
        where = f"--lead {self._role.host}:{self._role.port}"
        gives_up = gone >= self._config.supervise.rejoin_seconds
        if self._end_without_lead is not None and (end := self._end_without_lead.find(gone, gives_up)) is not None:
            notice(f"{self._config.run_directory} has ended without this machine")
            raise_end(end)
            return True
        if self._has_lead_ended(lead, gone):
            raise Preempted("the lead's command has ended, and nothing starts it again", where=where, fix=_AGAIN)
        if gives_up:
            raise Preempted(
                f"the lead has been gone for {format_seconds(gone)}: {lead.status.why}",
                where=where,
                fix=f"{_AGAIN} (supervise.rejoin_seconds sets how long they wait for each other)",
            )
        return False

    def _has_lead_ended(self, lead: LeadConnection, gone: float) -> bool:
        """Return whether the lead's process is known to be gone for good."""
        was_there = lead.status.session > 0 and lead.status.is_absent and gone >= self._config.supervise.lost_seconds
        return was_there and not self._role.is_restarted

    def _pass_on(self, lead: LeadConnection) -> None:
        """Report this machine's signals to the lead, which has all machines save and stop, and end alike."""
        self._check_interrupted(2)
        if not lead.status.is_up:
            return
        for number in self._signals[self._passed_on :]:
            self._passed_on += 1
            what = "end" if self._signals[: self._passed_on].count(signal.SIGINT) > 1 else "save and stop"
            notice(f"{signal.Signals(number).name} came; the lead is told, and all machines {what}")
            lead.send(SignalReceived(number))

    def _check_interrupted(self, most: int) -> None:
        """Raise KeyboardInterrupt if Ctrl-C came more often than `most` times."""
        if self._signals.count(signal.SIGINT) > most:
            raise KeyboardInterrupt

    def _handle(self, message: MachineMessage, lead: LeadConnection) -> None:
        match message:
            case BeginAttempt():
                self._end_attempt(lead)
                self._attempt = _NodeAttempt.begin(message, self._role, lead, self._own_process)
            case LookForFile():
                lead.send(look_for_file(message, self._config, lambda: not lead.status.is_up or bool(self._signals)))
            case Spare():
                self._end_attempt(lead)  # of an earlier connection, which was lost for a moment
                notice("this machine is a spare: the run has as many as it can use")
            case EndAttempt(number):
                self._end_attempt(lead, number)
            case SignalWorkers(number, number_of_signal):
                if self._attempt is not None and self._attempt.number == number:
                    self._attempt.signal(number_of_signal)
            case WriteStacks(number, ranks, wake):
                if self._attempt is not None and self._attempt.number == number:
                    self._attempt.write_stacks(ranks, wake)

    def _end_attempt(self, lead: LeadConnection, number: int | None = None) -> None:
        attempt = self._attempt
        self._attempt = None
        if attempt is not None:
            attempt.look(lead, now=True)  # the last readings say how a worker ended
            attempt.end()
            number = attempt.number
        if number is not None:
            lead.send(AttemptEnded(number))


@dataclass
class _NodeAttempt:
    """This machine's part of an attempt."""

    number: int
    run: Path
    folder: Path
    process: AttemptProcess
    workers: WorkerStatuses
    own_process: bool
    done: bool = False
    reported: ErrorReport | None = None
    told: bool = False
    looked: float = 0.0
    killed: set[int] = field(default_factory=set)
    """Ranks of the workers that were alive when they were killed because the lead said so."""

    @classmethod
    def begin(
        cls, order: BeginAttempt, role: MachineRole, lead: LeadConnection, own_process: bool
    ) -> _NodeAttempt | None:
        """Start the workers; on an error, report it to the lead and return None."""
        number = order.attempt
        config = order.config.config()
        part = order.part
        if part.own_disks:
            config = config.model_copy(update={"runs": own_folder(config, role)})
        if lead.status.interface_address is not None:
            part = replace(part, interface=interface_of(lead.status.interface_address))
        try:
            attempt = _make(config, order.owner) if part.own_disks else _join(config, order.owner, lead)
        except HeadwayError as error:
            reported = ErrorReport.of(error, part.first_rank)
            lead.send(WorkersEnded(number, error.exit_code, reported=reported))
            return None
        variables = {RESTARTS_VARIABLE: str(order.restarts), **part.variables()}
        with lead.pausing():
            process = AttemptProcess(config, RunOptions(), variables, own_process, number)
        first = part.first_rank
        here = config.parallel.workers
        workers = WorkerStatuses(part.world_size, range(first, first + here))
        return cls(number, config.run_directory, attempt.directory, process, workers, own_process)

    def look(self, lead: LeadConnection, now: bool = False) -> None:
        """Send what the workers do, five times a second, and how they ended."""
        for message in self.process.listen(0.0 if now else _POLL_SECONDS):
            self._take(message)
        code = self.process.poll()
        if not (now or code is not None) and time.monotonic() - self.looked < _LOOK_SECONDS:
            return
        if self.told:
            return
        self.looked = time.monotonic()
        self.workers.look(self.folder)
        lead.send(WorkerReadings(self.number, self.looked, self.workers.readings, self.workers.states))
        if self.own_process:
            reap_orphans(self.process.pid)
        if code is not None:
            for message in self.process.listen(0.0):
                self._take(message)
            self.told = True
            lead.send(WorkersEnded(self.number, code, self.done, self.reported, tuple(sorted(self.killed))))

    def _take(self, message: AttemptMessage) -> None:
        match message:
            case Done():
                self.done = True
            case ErrorReport():
                self.reported = message

    def signal(self, number: int) -> None:
        """Send a signal to all workers; if none has begun, there is nothing to save."""
        self.workers.look(self.folder)
        alive = self.workers.alive
        targets = list(alive.values())
        if not self.workers.readings and self.process.poll() is None:
            targets = [self.process.pid]
            number = signal.SIGKILL
            self.killed.update(self.workers.here or ())
        if number == signal.SIGKILL:
            self.killed.update(alive)
        for pid in targets:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def write_stacks(self, ranks: Sequence[int], wake: bool) -> None:
        """Have workers write their stacks; stopped ones are continued for that if `wake`."""
        going, stopped = self.workers.stack_files(self.folder, ranks)
        ask_for_stacks(going, 0.0)
        if wake:
            ask_for_stacks(stopped, _STACK_SECONDS, stopped=True)

    def end(self) -> None:
        """End all processes; one that writes a checkpoint may finish it."""
        sessions = {self.process.pid, *self.workers.sessions}
        left = end_all(sessions, os.getpid() if self.own_process else None, lambda: not wait_for_writers(self.run, 0.0))
        self.process.wait(_GIVE_UP_SECONDS)
        self.process.channel.end.close()
        self.workers.close()
        if left:
            warning(f"processes {left} of this attempt do not end; they can no longer publish anything")


def _make(config: Config, owner: Owner) -> Attempt:
    """Make this machine's own folder for an attempt that the lead has begun on a disk that is not seen here.

    It is none of the run's record: logs and stacks of this machine's workers, and what they load. `.owner` in it fences
    earlier attempts, as in the run directory.

    Raises:
        CheckpointError: the folder cannot be made.
    """
    run = RunDirectory(config.run_directory)
    try:
        with run.claim() as lock:
            lock.write(owner)
        attempt = Attempt(run.path, owner)
        attempt.directory.mkdir(parents=True, exist_ok=True)
        write_config(config, attempt.directory)
    except OSError as error:
        raise CheckpointError(
            f"{host_name()} cannot make its own folder for the run: {error.strerror or error}",
            where=str(error.filename or run.path),
            fix="make room there, or choose a place that can be written to with runs=...",
        ) from error
    return attempt


def _join(config: Config, owner: Owner, lead: LeadConnection) -> Attempt:
    """Join the attempt that the lead has begun, once this machine sees it on the shared folder.

    Raises:
        CheckpointError: this machine does not see it, or sees another one.
    """
    number = owner.attempt
    attempt = Attempt.join(config.run_directory, number, owner.token, VISIBILITY_TIMEOUT)
    seen = (attempt.directory / "config.yaml").exists
    if not wait_until(lambda: seen() or not lead.status.is_up, VISIBILITY_TIMEOUT, 0.05) or not seen():
        raise CheckpointError(
            f"{host_name()} does not see the config of attempt {number}",
            where=str(attempt.directory.absolute()),
            fix="choose a place on a file system that all machines of the run share (runs=...)",
        )
    return attempt
