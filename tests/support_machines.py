"""Machines for tests: network namespaces of this one, each with a cable and a name of its own (needs root)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from headway.core.waiting import wait_until
from waits import LONG

NETWORK, PORT = "10.231.77", 29477
SECRET = "a secret of the tests, long enough"


def run_ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


def can_make_machines() -> bool:
    """Whether this process may make network namespaces."""
    with suppress(OSError, subprocess.SubprocessError):
        run_ip("netns", "add", "hw-probe")
        run_ip("netns", "delete", "hw-probe")
        return os.getuid() == 0
    return False


@dataclass
class Machine:
    """A network namespace, and the command that runs in it."""

    number: int
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    logs: list[Path] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"hw-{chr(ord('a') + self.number)}"

    @property
    def space(self) -> str:
        return f"hwtest-{self.number}"

    def plug(self) -> None:
        """Connect it to the others."""
        run_ip("link", "set", f"hwport-{self.number}", "up")

    def cut(self) -> None:
        """Cut its cable."""
        run_ip("link", "set", f"hwport-{self.number}", "down")

    def start(self, *words: str, faults: str = "") -> None:
        """Start `headway train` there."""
        command = [
            *("ip", "netns", "exec", self.space, "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', self.name),
            *(sys.executable, "-m", "headway", "train", *words),
            *("--node", str(self.number), "--lead", f"{NETWORK}.1:{PORT}"),
        ]
        self.logs.append(self.folder / f"{self.name}-{len(self.logs)}.log")
        environment = {**os.environ, "HEADWAY_SECRET": SECRET, "HEADWAY_FAULTS": faults, "OMP_NUM_THREADS": "1"}
        with self.logs[-1].open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    @property
    def pids(self) -> list[int]:
        """All of its processes."""
        found = subprocess.run(["ip", "netns", "pids", self.space], capture_output=True, text=True, check=True)
        return [int(pid) for pid in found.stdout.split()]

    def signal_all(self, number: int) -> None:
        """Kill or freeze the machine."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def signal(self, number: int) -> None:
        """Send a signal to the command only, as a scheduler does."""
        assert self.process is not None, "started"
        os.kill(self.process.pid, number)

    def wait(self) -> int:
        """Return the exit code of its command."""
        assert self.process is not None, "started"
        return self.process.wait(LONG)

    def end(self) -> None:
        """Leave nothing behind."""
        self.signal_all(signal.SIGKILL)
        if self.process is not None:
            self.process.wait(30)

    @property
    def text(self) -> str:
        """What its commands have printed."""
        return "".join(path.read_text(errors="replace") for path in self.logs)

    def says(self, words: str, seconds: float = LONG) -> None:
        """Wait until it has printed something."""
        assert wait_until(lambda: words in self.text, seconds, 0.1), f"{words!r} is not in:\n{self.text}"


@contextmanager
def machines(count: int, folder: Path) -> Iterator[list[Machine]]:
    """Several machines at one switch, with a shared folder."""
    with ExitStack() as stack:
        for name in ("hwtest-switch",):
            with suppress(subprocess.CalledProcessError):
                run_ip("link", "delete", name)
        run_ip("link", "add", "hwtest-switch", "type", "bridge")
        stack.callback(run_ip, "link", "delete", "hwtest-switch")
        run_ip("link", "set", "hwtest-switch", "up")
        made = []
        for number in range(count):
            machine = Machine(number, folder)
            with suppress(subprocess.CalledProcessError):
                run_ip("netns", "delete", machine.space)
            run_ip("netns", "add", machine.space)
            stack.callback(run_ip, "netns", "delete", machine.space)
            port, inside = f"hwport-{number}", ("netns", "exec", machine.space, "ip")
            run_ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", machine.space)
            run_ip("link", "set", port, "master", "hwtest-switch")
            run_ip(*inside, "address", "add", f"{NETWORK}.{number + 1}/24", "dev", "eth0")
            for link in ("eth0", "lo"):
                run_ip(*inside, "link", "set", link, "up")
            machine.plug()
            stack.callback(machine.end)
            made.append(machine)
        yield made


def steps_done(run: Path) -> int:
    """Records of steps in a run's metrics, repeated ones too."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b'"train/loss"') if path.exists() else 0


def wait_for_steps(run: Path, more: int) -> float:
    """Wait for some more steps, and return the seconds that took."""
    began, before = time.monotonic(), steps_done(run)
    assert wait_until(lambda: steps_done(run) >= before + more, LONG, 0.05), f"no step of {run}"
    return time.monotonic() - began
