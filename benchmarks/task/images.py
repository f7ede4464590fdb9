"""Samples per second of a task of one's own, beside a plain loop of PyTorch with `DataLoader` and DDP, and Lightning.

    python benchmarks/task/images.py [--workers 1] [--processes 2] [--steps 200] [--rounds 3] [--python PYTHON]

Every round runs all contenders in turns, each in processes of its own; the ratio of each round is ours to the other's.
The pictures are decoded and cropped in every epoch by as many processes as `--processes` says. Lightning needs an
environment of its own (`--python`); without it, it is left out. The load of the machine is noted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from headway.telemetry.metrics import read_metrics

HERE = Path(__file__).parent


def ours(steps: int, processes: int, workers: int) -> float:
    """Return our samples per second, from the run's own record."""
    with tempfile.TemporaryDirectory() as folder:
        words = ("task=pictures:build", f"runs={folder}", "name=run", f"train.steps={steps}", "train.global_batch=64")
        more = ("train.device=cpu", f"data.processes={processes}", "telemetry.report=false", "schedule.name=constant")
        same = (f"train.micro_batch={64 // workers}", "optimizer.learning_rate=1e-3", "parallel.threads=1")
        config = Path(folder, "config.yaml")
        config.write_text("checkpoint: {every: 1000000 steps}\n")
        command = [sys.executable, "-m", "headway", "train", str(config), *words, *more, *same, "-w", str(workers)]
        subprocess.run(command, cwd=HERE, check=True, capture_output=True)
        metrics = read_metrics(Path(folder, "run"))
        seconds = metrics.series("speed/step_seconds")[1][steps // 10 :]
        return float(64 * len(seconds) / seconds.sum())


def theirs(name: str, python: str, steps: int, processes: int, workers: int) -> float:
    """Return the samples per second of a contender."""
    program = [str(HERE / "image_loops.py"), name, str(steps), str(processes), str(workers)]
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    several = workers > 1 and name == "plain"
    command = [python, *(launch if several else []), *program]
    done = subprocess.run(
        command, cwd=HERE, check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{"))
    return float(json.loads(line)["samples_per_second"])


def main() -> None:
    """Measure in rounds, and print a table of medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has Lightning")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    has = subprocess.run([given.python, "-c", "import lightning"], capture_output=True, check=False).returncode == 0
    shape = (given.steps, given.processes, given.workers)
    found: dict[str, list[float]] = {"headway": [], "plain": [], **({"lightning": []} if has else {})}
    for number in range(given.rounds):
        names = [*found][number % len(found) :] + [*found][: number % len(found)]
        for name in names:
            speed = ours(*shape) if name == "headway" else theirs(name, given.python, *shape)
            found[name].append(speed)
    record = {"load": os.getloadavg()[0], "settings": vars(given) | {"output": None}, "samples_per_second": found}
    for name, speeds in found.items():
        ratios = [mine / other for mine, other in zip(found["headway"], speeds, strict=True)]
        print(f"{name:<10} {statistics.median(speeds):>10,.0f} samples/s   ours / this {statistics.median(ratios):.2f}"
              f"  ({min(ratios):.2f} to {max(ratios):.2f})")  # fmt: skip
        record[f"ratio_{name}"] = statistics.median(ratios)
    if not has:
        print("lightning  n/a: not installed in --python")
    if given.output is not None:
        given.output.write_text(json.dumps(record, indent=2, default=str))


if __name__ == "__main__":
    main()
