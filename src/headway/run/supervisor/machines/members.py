"""The machines that are there, as the lead knows them: who may join, who is silent, and who works."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.run.supervisor.machines.differences import Differences
from headway.run.supervisor.machines.messages import Hello, MachineMessage, Refused, WorkerReadings

#: Two machines may have been started with one number by mistake. A restarted one comes after its old process is gone,
#: or silent for longer than this.
_SAME_NUMBER_SECONDS = 3.0
#: Most messages of a machine that wait to be read, without readings, of which only the newest counts.
_WAITING = 400
#: A clock may drift, and a message may be late. Smaller differences are ignored, so that beats keep their times.
_TOLERANCE_SECONDS = 0.25
_WINDOW_SECONDS = 30.0


@dataclass
class ClockOffset:
    """What is added to times of another machine's clock: from the messages that took least time."""

    seconds: float = math.inf
    _least: float = math.inf
    _since: float = 0.0

    def update(self, here: float, there: float) -> float:
        """Learn from a message that was sent at `there` by the other clock and arrived at `here` by this one."""
        late = here - there
        if late < self.seconds - _TOLERANCE_SECONDS or math.isinf(self.seconds):
            self.seconds = late
        self._least = min(self._least, late)
        if here - self._since >= _WINDOW_SECONDS:
            if self._least > self.seconds + _TOLERANCE_SECONDS:
                self.seconds = self._least
            self._least = math.inf
            self._since = here
        return self.seconds


@dataclass
class Member:
    """A machine that has joined."""

    number: int
    host: str
    process: str
    """A random name of its node process."""
    session: int
    """Number of its connection, counted over all machines."""
    heard: float
    clock: ClockOffset = field(default_factory=ClockOffset)
    readings: WorkerReadings | None = None
    """The newest message about its workers, with times of this machine's clock."""
    differs: tuple[str, ...] = ()
    """How its machine differs from the lead's."""
    inbox: deque[MachineMessage] = field(default_factory=lambda: deque(maxlen=_WAITING))

    def __str__(self) -> str:
        return f"machine {self.number} ({self.host})"


@dataclass(frozen=True)
class Expected:
    """What a machine that wants to join a run must be.

    Args:
        most: Number of machines, with the lead.
        workers: Workers per machine.
        version: Version of Headway.
        identity: Fingerprint of what the config says about the mathematics of the run.
        compare: Compares the machine that a process describes with the lead's.
        name_differences: Names the keys by which the config that a process describes differs from the lead's.
    """

    most: int
    workers: int
    version: str
    identity: str
    compare: Callable[[Mapping[str, str]], Differences] = lambda _: Differences(None, "", ())
    name_differences: Callable[[Mapping[str, Any]], str] = lambda _: ""

    def refusal(self, hello: Hello) -> Refused | None:
        """Return why a machine may not join, whichever others are there; None if it may."""
        number = hello.node
        if not 0 < number < self.most:
            return Refused(
                f"the lead knows machines 1 to {self.most - 1}, and this one says that it is {number}",
                "give every machine its own --node, and all of them the same --machines",
            )
        found = self._misfit(f"machine {number} ({hello.host})", hello)
        return None if found is None else Refused(*found, number)

    def _misfit(self, name: str, hello: Hello) -> tuple[str, str] | None:
        """Return why a machine does not fit, and what to do; None if it fits."""
        if hello.version != self.version:
            what = f"{name} has Headway {hello.version}, and the lead {self.version}"
            return what, "install one version on all machines"
        if hello.workers != self.workers:
            what = f"{name} was started with {hello.workers} workers, and the lead with {self.workers}"
            return what, "start all machines with the same --workers"
        if hello.identity != self.identity:
            what = f"{name} was started with another config than the lead"
            named = self.name_differences(hello.computes)
            return ": ".join(filter(None, (what, named))), "start all with the same config"
        found = self.compare(hello.machine)
        return None if found.refused is None else (f"{name} has {found.refused}", found.fix)


@dataclass
class Members:
    """The machines that have joined, without the lead."""

    expected: Expected
    joined: dict[int, Member] = field(default_factory=dict)
    departed: dict[int, str] = field(default_factory=dict)
    """Why a connection has ended, by its session."""
    closed: dict[int, float] = field(default_factory=dict)
    """When the connection of a machine was closed that has not come back, by its number."""
    refusals: list[Refused] = field(default_factory=list)
    _sessions: int = 0
    _met: set[int] = field(default_factory=set)

    def admit(self, hello: Hello, now: float) -> Member | Refused:
        """Let a machine join that has said hello, in place of an earlier process of the same machine."""
        found = self._refusal(hello, now)
        if found is not None:
            self.refusals.append(found)
            return found
        number = hello.node
        if number in self.joined:
            self.leave(number, "it was started again")
        self._sessions += 1
        member = Member(number, hello.host, hello.process, self._sessions, now)
        member.differs = self.expected.compare(hello.machine).others
        self.joined[number] = member
        self._met.add(number)
        self.closed.pop(number, None)
        return member

    def _refusal(self, hello: Hello, now: float) -> Refused | None:
        there = self.joined.get(hello.node)
        if there is not None and there.process != hello.process and now - there.heard < _SAME_NUMBER_SECONDS:
            what = f"two machines say that they are {there}: {hello.host} too"
            return Refused(what, "give every machine its own --node", hello.node)
        return self.expected.refusal(hello)

    @property
    def has_met_all(self) -> bool:
        """Whether every machine has been here."""
        return len(self._met) == self.expected.most - 1

    def leave(self, number: int, why: str, closed_at: float | None = None) -> None:
        """Remove a machine.

        Args:
            number: The machine.
            why: The reason, in words.
            closed_at: When its connection was closed, as by the end of its process; None if it is silent.
        """
        self.departed[self.joined.pop(number).session] = why
        if closed_at is not None:
            self.closed[number] = closed_at

    def silent(self, now: float, lost_seconds: float) -> list[Member]:
        """Return the machines that have said nothing for too long."""
        return [member for member in self.joined.values() if now - member.heard >= lost_seconds]


def choose_machines(here: Collection[int], machines: int, before: Collection[int] = ()) -> list[int]:
    """Return the numbers of the machines that work, the lead first; the others are spares.

    Args:
        here: The machines that have joined, without the lead.
        machines: How many are to work.
        before: Those that worked last: they have read the data already.
    """
    others = sorted(here, key=lambda number: (number not in before, number))[: max(0, machines - 1)]
    return [0, *sorted(others)]
