"""The lead: accepts the other machines of a run, and speaks with them."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial

from headway.core.console import notice, warning
from headway.core.coordination.launch_variables import LEAD, LISTEN, SECRET
from headway.core.errors import ConfigError
from headway.core.process.messages import Messages
from headway.core.process.signals import STOP_SIGNALS
from headway.core.process.waiting import wait_until
from headway.run.supervisor.machines.channel import Channel, ChannelError, WrongSecret
from headway.run.supervisor.machines.connection import GREETING_SECONDS, Connection, ConnectionThread
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

#: Most connections of processes that have not proven that they know the secret.
_MOST_UNKNOWN = 32
#: How long the others may take to hear how the run ended.
_FAREWELL_SECONDS = 5.0
_ANY_IPV6 = "::"
_EVERYWHERE = ("", _ANY_IPV6)
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
        self._messages = messages
        self._role = role
        self._members = members
        self._lost_seconds = lost_seconds
        self._clock = clock
        self._known: dict[int, Connection] = {}
        self._unknown: list[Connection] = []
        self._thread = ConnectionThread(self._turn, self._forget)
        self._refused_at = -60.0
        self._end: RunEnd | None = None
        self._signals: list[tuple[str, int]] = []
        self._listener = _listen(role)
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
        return str(self._listener.getsockname()[0])

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
        if self._listener in ready:
            self._accept(now)
        for connection in list(self._unknown):
            self._greet(connection, connection.end in ready, now)
        for number in list(self._known):
            self._attend(number, partial(self._converse, number, ready, now))
        for member in self._members.silent(now, self._lost_seconds):
            self._leave(member.number, f"it has said nothing for {now - member.heard:.0f} s")
        connections = [*self._unknown, *self._known.values()]
        writes = [connection.end for connection in connections if connection.channel.unsent]
        return [self._listener, *(connection.end for connection in connections)], writes

    def _accept(self, now: float) -> None:
        with suppress(OSError):
            end, _ = self._listener.accept()
            if len(self._unknown) >= _MOST_UNKNOWN:
                end.close()
                return
            self._unknown.append(Connection(end, Channel(self._role.secret, is_lead=True), now, self._messages))

    def _greet(self, connection: Connection, is_ready: bool, now: float) -> None:
        """Continue the greeting of a process that may be a machine of the run, or anything else."""
        try:
            messages = connection.receive(now) if is_ready else []
            connection.flush()
            if messages:
                self._admit(connection, messages, now)
            elif now - connection.began > GREETING_SECONDS:
                raise ChannelError("it takes too long")
        except ChannelError as error:
            if isinstance(error, WrongSecret) and now - self._refused_at > 60.0:
                self._refused_at = now
                peer = "unknown"
                with suppress(OSError):
                    peer = str(connection.end.getpeername()[0])
                warning(f"a process at {peer} wants to join the run and does not know its secret")
            with suppress(ChannelError):
                connection.flush()  # that it was refused
            if connection in self._unknown:
                self._unknown.remove(connection)
            connection.end.close()

    def _admit(self, connection: Connection, messages: list[MachineMessage], now: float) -> None:
        hello, *more = messages
        if not isinstance(hello, Hello):
            raise ChannelError("it does not say which machine it is")
        found = self._members.admit(hello, now)
        if isinstance(found, Refused):
            connection.send(found)
            raise ChannelError(found.what)
        self._unknown.remove(connection)
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
        for end in (self._listener, *(c.end for c in (*self._unknown, *self._known.values()))):
            with suppress(OSError):
                end.close()


def _listen(role: MachineRole) -> socket.socket:
    """Listen where the others look for the lead.

    That is the address that the launcher says, or the one that the lead's name stands for, if this machine has it. A
    name may also stand for another one, which leads here (a service of Kubernetes), or on this machine for loopback, or
    not be known yet (names of pods appear seconds after their start); then every interface is listened on, with a word.

    Raises:
        ConfigError: the name cannot be one, this machine does not have the address, or the port is in use.
    """
    last: OSError | None = None
    foreign: str | None = None
    for family, host in _addresses(role):
        both = host == _ANY_IPV6 and socket.has_dualstack_ipv6()
        try:
            listener = socket.create_server((host, role.port), family=family, backlog=128, dualstack_ipv6=both)
        except OSError as error:
            last = error
            if error.errno == errno.EADDRNOTAVAIL and host not in _EVERYWHERE:
                foreign = host
            continue
        if foreign is not None:
            notice(
                f"the lead's name {role.host} stands for {foreign}, which is no address of this machine: it listens on"
                f" every interface, at port {role.port}, in case that leads here"
            )
        listener.setblocking(False)
        return listener
    assert last is not None, "one address was tried"
    where = f"--lead {role.host}:{role.port}" if role.listen is None else f"{LISTEN}={role.listen}"
    what = last.strerror or str(last)
    fix = f"choose a free port (--lead, {LEAD}); the secret ({SECRET}) keeps strangers out"
    if foreign is not None and last.errno == errno.EADDRNOTAVAIL:
        what = f"{foreign} is no address of this machine, which leads since it is machine 0"
        fix = (
            "give all machines the address of machine 0, or this one its own --node; where that address leads here by"
            f" another machine, set {LISTEN}=0.0.0.0 here"
        )
    raise ConfigError(f"the lead cannot listen for the other machines: {what}", where=where, fix=fix)


def _addresses(role: MachineRole) -> list[tuple[socket.AddressFamily, str]]:
    """Return where the lead may listen, the best address first."""
    if role.listen is not None:
        return [(socket.AF_INET6 if ":" in role.listen else socket.AF_INET, role.listen)]
    try:
        found = socket.getaddrinfo(role.host, role.port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a name that DNS could not hold
        raise ConfigError(
            f"the lead's name cannot be one: {error}",
            where=f"--lead {role.host}:{role.port}",
            fix=f"give a name or an address of machine 0 (--lead, {LEAD})",
        ) from error
    except OSError as error:
        notice(
            f"the lead's name {role.host} is not known here, or not yet ({error.strerror or error}): it listens on"
            f" every interface, at port {role.port}"
        )
        both = [(socket.AF_INET6, _ANY_IPV6)] if socket.has_dualstack_ipv6() else []
        return [*both, (socket.AF_INET, "")]
    family, _, _, _, address = found[0]
    own = (family, str(address[0]))
    if role.host in ("localhost", own[1]):
        return [own]
    is_loopback = own[1].startswith("127.") or own[1] == "::1"
    everywhere = (family, _ANY_IPV6 if family == socket.AF_INET6 else "")
    return [everywhere] if is_loopback else [own, everywhere]
