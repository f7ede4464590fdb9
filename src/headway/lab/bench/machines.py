"""Cells on the machines that all run this same command, which meet by the channel of a training.

The first machine leads: it has each measurement made by as many machines as the cell has. A machine that is lost costs
that measurement. The others keep every result, so a lead that is lost costs only what is not measured yet: the next one
asks for them.
"""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import BinaryIO

from headway.config import Config
from headway.core.console import notice, warning
from headway.core.coordination.launched import machines_from_environment
from headway.core.errors import ConfigError, Preempted
from headway.core.files.atomic import write_json
from headway.core.files.hashes import fingerprint
from headway.core.format import counted, format_seconds
from headway.core.machine.system import host_name
from headway.core.process.command import tied_command
from headway.core.process.faults import FAULTS_VARIABLE, RESTARTS_VARIABLE
from headway.core.process.waiting import wait_until
from headway.core.version import __version__
from headway.lab.bench.blocks import block
from headway.lab.bench.launchers import LOCAL, end_command, launch_command, start_command
from headway.lab.bench.matrix import suite_config
from headway.lab.bench.messages import SUITE, EndMeasurement, KeepResult, Measure, Measured, Ready
from headway.lab.bench.results import CellResult, merge_results, read_results, write_result
from headway.lab.bench.spec import Spec
from headway.lab.bench.suite import Cell, Suite
from headway.run.supervisor.machines.attempt_machines import AttemptMachines, MachineEnd
from headway.run.supervisor.machines.differences import compare_machines, describe_machine
from headway.run.supervisor.machines.ending import raise_end
from headway.run.supervisor.machines.interfaces import interface_of
from headway.run.supervisor.machines.lead import Lead
from headway.run.supervisor.machines.lead_connection import LeadConnection
from headway.run.supervisor.machines.machine_role import MachineRole, find_role
from headway.run.supervisor.machines.members import Expected, Members, choose_machines
from headway.run.supervisor.machines.messages import Hello, MachineMessage, RunEnd

_POLL_SECONDS = 0.05
_TELL_SECONDS = 1.0
#: How long other machines may take to report once one has failed: the one that met the error says most about it.
_PEERS_SECONDS = 3.0
#: How long a machine may take to end the processes of a measurement.
_END_SECONDS = 60.0
#: Variables of a measurement that all of its machines have.
_SHARED_VARIABLES = (FAULTS_VARIABLE, RESTARTS_VARIABLE, "PYTHONUNBUFFERED")
#: How much of a machine's own log is sent to the lead.
_LOG_BYTES = 256 * 1024


@dataclass(frozen=True)
class SuiteMembership:
    """A machine's role among those that measure a suite."""

    role: MachineRole
    config: Config
    identity: str
    """Fingerprint of the suite."""

    @property
    def hello(self) -> Hello:
        """What the lead has to know of this machine."""
        return Hello(
            node=self.role.number,
            process=secrets.token_hex(8),
            host=host_name(),
            workers=self.config.parallel.workers,
            version=__version__,
            identity=self.identity,
            machine=describe_machine(),
        )


def find_membership(suite: Suite) -> SuiteMembership | None:
    """Return the role of this machine, from the variables that `headway train` reads, too; None for one machine.

    Raises:
        ConfigError: the number of this machine, the lead's address or the secret is missing, or there are fewer
            machines than the largest cell has.
    """
    most = max(suite.machines)
    given = machines_from_environment()
    if given is not None and given.isdecimal() and int(given) < most:
        raise ConfigError(
            f"the suite has cells on {most} machines, and {counted(int(given), 'machine')} will measure it",
            where="machines, HEADWAY_MACHINES",
            fix=f"start {most} machines, or measure fewer: machines={given}",
        )
    config = suite_config(suite)
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"machines": most})})
    role = find_role(config)
    return None if role is None else SuiteMembership(role, config, fingerprint(suite.model_dump(mode="json")))


# The lead -------------------------------------------------------------------------------------------------------------


class SuiteMachines:
    """The machines that measure a suite, as the first one sees them.

    Args:
        membership: The role of this machine, which leads.
    """

    def __init__(self, membership: SuiteMembership) -> None:
        config = membership.config
        self._most = config.parallel.machines
        self._supervise = config.supervise
        compare = partial(compare_machines, describe_machine(), determinism="off", device=config.train.device)
        expected = Expected(self._most, config.parallel.workers, __version__, membership.identity, compare)
        self._lead = Lead(membership.role, Members(expected), config.supervise.lost_seconds, messages=SUITE)
        self._measurement = 0
        self._kept: list[CellResult] = []
        self._told: dict[int, int] = {}
        """How many of these results each machine has, by its session."""

    @classmethod
    @contextmanager
    def of(cls, membership: SuiteMembership | None) -> Iterator[SuiteMachines | None]:
        """Lead the other machines for the length of a block, and tell them how it ends; None without any.

        They are not told of a stop, after which another lead continues with the results that they keep.
        """
        if membership is None:
            yield None
            return
        machines = cls(membership)
        ended = None
        try:
            yield machines
        except BaseException as error:
            ended = error
            raise
        finally:
            if isinstance(ended, Preempted):
                machines._lead.leave()
            else:
                machines._lead.close(RunEnd.of(ended))

    def gather(self, folder: Path) -> None:
        """Write the results that the machines have kept of an earlier lead into the folder of results.

        Machines that are slow to come bring none: they were not there.
        """
        found: list[CellResult] = []
        waiting = set(range(1, self._most))

        def all_have_come() -> bool:
            for number in self._lead.here:
                for message in self._lead.take_messages(number):
                    match message:
                        case KeepResult(result):
                            found.append(result)
                        case Ready():
                            waiting.discard(number)
            return not waiting

        wait_until(all_have_come, self._supervise.lost_seconds, _POLL_SECONDS)
        if found:
            for result in merge_results([*read_results(folder), *found]):
                write_result(folder, result)
            cells = counted(len({result.key for result in found}), "cell")
            notice(f"other machines have kept results of {cells} from an earlier lead")

    def keep(self, result: CellResult) -> None:
        """Have all machines keep a result."""
        self._kept.append(result)
        self._share()

    def _share(self) -> None:
        for number, member in self._lead.here.items():
            for result in self._kept[self._told.get(member.session, 0) :]:
                self._lead.tell([number], KeepResult(result))
            self._told[member.session] = len(self._kept)

    def run(self, spec_path: Path, environment: Mapping[str, str], log: BinaryIO, timeout_seconds: float) -> int | None:
        """Measure a cell on as many machines as it has.

        Args:
            spec_path: The cell, and how it is measured.
            environment: Variables of the processes here.
            log: Gets what the processes here print, then the ends of the logs of other machines.
            timeout_seconds: Longest time, from when all machines are there.

        Returns:
            The exit code of the first machine that failed, 0 if none has; None if it took too long.

        Raises:
            Preempted: not enough machines have come in time.
        """
        spec = Spec.read(spec_path)
        machines = self._assemble(spec.result.cell)
        told = list[str]()
        self._measurement += 1
        process: Popen[bytes] | None = None
        try:
            shared = {name: environment[name] for name in _SHARED_VARIABLES}
            for member in machines.members:
                order = Measure(self._measurement, machines.part(member), spec.dump(), shared)
                self._lead.tell([member.number], order)
            process = _start(spec_path, {**environment, **machines.variables()}, log)
            return self._wait(machines, process, spec, told, timeout_seconds)
        finally:
            if process is not None:
                end_command(process)
            self._end(machines, told)
            log.write("\n".join(["", *told, ""]).encode())
            log.flush()

    def _assemble(self, cell: Cell) -> AttemptMachines:
        """Wait for the machines of a cell.

        Raises:
            Preempted: not enough have come in time.
        """
        began = time.monotonic()
        said = False
        while len(here := self._lead.here) < cell.machines - 1:
            waited = time.monotonic() - began
            missing = f"{counted(cell.machines - 1 - len(here), 'machine')} of the {cell.machines} of {cell.name}"
            if waited >= self._supervise.rejoin_seconds:
                raise Preempted(
                    f"{missing} did not come within {format_seconds(waited)}; what is measured is kept",
                    where="config.supervise.rejoin_seconds",
                    fix="run the same command again on all machines, or with fewer in machines=...",
                )
            if waited >= _TELL_SECONDS and not said:
                said = True
                notice(f"waiting for {missing}")
            for refusal in self._lead.take_refusals():
                warning(f"a machine was not taken in: {refusal.what}")
            time.sleep(_POLL_SECONDS)
        self._share()
        numbers = choose_machines(here, cell.machines)
        return AttemptMachines(self._lead, [here[number] for number in numbers[1:]], cell.workers // cell.machines)

    def _wait(
        self, machines: AttemptMachines, process: Popen[bytes], spec: Spec, told: list[str], timeout_seconds: float
    ) -> int | None:
        until = time.monotonic() + timeout_seconds
        failed = None
        while True:
            self._take(machines, told)
            if (lost := machines.lost()) is not None:
                member, why, _ = lost
                told.append(block(spec.ended("killed", f"{member} was lost: {why}").model_dump(mode="json")))
                return 1
            codes = [process.poll(), *(end.code for end in machines.ends.values())]
            if failed is None and (failed := next(filter(None, codes), None)) is not None:
                until = min(until, time.monotonic() + _PEERS_SECONDS)
            if process.returncode is not None and machines.all_ended:
                return failed or 0
            if time.monotonic() >= until:
                return failed
            time.sleep(_POLL_SECONDS)

    def _take(self, machines: AttemptMachines, told: list[str]) -> None:
        """Take what the machines of a cell report."""
        for member in machines.members:
            for message in self._lead.take_messages(member.number):
                match message:
                    case Measured(self._measurement, code, log) if member.number not in machines.ends:
                        machines.ends[member.number] = MachineEnd(code)
                        told += [f"--- {member}, exit code {code}:", log]

    def _end(self, machines: AttemptMachines, told: list[str]) -> None:
        """Have the machines end what is left of a measurement, and wait until they have."""
        left = [member for member in machines.members if member.number not in machines.ends]
        self._lead.tell([member.number for member in left], EndMeasurement())

        def all_ended() -> bool:
            self._take(machines, told)
            return all(m.number in machines.ends or self._lead.why_gone(m.session) is not None for m in left)

        if not wait_until(all_ended, _END_SECONDS, _POLL_SECONDS):
            for member in left:
                if member.number not in machines.ends:
                    self._lead.drop(member.number, "its processes do not end")
        machines.close()


def _start(spec: Path, environment: Mapping[str, str], log: BinaryIO) -> Popen[bytes]:
    """Start the workers of this machine, which do not outlive this process."""
    return start_command(tied_command(launch_command(LOCAL, spec, 1)), environment, log)


# The other machines ---------------------------------------------------------------------------------------------------


def measure_for_lead(membership: SuiteMembership) -> None:
    """Measure what the lead says, and keep the results that it sends, until the suite is measured.

    Raises:
        HeadwayError: with the exit code with which the lead has ended, or because it is gone.
    """
    lost_seconds = membership.config.supervise.lost_seconds
    lead = LeadConnection(membership.role, membership.hello, lost_seconds, messages=SUITE)
    node = _Node(lead, membership)
    try:
        while True:
            is_up = lead.status.is_up  # looked at first: what came before it was lost is taken below
            for message in lead.take():
                if isinstance(message, RunEnd):
                    raise_end(message)
                    return
                node.take(message)
            if is_up:
                node.greet()
            else:
                node.wait_for_lead()
            node.look()
            time.sleep(_POLL_SECONDS)
    finally:
        node.end()
        lead.close()


class _Node:
    """A machine that measures for a lead."""

    def __init__(self, lead: LeadConnection, membership: SuiteMembership) -> None:
        self._lead = lead
        self._role = membership.role
        self._rejoin_seconds = membership.config.supervise.rejoin_seconds
        self._measurement: _Measurement | None = None
        self._kept: dict[str, CellResult] = {}
        """The newest result of each cell, by its key."""
        self._session = 0

    def take(self, message: MachineMessage) -> None:
        """Follow a message of the lead."""
        match message:
            case KeepResult(result):
                self._kept[result.key] = result
            case EndMeasurement():
                self.end()
            case Measure():
                self.end()
                self._measurement = _Measurement(message, self._lead)

    def greet(self) -> None:
        """Hand over the results to a lead that is new, or was lost for a moment."""
        if self._lead.status.session == self._session:
            return
        self._session = self._lead.status.session
        notice(f"machine {self._role.number} has joined the lead at {self._role.host}:{self._role.port}")
        for result in self._kept.values():
            self._lead.send(KeepResult(result))
        self._lead.send(Ready())

    def wait_for_lead(self) -> None:
        """End the measurement, for which no lead waits, and give up after a time.

        Raises:
            ConfigError: the lead refuses this machine.
            Preempted: it was gone for too long.
        """
        if self._measurement is not None:
            notice("the measurement of this machine is ended: the lead is lost")
            self.end()
        self._lead.status.check_refused(self._role)
        gone = time.monotonic() - self._lead.status.lost_at
        if gone >= self._rejoin_seconds:
            raise Preempted(
                f"the lead has been gone for {format_seconds(gone)}: {self._lead.status.why}",
                where=f"{self._role.host}:{self._role.port}",
                fix="run the same command again on all machines",
            )

    def look(self) -> None:
        """Report the end of the measurement if it has ended by itself."""
        if self._measurement is not None and self._measurement.process.poll() is not None:
            self.end()

    def end(self) -> None:
        """End what is left of the measurement, and report it."""
        if self._measurement is not None:
            self._measurement.end(self._lead)
        self._measurement = None


class _Measurement:
    """This machine's part of a measurement."""

    def __init__(self, order: Measure, lead: LeadConnection) -> None:
        self._number = order.number
        self._folder = tempfile.TemporaryDirectory(prefix="headway-bench-")
        spec = Path(self._folder.name) / "cell.json"
        self._log = Path(self._folder.name) / "cell.log"
        write_json(spec, order.spec)
        address = lead.status.interface_address
        interface = None if address is None else interface_of(address)
        part = replace(order.part, interface=interface)
        cell = Spec.read(spec).result.cell
        each = cell.workers // cell.machines
        first = part.first_rank
        here = f"worker {first}" if each == 1 else f"workers {first} to {first + each - 1}"
        notice(f"{cell.name}: {here} of {cell.workers}")
        with self._log.open("wb") as log:
            self.process = _start(spec, {**os.environ, **order.variables, **part.variables()}, log)

    def end(self, lead: LeadConnection) -> None:
        """End what is left of it, and report its end and its log to the lead."""
        code = self.process.poll()
        if code is None:
            code = -signal.SIGTERM
        end_command(self.process)
        with suppress(OSError):
            text = self._log.read_bytes()[-_LOG_BYTES:].decode(errors="replace")
            lead.send(Measured(self._number, code, text))
        self._folder.cleanup()
