"""Machines for tests, which stand as network namespaces of this one (needs root), and the commands that run on them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from headway.core.process.waiting import wait_until
from headway.lab.chaos.machines import NetworkMachine, standing_machines
from support.waits import LONG

SECRET = "a secret of the tests, long enough"


@dataclass
class Machine:
    """A machine, and what its commands have printed."""

    stands: NetworkMachine
    folder: Path
    logs: list[Path] = field(default_factory=list)

    @property
    def number(self) -> int:
        return self.stands.number

    @property
    def name(self) -> str:
        return self.stands.name

    def start(self, *words: str, faults: str = "", lead: str | None = None, within: Sequence[str] = ()) -> None:
        """Start `headway train` there.

        Args:
            words: More of its command line.
            faults: `HEADWAY_FAULTS`.
            lead: Where it looks for the lead; the lead's address when not given.
            within: A command that runs the one after it.
        """
        command = [*within, sys.executable, "-m", "headway", "train", *words, "--node", str(self.number)]
        self.logs.append(self.folder / f"{self.name}-{len(self.logs)}.log")
        variables = {"HEADWAY_SECRET": SECRET, "HEADWAY_FAULTS": faults, "OMP_NUM_THREADS": "1"}
        self.stands.start([*command, "--lead", lead or self.stands.lead], self.logs[-1], variables)

    def wait(self) -> int:
        """Return the exit code of its command."""
        return self.stands.wait(LONG)

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
    with standing_machines(count, namespaces=True) as standing:
        yield [Machine(machine, folder) for machine in standing if isinstance(machine, NetworkMachine)]


def steps_done(run: Path) -> int:
    """Records of steps in a run's metrics, repeated ones too."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b'"train/loss"') if path.exists() else 0


def wait_for_steps(run: Path, more: int) -> float:
    """Wait for some more steps, and return the seconds that took."""
    began, before = time.monotonic(), steps_done(run)
    assert wait_until(lambda: steps_done(run) >= before + more, LONG, 0.05), f"no step of {run}"
    return time.monotonic() - began
