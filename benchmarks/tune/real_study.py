"""A real study: ASHA beside a whole grid, on the text and the model of `headway quickstart`.

Both search the same points in the same order; ASHA ends those that are worse than others at a few steps. It has to
reach the best loss of the grid within 1 %, for at most a third of its steps.

    python benchmarks/tune/real_study.py
    python benchmarks/tune/real_study.py --steps 480 --folder study --output study.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RATES = (1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3, 6.4e-3, 1.28e-2, 2.56e-2, 5.12e-2)
LAYERS = (1, 2)
#: What a search with ASHA may have as its best loss, and of the grid's steps.
MOST_LOSS = 1.01
MOST_STEPS = 1 / 3


def study(folder: Path, name: str, steps: int, stopping: str) -> dict[str, Any]:
    """Work on a study, and return its trials, its best loss, its steps and its seconds."""
    space = folder / f"{name}.yaml"
    ranges = f"{{optimizer.learning_rate: {list(RATES)}, model.layers: {list(LAYERS)}}}"
    space.write_text(f"space: {ranges}\nsampler: grid\nstopping: {stopping}\n")
    overrides = [
        f"train.steps={steps}",
        "train.precision=fp32",
        "optimizer.name=adamw",
        "train.sequence_length=64",
        "train.global_batch=4",
        "schedule.warmup='10 steps'",
        f"evaluation.every='{steps // 12} steps'",
        "evaluation.rows=128",
        "checkpoint.every='100 steps'",
        "telemetry.report=false",
        "data.store=data/quickstart",
    ]
    command = [sys.executable, "-m", "headway", "tune", "quickstart", space.name, *overrides]
    start = time.monotonic()
    out = ["--dir", name, "--json"]
    done = subprocess.run([*command, *out], cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    seconds = time.monotonic() - start
    trials = json.loads(done.stdout)["trials"]
    values = [one["objectives"][0] for one in trials if one["state"] == "complete"]
    steps_done = sum(one["step"] for one in trials)
    return {"trials": trials, "best": min(values), "complete": len(values), "steps": steps_done, "seconds": seconds}


def main() -> None:
    """Search twice, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240, help="Steps of a whole trial, a multiple of 12")
    parser.add_argument("--folder", type=Path, default=None, help="Keep the studies there; typed again, it continues")
    parser.add_argument("--output", type=Path, default=None, help="JSON with all trials")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headway-study-") as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(exist_ok=True)
        rules = {"asha": f"{{name: asha, first_steps: {options.steps // 12}, factor: 4}}", "grid": "none"}
        found = {name: study(folder, name, options.steps, stopping) for name, stopping in rules.items()}
    loss, steps = (found["asha"][key] / found["grid"][key] for key in ("best", "steps"))
    for name, one in found.items():
        what = f"best loss {one['best']:.4f}, {one['complete']} of {len(one['trials'])} trials to the end"
        print(f"{name}: {what}, {one['steps']:,} steps, {one['seconds']:,.0f} s")
    verdicts = ["met" if kept else "MISSED" for kept in (loss <= MOST_LOSS, steps <= MOST_STEPS)]
    print(f"asha's best loss is {loss:.4f} of the grid's: {verdicts[0]} (at most {MOST_LOSS})")
    print(f"asha took {steps:.3f} of the grid's steps: {verdicts[1]} (at most {MOST_STEPS:.3f})")
    if options.output:
        options.output.write_text(json.dumps({**found, "loss": loss, "steps": steps}, indent=1))


if __name__ == "__main__":
    main()
