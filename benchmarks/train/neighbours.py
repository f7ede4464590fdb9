"""How a training fares on processors that busy neighbours use as well: a plain loop of PyTorch, and `headway.Trainer`.

Each trains the same module on the same rows, in a process of its own. For every number of neighbours (processes that
never wait) the contenders take turns: one runs and is measured, the others are stopped. A third contender is the plain
loop with OMP_WAIT_POLICY=PASSIVE, which its user would have to know of, and to set before PyTorch is loaded.

    python benchmarks/train/neighbours.py
    python benchmarks/train/neighbours.py --neighbours 0 2 --seconds 3 --output neighbours.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway import Callback, Config, Trainer

CONTENDERS = ("plain", "plain, passive", "trainer")
VARIABLES = {"plain, passive": {"OMP_WAIT_POLICY": "PASSIVE"}}
#: Rows and length of a step, and the size of the model.
ROWS, LENGTH, VOCABULARY, WIDTH, LAYERS = 8, 128, 2048, 192, 3
#: The Trainer looks at its neighbours every two seconds; so long a contender runs before it is measured.
SETTLE_SECONDS = 3.0
START_SECONDS = 120.0


class Model(nn.Module):
    """A small causal transformer of PyTorch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = self.head(self.layers(self.embedding(ids), mask=self.mask, is_causal=True))
        return logits


class Rows:
    """Random rows, each a function of its number."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.randint(VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        return {"ids": row[:-1], "targets": row[1:]}


def loss_of(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Return the mean loss."""
    return nn.functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["targets"].flatten())


def leave_count(path: Path, steps: int) -> None:
    """Leave the number of finished steps for the process that measures."""
    with path.open("r+b", buffering=0) as file:
        file.write(struct.pack("q", steps))


def train_plain(count: Path, threads: int) -> None:
    """Train as one writes it by hand, with the same clipping."""
    torch.set_num_threads(threads)
    model, rows = Model(), Rows()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    step = 0
    while True:
        samples = [rows[(step * ROWS + n) % len(rows)] for n in range(ROWS)]
        loss = loss_of(model, {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]})
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        step += 1
        leave_count(count, step)


class LeaveCount(Callback):
    """Leaves the number of finished steps."""

    def __init__(self, count: Path) -> None:
        self.count = count

    def on_step(self, job: Any, step: int, metrics: dict[str, float]) -> None:
        """Leave it."""
        leave_count(self.count, step)


def train_with_trainer(count: Path, threads: int) -> None:
    """Train with `headway.Trainer`."""
    config = Config.model_validate(
        {
            "name": "neighbours",
            "runs": str(count.parent),
            "train": {"steps": 10**6, "global_batch": ROWS, "device": "cpu", "precision": "fp32"},
            "optimizer": {"learning_rate": 1e-3},
            "checkpoint": {"every": "1000000 steps"},
            "parallel": {"threads": threads},
            "telemetry": {"report": False},
        }
    )
    Trainer(Model(), Rows(), loss_of, config, callbacks=[LeaveCount(count)]).fit()


@dataclass
class Contender:
    """A training in a process of its own, stopped unless it is its turn."""

    name: str
    process: subprocess.Popen[bytes]
    count: Path

    @property
    def steps(self) -> int:
        """Finished steps."""
        return int(struct.unpack("q", self.count.read_bytes())[0])

    def measure(self, seconds: float) -> float:
        """Let it run, and return its steps per second after it has settled."""
        self.process.send_signal(signal.SIGCONT)
        time.sleep(SETTLE_SECONDS)
        began, before = time.perf_counter(), self.steps
        time.sleep(seconds)
        while self.steps < before + 2:  # however slow it is
            time.sleep(0.01)
        # From a step's end to a step's end, or the speed of slow ones would be a matter of luck.
        now = self.steps
        while self.steps == now:
            time.sleep(0.001)
        speed = (self.steps - before) / (time.perf_counter() - began)
        self.process.send_signal(signal.SIGSTOP)
        return speed


def start(name: str, folder: Path, threads: int) -> Contender:
    """Start a contender, wait for its first steps, and stop it."""
    count = folder / f"{name.replace(', ', '-')}.count"
    count.write_bytes(struct.pack("q", 0))
    command = [sys.executable, __file__, "--contender", name.split(",")[0], str(count), "--threads", str(threads)]
    environment = {**os.environ, **VARIABLES.get(name, {})}
    environment.pop("OMP_NUM_THREADS", None)
    log = (folder / f"{count.stem}.log").open("wb")
    contender = Contender(name, subprocess.Popen(command, env=environment, stdout=log, stderr=log), count)
    until = time.monotonic() + START_SECONDS
    while contender.steps < 3:
        if contender.process.poll() is not None or time.monotonic() > until:
            contender.process.kill()
            raise SystemExit(f"{name} does not train:\n{(folder / f'{count.stem}.log').read_text()}")
        time.sleep(0.05)
    contender.process.send_signal(signal.SIGSTOP)
    return contender


def measure(numbers: list[int], seconds: float, threads: int) -> dict[str, dict[int, float]]:
    """Return the steps per second of each contender, by the number of neighbours."""
    found: dict[str, dict[int, float]] = {name: {} for name in CONTENDERS}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        contenders = list[Contender]()
        for name in CONTENDERS:
            contenders.append(start(name, folder, threads))
            stack.callback(contenders[-1].process.wait)
            stack.callback(contenders[-1].process.kill)
        for number in numbers:
            busy = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(number)]
            try:
                for contender in contenders:
                    found[contender.name][number] = contender.measure(seconds)
            finally:
                for process in busy:
                    process.kill()
                    process.wait()
    return found


def table(found: dict[str, dict[int, float]], cores: int, threads: int) -> str:
    """Return the speeds, and the Trainer's ratios to the plain loop and to a fair share of its own quiet speed."""
    lines = [f"steps per second with {threads} threads on {cores} processors"]
    lines.append(f"{'neighbours':>10} " + "".join(f"{name:>16}" for name in found) + f"{'to plain':>10}{'to fair':>9}")
    quiet = found["trainer"].get(0)
    for number, plain in found["plain"].items():
        ours = found["trainer"][number]
        # Each thread and each neighbour gets the same part of the processors.
        share = min(1.0, cores / (threads + number))
        fair = f"{ours / (quiet * share):9.2f}" if quiet else f"{'n/a':>9}"
        speeds = "".join(f"{speeds[number]:16.2f}" for speeds in found.values())
        lines.append(f"{number:10} {speeds}{ours / plain:10.2f}{fair}")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--threads", type=int, default=cores)
    parser.add_argument("--output", type=Path, default=None, help="JSON with all measurements")
    parser.add_argument("--contender", nargs=2, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        name, count = options.contender
        (train_plain if name == "plain" else train_with_trainer)(Path(count), options.threads)
        return
    found = measure(options.neighbours, options.seconds, options.threads)
    print(table(found, cores, options.threads))
    if options.output:
        facts = {"machine": platform.platform(), "cores": cores, "threads": options.threads, "torch": torch.__version__}
        speeds = {name: {str(number): speed for number, speed in row.items()} for name, row in found.items()}
        options.output.write_text(json.dumps({**facts, "steps_per_second": speeds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
