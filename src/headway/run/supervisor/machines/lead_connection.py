"""A node's connection to the lead, made again when it is lost."""

from __future__ import annotations

import socket
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from headway.core.coordination.launch_variables import SECRET
from headway.core.errors import ConfigError
from headway.core.process.messages import Messages
from headway.run.supervisor.machines.channel import Channel, ChannelError, WrongSecret
from headway.run.supervisor.machines.connection import GREETING_SECONDS, Connection, ConnectionThread
from headway.run.supervisor.machines.machine_role import MachineRole
from headway.run.supervisor.machines.messages import (
    MACHINE,
    Alive,
    FromNode,
    Hello,
    MachineMessage,
    OtherMessage,
    Refused,
    Welcome,
)

#: Time between two tries to reach the lead, and how long one may take.
_RETRY_SECONDS = 1.0
_CONNECT_SECONDS = 5.0


@dataclass
class LeadStatus:
    """What a machine knows of its connection to the lead."""

    session: int = 0
    """Number of connections so far; 0 before the first."""
    is_up: bool = False
    """Whether the lead has welcomed this machine on the present connection."""
    lost_at: float = field(default_factory=time.monotonic)
    """When the connection was lost, or the first try."""
    why: str = "it cannot be reached"
    """Why there is no connection."""
    is_absent: bool = False
    """Whether no process listened at the lead's port at the last try, while its machine answered."""
    interface_address: str | None = None
    """The address of this machine by which it reaches the lead."""
    refusal: Refused | None = None

    def lose(self, why: str) -> None:
        """Note that the connection has ended, or could not be made."""
        self.why = why
        if self.is_up:
            self.is_up = False
            self.lost_at = time.monotonic()

    def check_refused(self, role: MachineRole) -> None:
        """Check that the lead has not refused this machine.

        Raises:
            ConfigError: it has.
        """
        if self.refusal is not None:
            raise ConfigError(
                f"the lead does not take this machine: {self.refusal.what}",
                where=f"--lead {role.host}:{role.port}",
                fix=self.refusal.fix,
            )


class LeadConnection:
    """Keeps up a connection to the lead on a thread.

    Args:
        role: The role of this machine.
        hello: What the lead has to know of this machine.
        lost_seconds: How long the lead may be silent.
        messages: The types of messages that may come and go.
    """

    def __init__(
        self,
        role: MachineRole,
        hello: Hello,
        lost_seconds: float,
        *,
        messages: Messages[MachineMessage] = MACHINE,
    ) -> None:
        self._messages = messages
        self._role = role
        self._lost_seconds = lost_seconds
        self._hello = hello
        self._connection: Connection | None = None
        self._next_try = 0.0
        self.inbox: deque[MachineMessage] = deque(maxlen=1000)
        self.status = LeadStatus()
        self._thread = ConnectionThread(self._turn, self._forget)
        self.pausing = self._thread.paused
        self._thread.start()

    def send(self, message: FromNode | OtherMessage) -> None:
        """Send a message, if the lead is there."""
        with self._thread.lock:
            if self.status.is_up and self._connection is not None:
                self._guarded(lambda found: found.send(message))
                if self._connection is not None:
                    self._connection.spoke = time.monotonic()
        self._thread.wake()

    def take(self) -> list[MachineMessage]:
        """Return the messages since the last call."""
        with self._thread.lock:
            found = list(self.inbox)
            self.inbox.clear()
        return found

    def close(self) -> None:
        """Send what is left, and close the connection."""
        with self._thread.lock:
            self._guarded(Connection.flush)
        self._thread.stop()
        self._forget()

    def _turn(self, ready: list[socket.socket]) -> tuple[list[socket.socket], list[socket.socket]]:
        now = time.monotonic()
        if self._connection is None:
            if now >= self._next_try and self.status.refusal is None:
                self._dial(now)
        else:
            self._guarded(lambda found: self._converse(found, found.end in ready, now))
        connection = self._connection
        if connection is None:
            return [], []
        return [connection.end], [connection.end] if connection.channel.unsent else []

    def _dial(self, now: float) -> None:
        self._next_try = now + _RETRY_SECONDS
        try:
            # Blocks this thread, which has nothing else to do, for as long as the network takes to refuse.
            self._thread.lock.release()
            try:
                end = socket.create_connection((self._role.host, self._role.port), _CONNECT_SECONDS)
            finally:
                self._thread.lock.acquire()
        except (OSError, UnicodeError) as error:  # UnicodeError: a name that DNS could not hold
            self.status.lose(f"it cannot be reached: {getattr(error, 'strerror', None) or error}")
            self.status.is_absent = isinstance(error, ConnectionRefusedError)
            return
        self.status.is_absent = False
        self.status.interface_address = str(end.getsockname()[0])
        channel = Channel(self._role.secret, is_lead=False)
        self._connection = Connection(end, channel, time.monotonic(), self._messages)

    def _converse(self, connection: Connection, is_ready: bool, now: float) -> None:
        status = self.status
        was_open = connection.channel.is_open
        for message in connection.receive(now) if is_ready else []:
            match message:
                case Refused():
                    status.refusal = message
                    raise ChannelError(message.what)
                case Welcome():
                    status.session += 1
                    status.is_up = True
                case Alive():
                    pass
                case _:
                    self.inbox.append(message)
        if connection.channel.is_open and not was_open:
            connection.send(self._hello)
        if not status.is_up and now - connection.began > GREETING_SECONDS:
            raise ChannelError("it does not answer")
        if status.is_up and now - connection.heard >= self._lost_seconds:
            raise ChannelError(f"it has said nothing for {now - connection.heard:.0f} s")
        if status.is_up:
            connection.keep_alive(now)
        connection.flush()

    def _guarded(self, action: Any) -> None:
        """Use the connection; if that fails, it is lost."""
        connection = self._connection
        if connection is None:
            return
        try:
            action(connection)
        except ChannelError as error:
            if isinstance(error, WrongSecret):
                self.status.refusal = Refused("the lead has another secret", f"set {SECRET} alike on all machines")
            self.status.lose(str(error))
            self._connection = None
            with suppress(OSError):
                connection.end.close()

    def _forget(self) -> None:
        if self._connection is not None:
            with suppress(OSError):
                self._connection.end.close()
