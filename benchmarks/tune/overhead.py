"""What a trial costs beyond its steps: `headway tune`, `ray.tune` with a plain function, and Optuna in a plain loop.

All train the same small model on the same samples for the same steps, one trial at a time, with values drawn at random.
A trial of `headway tune` is a run: a process of its own, with checkpoints, metrics and a ledger, that survives kills.
The others call a function that has none of that. `headway train` is the same runs typed one after the other.

Each contender works on a few trials and on more of them. What one more trial takes, less the time of its steps, is its
overhead; the rest is the start of the search. All take turns, and the median counts.

    python benchmarks/tune/overhead.py
    python benchmarks/tune/overhead.py --rounds 5 --trials 3 9 --output tune.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

STEPS, STEP_SECONDS = 20, 0.02
#: The model and samples of all contenders; a step takes as long as is said, so that it is the same for all.
WORK = f"""\
import time

import torch

STEPS, STEP_SECONDS = {STEPS}, {STEP_SECONDS}


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return {{"x": x, "y": x.sum(0, keepdim=True)}}


def make_model():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))


def loss_of(model, batch):
    time.sleep(STEP_SECONDS)
    return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])


def build(config):
    import headway

    return headway.Task(make_model(), Rows(), loss_of)


def train(rate):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, batches = make_model(), iter(torch.utils.data.DataLoader(Rows(), batch_size=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step in range(STEPS):
        loss = loss_of(model, next(batches, None) or next(iter(torch.utils.data.DataLoader(Rows(), batch_size=4))))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss)
"""
RAY = """\
import os, sys
import ray
from ray import tune
from work import train

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
space = {"rate": tune.loguniform(1e-4, 1e-1)}
made = tune.TuneConfig(num_samples=int(sys.argv[1]), max_concurrent_trials=1, metric="loss", mode="min")
found = tune.Tuner(
    lambda config: tune.report({"loss": train(config["rate"])}),
    param_space=space,
    tune_config=made,
    run_config=tune.RunConfig(storage_path=os.path.abspath("ray"), verbose=0),
).fit()
assert len(found) == int(sys.argv[1]) and not found.errors
"""
OPTUNA = """\
import sys
import optuna
from work import train

optuna.logging.set_verbosity(optuna.logging.WARNING)
study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0))
study.optimize(lambda trial: train(trial.suggest_float("rate", 1e-4, 1e-1, log=True)), n_trials=int(sys.argv[1]))
"""
CONFIG = f"""\
name: work
task: "work:build"
train: {{steps: {STEPS}, global_batch: 4, micro_batch: 4, device: cpu}}
parallel: {{threads: 1}}
telemetry: {{report: false}}
"""
SPACE = """\
space: {optimizer.learning_rate: {log: [1e-4, 1e-1]}}
objective: train/loss
sampler: random
"""


def run(folder: Path, *command: str) -> float:
    """Run a command to its end, and return its seconds."""
    environment = {
        **os.environ,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "PYTHONPATH": python_path(folder),
    }
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return time.perf_counter() - start


def python_path(folder: Path) -> str:
    """Return the path with the work, before that of this process."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def headway_tune(folder: Path, trials: int) -> float:
    """Search with trials that are runs."""
    words = ("tune", "work.yaml", "space.yaml", "--trials", str(trials))
    return run(folder, sys.executable, "-m", "headway", *words)


def headway_train(folder: Path, trials: int) -> float:
    """Train the runs one after the other."""
    seconds = 0.0
    for number in range(trials):
        seconds += run(folder, sys.executable, "-m", "headway", "train", "work.yaml", f"name=run-{number}")
    return seconds


def ray_tune(folder: Path, trials: int) -> float:
    """Search with Ray."""
    return run(folder, sys.executable, "ray_search.py", str(trials))


def optuna_loop(folder: Path, trials: int) -> float:
    """Search with Optuna."""
    return run(folder, sys.executable, "optuna_search.py", str(trials))


CONTENDERS: dict[str, Callable[[Path, int], float]] = {
    "headway tune": headway_tune,
    "headway train": headway_train,
    "ray.tune": ray_tune,
    "optuna": optuna_loop,
}


def measure(contender: Callable[[Path, int], float], few: int, many: int) -> tuple[float, float]:
    """Return the overhead of a trial, and the seconds that the search takes beside its trials."""
    seconds = []
    for trials in (few, many):
        with tempfile.TemporaryDirectory(prefix="headway-tune-") as name:
            folder = Path(name)
            files = {
                "work.py": WORK, "ray_search.py": RAY, "optuna_search.py": OPTUNA,
                "work.yaml": CONFIG, "space.yaml": SPACE,
            }  # fmt: skip
            for file, text in files.items():
                (folder / file).write_text(text)
            seconds.append(contender(folder, trials))
    each = (seconds[1] - seconds[0]) / (many - few)
    return each - STEPS * STEP_SECONDS, seconds[0] - few * each


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trials", type=int, nargs=2, default=(2, 6), help="Few, and many")
    parser.add_argument("--output", type=Path, default=None, help="JSON with all measurements")
    options = parser.parse_args()
    overheads: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    starts: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    missing: dict[str, str] = {}
    for number in range(1, options.rounds + 1):
        for name, contender in CONTENDERS.items():
            if name in missing:
                continue
            try:
                overhead, start = measure(contender, *options.trials)
            except RuntimeError as error:
                missing[name] = (str(error).strip().splitlines() or ["no output"])[-1]
                continue
            overheads[name].append(overhead)
            starts[name].append(start)
            print(f"round {number}: {name}: {overhead:.2f} s a trial beyond its steps, {start:.2f} s once", flush=True)
    medians = {name: statistics.median(found) for name, found in overheads.items() if found}
    ours = medians["headway tune"]
    ratios = {name: ours / value for name, value in medians.items() if name != "headway tune" and value > 0}
    print(f"medians of {options.rounds}; load {os.getloadavg()[0]:.1f}")
    for name, value in medians.items():
        ratio = f", headway tune is {ratios[name]:.2f} of it" if name in ratios else ""
        print(f"{name:15}{value:8.2f} s a trial, {statistics.median(starts[name]):6.2f} s once{ratio}")
    for name, why in missing.items():
        print(f"{name:15}     n/a: {why}")
    if options.output:
        facts = {"load": os.getloadavg()[0], "python": platform.python_version(), "missing": missing}
        found = {"overhead_seconds": overheads, "start_seconds": starts, "medians": medians, "ratios": ratios}
        options.output.write_text(json.dumps({**found, **facts}, indent=1))


if __name__ == "__main__":
    main()
