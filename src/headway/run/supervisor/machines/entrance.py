"""Where the lead of a run listens, and the greeting of each process that connects there."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

from headway.core.console import notice, warning
from headway.core.coordination.launch_variables import LEAD, LISTEN, SECRET
from headway.core.errors import ConfigError
from headway.core.process.messages import Messages
from headway.run.supervisor.machines.channel import Channel, ChannelError, WrongSecret
from headway.run.supervisor.machines.connection import GREETING_SECONDS, Connection
from headway.run.supervisor.machines.machine_role import MachineRole
from headway.run.supervisor.machines.messages import MachineMessage

#: Most connections of processes that have not proven that they know the secret.
_MOST_UNKNOWN = 32
#: Time between two warnings about processes that do not know the secret.
_REFUSED_SECONDS = 60.0
_ANY_IPV6 = "::"
_EVERYWHERE = ("", _ANY_IPV6)


class Entrance:
    """Listens for the machines of a run; each connection that it accepts may be one of them, or anything else.

    Args:
        role: The lead's own role.
        messages: The types of messages that may come and go.

    Raises:
        ConfigError: the lead cannot listen.
    """

    def __init__(self, role: MachineRole, messages: Messages[MachineMessage]) -> None:
        self._role = role
        self._messages = messages
        self._refused_at = -_REFUSED_SECONDS
        self.unknown: list[Connection] = []
        """The connections of processes that have not yet said which machine they are."""
        self.listener = _listen(role)

    def turn(
        self,
        ready: Sequence[socket.socket],
        now: float,
        admit: Callable[[Connection, Sequence[MachineMessage], float], None],
    ) -> None:
        """Accept a connection, and continue all greetings.

        Args:
            ready: Sockets that can be read.
            now: Seconds of a clock that never decreases.
            admit: Takes over a connection, with the first messages of its process and the time; raises `ChannelError`
                to refuse it.
        """
        if self.listener in ready:
            self._accept(now)
        for connection in list(self.unknown):
            try:
                messages = connection.receive(now) if connection.end in ready else []
                connection.flush()
                if messages:
                    admit(connection, messages, now)
                    self.unknown.remove(connection)
                elif now - connection.began > GREETING_SECONDS:
                    raise ChannelError("it takes too long")
            except ChannelError as error:
                self._refuse(connection, error, now)

    def close(self) -> None:
        """Stop listening, and close the connections of unknown processes."""
        for end in (self.listener, *(connection.end for connection in self.unknown)):
            with suppress(OSError):
                end.close()

    def _accept(self, now: float) -> None:
        with suppress(OSError):
            end, _ = self.listener.accept()
            if len(self.unknown) >= _MOST_UNKNOWN:
                end.close()
                return
            self.unknown.append(Connection(end, Channel(self._role.secret, is_lead=True), now, self._messages))

    def _refuse(self, connection: Connection, error: ChannelError, now: float) -> None:
        if isinstance(error, WrongSecret) and now - self._refused_at > _REFUSED_SECONDS:
            self._refused_at = now
            peer = "unknown"
            with suppress(OSError):
                peer = str(connection.end.getpeername()[0])
            warning(f"a process at {peer} wants to join the run and does not know its secret")
        with suppress(ChannelError):
            connection.flush()  # that it was refused
        self.unknown.remove(connection)
        connection.end.close()


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
