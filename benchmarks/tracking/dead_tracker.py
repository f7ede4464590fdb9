"""Whether a dead MLflow server costs a step: the same run with and without one, in turn.

`headway train` as a user starts it, for so many seconds, without trackers and with an MLflow server that takes
connections and never answers (`--how silent`), or at whose port nothing listens (`--how refused`). The order of a pair
changes from one to the next, so that a machine which slows down favours neither. A run counts by the median of its
steps' times after the first ones, the pairs by the median of their ratios. Above the limit, the exit code is 1. Use a
machine that does nothing else:

    python benchmarks/tracking/dead_tracker.py
    python benchmarks/tracking/dead_tracker.py --pairs 5 --seconds 60 --output dead-tracker.json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from headway.telemetry.metrics import read_records

#: Most that the median step may be slower: what pairs of the same run differ by on an idle machine.
LIMIT = 1.02
#: Steps at the start that do not count: they warm up.
FIRST = 20


def step_seconds(run: Path) -> list[float]:
    """Return the times of the steps of a run so far."""
    return [record["speed/step_seconds"] for record in read_records(run) if "speed/step_seconds" in record]


def train(config: str, words: list[str], run: Path, seconds: float) -> list[float]:
    """Train for so long after the first steps, and return the times of the steps that count."""
    process = subprocess.Popen([sys.executable, "-m", "headway", "train", config, *words])
    try:
        while len(step_seconds(run)) <= FIRST:
            if process.poll() is not None:
                sys.exit(f"the run {run.name} has ended with exit code {process.returncode}")
            time.sleep(0.5)
        time.sleep(seconds)
    finally:  # also when this command is stopped
        process.send_signal(signal.SIGTERM)
        process.wait()
    return step_seconds(run)[FIRST:]


def main() -> None:
    """Train in pairs, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run, after its first steps")
    parser.add_argument("--how", choices=("silent", "refused"), default="silent", help="how the server is dead")
    parser.add_argument("--output", type=Path, default=None, help="JSON")
    parser.add_argument("overrides", nargs="*", help="of the config, key=value")
    options = parser.parse_args()
    dead = socket.create_server(("127.0.0.1", 0))  # the kernel takes connections; nothing reads them
    address = f"http://127.0.0.1:{dead.getsockname()[1]}"
    if options.how == "refused":
        dead.close()
    pairs = []
    with tempfile.TemporaryDirectory(prefix="headway-dead-tracker-") as folder:
        words = [
            *(f"runs={folder}", f"data.store={folder}/store", "train.steps=1000000", "evaluation.every=null"),
            *("checkpoint.every=1000000 steps", "telemetry.report=false", *options.overrides),
        ]
        prepare = [sys.executable, "-m", "headway", "data", "prepare", options.config, "name=prepare", *words]
        subprocess.run(prepare, check=True)
        for number in range(options.pairs):
            found = {}
            for how in ("without", "dead") if number % 2 == 0 else ("dead", "without"):
                name = f"{how}-{number}"
                track = [f"track=[{{mlflow: {{uri: '{address}'}}}}]"] if how == "dead" else []
                seconds = train(options.config, [f"name={name}", *words, *track], Path(folder) / name, options.seconds)
                found[how] = {"steps": len(seconds), "median_seconds": statistics.median(seconds)}
            pairs.append({**found, "ratio": found["dead"]["median_seconds"] / found["without"]["median_seconds"]})
            print(f"pair {number + 1}: {json.dumps(pairs[-1])}", file=sys.stderr)
    dead.close()
    ratio = statistics.median(pair["ratio"] for pair in pairs)
    record = {
        "how": options.how,
        "seconds": options.seconds,
        "ratio": ratio,
        "limit": LIMIT,
        "load": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "pairs": pairs,
    }
    print(json.dumps(record, indent=1))
    if options.output:
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    if ratio > LIMIT:
        sys.exit(1)


if __name__ == "__main__":
    main()
