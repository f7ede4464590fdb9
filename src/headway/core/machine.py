"""What the operating system tells about a machine: files below a root, outputs of commands, the environment.

Everything that looks at a machine takes one of these, so that a recorded machine (a folder of small text files and a
table of outputs) can stand in for it.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

#: A tool that takes longer than this does not answer any more.
_COMMAND_SECONDS = 20.0


def host_name() -> str:
    """What records call this machine: at most 64 characters, for they are of bounded size."""
    return socket.gethostname()[:64]


def kernel_name() -> str:
    """The same for processes that share a kernel, and so its page cache, whatever containers they are in."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return host_name()


@dataclass(frozen=True)
class Output:
    """How a command went."""

    state: Literal["ok", "failed", "missing", "silent"]
    """`missing`: there is no such program here; `silent`: it did not answer in time."""
    text: str = ""
    """Standard output when all went well, else everything it said."""


@dataclass(frozen=True)
class Space:
    """Size of a file system, in bytes."""

    total_bytes: int
    free_bytes: int
    """What this user may still write."""


def run_command(arguments: Sequence[str]) -> Output:
    """Run a program and wait for what it says, in the language of programs (C) and without input."""
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
    said, complained = (stream.decode(errors="replace") for stream in (done.stdout, done.stderr))
    return Output("ok", said) if done.returncode == 0 else Output("failed", f"{said}{complained}".strip())


def space_of(path: Path) -> Space:
    """Size of the file system that holds a path.

    Raises:
        OSError: the path is not there, or may not be looked at.
    """
    found = os.statvfs(path)
    return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


@dataclass(frozen=True)
class Machine:
    """One machine, or the recording of one. Paths are absolute and looked up below `root`."""

    root: Path = Path("/")
    run: Callable[[Sequence[str]], Output] = run_command
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    space: Callable[[Path], Space] = space_of

    def path(self, path: str | Path) -> Path:
        """Where a path of the machine is found."""
        return self.root / str(path).lstrip("/")

    def text(self, path: str | Path) -> str | None:
        """Contents of a file without the white space around them; None when it cannot be read."""
        try:
            return self.path(path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:  # also what some files of /sys answer for "unknown"
            return None

    def number(self, path: str | Path) -> int | None:
        """A file that holds one whole number; None when it cannot be read or holds something else."""
        try:
            return int(self.text(path) or "")
        except ValueError:
            return None

    def names(self, path: str | Path) -> list[str]:
        """Sorted names in a folder; empty when there is none."""
        try:
            return sorted(entry.name for entry in self.path(path).iterdir())
        except OSError:
            return []

    def exists(self, path: str | Path) -> bool:
        """Whether a file or folder is there."""
        try:
            return self.path(path).exists()
        except OSError:
            return False


def cpu_list(text: str | None) -> list[int]:
    """The processors in the kernel's list format: "0-3,8" -> [0, 1, 2, 3, 8]."""
    found: list[int] = []
    for part in filter(None, (text or "").split(",")):
        first, _, last = part.strip().partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found
