"""A thread that keeps a machine's connections alive while its main thread loads libraries or waits for processes.

A process with several threads cannot be copied, so the thread pauses while an attempt process is started.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from headway.core.process.messages import Messages
from headway.core.process.table import has_one_thread
from headway.core.process.waiting import wait_until
from headway.run.supervisor.machines.channel import Channel, ChannelError
from headway.run.supervisor.machines.messages import Alive, MachineMessage

#: Time between two turns without traffic, and between signs of life of a machine that has nothing else to say.
TURN_SECONDS = 0.2
ALIVE_SECONDS = 1.0
#: How long the other side may take to prove that it knows the secret.
GREETING_SECONDS = 5.0
_RECEIVE_BYTES = 256 * 1024
#: How long a thread of the C library may take to end.
_THREAD_SECONDS = 1.0


class Connection:
    """A socket with its channel.

    Args:
        end: The socket.
        channel: This side of the connection.
        now: Seconds of a clock that never decreases.
        messages: The types of messages that may come and go.
    """

    def __init__(self, end: socket.socket, channel: Channel, now: float, messages: Messages[MachineMessage]) -> None:
        self.end = end
        self.channel = channel
        self._messages = messages
        self.began = self.heard = self.spoke = now
        end.setblocking(False)
        with suppress(OSError):  # readings are small and frequent
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def receive(self, now: float) -> list[MachineMessage]:
        """Return the messages that have arrived.

        Raises:
            ChannelError: the connection is closed, or was used wrongly.
        """
        try:
            data = self.end.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ChannelError(f"the connection broke: {error.strerror or error}") from error
        if not data:
            raise ChannelError("the connection was closed")
        self.heard = now
        lines = self.channel.receive(data)
        try:
            return [self._messages.decode(line) for line in lines]
        except ValueError as error:
            raise ChannelError(f"a line is no message: {error}") from error

    def send(self, message: MachineMessage) -> None:
        """Add a message to what is to be sent.

        Raises:
            ChannelError: the other side does not read, or the message is too long.
        """
        self.channel.send(self._messages.encode(message).encode())

    def flush(self) -> None:
        """Send what waits to be sent, as far as the other side takes it.

        Raises:
            ChannelError: the connection is closed.
        """
        if not self.channel.unsent:
            return
        try:
            sent = self.end.send(self.channel.unsent)
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelError(f"the connection broke: {error.strerror or error}") from error
        del self.channel.unsent[:sent]

    def keep_alive(self, now: float) -> None:
        """Say that this machine is there, if it is time to."""
        if self.channel.is_open and now - self.spoke >= ALIVE_SECONDS:
            self.spoke = now
            self.send(Alive())


class ConnectionThread:
    """Runs a function on a thread, again and again.

    Args:
        turn: Called with the sockets that can be read, holding `lock`; returns the sockets to wait for, and those of
            them that have something to send.
        forget: Closes the sockets, in a copy of this process.
    """

    def __init__(
        self,
        turn: Callable[[list[socket.socket]], tuple[list[socket.socket], list[socket.socket]]],
        forget: Callable[[], None],
    ) -> None:
        self.lock = threading.RLock()
        self._turn, self._wake = turn, os.pipe()
        os.set_blocking(self._wake[1], False)
        self._thread: threading.Thread | None = None
        self._stops = False
        os.register_at_fork(after_in_child=forget)

    def start(self) -> None:
        """Start the thread."""
        self._stops = False
        self._thread = threading.Thread(target=self._run, name="headway-machines", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stops = True
        self.wake()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wake(self) -> None:
        """Have the thread take its next turn now."""
        with suppress(BlockingIOError):
            os.write(self._wake[1], b"x")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Have no thread for the length of a block, in which this process is copied."""
        runs = self._thread is not None
        self.stop()
        wait_until(has_one_thread, _THREAD_SECONDS, 0.001)
        try:
            yield
        finally:
            if runs:
                self.start()

    def _run(self) -> None:
        ready: list[socket.socket] = []
        while not self._stops:
            with self.lock:
                reads, writes = self._turn(ready)
            wake = self._wake[0]
            waits: list[int | socket.socket] = [wake, *reads]
            try:
                found, _, _ = select.select(waits, writes, [], TURN_SECONDS)
            except (OSError, ValueError):  # the main thread has closed one of them
                continue
            if wake in found:
                os.read(wake, 4096)
            ready = [end for end in found if isinstance(end, socket.socket)]
