"""Edits files, has them read in a process of their own, and keeps what it should not have come to."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from fuzz.edits import Edit, edited, edits
from fuzz.targets import Target

#: Bytes by which memory may grow while one input is read.
MOST_GROWTH = 10**9
# Seconds of the processor, and of the clock, that one input may take.
_CPU_SECONDS, _WALL_SECONDS = 10.0, 120.0
# Inputs before hypothesis begins anew with another seed, and between two looks at the clock.
_BATCH = 50
# Seconds in which what was found is made smaller; after a hang each attempt takes as long as it does.
_SHRINK_SECONDS = 60.0


class Found(AssertionError):
    """A reader did what it should not."""


@dataclass
class Summary:
    """What came of a target."""

    inputs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failure: str | None = None
    case: Path | None = None
    """The smallest input that was found."""


class Reader:
    """A process with `reader.py`, started anew when it has ended."""

    def __init__(self, target: Target, cases: Path) -> None:
        self._command = [sys.executable, "-m", "fuzz.reader", target.name, str(cases)]
        self._process: subprocess.Popen[str] | None = None

    def read(self, case: Path) -> dict[str, Any]:
        """What came of reading a case."""
        if self._process is None:
            self.start()
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(f"{case}\n")
        self._process.stdin.flush()
        return self._answer(_CPU_SECONDS, _WALL_SECONDS)

    def start(self) -> None:
        """Have it read all sound files.

        Raises:
            RuntimeError: it cannot.
        """
        here = Path(__file__).parents[1]
        paths = os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": ""}
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        ready = self._answer(600.0, 1200.0)
        if not ready.get("ready"):
            raise RuntimeError(f"the sound files cannot be read: {ready}")

    def _answer(self, cpu_seconds: float, wall_seconds: float) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdout is not None
        began, cpu_began = time.monotonic(), _cpu_seconds(process.pid)
        while not select.select([process.stdout], [], [], 0.2)[0]:
            used = _cpu_seconds(process.pid) - cpu_began
            if used > cpu_seconds or time.monotonic() - began > wall_seconds:
                self.close()
                return {"outcome": "hang", "text": f"{used:.0f} s of the processor", "growth": 0}
        line = process.stdout.readline()
        if line:
            return dict(json.loads(line))
        code = process.wait()
        self._process = None
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return {"outcome": "crash", "text": name, "growth": 0}

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def fuzz(target: Target, seconds: float, folder: Path, first_seed: int = 0) -> Summary:
    """Fuzz one target for some seconds, or until something is found.

    Args:
        target: What is fuzzed.
        seconds: How long; to make the files and to start is not counted.
        folder: Where cases are made, and what was found is kept.
        first_seed: Of hypothesis; each batch of inputs has the next one.
    """
    summary = Summary()
    cases, work = folder / "cases", folder / "work"
    cases.mkdir(parents=True)
    target.make(cases)
    shutil.copytree(cases, work, symlinks=True)
    choices = [
        (case.name, path.relative_to(case))
        for case in sorted(cases.iterdir())
        for pattern in target.edited
        for path in sorted(case.glob(pattern))
        if path.is_file()
    ]
    reader = Reader(target, cases)
    reader.start()
    until = time.monotonic() + seconds
    last: tuple[int, list[Edit], Found] | None = None  # the smallest that was found

    def once(choice: int, changes: list[Edit]) -> None:
        nonlocal last, until
        if last is not None and time.monotonic() > until:  # it is small enough
            if (choice, changes) == last[:2]:
                raise last[2]
            return
        case, path = choices[choice]
        sound = (cases / case / path).read_bytes()
        (work / case / path).write_bytes(edited(sound, changes))
        try:
            answer = reader.read(work / case)
            summary.inputs += 1
            outcome, growth = str(answer["outcome"]), answer["growth"]
            summary.outcomes[outcome] += 1
            if outcome in ("crash", "hang", "traceback") or growth > MOST_GROWTH:
                summary.case = _keep(work / case, folder / "found")
                what = outcome if growth <= MOST_GROWTH else f"growth by {growth / 1e9:.1f} GB"
                found = Found(f"{what} at {path}, kept in {summary.case}, edits {changes!r}:\n{answer['text']}")
                if last is None:
                    until = time.monotonic() + _SHRINK_SECONDS
                last = choice, changes, found
                raise found
        finally:
            (work / case / path).write_bytes(sound)

    number = first_seed
    try:
        while time.monotonic() < until:
            test = given(st.integers(0, len(choices) - 1), edits())(once)
            seed(number)(
                settings(
                    max_examples=_BATCH,
                    deadline=None,
                    database=None,
                    print_blob=False,
                    report_multiple_bugs=False,
                    suppress_health_check=list(HealthCheck),
                    phases=(Phase.generate, Phase.shrink),
                )(test)
            )()
            number += 1
    except Exception:
        if last is None:  # otherwise hypothesis says more than is needed, also that it comes only sometimes
            raise
        summary.failure = str(last[2])
    finally:
        reader.close()
    return summary


def _keep(case: Path, found: Path) -> Path:
    """Copy a case to where findings are, in place of the larger one that was there."""
    shutil.rmtree(found, ignore_errors=True)
    shutil.copytree(case, found / case.name, symlinks=True)
    return found / case.name
