"""Training speed beside what users would pick instead: whole commands, the same model, data, precision and batch.

`headway train` as a user starts it, against loops with the Trainer of Hugging Face, Lightning, Accelerate, LitGPT and
one in nanoGPT's manner, and against `ceiling.py`, the best loop that we know how to write by hand. All begin from the
same weights and see the same rows in the same order; the mean loss of all steps must come out the same. Each is tried
with and without torch.compile first, and then takes part as it is fastest; they take turns, one after the other, in
rounds. Medians over rounds are shown.

- tokens/s: from the end of step `--warmup` to the end of the last one, all between steps included.
- first step: from the start of the command to the end of the first step.
- memory: the largest sum of what all processes of the command have for themselves and share (PSS).

The peers need an environment of their own: `pip install transformers accelerate lightning litgpt safetensors`.

    python benchmarks/train/speed.py --peers peers/bin/python
    python benchmarks/train/speed.py --preset 4m --vocabulary 8192 --rounds 7 --output speed.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).parent / "peers"))

HERE = Path(__file__).parent
PEERS = ("transformers", "lightning", "accelerate", "litgpt", "nanogpt")
#: What Headway's speed is to be of the best peer's and of the hand-written loop's.
LEAST_OF_PEERS, LEAST_OF_CEILING = 1.3, 0.95
#: Of a peer's first step, what ours may take.
MOST_OF_FIRST_STEP = 0.5
LEARNING_RATE, MAX_GRAD_NORM, BETAS = 3e-4, 1.0, (0.9, 0.95)
#: Between mean losses; rounding is a thousand times smaller.
LOSS_TOLERANCE = 0.01
_LOOK_SECONDS = 0.25


@dataclass
class Measured:
    """One run of a command."""

    tokens_per_second: float
    first_step_seconds: float
    peak_bytes: int
    mean_loss: float
    command_seconds: float
    step_seconds: list[float]


class Workload:
    """What all train on, in a folder."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.tokens_per_step = options.rows * options.sequence_length
        self.steps = options.warmup + options.steps
        self.config = folder / "config.yaml"
        self.config.write_text(yaml.safe_dump(self._settings()))
        subprocess.run([sys.executable, "-m", "headway", "data", "prepare", str(self.config)], check=True)
        self._export()

    def _settings(self) -> dict[str, Any]:
        options = self.options
        return {
            "name": "speed",
            "runs": str(self.folder / "runs"),
            "data": {
                "sources": ["stdlib:"],
                "store": str(self.folder / "store"),
                "bad_documents": "skip",
                "tokenizer": {"vocab_size": options.vocabulary},
            },
            "model": {"preset": options.preset},
            "train": {
                "steps": self.steps,
                "sequence_length": options.sequence_length,
                "global_batch": options.rows,
                "micro_batch": options.rows,
                "precision": options.precision,
                "max_grad_norm": MAX_GRAD_NORM,
                "device": "cpu",
            },
            "optimizer": {"name": "adamw", "learning_rate": LEARNING_RATE, "weight_decay": 0.0, "betas": list(BETAS)},
            "schedule": {"name": "constant", "warmup": 1},
            "checkpoint": {"every": "1000000 steps"},
            "evaluation": {"every": None},
        }

    def _export(self) -> None:
        """The first weights and the rows of all steps, for those who are not us."""
        from headway.config import load_config, resolve_grid
        from headway.data.feeding.feed import TokenFeed
        from headway.data.remote_store import open_store
        from headway.models.build import build_model
        from headway.models.huggingface import export_model

        config = load_config(self.config, [])
        store = open_store(config.data)
        grid = resolve_grid(config, 1)
        feed = TokenFeed.of(config, grid, store)
        steps = []
        for step in range(self.steps):
            batches = [batch for lane in range(grid.lanes) for batch in feed.batch(step, lane)]
            ids = np.concatenate([batch["ids"].numpy() for batch in batches])
            targets = np.concatenate([batch["targets"].numpy() for batch in batches])
            steps.append(np.concatenate((ids, targets[:, -1:]), axis=1).astype(np.int32))
        np.save(self.folder / "rows.npy", np.stack(steps))
        model = build_model(config.model, vocab_size=store.vocab_size, seed=config.seed)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        export_model(model, self.folder / "model")

    def job(self, compiled: bool) -> Path:
        """For a contender that is not us."""
        from workload import Job

        job = Job(
            model=str(self.folder / "model"),
            rows=str(self.folder / "rows.npy"),
            result=str(self.folder / "result.json"),
            precision=self.options.precision,
            compile=compiled,
            threads=self.options.threads,
            learning_rate=LEARNING_RATE,
            max_grad_norm=MAX_GRAD_NORM,
            betas=BETAS,
        )
        path = self.folder / "job.json"
        path.write_text(json.dumps(asdict(job)))
        return path


def pss_bytes(pid: int) -> int:
    """What a process and all below it have for themselves, and their parts of what is shared."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            total += sum(pss_bytes(int(child)) for child in children.read_text().split())
    except (OSError, ProcessLookupError):
        pass  # it has ended
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


def run(name: str, compiled: bool, work: Workload) -> Measured:
    """Carry out a contender's command.

    Raises:
        RuntimeError: it failed.
    """
    if name == "headway":
        shutil.rmtree(work.folder / "runs", ignore_errors=True)
        words = [
            f"train.compile={str(compiled).lower()}",
            "parallel.workers=1",
            f"parallel.threads={work.options.threads}",
        ]
        command = [sys.executable, "-m", "headway", "train", str(work.config), *words]
    else:
        python = sys.executable if name == "ceiling" else work.options.peers
        script = HERE / "ceiling.py" if name == "ceiling" else HERE / "peers" / f"{name}_peer.py"
        command = [python, str(script), str(work.job(compiled))]
    (work.folder / "result.json").unlink(missing_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(work.options.threads), "TOKENIZERS_PARALLELISM": "false"}
    start = time.time()
    with (work.folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=work.folder)
        with watched(process.pid) as largest:
            code = process.wait()
    seconds = time.time() - start
    if code:
        tail = (work.folder / f"{name}.log").read_text()[-2000:]
        raise RuntimeError(f"{name} ended with exit code {code}:\n{tail}")
    ends, loss = results(name, work)
    first = work.options.warmup
    steps = [after - before for before, after in zip(ends[first - 1 :], ends[first:], strict=False)]
    speed = work.tokens_per_step * len(steps) / sum(steps)
    return Measured(speed, ends[0] - start, largest[0], loss, seconds, steps)


def results(name: str, work: Workload) -> tuple[list[float], float]:
    """Wall-clock times of the ends of all steps, and the mean loss."""
    if name != "headway":
        result = json.loads((work.folder / "result.json").read_text())
        return result["ends"], result["mean_loss"]
    lines = (work.folder / "runs" / "speed" / "metrics.jsonl").read_text().splitlines()
    steps = [record for line in lines if "train/loss" in (record := json.loads(line))]
    return [record["time"] for record in steps], statistics.fmean(record["train/loss"] for record in steps)


def choose(names: list[str], work: Workload) -> tuple[dict[str, bool], dict[str, str]]:
    """Which of them are faster compiled, by one run each way; and why others cannot take part."""
    chosen, missing = {}, {}
    for name in names:
        speeds = {}
        for compiled in (False, True) if work.options.compile == "best" else (work.options.compile == "on",):
            try:
                run(name, compiled, work) if compiled else None  # so that what is compiled is in its cache
                speeds[compiled] = run(name, compiled, work).tokens_per_second
                say(f"{name} {'compiled' if compiled else 'eager'}: {speeds[compiled]:,.0f} tokens/s")
            except RuntimeError as error:
                missing[name] = str(error).strip().splitlines()[-1]
                say(f"{name} {'compiled' if compiled else 'eager'}: {error}")
        if speeds:
            chosen[name] = max(speeds, key=lambda compiled: speeds[compiled])
            missing.pop(name, None)
    return chosen, missing


def say(line: str) -> None:
    """Progress."""
    print(line, file=sys.stderr, flush=True)


def take_turns(chosen: dict[str, bool], work: Workload) -> dict[str, list[Measured]]:
    """All rounds, another first in each."""
    names = list(chosen)
    found: dict[str, list[Measured]] = {name: [] for name in names}
    for number in range(work.options.rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(run(name, chosen[name], work))
            say(
                f"round {number + 1} of {work.options.rounds}: {name} {found[name][-1].tokens_per_second:,.0f} tokens/s"
            )
    return found


def summary(found: dict[str, list[Measured]]) -> dict[str, dict[str, float]]:
    """Medians by contender, and ratios to ours of each round, of which the median too."""
    rows = {}
    for name, runs in found.items():
        ours = found["headway"]
        rows[name] = {
            **{
                key: statistics.median(getattr(one, key) for one in runs)
                for key in ("tokens_per_second", "first_step_seconds", "peak_bytes", "mean_loss", "command_seconds")
            },
            "headway_speed_ratio": statistics.median(
                a.tokens_per_second / b.tokens_per_second for a, b in zip(ours, runs, strict=True)
            ),
            "headway_first_step_ratio": statistics.median(
                a.first_step_seconds / b.first_step_seconds for a, b in zip(ours, runs, strict=True)
            ),
        }
    return rows


def show(rows: dict[str, dict[str, float]], chosen: dict[str, bool], missing: dict[str, str]) -> None:
    """The table, and what of the targets is met."""
    columns = f"{'tokens/s':>9}{'headway is':>12}{'first step s':>14}{'headway is':>12}{'peak GiB':>10}{'loss':>8}"
    print(f"{'':23}{columns}")
    for name, row in sorted(rows.items(), key=lambda item: -item[1]["tokens_per_second"]):
        print(
            f"{name:14}{'compiled' if chosen[name] else 'eager':9}{row['tokens_per_second']:9,.0f}"
            f"{row['headway_speed_ratio']:11.2f}x{row['first_step_seconds']:14.2f}{row['headway_first_step_ratio']:11.2f}x"
            f"{row['peak_bytes'] / 2**30:10.2f}{row['mean_loss']:8.3f}"
        )
    for name, why in missing.items():
        print(f"{name:14}n/a: {why}")
    peers = [name for name in rows if name in PEERS]
    best, ours = max((rows[n]["tokens_per_second"], n) for n in peers)[1] if peers else None, rows["headway"]
    verdicts = []
    if best:
        quickest = min(peers, key=lambda n: rows[n]["first_step_seconds"])
        smallest = min(peers, key=lambda n: rows[n]["peak_bytes"])
        memory = ours["peak_bytes"] / rows[smallest]["peak_bytes"]
        verdicts += [
            (f"speed of the best peer's ({best})", rows[best]["headway_speed_ratio"], LEAST_OF_PEERS, True),
            (f"first step of the quickest peer's ({quickest})", rows[quickest]["headway_first_step_ratio"],
             MOST_OF_FIRST_STEP, False),
            (f"memory of the smallest peer's ({smallest})", memory, 1.0, False),
        ]  # fmt: skip
    if "ceiling" in rows:
        ratio = rows["ceiling"]["headway_speed_ratio"]
        verdicts.append(("speed of the hand-written loop's", ratio, LEAST_OF_CEILING, True))
    for what, ratio, limit, at_least in verdicts:
        met = ratio >= limit if at_least else ratio <= limit
        print(f"{what}: {ratio:.2f}, {'met' if met else 'MISSED'} ({'at least' if at_least else 'at most'} {limit})")
    for name, row in rows.items():
        if abs(row["mean_loss"] - ours["mean_loss"]) > LOSS_TOLERANCE:
            print(f"{name} does not compute the same: mean loss {row['mean_loss']:.4f}, ours {ours['mean_loss']:.4f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="30m", help="model shape (headway models)")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--rows", type=int, default=4, help="of a step")
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=20, help="that are measured")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", choices=["best", "on", "off"], default="best")
    parser.add_argument("--only", nargs="+", choices=["ceiling", *PEERS], help="beside us; default: all")
    parser.add_argument("--peers", default=None, help="Python that has transformers, accelerate, lightning and litgpt")
    parser.add_argument("--folder", type=Path, default=None, help="keeps the prepared data for the next time")
    parser.add_argument("--output", type=Path, default=None, help="JSON with all measurements")
    options = parser.parse_args()
    names = ["headway", *(options.only or ["ceiling", *PEERS])]
    with tempfile.TemporaryDirectory(prefix="headway-speed-") as scratch:
        work = Workload(options, options.folder or Path(scratch))
        usable = [name for name in names if name not in PEERS or options.peers]
        chosen, missing = choose(usable, work)
        missing |= {name: "no --peers" for name in names if name not in usable}
        found = take_turns(chosen, work)
    rows = summary(found)
    load = os.getloadavg()[0]
    what = f"{work.parameters / 1e6:.1f} M parameters, {options.rows} x {options.sequence_length} tokens"
    print(f"{what}, {options.precision}, {options.threads} threads; medians of {options.rounds}; load {load:.1f}")
    show(rows, chosen, missing)
    if options.output:
        record = {
            "settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()},
            "machine": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "compiled": chosen,
            "missing": missing,
            "medians": rows,
            "rounds": {name: [asdict(one) for one in runs] for name, runs in found.items()},
            "load": load,
        }
        options.output.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
