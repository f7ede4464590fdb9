"""False alarms and recall of `health`'s comparison of steps, and of the alert `HeadwayAnomaly`.

Trains 240 healthy models of fewer than 100k parameters (20 seeds, four shapes, three optimizers) on this repository's
documentation, byte by byte, and records loss and gradient norm of every step. The detector then runs on the recordings:
as they are, which counts false alarms, and with 100 faults planted one at a time, which counts those found. Values of a
faulty batch are real: each recording holds what the model itself yields for it, without an update. The same is measured
of a plain rule: loss or norm alone exceeds the limit, both compared with means over the whole window.

    python benchmarks/telemetry/alarms.py --recordings /tmp/recordings.json

A file of recordings that is there is used again.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import multiprocessing
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from headway.config import ModelConfig, OptimizerConfig
from headway.config.sections.health import HealthConfig
from headway.models.build import build_model
from headway.telemetry.anomalies import AnomalyWatch
from headway.training.health import decisions
from headway.training.health.decisions import History, judge, remember
from headway.training.optimizer import build_optimizer

SEEDS, STEPS = 20, 240
#: Model, rows of a batch and tokens of a row.
SHAPES: Sequence[tuple[dict[str, int], int, int]] = (
    ({"dim": 32, "layers": 1, "heads": 2, "ffn_dim": 64}, 8, 32),
    ({"dim": 32, "layers": 3, "heads": 2, "ffn_dim": 64}, 4, 32),
    ({"dim": 48, "layers": 2, "heads": 4, "ffn_dim": 96}, 2, 64),
    ({"dim": 64, "layers": 1, "heads": 4, "ffn_dim": 128}, 2, 32),
)
LEARNING_RATES = {"adamw": 3e-3, "muon": 3e-3, "lion": 5e-4}
WARMUP, MAX_NORM = 24, 1.0
#: Each recording has the values of faulty batches at this many steps before its end.
PROBED_BEFORE_END = 60

Recording = dict[str, Any]


def record(job: tuple[int, int, str]) -> Recording:
    """Train one model and return its losses and gradient norms, and those of faulty batches."""
    seed, shape, optimizer_name = job
    torch.set_num_threads(1)
    sizes, rows, length = SHAPES[shape]
    model = build_model(ModelConfig(**sizes, max_sequence_length=length), vocab_size=256, seed=seed)
    assert sum(p.numel() for p in model.parameters()) < 100_000
    peak = LEARNING_RATES[optimizer_name]
    config = OptimizerConfig(name=optimizer_name, learning_rate=peak)
    optimizer = build_optimizer(config, model, torch.device("cpu"))
    texts = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    data = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in texts)), dtype=torch.uint8).long()
    chance = torch.Generator().manual_seed(seed)

    def passes(batch: torch.Tensor) -> tuple[float, float]:
        optimizer.zero_grad()
        loss = model(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) / (rows * length)
        loss.backward()
        return loss.item(), float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))

    losses, norms, probes = [], [], {}
    for step in range(STEPS):
        starts = torch.randint(len(data) - length - 1, (rows,), generator=chance)
        batch = torch.stack([data[start : start + length + 1] for start in starts.tolist()])
        if step == STEPS - PROBED_BEFORE_END:
            probes = {name: passes(faulty) for name, faulty in faulty_batches(batch, seed)}
        loss, norm = passes(batch)
        decayed = 0.55 + 0.45 * math.cos(math.pi * step / STEPS)
        for group in optimizer.param_groups:
            group["lr"] = peak * min((step + 1) / WARMUP, decayed)
        optimizer.step()
        losses.append(loss)
        norms.append(norm)
    return {"seed": seed, "shape": shape, "optimizer": optimizer_name, "loss": losses, "norm": norms, "probes": probes}


def faulty_batches(batch: torch.Tensor, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield batches as broken data have them, (rows, tokens) like `batch`."""
    chance = torch.Generator().manual_seed(seed)
    yield "random bytes", torch.randint(256, batch.shape, generator=chance)
    yield "one byte repeated", torch.full_like(batch, int(torch.randint(128, 256, (1,), generator=chance)))
    yield "bytes in random order", batch.flatten()[torch.randperm(batch.numel(), generator=chance)].view_as(batch)
    coded = base64.b64encode(random.Random(seed).randbytes(batch.numel()))[: batch.numel()]
    yield "base64", torch.frombuffer(bytearray(coded), dtype=torch.uint8).long().view_as(batch)


@dataclass(frozen=True)
class Fault:
    """Something that a recording is changed by, from a step on."""

    kind: str
    what: str
    recording: int
    first_step: int
    length: int
    change: Callable[[int, float, float], tuple[float, float]]
    """Returns loss and norm of the fault's step (from 0) from the healthy ones."""


def faults(recordings: Sequence[Recording]) -> Iterator[Fault]:
    """Yield 100 faults, always the same of the same recordings: 40 spikes, 20 drifts, 40 faulty batches."""
    chance = random.Random(0)

    def fault(
        kind: str, what: str, length: int, change: Callable[[int, int, float, float], tuple[float, float]]
    ) -> Fault:
        recording, first = chance.randrange(len(recordings)), chance.randrange(100, 180)
        return Fault(kind, what, recording, first, length, partial(change, recording))

    for factor in (3.0, 5.0, 10.0, 100.0):
        for _ in range(5):
            yield fault("gradient spike", f"norm x {factor:g}", 1, lambda _, i, loss, norm, f=factor: (loss, norm * f))
    for more in (0.5, 1.0, 2.0, 5.0):
        for _ in range(5):
            yield fault(
                "loss spike", f"loss + {more:g}, norm x 3", 1, lambda _, i, loss, norm, m=more: (loss + m, norm * 3)
            )
    for more, length in ((1.0, 10), (3.0, 40)):
        for _ in range(5):
            yield fault(
                "drift", f"loss up to + {more:g} in {length} steps", length,
                lambda _, i, loss, norm, m=more, n=length: (loss + m * (i + 1) / n, norm),
            )  # fmt: skip
    for factor, length in ((8.0, 10), (8.0, 40)):
        for _ in range(5):
            yield fault(
                "drift", f"norm up to x {factor:g} in {length} steps", length,
                lambda _, i, loss, norm, f=factor, n=length: (loss, norm * f ** ((i + 1) / n)),
            )  # fmt: skip
    for name in recordings[0]["probes"]:
        for length in (1, 3):
            for _ in range(5):
                yield fault(
                    "faulty batch", f"{name}, {length} steps", length,
                    lambda at, i, loss, norm, name=name: tuple(recordings[at]["probes"][name]),
                )  # fmt: skip


def replay(recording: Recording, fault: Fault | None = None) -> tuple[set[int], dict[int, set[str]]]:
    """Return the steps at which health warns, and the labels of the alerts that begin at a step."""
    config, history, watch = HealthConfig(), History(), AnomalyWatch()
    warned: set[int] = set()
    began: dict[int, set[str]] = {}
    before: set[str] = set()
    for step, (loss, norm) in enumerate(zip(recording["loss"], recording["norm"], strict=True)):
        if fault is not None and 0 <= step - fault.first_step < fault.length:
            loss, norm = fault.change(step - fault.first_step, loss, norm)
        judgement = judge(config, history, loss, norm)
        remember(config, history, loss, norm)
        if judgement.kind != "good":
            warned.add(step)
        values = {"train/loss": loss, "train/grad_norm": norm, "train/skipped_steps": 0.0, **judgement.metrics}
        # Steps of a minute, so that an alert is over after fifty of them.
        watch.add(step + 1, 1, {"time": 60.0 * step, **values})
        now = {one.label for one in watch.found()}
        if now - before:
            began[step] = now - before
        before = now
    return warned, began


def measure(recordings: Sequence[Recording]) -> dict[str, Any]:
    """Return false alarms in 1,000 steps, and found faults by kind, of warnings and alerts."""
    healthy = [replay(recording) for recording in recordings]
    steps = sum(len(recording["loss"]) for recording in recordings)
    found: dict[str, dict[str, list[bool]]] = {"warnings": {}, "alerts": {}}
    for fault in faults(recordings):
        # The step after a fault may be needed to see what it was.
        during = range(fault.first_step, fault.first_step + fault.length + 1)
        changed = replay(recordings[fault.recording], fault)
        for name, now, before in zip(found, changed, healthy[fault.recording], strict=True):
            found[name].setdefault(f"{fault.kind}: {fault.what}", []).append(
                any(step in now and step not in before for step in during)
            )
    false = {"warnings": sum(len(one) for one, _ in healthy), "alerts": sum(len(one) for _, one in healthy)}
    return {
        "steps": steps,
        **{
            name: {
                "false alarms": false[name],
                "false alarms in 1,000 steps": 1000 * false[name] / steps,
                "recall": {kind: f"{sum(hits)} of {len(hits)}" for kind, hits in kinds.items()},
                "found": sum(sum(hits) for hits in kinds.values()),
            }
            for name, kinds in found.items()
        },
    }


def main() -> None:
    """Record, unless that was done before; measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=Path, default=Path("recordings.json"), help="where recordings are kept")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    if not options.recordings.exists():
        jobs = list(product(range(SEEDS), range(len(SHAPES)), LEARNING_RATES))
        with multiprocessing.Pool(options.processes) as pool:
            options.recordings.write_text(json.dumps(pool.map(record, jobs, chunksize=1)))
    recordings = json.loads(options.recordings.read_text())
    print(table(recordings))


def table(recordings: Sequence[Recording]) -> str:
    """Return false alarms and recall as a table in Markdown."""
    with (
        patch.object(decisions, "_LOSS_PART", 1),
        patch.object(decisions, "is_spike", lambda loss, norm, limit: max(loss, norm) > limit),
    ):
        plain = measure(recordings)["warnings"]
    found = measure(recordings)
    columns = {"plain rule": plain, "warnings": found["warnings"], "alerts": found["alerts"]}
    rows = [
        ["", *columns],
        ["---"] * (1 + len(columns)),
        ["false alarms in 1,000 steps", *(f"{one['false alarms in 1,000 steps']:.2f}" for one in columns.values())],
        ["found of 100 faults", *(str(one["found"]) for one in columns.values())],
        *([kind, *(one["recall"][kind] for one in columns.values())] for kind in plain["recall"]),
    ]
    return f"{found['steps']:,} healthy steps\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    main()
