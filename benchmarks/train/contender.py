"""A contender of `speed.py`: its command, stopped and let go on, and what was measured of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

HERE = Path(__file__).parent
_LOOK_SECONDS, _POLL_SECONDS = 0.25, 0.03


class Workload(Protocol):
    """What a contender needs of the work of `speed.py`."""

    options: Any
    """Of the command line: `threads`, `peers`, `warmup`."""
    folder: Path
    config: Path
    """Headway's, by which it trains."""
    tokens_per_step: int

    def job(self, name: str, compiled: bool) -> Path:
        """Write the job of a contender other than Headway."""
        ...


@dataclass
class Measured:
    """One run of a command."""

    tokens_per_second: float
    first_step_seconds: float
    mean_loss: float
    command_seconds: float
    step_seconds: list[float]
    peak_bytes: int | None = None
    """Of a command that was alone."""


def family(pid: int) -> Iterator[int]:
    """A process and all below it, from the top."""
    yield pid
    with suppress(OSError):  # it has ended
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in children.read_text().split():
                yield from family(int(child))


def pss_bytes(pid: int) -> int:
    """What a process and all below it have for themselves, and their parts of what is shared."""
    total = 0
    for member in family(pid):
        with suppress(OSError):
            for line in Path(f"/proc/{member}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


@contextmanager
def watched(pid: int) -> Iterator[list[int]]:
    """The largest `pss_bytes` so far, in a list of one."""
    largest, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(_LOOK_SECONDS):
            largest[0] = max(largest[0], pss_bytes(pid))

    thread = threading.Thread(target=look)
    thread.start()
    yield largest
    over.set()
    thread.join()


class Command:
    """A contender's command, which is running."""

    def __init__(self, name: str, compiled: bool, work: Workload) -> None:
        self.name, self.work, self.turns = name, work, list[tuple[float, float]]()
        if name == "headway":
            shutil.rmtree(work.folder / "runs", ignore_errors=True)
            words = [
                f"train.compile={str(compiled).lower()}",
                "parallel.workers=1",
                f"parallel.threads={work.options.threads}",
            ]
            command = [sys.executable, "-m", "headway", "train", str(work.config), *words]
            self._steps = work.folder / "runs" / "speed" / "metrics.jsonl"
        else:
            own = HERE / f"{name}.py"
            script = own if own.exists() else HERE / "peers" / f"{name}_peer.py"
            python = sys.executable if script == own else work.options.peers
            command = [python, str(script), str(work.job(name, compiled))]
            self._steps = work.folder / f"{name}.json.ends"
        for left in (self._steps, work.folder / f"{name}.json"):
            left.unlink(missing_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": str(work.options.threads), "TOKENIZERS_PARALLELISM": "false"}
        self._log = work.folder / f"{name}.log"
        self.began = time.time()
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=work.folder)

    def ends(self) -> list[float]:
        """Wall-clock times of the ends of the steps so far."""
        try:
            lines = self._steps.read_text().splitlines()
        except OSError:
            return []
        if self.name != "headway":
            return [float(line) for line in lines]
        return [record["time"] for line in lines if "train/loss" in (record := json.loads(line))]

    def _done(self) -> int:
        """Steps; reading more than that would take time from them."""
        mark = b'"train/loss"' if self.name == "headway" else b"\n"
        return self._steps.read_bytes().count(mark) if self._steps.exists() else 0

    def wait_for(self, steps: int) -> None:
        """Until so many steps are done, or the command has ended."""
        while self.process.poll() is None and self._done() < steps:
            time.sleep(_POLL_SECONDS)

    def turn(self, steps: int) -> None:
        """Go on for so many steps, then stop."""
        began = time.time()
        self._send(signal.SIGCONT)
        self.wait_for(self._done() + steps)
        self.turns.append((began, time.time()))
        self.stop()

    def stop(self) -> None:
        """Until the next turn."""
        self._send(signal.SIGSTOP)

    def kill(self) -> None:
        """With all below it."""
        self._send(signal.SIGKILL)
        self.process.wait()

    def _send(self, number: int) -> None:
        pids = [] if self.process.poll() is not None else list(family(self.process.pid))
        # Nobody who watches over others sees them stopped.
        for pid in reversed(pids) if number == signal.SIGCONT else pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def measured(self, peak_bytes: int | None = None) -> Measured:
        """Of a command that has ended.

        Raises:
            RuntimeError: it failed, or no step began and ended in one turn.
        """
        if code := self.process.wait():
            raise RuntimeError(f"{self.name} ended with exit code {code}:\n{self._log.read_text()[-2000:]}")
        ends, ended = self.ends(), time.time()
        pairs = list(pairwise(ends[self.work.options.warmup - 1 :]))
        if self.turns:
            pairs = [(a, b) for a, b in pairs if any(start <= a and b <= stop for start, stop in self.turns)]
        if not pairs:
            raise RuntimeError(f"{self.name}: no step after the warm-up began and ended in one turn; take more --steps")
        seconds = [b - a for a, b in pairs]
        speed = self.work.tokens_per_step * len(seconds) / sum(seconds)
        return Measured(speed, ends[0] - self.began, self._mean_loss(), ended - self.began, seconds, peak_bytes)

    def _mean_loss(self) -> float:
        if self.name != "headway":
            loss: float = json.loads((self.work.folder / f"{self.name}.json").read_text())["mean_loss"]
            return loss
        records = map(json.loads, self._steps.read_text().splitlines())
        return statistics.fmean(record["train/loss"] for record in records if "train/loss" in record)


def run(name: str, compiled: bool, work: Workload) -> Measured:
    """Carry out a contender's command, alone.

    Raises:
        RuntimeError: it failed.
    """
    command = Command(name, compiled, work)
    with watched(command.process.pid) as largest:
        command.process.wait()
    return command.measured(largest[0])
