"""Machines that stand on this one: network namespaces where that is allowed, otherwise processes on loopback.

A namespace has a cable to a switch that it shares with the others, and a host name of its own. So a machine can be cut
off, in one direction too. All of them see the same folders.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal

from headway.core.exposure import free_port
from headway.core.process.signals import defer_signals
from headway.core.process.waiting import wait_until

#: What of a machine's traffic is lost: all, as without a cable, or only what it sends, or what is sent to it.
Cut = Literal["cut", "cut-out", "cut-in"]
#: A variable that only the processes of one machine have.
_MARK = "HEADWAY_CHAOS_MACHINE"
_NETWORK = "10.231.77"
_PORT = 29450
_PREFIX_BITS = 24
#: A network card that no machine has: what is sent there is lost without an error.
_NOWHERE = "02:00:00:00:00:00"
_COMMAND_SECONDS = 30.0
_END_SECONDS = 30.0


class Machine:
    """A machine that is only processes, which end, stop and continue together.

    Args:
        number: Its number among the machines, from 0.
        lead: Address of machine 0.
    """

    def __init__(self, number: int, lead: str) -> None:
        self.number = number
        self.lead = lead
        self._mark = f"{number}-{secrets.token_hex(8)}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        """Its name in records."""
        return socket.gethostname()

    def start(self, command: Sequence[str], log: Path, variables: Mapping[str, str]) -> None:
        """Start a command on it, whose output is appended to a file."""
        environment = {**os.environ, **variables, _MARK: self._mark}
        with log.open("ab") as file, defer_signals():
            self._process = subprocess.Popen(
                self._within(command), stdout=file, stderr=file, env=environment, start_new_session=True
            )

    def _within(self, command: Sequence[str]) -> list[str]:
        return [*command]

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "it was started"
        return self._process

    @property
    def code(self) -> int | None:
        """The exit code of its command, negative for a signal; None while it runs."""
        return self._started.poll()

    def wait(self, seconds: float) -> int:
        """Wait for the end of its command, and return the exit code."""
        return self._started.wait(seconds)

    @property
    def answers_signals(self) -> bool:
        """Return whether its command has installed its SIGTERM handler, which its first line does."""
        try:
            status = Path(f"/proc/{self._started.pid}/status").read_text(encoding="ascii")
        except OSError:
            return False
        caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
        return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)

    def terminate(self) -> None:
        """Send SIGTERM to its command only, as a scheduler does."""
        with suppress(ProcessLookupError):
            os.kill(self._started.pid, signal.SIGTERM)

    @property
    def processes(self) -> list[int]:
        """Process numbers of all that its command has started, with the command."""
        import psutil

        found = []
        for pid in psutil.pids():
            with suppress(psutil.Error, OSError):
                if psutil.Process(pid).environ().get(_MARK) == self._mark:
                    found.append(pid)
        return found

    def kill(self) -> None:
        """Kill all of its processes."""
        self._signal_all(signal.SIGKILL)

    def freeze(self) -> None:
        """Stop all of its processes."""
        self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue all of its processes."""
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: int) -> None:
        reached: set[int] = set()
        while new := set(self.processes) - reached:  # some may start another one meanwhile
            reached |= new
            for pid in new:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def end(self) -> None:
        """Leave none of its processes behind."""
        self.kill()
        if self._process is not None:
            self._process.wait(_END_SECONDS)
        wait_until(lambda: not self.processes, _END_SECONDS, 0.1)

    def cut(self, kind: Cut) -> None:
        """Lose its traffic."""
        raise NotImplementedError("processes on loopback have no cable")

    def plug(self) -> None:
        """Connect it to the others again."""


class NetworkMachine(Machine):
    """A network namespace.

    Args:
        number: Its number among the machines, from 0.
        lead: Address of machine 0.
        prefix: Begins the names of its network devices.
        others: Numbers of the other machines.
    """

    def __init__(self, number: int, lead: str, prefix: str, others: Collection[int]) -> None:
        super().__init__(number, lead)
        self._prefix = prefix
        self._others = others

    @property
    def name(self) -> str:
        """Its host name."""
        return f"machine-{self.number}"

    @property
    def address(self) -> str:
        """Its address at the switch."""
        return _address(self.number)

    @property
    def space(self) -> str:
        """Name of its namespace."""
        return _space(self._prefix, self.number)

    @property
    def processes(self) -> list[int]:
        """Process numbers of all that run in its namespace, whatever they call themselves."""
        # A process that sets its title may overwrite the environment that /proc shows (Ray's workers do).
        done = subprocess.run(
            ["ip", "netns", "pids", self.space], capture_output=True, text=True, check=True, timeout=_COMMAND_SECONDS
        )
        return [int(pid) for pid in done.stdout.split()]

    def _within(self, command: Sequence[str]) -> list[str]:
        named = ("unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', self.name)
        return ["ip", "netns", "exec", self.space, *named, *command]

    def cut(self, kind: Cut) -> None:
        """Lose its traffic, without an error for whoever sends it."""
        if kind == "cut":
            _ip("link", "set", _cable(self._prefix, self.number), "down")
        for other in self._others if kind != "cut" else ():
            sender, receiver = (self.number, other) if kind == "cut-out" else (other, self.number)
            card = ("lladdr", _NOWHERE, "dev", "eth0", "nud", "permanent")
            _ip("-n", _space(self._prefix, sender), "neighbour", "replace", _address(receiver), *card)

    def plug(self) -> None:
        """Connect it to the others again."""
        _ip("link", "set", _cable(self._prefix, self.number), "up")
        for number in (self.number, *self._others):
            _ip("-n", _space(self._prefix, number), "neighbour", "flush", "dev", "eth0", "nud", "permanent")


def can_make_namespaces() -> bool:
    """Return whether this process may make network namespaces."""
    if getattr(os, "getuid", lambda: 1)() != 0 or not all(map(shutil.which, ("ip", "unshare"))):
        return False
    name = f"hw{os.getpid()}-probe"
    try:
        _ip("netns", "add", name)
        _ip("netns", "delete", name)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


@contextmanager
def standing_machines(count: int, namespaces: bool) -> Iterator[list[Machine]]:
    """Have some machines for the length of a block; their processes are ended with it.

    Args:
        count: Number of machines.
        namespaces: Whether they are network namespaces.
    """
    with ExitStack() as stack:
        if namespaces:
            machines = _namespaces(count, stack)
        else:
            lead = f"127.0.0.1:{free_port('127.0.0.1')}"
            machines = [Machine(number, lead) for number in range(count)]
        for machine in machines:
            stack.callback(machine.end)
        yield machines


def _namespaces(count: int, stack: ExitStack) -> list[Machine]:
    prefix = f"hw{os.getpid()}"
    switch = f"{prefix}-s"
    _ip("link", "add", switch, "type", "bridge")
    stack.callback(_ip, "link", "delete", switch)
    _ip("link", "set", switch, "up")
    machines: list[Machine] = []
    for number in range(count):
        space = _space(prefix, number)
        cable = _cable(prefix, number)
        _ip("netns", "add", space)
        stack.callback(_ip, "netns", "delete", space)
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
        # With its namespace it would go only after the last process in there, while the next one may want its name.
        stack.callback(_ip, "link", "delete", cable)
        _ip("link", "set", cable, "master", switch, "up")
        _ip("-n", space, "address", "add", f"{_address(number)}/{_PREFIX_BITS}", "dev", "eth0")
        for device in ("eth0", "lo"):
            _ip("-n", space, "link", "set", device, "up")
        others = [other for other in range(count) if other != number]
        machines.append(NetworkMachine(number, f"{_address(0)}:{_PORT}", prefix, others))
    return machines


def _space(prefix: str, number: int) -> str:
    return f"{prefix}-{number}"


def _cable(prefix: str, number: int) -> str:
    return f"{prefix}-c{number}"  # a device's name has at most 15 characters


def _address(number: int) -> str:
    return f"{_NETWORK}.{number + 1}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=_COMMAND_SECONDS)
