"""The machines of one attempt other than the lead's, as the lead's attempt monitor sees them."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.config import Config
from headway.core.coordination.launched import MachinePart
from headway.core.errors import Preempted
from headway.core.process.waiting import wait_until
from headway.run.directory.run_directory import Attempt
from headway.run.supervisor.error_report import ErrorReport
from headway.run.supervisor.machines.interfaces import interface_of
from headway.run.supervisor.machines.lead import Lead
from headway.run.supervisor.machines.members import Member
from headway.run.supervisor.machines.messages import (
    AttemptEnded,
    BeginAttempt,
    EndAttempt,
    FromLead,
    SignalWorkers,
    WorkersEnded,
    WriteStacks,
)
from headway.run.supervisor.messages import SentConfig
from headway.run.supervisor.worker_status import WorkerStatuses

if TYPE_CHECKING:
    from headway.run.supervisor.watchdog import Finding

#: How long a machine may take to end its processes, beyond what their last writes take.
_END_SECONDS = 90.0


@dataclass(frozen=True)
class MachineEnd:
    """How the workers of a machine have ended by themselves."""

    code: int
    """Exit code of its attempt process, negative for a signal."""
    is_done: bool = False
    reported: ErrorReport | None = None
    """The error that it has reported."""
    first_rank: int = 0
    killed_here: Collection[int] = ()
    """Ranks of its workers that the supervisor has killed, because another worker had died."""

    @property
    def rank(self) -> int:
        """The worker that it is about: the one that it reports, or the first one of the machine."""
        rank = None if self.reported is None else self.reported.rank
        return self.first_rank if rank is None else rank

    @property
    def signal(self) -> int | None:
        """The signal that has killed that worker, or the attempt process; None without one."""
        reported = None if self.reported is None else self.reported.signal
        return reported or (-self.code if self.code < 0 else None)

    @property
    def is_consequence(self) -> bool:
        """Whether the supervisor itself has killed that worker, so that its end says nothing about the cause."""
        return self.signal == signal.SIGKILL and self.rank in self.killed_here

    @property
    def is_good(self) -> bool:
        """Whether its workers have done all steps."""
        return self.code == 0 and self.is_done

    @property
    def severity(self) -> int:
        """How much it says about the cause, 0 for most: deliberate errors, then kills, then what follows from both."""
        code = self.code if self.reported is None else self.reported.exit_code
        if self.is_good:
            return 5
        if self.is_consequence:
            return 4
        if self.reported is not None and code not in (0, 1):
            return 1 if code == Preempted.exit_code else 0
        return 3 if self.signal is None else 2


def most_telling(ends: Collection[MachineEnd], found: Finding | None) -> MachineEnd:
    """Return the end that says most about why an attempt has ended.

    Args:
        ends: Those of the machines that have ended, in any order.
        found: What the watchdog has found first; of two ends that say as much, that of this worker counts.
    """
    return min(ends, key=lambda end: (end.severity, found is None or end.rank != found.rank, end.rank))


class MeetingPlace:
    """The address at which the workers of all machines meet, reserved for the length of an attempt.

    No other process gets the port. The first worker, which binds it as well, is the only one that listens.

    Args:
        address: The address of this machine at which the others have reached it.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._reserved = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind((address, 0))
        self.port = int(self._reserved.getsockname()[1])

    def close(self) -> None:
        """Release the port."""
        self._reserved.close()


class AttemptMachines:
    """The other machines that work in an attempt; none for a run on one machine.

    Args:
        lead: Speaks with them; None without any.
        members: The machines, in the order of their ranks.
        workers: Workers per machine.
        own_disks: Whether every machine has a folder of its own, since some do not see the lead's.
        identity: Fingerprint of the config that all machines were started with; None for a run on one machine.
    """

    def __init__(
        self,
        lead: Lead | None = None,
        members: Sequence[Member] = (),
        workers: int = 1,
        *,
        own_disks: bool = False,
        identity: str | None = None,
    ) -> None:
        self.identity = identity
        self._lead = lead
        self.members = members
        self._workers = workers
        self._own_disks = own_disks
        self._attempt: int | None = None
        self._meeting = None if lead is None or not members else MeetingPlace(lead.address)
        self.statuses = WorkerStatuses(self.world_size, range(0))
        """What the machines have sent about their workers."""
        self.ends: dict[int, MachineEnd] = {}
        self._ended: set[int] = set()

    def __len__(self) -> int:
        return len(self.members)

    @property
    def world_size(self) -> int:
        """Workers of all machines."""
        return (len(self.members) + 1) * self._workers

    def host_of(self, rank: int) -> str | None:
        """Return the name of the machine of a worker; None for the lead's own."""
        return next((member.host for member in self.members if rank in self._ranks(member)), None)

    def _ranks(self, member: Member) -> range:
        first = (1 + [one.number for one in self.members].index(member.number)) * self._workers
        return range(first, first + self._workers)

    def variables(self) -> dict[str, str]:
        """Return what the lead's own attempt process has to know."""
        if self._meeting is None:
            return {}
        return self._part(0, interface_of(self._meeting.address)).variables()

    def pausing(self) -> AbstractContextManager[None]:
        """Return a block in which this process can be copied."""
        return nullcontext() if self._lead is None else self._lead.pausing()

    def begin(self, config: Config, attempt: Attempt, restarts: int) -> None:
        """Have the machines start their workers.

        Args:
            config: Complete and checked.
            restarts: Earlier attempts of this command.
        """
        if self._lead is None or self._attempt is not None:
            return
        self._attempt = attempt.number
        sent_config = SentConfig.of(config)
        for member in self.members:
            order = BeginAttempt(attempt.number, attempt.owner, self.part(member), sent_config, restarts)
            self._lead.tell([member.number], order)

    def part(self, member: Member) -> MachinePart:
        """Return the part of one of these machines, which itself knows its interface."""
        return self._part(self._ranks(member).start, None)

    def _part(self, first_rank: int, interface: str | None) -> MachinePart:
        assert self._meeting is not None, "there are members"
        address, port = self._meeting.address, self._meeting.port
        return MachinePart(first_rank, self.world_size, address, port, interface, self._own_disks)

    def look(self) -> None:
        """Take what the machines have sent."""
        if self._lead is None or self._attempt is None:
            return
        for member in self._present:
            newest = self._lead.newest_readings(member.number)
            ranks = self._ranks(member)
            if newest is not None and newest.attempt == self._attempt:
                # A machine may speak for its own ranks only.
                readings = {rank: one for rank, one in newest.readings.items() if rank in ranks}
                self.statuses.add(readings, {rank: one for rank, one in newest.states.items() if rank in ranks})
            for message in self._lead.take_messages(member.number):
                match message:
                    case WorkersEnded(self._attempt, code, is_done, reported, killed):
                        self.ends[member.number] = MachineEnd(code, is_done, reported, ranks.start, killed)
                    case AttemptEnded(self._attempt):
                        self._ended.add(member.number)

    @property
    def _present(self) -> list[Member]:
        assert self._lead is not None, "there are members"
        return [member for member in self.members if self._lead.why_gone(member.session) is None]

    def lost(self) -> tuple[Member, str, range] | None:
        """Return a machine that is lost, with the reason and its ranks; None if all are there."""
        for member in self.members:
            if self._lead is None or member.number in self.ends:
                continue
            if (why := self._lead.why_gone(member.session)) is not None:
                return member, why, self._ranks(member)
        return None

    @property
    def all_ended(self) -> bool:
        """Whether the workers of all these machines have ended by themselves."""
        return all(member.number in self.ends for member in self.members)

    def signal(self, number: int) -> None:
        """Send a signal to all workers of these machines."""
        self._tell(lambda attempt: SignalWorkers(attempt, number))

    def write_stacks(self, ranks: Collection[int], wake: bool) -> None:
        """Have workers of these machines write their stacks; do not wait for it."""
        theirs = tuple(rank for rank in ranks if self.host_of(rank) is not None)
        if theirs:
            self._tell(lambda attempt: WriteStacks(attempt, theirs, wake))

    def end(self) -> None:
        """Have the machines end all processes of the attempt."""
        self._tell(EndAttempt)

    def wait_for_end(self, look: Callable[[], object] = lambda: None) -> None:
        """Wait until no process of the attempt is left on a machine that is there; drop a machine that takes long.

        Args:
            look: Called several times a second.
        """
        if self._lead is None or self._attempt is None:
            self.close()
            return

        def left() -> list[Member]:
            look()
            self.look()
            return [member for member in self._present if member.number not in self._ended]

        if not wait_until(lambda: not left(), _END_SECONDS, 0.05):
            for member in left():
                self._lead.drop(member.number, "its processes do not end")
        self.close()

    def close(self) -> None:
        """Release the port at which workers meet."""
        if self._meeting is not None:
            self._meeting.close()

    def _tell(self, message: Callable[[int], FromLead]) -> None:
        """Send what is made of the number of the attempt to the machines that are there."""
        if self._lead is not None and self._attempt is not None:
            self._lead.tell([member.number for member in self._present], message(self._attempt))
