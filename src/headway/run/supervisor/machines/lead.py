"""The lead: accepts the other machines of a run, and speaks with them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial

from headway.core.console import notice, warning
from headway.core.process.messages import Messages
from headway.core.process.signals import STOP_SIGNALS
from headway.core.process.waiting import wait_until
from headway.run.supervisor.machines.channel import ChannelError
from headway.run.supervisor.machines.connection import Connection, ConnectionThread
from headway.run.supervisor.machines.entrance import Entrance
from headway.run.supervisor.machines.machine_role import MachineRole
from headway.run.supervisor.machines.members import Member, Members
from headway.run.supervisor.machines.messages import (
    MACHINE,
    Alive,
    FromLead,
    Hello,
    MachineMessage,
    OtherMessage,
    Refused,
    RunEnd,
    SignalReceived,
    Welcome,
    WorkerReadings,
)

#: How long the others may take to hear how the run ended.
_FAREWELL_SECONDS = 5.0
#: How a socket of both families shows an address of IPv4.
_MAPPED = "::ffff:"


class Lead:
    """Listens for the other machines of a run, on a thread that does not touch the run.

    Args:
        role: The lead's own role.
        members: Decides who may join.
        lost_seconds: How long a machine may be silent.
        clock: Returns seconds that never decrease.
        messages: The types of messages that may come and go.
    """

    def __init__(
        self,
        role: MachineRole,
        members: Members,
        lost_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        messages: Messages[MachineMessage] = MACHINE,
    ) -> None:
        self._members = members
        self._lost_seconds = lost_seconds
        self._clock = clock
        self._known: dict[int, Connection] = {}
        self._thread = ConnectionThread(self._turn, self._forget)
        self._end: RunEnd | None = None
        self._signals: list[tuple[str, int]] = []
        self._entrance = Entrance(role, messages)
        self.pausing = self._thread.paused
        self._thread.start()

    @property
    def here(self) -> dict[int, Member]:
        """The machines that have joined, by number."""
        with self._thread.lock:
            return dict(self._members.joined)

    @property
    def closed(self) -> dict[int, float]:
        """Seconds since the connection of a machine was closed that has not come back, by its number."""
        now = self._clock()
        with self._thread.lock:
            return {number: now - at for number, at in self._members.closed.items()}

    @property
    def address(self) -> str:
        """The address of this machine at which the others have reached it."""
        with self._thread.lock:
            for connection in self._known.values():
                with suppress(OSError):
                    return str(connection.end.getsockname()[0]).removeprefix(_MAPPED)
        return str(self._entrance.listener.getsockname()[0])

    def why_gone(self, session: int) -> str | None:
        """Return why a connection has ended; None if it has not."""
        with self._thread.lock:
            return self._members.departed.get(session)

    def take_refusals(self) -> list[Refused]:
        """Return the refusals since the last call."""
        with self._thread.lock:
            found = self._members.refusals
            self._members.refusals = []
        return found

    def take_signals(self) -> list[tuple[str, int]]:
        """Return the stop signals that machines have received since the last call, with the machines' names."""
        with self._thread.lock:
            found = self._signals
            self._signals = []
        return found

    def take_messages(self, number: int) -> list[MachineMessage]:
        """Return the messages of a machine since the last call."""
        with self._thread.lock:
            member = self._members.joined.get(number)
            found = list(member.inbox) if member is not None else []
            if member is not None:
                member.inbox.clear()
        return found

    def newest_readings(self, number: int) -> WorkerReadings | None:
        """Return the newest message of a machine about its workers."""
        with self._thread.lock:
            member = self._members.joined.get(number)
            return None if member is None else member.readings

    def tell(self, numbers: Collection[int], message: FromLead | OtherMessage) -> None:
        """Send a message to some machines; one that is gone is left out."""
        with self._thread.lock:
            for number in numbers:
                if number in self._known:
                    self._attend(number, partial(self._known[number].send, message))
        self._thread.wake()

    def drop(self, number: int, why: str) -> None:
        """Close the connection to a machine, which then ends its workers."""
        with self._thread.lock:
            if number in self._known:
                self._leave(number, why)

    def close(self, end: RunEnd) -> None:
        """Tell all machines how the run ended, and stop listening."""
        with self._thread.lock:
            self._end = end
        self.tell(self.here, end)
        # Also those that are still on their way here, which would wait for a lead that is gone.
        wait_until(lambda: not self.here and self._members.has_met_all, _FAREWELL_SECONDS)
        self.leave()

    def leave(self) -> None:
        """Send what is left, and close all connections without another word: another lead may follow."""
        self._thread.stop()
        with self._thread.lock:
            for number in list(self._known):
                self._attend(number, self._known[number].flush)
        self._forget()

    def _turn(self, ready: list[socket.socket]) -> tuple[list[socket.socket], list[socket.socket]]:
        now = self._clock()
        self._entrance.turn(ready, now, self._admit)
        for number in list(self._known):
            self._attend(number, partial(self._converse, number, ready, now))
        for member in self._members.silent(now, self._lost_seconds):
            self._leave(member.number, f"it has said nothing for {now - member.heard:.0f} s")
        connections = [*self._entrance.unknown, *self._known.values()]
        writes = [connection.end for connection in connections if connection.channel.unsent]
        return [self._entrance.listener, *(connection.end for connection in connections)], writes

    def _admit(self, connection: Connection, messages: Sequence[MachineMessage], now: float) -> None:
        """Let a machine join by what it says first.

        Raises:
            ChannelError: it is no machine of the run, or may not join.
        """
        hello, *more = messages
        if not isinstance(hello, Hello):
            raise ChannelError("it does not say which machine it is")
        found = self._members.admit(hello, now)
        if isinstance(found, Refused):
            connection.send(found)
            raise ChannelError(found.what)
        if (old := self._known.pop(found.number, None)) is not None:
            old.end.close()
        self._known[found.number] = connection
        found.inbox.extend(more)
        connection.send(Welcome())
        if self._end is not None:
            connection.send(self._end)
        notice(f"{found} has joined")
        for difference in found.differs:
            warning(f"{found} has {difference}")

    def _converse(self, number: int, ready: list[socket.socket], now: float) -> None:
        connection = self._known[number]
        member = self._members.joined[number]
        if connection.end in ready:
            for message in connection.receive(now):
                match message:
                    case WorkerReadings():
                        member.readings = message.with_times_of_here(member.clock.update(now, message.now))
                    case SignalReceived(number_of_signal):
                        if number_of_signal in STOP_SIGNALS:
                            self._signals.append((str(member), number_of_signal))
                    case Alive():
                        pass
                    case _:
                        member.inbox.append(message)
            member.heard = connection.heard
        connection.keep_alive(now)
        connection.flush()

    def _attend(self, number: int, action: Callable[[], object]) -> None:
        try:
            action()
        except ChannelError as error:
            self._leave(number, str(error), self._clock())

    def _leave(self, number: int, why: str, closed_at: float | None = None) -> None:
        self._known.pop(number).end.close()
        self._members.leave(number, why, closed_at)

    def _forget(self) -> None:
        self._entrance.close()
        for connection in self._known.values():
            with suppress(OSError):
                connection.end.close()
