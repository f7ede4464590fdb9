"""Facts of the operating system about a machine: files below a root, outputs of commands, the environment.

All code that inspects a machine takes a `Machine`, so that a recorded one (a folder of small text files and a table of
outputs) can replace it in tests.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

#: Time limit of a command.
_COMMAND_SECONDS = 20.0


def host_name() -> str:
    """Return the name of this machine for records, at most 64 characters, since records have a limited size."""
    return socket.gethostname()[:64]


def kernel_name() -> str:
    """Return a name that all processes on this kernel share, and with it its page cache, in whatever container."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return host_name()


@dataclass(frozen=True)
class Output:
    """Result of a command."""

    state: Literal["ok", "failed", "missing", "silent"]
    """`missing`: there is no such program here; `silent`: it did not answer in time."""
    text: str = ""
    """Standard output on success, otherwise standard output and error."""


@dataclass(frozen=True)
class Space:
    """Size of a file system, in bytes."""

    total_bytes: int
    free_bytes: int
    """Bytes that this user may still write."""


def run_command(arguments: Sequence[str]) -> Output:
    """Run a program without input in the C locale, and wait for its output."""
    try:
        done = subprocess.run(
            arguments,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_COMMAND_SECONDS,
            env={**os.environ, "LC_ALL": "C"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Output("silent")
    except OSError:
        return Output("missing")
    output, errors = (stream.decode(errors="replace") for stream in (done.stdout, done.stderr))
    return Output("ok", output) if done.returncode == 0 else Output("failed", f"{output}{errors}".strip())


def space_of(path: Path) -> Space:
    """Return the size of the file system that holds a path.

    Raises:
        OSError: the path does not exist or is not accessible.
    """
    found = os.statvfs(path)
    return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


@dataclass(frozen=True)
class Machine:
    """A machine, or the recording of one. Paths are absolute and are looked up below `root`."""

    root: Path = Path("/")
    run: Callable[[Sequence[str]], Output] = run_command
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    space: Callable[[Path], Space] = space_of

    def path(self, path: str | Path) -> Path:
        """Return the real path of a path of the machine."""
        return self.root / str(path).lstrip("/")

    def text(self, path: str | Path) -> str | None:
        """Return the content of a file without surrounding white space; None when it cannot be read."""
        try:
            return self.path(path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:  # some files of /sys also answer so for "unknown"
            return None

    def number(self, path: str | Path) -> int | None:
        """Return the integer in a file; None when the file cannot be read or holds something else."""
        try:
            return int(self.text(path) or "")
        except ValueError:
            return None

    def names(self, path: str | Path) -> list[str]:
        """Return the sorted names in a folder; empty when there is no such folder."""
        try:
            return sorted(entry.name for entry in self.path(path).iterdir())
        except OSError:
            return []

    def exists(self, path: str | Path) -> bool:
        """Return whether a file or folder exists."""
        try:
            return self.path(path).exists()
        except OSError:
            return False


def cpu_list(text: str | None) -> list[int]:
    """Parse the kernel's list format of processors: "0-3,8" -> [0, 1, 2, 3, 8]."""
    found: list[int] = []
    for part in filter(None, (text or "").split(",")):
        first, _, last = part.strip().partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found
