"""Planned speed and memory beside what others have published of their training runs.

The figures are facts from public documents, and a few of Headway's own, each with its source, in `published.json`.
Other trainers have other kernels and another memory, so a ratio holds the error of the plan and the difference of the
implementations. The shares of the peak in `headway.lab.plan.accelerators` were chosen by the cases that are marked as
calibration; only the others say how good a plan is. Nothing is run.

    python benchmarks/plan/published.py
    python benchmarks/plan/published.py --output published-results.json
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.config import Config, resolve
from headway.lab.plan.accelerators import parse_machines
from headway.lab.plan.recommend import option

FIGURES = Path(__file__).with_name("published.json")
#: Bounds of planned over published speed: of the median, and of every case.
MEDIAN, EACH = (0.9, 1.1), (0.6, 1.6)


def compare(case: dict[str, Any], models: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return one line of the table."""
    machines = parse_machines(case["gpus"], interconnect=case.get("interconnect"))
    machines = replace(machines, accelerator=replace(machines.accelerator, **case.get("accelerator", {})))
    parallel, train = case.get("parallel", {}), case["train"]
    data = machines.count // math.prod(parallel.get(key, 1) for key in ("tensor", "context", "pipeline"))
    values = {
        "model": {**models[case["model"]], "max_sequence_length": train["sequence_length"]},
        "train": {"steps": 1, **train, "global_batch": data * train["micro_batch"] * case["micro_batches"]},
        "parallel": {**parallel, "strategy": "auto"},
    }
    config = resolve(Config.model_validate({**values, "parallel": {**parallel, "workers": machines.count}}))
    strategy = "zero3" if data * parallel.get("context", 1) > 1 else "single"
    planned = option(config, config.model, machines, strategy, train["activation_checkpointing"])
    if planned.refusal is not None or planned.memory is None or planned.speed is None:
        raise SystemExit(f"{case}: {planned.refusal}")
    speed, gib = planned.speed.tokens_per_second / machines.count, planned.memory.peak_bytes / 2**30
    published = case.get("memory_gib")
    return {
        **case,
        "planned_tokens_per_second": speed,
        "speed_ratio": speed / case["tokens_per_second"],
        "planned_memory_gib": gib,
        "memory_ratio": None if published is None else gib / published,
    }


def described(line: dict[str, Any]) -> str:
    """Return a line of the table as text."""
    train, parallel = line["train"], line.get("parallel", {})
    ways = [train["activation_checkpointing"], train["precision"], *(["compiled"] if train.get("compile") else [])]
    ways += [f"{key} {value}" for key, value in parallel.items()]
    known = line["memory_ratio"]
    memory = "" if known is None else f"{line['memory_gib']:5.1f} GiB {line['planned_memory_gib']:6.1f} {known:5.2f}"
    return (
        f"{line['model']:13} {line['gpus']:13} {train['sequence_length']:7,} x{train['micro_batch']:<3}"
        f"x{line['micro_batches']:<3} {line['tokens_per_second']:8,} {line['planned_tokens_per_second']:8,.0f}"
        f" {line['speed_ratio']:5.2f}  {memory:24} {', '.join(ways)}"
    )


def summary(lines: list[dict[str, Any]], name: str) -> bool:
    """Print median and extremes of a group of cases; return whether they are within their bounds."""
    for key in ("speed_ratio", "memory_ratio"):
        ratios = sorted(line[key] for line in lines if line[key] is not None)
        if ratios:
            words = f"median {statistics.median(ratios):.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f}"
            print(f"{name}, {key.replace('_', ' ')}: {len(ratios)} cases, {words}")
    ratios = [line["speed_ratio"] for line in lines]
    return MEDIAN[0] <= statistics.median(ratios) <= MEDIAN[1] and EACH[0] <= min(ratios) and max(ratios) <= EACH[1]


def main() -> None:
    """Print the table, and fail when the plan is too far off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="also write the figures as JSON")
    arguments = parser.parse_args()
    figures = json.loads(FIGURES.read_text())
    lines = [compare(case, figures["models"]) for case in figures["cases"]]
    groups = {
        "calibration": [line for line in lines if line.get("calibrates")],
        "held out": [line for line in lines if not line.get("calibrates")],
    }
    print(
        "model, accelerators, row x micro-batch x micro-batches; tokens/s of one accelerator: published, planned, ratio"
    )
    for name, some in groups.items():
        print(f"\n{name}:")
        for line in some:
            print(described(line))
    for note in dict.fromkeys(line["note"] for line in lines if "note" in line):
        print(f"\nfor {', '.join(dict.fromkeys(x['model'] for x in lines if x.get('note') == note))}: {note}")
    print()
    good = [summary(some, name) for name, some in groups.items()]
    if arguments.output:
        arguments.output.write_text(json.dumps(lines, indent=2) + "\n")
    if not all(good):
        sys.exit(1)


if __name__ == "__main__":
    main()
