"""How much of its time a run spends on training when a worker is killed every so many minutes.

`headway train` as a user starts it, with `checkpoint.every=auto` and the failure rate given; at every interval one of
the workers, in turn, gets SIGKILL. The effective training time ratio (ETTR) is the time of the steps that count, first
computations only, over all time from the start of the first attempt to the end of the last; start-up, steps computed
again, evaluation and waiting for checkpoints are losses. The first start, up to the beginning of the first step, is one
of the losses, so short runs look worse than long ones; the ratio without it is given too. Where that is less than its
limit, the exit code is 1.

    python benchmarks/supervise/goodput.py
    python benchmarks/supervise/goodput.py --minutes 20 --workers 2 --output goodput.json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from headway.core.coordination.heartbeat import read_heartbeat
from headway.telemetry.goodput import goodput_of
from headway.telemetry.metrics import FILE_NAME
from headway.telemetry.record import open_run

LIMIT = 0.95


def newest_worker(run: Path, rank: int) -> int | None:
    """The process number of a worker of the newest attempt, once it has done a step of it."""
    pages = sorted(run.glob(f"attempts/*/heartbeat-{rank}"))
    reading = read_heartbeat(pages[-1]) if pages else None
    return reading.pid if reading is not None and reading.step > reading.first_step >= 0 else None


def first_steps(run: Path) -> dict[int, float]:
    """When each attempt's first step was finished."""
    found: dict[int, float] = {}
    for line in (run / FILE_NAME).read_text().splitlines():
        record = json.loads(line)
        if "train/loss" in record:
            found.setdefault(record["attempt"], record["time"])
    return found


def first_start(run: Path) -> float:
    """Seconds of the goodput's time before its first step began, which counts as a step."""
    with (run / FILE_NAME).open() as lines:
        step = next(record for record in map(json.loads, lines) if "train/loss" in record)
    started = open_run(run).attempts[0].started
    assert started is not None, "every attempt writes it down"
    return float(step["time"] - step["speed/step_seconds"] - started)


def main() -> None:
    """Train, kill, and count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--minutes", type=float, default=10.0, help="until the run is told to stop")
    parser.add_argument("--every", type=float, default=120.0, help="seconds between kills")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--output", type=Path, default=None, help="JSON")
    parser.add_argument("overrides", nargs="*", help="of the config, key=value")
    options = parser.parse_args()
    if 60 * options.minutes <= options.every:
        parser.error(f"no worker would be killed in {options.minutes:g} minutes: --every is {options.every:g} seconds")
    with tempfile.TemporaryDirectory(prefix="headway-goodput-") as folder:
        words = [
            *("name=goodput", f"runs={folder}", f"data.store={folder}/store", f"parallel.workers={options.workers}"),
            *("train.steps=1000000", "train.precision=fp32", "evaluation.every=null", "telemetry.report=false"),
            *("checkpoint.every=auto", f"checkpoint.failures_per_day={86400 / options.every:.0f}"),
            *("supervise.max_failures=1000000", *options.overrides),
        ]
        command = [sys.executable, "-m", "headway"]
        subprocess.run([*command, "data", "prepare", options.config, *words], check=True)
        run, kills = Path(folder) / "goodput", list[float]()
        start = time.time()
        process = subprocess.Popen([*command, "train", options.config, *words])
        try:
            while time.time() < start + 60 * options.minutes:
                time.sleep(0.1)
                due = start + options.every * (len(kills) + 1)
                pid = newest_worker(run, len(kills) % options.workers)
                if time.time() >= due and pid is not None:
                    with suppress(ProcessLookupError):  # gone by itself: the next one
                        os.kill(pid, signal.SIGKILL)
                        kills.append(time.time())
                        print(f"killed worker {(len(kills) - 1) % options.workers} ({len(kills)})", file=sys.stderr)
        finally:  # also when this command is stopped
            process.send_signal(signal.SIGTERM)
            process.wait()
        found, steps, first = goodput_of(open_run(run)), first_steps(run), first_start(run)
        assert found is not None, "the run has begun"
    # The run may have been told to stop before it was back after the last kill.
    back = [min(later) - kill for kill in kills if (later := [t for t in steps.values() if t > kill])]
    ratio = found.ratio * found.wall_seconds / (found.wall_seconds - first)
    load = os.getloadavg()[0]
    print(f"{len(kills)} kills, one every {options.every:.0f} s, {options.workers} workers; load {load:.1f}")
    print(found)
    if back:
        print(f"from a kill to the next new step: median {statistics.median(back):.2f} s, longest {max(back):.2f} s")
    print(f"without the first start of {first:.1f} s: {ratio:.1%}")
    verdict = "met" if ratio >= LIMIT else "MISSED"
    print(f"effective training time ratio: {ratio:.3f}, {verdict} (at least {LIMIT})")
    if options.output:
        record = {"kills": len(kills), "ratio": found.ratio, "ratio_without_first_start": ratio, "recoveries": back}
        options.output.write_text(json.dumps({**record, "words": str(found), "load": load}, indent=1))
    if ratio < LIMIT:
        sys.exit(1)


if __name__ == "__main__":
    main()
