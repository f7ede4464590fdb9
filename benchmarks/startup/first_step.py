"""How long until something happens: from the start of a command to its first finished step, beside the peers' loops.

The contenders are those of `benchmarks/train/speed.py`, which says what they do, without torch.compile. Two floors:
`import torch` is a Python that loads PyTorch and ends, `ceiling` the hand-written loop, which loads nothing else. Of us
also a second start, which finds and loads a checkpoint before its first step, and the commands that need no PyTorch.

    python benchmarks/startup/first_step.py --peers peers/bin/python
    python benchmarks/startup/first_step.py --rounds 9 --output startup.json
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
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

import speed

#: Of the quickest peer's time, what ours may take.
LIMIT = 0.5


def seconds_of(*command: str) -> float:
    """A command from start to end."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def first_step(name: str, work: speed.Workload) -> float:
    """Of a contender."""
    return speed.run(name, False, work).first_step_seconds


def next_step(work: speed.Workload) -> float:
    """Of a run of ours that goes on from its last checkpoint, which the caller has left there."""
    metrics = work.folder / "runs" / "speed" / "metrics.jsonl"
    steps = sum("train/loss" in line for line in metrics.read_text().splitlines())
    words = [f"train.steps={work.steps + steps}", f"parallel.threads={work.options.threads}", "--accept-changes"]
    start = time.time()
    seconds_of(sys.executable, "-m", "headway", "train", str(work.config), "parallel.workers=1", *words)
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return min(r["time"] for r in records if "train/loss" in r and r["step"] > steps) - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", default=None, help="Python that has transformers, accelerate, lightning and litgpt")
    parser.add_argument("--output", type=Path, default=None, help="JSON with all measurements")
    options = parser.parse_args()
    work_options = argparse.Namespace(
        preset="4m", vocabulary=8192, rows=4, sequence_length=128, precision="fp32", steps=1, warmup=1,
        threads=len(os.sched_getaffinity(0)), peers=options.peers,
    )  # fmt: skip
    peers = speed.PEERS if options.peers else ()
    seconds: dict[str, list[float]] = {}
    missing: dict[str, str] = {} if peers else dict.fromkeys(speed.PEERS, "no --peers")
    python = sys.executable
    with tempfile.TemporaryDirectory(prefix="headway-startup-") as folder:
        work = speed.Workload(work_options, Path(folder))
        for number in range(options.rounds + 1):
            measured = {
                "import torch": lambda: seconds_of(python, "-c", "import torch"),
                "ceiling": lambda: first_step("ceiling", work),
                "headway": lambda: first_step("headway", work),
                "headway, going on": lambda: next_step(work),
                "headway -h": lambda: seconds_of(python, "-m", "headway", "-h"),
                "headway config show": lambda: seconds_of(python, "-m", "headway", "config", "show", str(work.config)),
                **{name: lambda name=name: first_step(name, work) for name in peers if name not in missing},  # type: ignore[misc]
            }
            for name, measure in measured.items():
                try:
                    taken = measure()
                except RuntimeError as error:
                    missing[name] = str(error).strip().splitlines()[-1]
                    continue
                if number:  # the first round brings files into memory
                    seconds.setdefault(name, []).append(taken)
                    speed.say(f"round {number} of {options.rounds}: {name} {taken:.2f} s")
        shutil.rmtree(work.folder / "runs", ignore_errors=True)
    medians = {name: statistics.median(all_) for name, all_ in seconds.items()}
    load = os.getloadavg()[0]
    print(f"medians of {options.rounds}; load {load:.1f}")
    for name, taken in sorted(medians.items(), key=lambda item: item[1]):
        print(f"{name:22}{taken:7.2f} s   headway's first step is {medians['headway'] / taken:5.2f} of it")
    for name, why in missing.items():
        print(f"{name:22}    n/a: {why}")
    known = [name for name in peers if name in medians]
    if known:
        quickest = min(known, key=lambda name: medians[name])
        ratio = medians["headway"] / medians[quickest]
        verdict = "met" if ratio <= LIMIT else "MISSED"
        print(f"first step of the quickest peer's ({quickest}): {ratio:.2f}, {verdict} (at most {LIMIT})")
    if options.output:
        facts = {"load": load, "python": platform.python_version(), "missing": missing}
        options.output.write_text(json.dumps({"medians": medians, "seconds": seconds, **facts}, indent=1))


if __name__ == "__main__":
    main()
