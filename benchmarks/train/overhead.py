"""What a step of `headway train` takes besides the model and the optimizer: data, metrics, health, signals.

The model is so small that little else is left of a step. It is trained by the whole command, and by `bare.py`, a loop
around the same model that does nothing but forward, backward, clipping and update; what ours takes longer is the
overhead, in milliseconds of every step, whatever the model. In a round both are under way at the same time and take
turns, as in `speed.py`, for how fast a processor is changes by more than that; the median of the rounds' differences
counts.

    python benchmarks/train/overhead.py
    python benchmarks/train/overhead.py --rounds 9 --output overhead.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from pathlib import Path

import speed
from contender import Command

#: Of a step of this length, what the loop may take at most.
STEP_SECONDS, LIMIT = 0.1, 0.01
STEPS_OF_A_TURN = 40


def in_turns(names: list[str], work: speed.Workload) -> dict[str, float]:
    """The mean seconds of a step of each; of single steps the clock has only milliseconds."""
    commands = list[Command]()
    try:
        for name in names:
            commands.append(Command(name, False, work))
            commands[-1].wait_for(work.options.warmup)
            commands[-1].stop()
        while waiting := [command for command in commands if command.process.poll() is None]:
            for command in waiting:
                command.turn(STEPS_OF_A_TURN)
        return {command.name: statistics.fmean(command.measured().step_seconds) for command in commands}
    finally:
        for command in commands:
            command.kill()


def differences(found: dict[str, list[float]]) -> list[float]:
    """By how many seconds our step took longer, in each round."""
    return [ours - loop for ours, loop in zip(found["headway"], found["bare"], strict=True)]


def report(found: dict[str, list[float]], load: float) -> str:
    """The medians, and whether the overhead is within its limit.

    Args:
        found: Mean seconds of a step, by contender and round.
        load: Of the machine.
    """
    longer = differences(found)
    overhead = statistics.median(longer)
    share = overhead / STEP_SECONDS
    verdict = "met" if share <= LIMIT else "MISSED"
    spread = f"{min(longer) * 1000:.2f} to {max(longer) * 1000:.2f}"
    return "\n".join(
        [
            *(f"{name:8} {statistics.median(seconds) * 1000:6.2f} ms a step" for name, seconds in found.items()),
            f"overhead {overhead * 1000:6.2f} ms a step ({spread} over {len(longer)} rounds; load {load:.1f})",
            f"of a step of {STEP_SECONDS * 1000:.0f} ms: {share:.1%}, {verdict} (at most {LIMIT:.0%})",
        ]
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--output", type=Path, default=None, help="JSON with all measurements")
    options = parser.parse_args()
    work_options = argparse.Namespace(
        preset="1m", vocabulary=512, rows=1, sequence_length=32, precision="fp32", steps=options.steps, warmup=50,
        threads=1, peers=None,
    )  # fmt: skip
    found: dict[str, list[float]] = {"headway": [], "bare": []}
    with tempfile.TemporaryDirectory(prefix="headway-overhead-") as folder:
        work = speed.Workload(work_options, Path(folder))
        for number in range(options.rounds):
            for name, seconds in in_turns(list(found)[:: 1 if number % 2 else -1], work).items():
                found[name].append(seconds)
            figures = ", ".join(f"{name} {seconds[-1] * 1000:.2f} ms" for name, seconds in found.items())
            speed.say(f"round {number + 1} of {options.rounds}: {figures} a step")
    load = os.getloadavg()[0]
    print(report(found, load))
    if options.output:
        record = {"seconds": found, "overhead_seconds": statistics.median(differences(found)), "load": load}
        record |= {"python": platform.python_version()}
        options.output.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
