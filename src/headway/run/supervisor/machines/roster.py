"""The machines that are there, as the lead knows them: who may join, who is silent, and who works."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.run.supervisor.machines.likeness import Differences
from headway.run.supervisor.machines.messages import ClockOffset

#: Two machines may have been started with one number by mistake. A restarted one comes after its old process is gone,
#: or silent for longer than this.
_SAME_NUMBER_SECONDS = 3.0
#: Most messages of a machine that wait to be read, without readings, of which only the newest counts.
_WAITING = 400


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
    readings: dict[str, Any] | None = None
    """The newest message about its workers."""
    differs: tuple[str, ...] = ()
    """How its machine differs from the lead's."""
    inbox: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_WAITING))

    def __str__(self) -> str:
        return f"machine {self.number} ({self.host})"


@dataclass(frozen=True)
class Refusal:
    """Why a machine may not join."""

    what: str
    fix: str
    machine: int | None = None
    """Its number; None if it has none that can be one."""


@dataclass
class Roster:
    """The machines that have joined, without the lead.

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
    compare: Callable[[Any], Differences] = lambda _: Differences(None, "", ())
    name_differences: Callable[[Any], str] = lambda _: ""
    members: dict[int, Member] = field(default_factory=dict)
    departed: dict[int, str] = field(default_factory=dict)
    """Why a connection has ended, by its session."""
    closed: dict[int, float] = field(default_factory=dict)
    """When the connection of a machine was closed that has not come back, by its number."""
    refusals: list[Refusal] = field(default_factory=list)
    _sessions: int = 0
    _met: set[int] = field(default_factory=set)

    def admit(self, hello: Mapping[str, Any], now: float) -> Member | Refusal:
        """Let a machine join that has said hello, in place of an earlier process of the same machine."""
        found = self._refusal(hello, now)
        if found is not None:
            self.refusals.append(found)
            return found
        number = hello["node"]
        if number in self.members:
            self.leave(number, "it was started again")
        self._sessions += 1
        member = Member(number, str(hello.get("host"))[:64], str(hello.get("process"))[:64], self._sessions, now)
        member.differs = self.compare(hello.get("machine")).others
        self.members[number] = member
        self._met.add(number)
        self.closed.pop(number, None)
        return member

    def _refusal(self, hello: Mapping[str, Any], now: float) -> Refusal | None:
        number = hello.get("node")
        if not isinstance(number, int) or not 0 < number < self.most:
            return Refusal(
                f"the lead knows machines 1 to {self.most - 1}, and this one says that it is {number!r}",
                "give every machine its own --node, and all of them the same --machines",
            )
        found = self._misfit(number, hello, now)
        return None if found is None else Refusal(*found, number)

    def _misfit(self, number: int, hello: Mapping[str, Any], now: float) -> tuple[str, str] | None:
        """Return why a machine may not join, and what to do; None if it may."""
        host, there = str(hello.get("host"))[:64], self.members.get(number)
        if there is not None and there.process != hello.get("process") and now - there.heard < _SAME_NUMBER_SECONDS:
            return f"two machines say that they are {there}: {host} too", "give every machine its own --node"
        name = f"machine {number} ({host})"
        if hello.get("version") != self.version:
            what = f"{name} has Headway {hello.get('version')}, and the lead {self.version}"
            return what, "install one version on all machines"
        if hello.get("workers") != self.workers:
            what = f"{name} was started with {hello.get('workers')} workers, and the lead with {self.workers}"
            return what, "start all machines with the same --workers"
        if hello.get("identity") != self.identity:
            what = f"{name} was started with another config than the lead"
            named = self.name_differences(hello.get("computes"))
            return ": ".join(filter(None, (what, named))), "start all with the same config"
        found = self.compare(hello.get("machine"))
        return None if found.refused is None else (f"{name} has {found.refused}", found.fix)

    @property
    def has_met_all(self) -> bool:
        """Whether every machine has been here."""
        return len(self._met) == self.most - 1

    def leave(self, number: int, why: str, closed_at: float | None = None) -> None:
        """Remove a machine.

        Args:
            number: The machine.
            why: The reason, in words.
            closed_at: When its connection was closed, as by the end of its process; None if it is silent.
        """
        self.departed[self.members.pop(number).session] = why
        if closed_at is not None:
            self.closed[number] = closed_at

    def silent(self, now: float, lost_seconds: float) -> list[Member]:
        """Return the machines that have said nothing for too long."""
        return [member for member in self.members.values() if now - member.heard >= lost_seconds]


def choose_team(here: Collection[int], machines: int, before: Collection[int] = ()) -> list[int]:
    """Return the numbers of the machines that work, the lead first; the others are spares.

    Args:
        here: The machines that have joined, without the lead.
        machines: How many are to work.
        before: Those that worked last: they have read the data already.
    """
    others = sorted(here, key=lambda number: (number not in before, number))[: max(0, machines - 1)]
    return [0, *sorted(others)]
