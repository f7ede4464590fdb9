"""What it takes to watch many runs: a scrape of the exporter, a reading of `headway top`, and a chart of `headway ui`.

Makes a folder of runs that train, as their files look, and measures while each of them goes on:

    python benchmarks/tracking/watch_runs.py --runs 50 --steps 10000
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import tempfile
import time
from pathlib import Path

import orjson
import psutil
from rich.console import Console

from headway.core.machine.system import host_name
from headway.tracking.exporter import exposition
from headway.tracking.live_table import pause_seconds, table
from headway.tracking.runs_folder import RunsFolder
from headway.tracking.ui.pages import Pages

CONFIG = """\
name: {name}
train: {{steps: 1000000, global_batch: 64, sequence_length: 1024}}
supervise: {{max_failures: 3, failure_window: 1 h}}
"""


def record(step: int, started: float) -> str:
    """A step's record with the values of an ordinary run."""
    values = {
        "step": step,
        "attempt": 1,
        "time": round(started + step * 0.5, 3),
        "train/loss": 9.0 - step * 1e-5,
        "train/grad_norm": 0.7103982355873647,
        "train/learning_rate": 3e-4,
        "train/items": 65536.0,
        "train/skipped_steps": 0.0,
        "speed/step_seconds": 0.4837264198235,
        "speed/tokens_per_second": 135481.2736452,
        "speed/data_wait_share": 0.00295281290518,
        "speed/mfu": 0.4129384756,
        "memory/peak_gib": 61.29768,
        "data/epochs/web": 1.6666666666666667,
        "cost/spent_usd": step * 1e-3,
    }
    return json.dumps(values, separators=(",", ":")) + "\n"


def make_runs(folder: Path, runs: int, steps: int) -> list[Path]:
    """Runs of this process, so that they are seen to train."""
    started = psutil.Process().create_time()
    text = "".join(record(step, started) for step in range(1, steps + 1))
    paths = [folder / f"run-{number:02d}" for number in range(runs)]
    for path in paths:
        attempt = path / "attempts" / "001"
        attempt.mkdir(parents=True)
        (path / "config.yaml").write_text(CONFIG.format(name=path.name))
        (path / "run.json").write_text("{}")
        facts = {"host": host_name(), "pid": os.getpid(), "started": started}
        (attempt / "attempt.json").write_text(json.dumps(facts))
        (attempt / "system-here.jsonl").write_text(
            '{"time":1.0,"system/cpu_share":0.5,"gpu/utilization_share/0":0.9}\n'
        )
        (path / "metrics.jsonl").write_text(text)
        manifest = path / "checkpoints" / f"step-{steps:08d}" / "manifest.json"
        manifest.parent.mkdir(parents=True)
        manifest.write_text("{}")
    return paths


def go_on(paths: list[Path], step: int, steps: int) -> None:
    """Every run does a few more steps."""
    started = psutil.Process().create_time()
    text = "".join(record(step + number, started) for number in range(1, steps + 1))
    for path in paths:
        with (path / "metrics.jsonl").open("a") as file:
            file.write(text)


def resident_mib() -> float:
    """Memory of this process now."""
    gc.collect()
    return float(psutil.Process().memory_info().rss) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--scrapes", type=int, default=40)
    parser.add_argument("--new-steps", type=int, default=30, help="steps that each run does between two readings")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between readings of `headway top`")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        paths = make_runs(folder, given.runs, given.steps)
        mib = (paths[0] / "metrics.jsonl").stat().st_size * len(paths) / 2**20
        print(f"{given.runs} runs of {given.steps:,} steps, {mib:.0f} MiB of records")

        started, before = time.perf_counter(), resident_mib()
        runs = RunsFolder(folder)
        size = len(exposition(runs))
        print(f"first reading, before the exporter serves: {time.perf_counter() - started:.2f} s")
        took, step = [], given.steps
        first = resident_mib()
        for _ in range(given.scrapes):
            go_on(paths, step, given.new_steps)
            step += given.new_steps
            started = time.process_time()
            exposition(runs)
            took.append(time.process_time() - started)
        took.sort()
        print(f"a scrape of {size / 1024:.0f} KiB, {given.new_steps} new steps of each run:", end=" ")
        print(f"median {took[len(took) // 2]:.3f} s, most {took[-1]:.3f} s of processor time")
        print(f"memory: {first - before:.0f} MiB after the first", end=", ")
        print(f"{resident_mib() - first:+.1f} MiB {given.scrapes} later")

        started = time.process_time()
        runs = RunsFolder(folder, newest=True)
        runs.refresh()
        print(f"headway top: first reading {time.process_time() - started:.2f} s")
        with Path(os.devnull).open("w") as nowhere:
            console, took = Console(file=nowhere, width=160, force_terminal=True), []
            for _ in range(given.scrapes):
                go_on(paths, step, int(given.every * 2))
                step += int(given.every * 2)
                started = time.process_time()
                console.print(table(runs.refresh(), time.time(), 160, 60))
                took.append(time.process_time() - started)
        mean = sum(took) / len(took)
        pause = pause_seconds(given.every, mean)
        print(f"headway top: {mean * 1e3:.0f} ms a reading, one in {pause:.1f} s: {mean / pause:.1%} of a core")
        pages = Pages(RunsFolder(folder, newest=True))
        names = [one["name"] for one in pages.runs()["runs"]]
        for when in ("first", "next"):
            started, size = time.process_time(), 0
            for start in range(0, len(names), 8):
                query = {
                    "metric": ["train/loss"],
                    "smoothing": ["0.9"],
                    "points": ["480"],
                    "run": names[start : start + 8],
                }
                size += len(orjson.dumps(pages.curves(query)))
            took_seconds = time.process_time() - started
            print(f"headway ui: {when} chart of all runs {took_seconds:.2f} s, {size / 1024:.0f} KiB")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"peak memory of this process: {peak:.0f} MiB")


if __name__ == "__main__":
    main()
