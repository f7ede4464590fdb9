"""Planned speed and memory beside what others have published of their training runs.

The figures are facts from public documents, and a few of Headway's own, each with its source, in `published.json`.
Other trainers have other kernels and another memory, so a ratio holds the error of the plan and the difference of the
implementations. What is known of the difference is computed: trainers that take the loss from whole logits and keep the
residual stream in bf16 (`as_trained`). Peaks are compared with what was counted: tensors, or what PyTorch's allocator
reserved for them (`memory_counts`), which includes the allocator's part of the plan's reserve. The shares of the peak
in `headway.lab.plan.accelerators` were chosen by the cases that are marked as
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
from headway.config.optimizers import FP32_BYTES
from headway.lab.plan.accelerators import parse_machines
from headway.lab.plan.activations import Activations
from headway.lab.plan.layout import Layout
from headway.lab.plan.losses import logits_loss_bytes
from headway.lab.plan.memory_plan import MemoryPlan
from headway.lab.plan.recommend import Planner
from headway.lab.plan.stages import pipeline_stages

FIGURES = Path(__file__).with_name("published.json")
#: Bounds of planned over published speed: of the median, and of every case.
MEDIAN, EACH = (0.9, 1.1), (0.6, 1.6)
#: The same of planned over published memory.
MEMORY_MEDIAN, MEMORY_EACH = (0.9, 1.15), (0.75, 1.3)
#: Layer inputs that are gone at moments of a sharded step; at the others none is left.
_GONE = {
    "last layer gathered": 1,
    "loss": 0,
    "loss, backward": 0,
    "last layer, backward": 0,
    "next layer, backward": 1,
}


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
    planned = Planner(config, config.model, machines).option(strategy, train["activation_checkpointing"])
    if planned.refusal is not None or planned.memory is None or planned.speed is None:
        raise SystemExit(f"{case}: {planned.refusal}")
    assert planned.layout is not None
    memory = as_trained(case, config, planned.layout, planned.memory)
    speed = planned.speed.tokens_per_second / machines.count
    published = case.get("memory_gib")
    pool = memory.pool_bytes if case.get("memory_counts") == "reserved" else 0
    gib = (memory.peak_bytes + pool) / 2**30
    return {
        **case,
        "planned_tokens_per_second": speed,
        "speed_ratio": speed / case["tokens_per_second"],
        "planned_memory_gib": gib,
        "planned_here_gib": planned.memory.peak_bytes / 2**30,
        "planned_reserve_gib": planned.memory.reserve_bytes / 2**30,
        "memory_ratio": None if published is None else gib / published,
    }


def as_trained(case: dict[str, Any], config: Config, layout: Layout, memory: MemoryPlan) -> MemoryPlan:
    """Return the memory of a step as the published trainer computes it.

    With `whole_logits` all logits of a micro-batch exist, in 16 bits and twice in fp32 (torchtitan,
    `torchtitan/train.py`, `loss_fn`), and the last stage of a pipeline keeps those of all micro-batches until the end
    of the step (PyTorch, `torch/distributed/pipelining/stage.py`, `output_chunks`). Shared by tensor-parallel workers,
    they exist up to four times in fp32 (`torch/distributed/tensor/parallel/loss.py`,
    `_nll_loss_and_log_softmax_backward`: scores, their gradient, exponentials and the sum). With `half_stream` the
    inputs of layers are kept in 16 bits, which are 32 here.
    """
    if not case.get("whole_logits"):
        return memory
    model, train, mesh = config.model, config.train, layout.mesh
    assert model.vocab_size is not None and model.dim is not None
    sizes = Activations.of_layout(config, model, layout, "cuda")
    tokens = layout.micro_batch * train.sequence_length // mesh.cp
    vocabulary = model.vocab_size // mesh.tp
    forward, backward = logits_loss_bytes(config, vocabulary, model.dim, tokens)
    kept = 2 * tokens * vocabulary * layout.micro_batches if mesh.pp > 1 else 0
    if mesh.tp > 1:
        backward = max(backward, 4 * FP32_BYTES * tokens * vocabulary)
    more = {"loss": forward - sizes.loss_forward, "loss, backward": backward - sizes.loss_backward}
    stages = pipeline_stages(config, model, layout)
    each = len(memory.moments) // len(stages)
    moments = []
    for index, moment in enumerate(memory.moments):
        stage = stages[index // each]
        buffers = kept + more.get(moment.name, 0) if stage.has_loss else 0
        inputs = (1 + stage.ahead) * stage.layers - _GONE[moment.name] if moment.name in _GONE else 0
        halves = inputs * sizes.layer_input // 2 if case.get("half_stream") else 0
        moments.append(moment.plus(moment.name, buffers=buffers, activations=-halves))
    return replace(memory, moments=moments)


def described(line: dict[str, Any]) -> str:
    """Return a line of the table as text."""
    train, parallel = line["train"], line.get("parallel", {})
    ways = [train["activation_checkpointing"], train["precision"], *(["compiled"] if train.get("compile") else [])]
    ways += [f"{key} {value}" for key, value in parallel.items()]
    known = line["memory_ratio"]
    memory = ""
    if known is not None:
        memory = (
            f"{line['memory_gib']:5.1f} GiB {line['memory_counts']:9} {line['planned_memory_gib']:6.1f} {known:5.2f}"
            f"  {line['planned_here_gib']:5.1f} + {line['planned_reserve_gib']:4.1f}"
        )
    return (
        f"{line['model']:13} {line['gpus']:13} {train['sequence_length']:7,} x{train['micro_batch']:<3}"
        f"x{line['micro_batches']:<3} {line['tokens_per_second']:8,} {line['planned_tokens_per_second']:8,.0f}"
        f" {line['speed_ratio']:5.2f}  {memory:48} {', '.join(ways)}"
    )


def summary(lines: list[dict[str, Any]], name: str) -> bool:
    """Print median and extremes of a group of cases; return whether they are within their bounds."""
    for key in ("speed_ratio", "memory_ratio"):
        ratios = sorted(line[key] for line in lines if line[key] is not None)
        if ratios:
            words = f"median {statistics.median(ratios):.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f}"
            print(f"{name}, {key.replace('_', ' ')}: {len(ratios)} cases, {words}")
    speeds = [line["speed_ratio"] for line in lines]
    peaks = [line["memory_ratio"] for line in lines if line["memory_ratio"] is not None]
    return _within(speeds, MEDIAN, EACH) and (not peaks or _within(peaks, MEMORY_MEDIAN, MEMORY_EACH))


def _within(ratios: list[float], median: tuple[float, float], each: tuple[float, float]) -> bool:
    is_near = median[0] <= statistics.median(ratios) <= median[1]
    return is_near and each[0] <= min(ratios) and max(ratios) <= each[1]


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
        "; peak: published, what it counts, planned for that trainer, ratio; planned here + reserve, in GiB"
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
