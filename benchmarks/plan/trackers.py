"""What `headway plan` says beside PyTorch's own memory trackers, for models and machines that nobody has here.

A model on the `meta` device is sharded by the real strategy over a process group that only pretends (`FakeStore`), and
one step of forward, backward and update runs on tensors without content under `FSDPMemTracker`. Nothing is computed or
sent, so 405 B parameters on 1024 workers fit into a laptop. The kernels are those of the CPU, as no GPU is there; the
tracker sees neither temporaries inside a kernel nor what gloo or NCCL take.

    python benchmarks/plan/trackers.py --output trackers.json
    python benchmarks/plan/trackers.py --cases 8b-64
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from headway.config import Config, resolve, resolve_mesh
from headway.core.format import format_bytes
from headway.lab.plan.layout import Layout
from headway.lab.plan.memory import MemoryPlan, plan_memory
from headway.models.decoder import Decoder
from headway.models.layers.rope import rotary_tables
from headway.models.shape import Shape
from headway.parallel.strategy import make_strategy
from headway.parallel.world import World
from headway.training.optimizer import build_optimizer
from headway.training.step import autocast

LARGE: dict[str, dict[str, Any]] = {
    # Dubey et al. 2024, table 3.
    "405b": {
        "dim": 16384, "layers": 126, "heads": 128, "kv_heads": 8, "ffn_dim": 53248, "max_sequence_length": 8192,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One model on so many workers."""

    model: str
    workers: int
    strategy: str = "zero3"
    checkpointing: str = "full"
    precision: str = "bf16"
    length: int = 4096

    @property
    def name(self) -> str:
        """As it is chosen on the command line."""
        return f"{self.model}-{self.workers}"

    def config(self, vocab_size: int = 128256) -> Config:
        """What a user would write."""
        model = LARGE.get(self.model, {"preset": self.model})
        values = {
            "model": {**model, "vocab_size": vocab_size},
            "train": {
                "steps": 1,
                "sequence_length": self.length,
                "micro_batch": 1,
                "global_batch": self.workers,
                "precision": self.precision,
                "activation_checkpointing": self.checkpointing,
                "device": "cpu",
            },
            "parallel": {"strategy": self.strategy, "workers": self.workers},
        }
        return resolve(Config.model_validate(values))


CASES = [
    Case("1b", 8, checkpointing="none"),
    Case("8b", 64),
    Case("70b", 512),
    Case("405b", 1024),
]


@contextmanager
def pretended_world(config: Config, workers: int) -> Iterator[World]:
    """The first of so many workers; collectives return at once and change nothing."""
    dist.init_process_group("fake", rank=0, world_size=workers, store=FakeStore())
    try:
        yield World(0, workers, 0, torch.device("cpu"), resolve_mesh(config, workers))
    finally:
        dist.destroy_process_group()


def track(config: Config, workers: int) -> dict[str, int]:
    """Bytes at the peak of the second step, by the tracker's kinds, "Total" among them."""
    with pretended_world(config, workers) as world:
        # Outside of fake mode and on meta: FSDP looks at storages that fake tensors do not have.
        with torch.device("meta"):
            model = Decoder(config.model)
        model.set_activation_checkpointing(config.train.activation_checkpointing)
        strategy = make_strategy(config, model.train(), world)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            model.cos, model.sin = (
                table.clone()
                for table in rotary_tables(config.model.max_sequence_length, model.shape.head_dim, 10_000.0)
            )
            optimizer = build_optimizer(config.optimizer, model, world.device, strategy.owns_for_update)
            ids = torch.zeros(1, config.train.sequence_length, dtype=torch.int64)

            def step() -> None:
                strategy.begin()
                with strategy.micro_batch(last_of_lane=True, last=True):
                    with autocast(config.train.precision, world.device):
                        loss = model(ids, ids)
                    loss.backward()
                strategy.reduce()
                optimizer.step()

            # A first step outside of the tracker: sharding is propagated through tensors of full size only once.
            step()
            tracker = FSDPMemTracker(model, optimizer) if isinstance(model, FSDPModule) else MemTracker()
            if not isinstance(model, FSDPModule):
                tracker.track_external(model, optimizer)
            tracker.track_inputs((ids,)) if isinstance(tracker, FSDPMemTracker) else None
            with tracker:
                step()
            snapshot = tracker.get_tracker_snapshot("peak")
    return {getattr(kind, "value", str(kind)): size for kind, size in next(iter(snapshot.values())).items()}


def planned(config: Config, workers: int) -> MemoryPlan:
    """The plan for kernels of the CPU, without gloo's buffers, which the tracker does not see either."""
    return plan_memory(config, config.model, Layout.of(config, workers), "cpu", gloo=False)


def unseen_bytes(config: Config, plan: MemoryPlan) -> int:
    """What a kernel takes inside: adding a chunk's half-precision part of the projection's gradient to the fp32 sum."""
    half, shape = config.train.precision in ("bf16", "fp16"), Shape.of(config.model)
    return 4 * shape.vocab_size * shape.dim if half and plan.peak.name == "loss" else 0


def compare(case: Case) -> dict[str, Any]:
    """One line of the table."""
    config, start = case.config(), time.perf_counter()
    tracked = track(config, case.workers)
    seconds = time.perf_counter() - start
    plan = planned(config, case.workers)
    seen = plan.peak_bytes - unseen_bytes(config, plan)
    error = seen / tracked["Total"] - 1
    print(
        f"{case.model:5} x{case.workers:<5} {case.strategy} {case.precision} {case.checkpointing:4}"
        f"  tracked {format_bytes(tracked['Total']):>10}  planned {format_bytes(seen):>10}  {error:+6.1%}"
        f"  ({plan.peak.name}; {seconds:.0f} s)",
        flush=True,
    )
    return {
        "case": case.name,
        "strategy": case.strategy,
        "precision": case.precision,
        "checkpointing": case.checkpointing,
        "tracked_bytes": tracked,
        "planned_bytes": seen,
        "planned_parts": plan.peak.parts,
        "error": error,
    }


def main() -> None:
    """Compare, and fail when one is too far off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--tolerance", type=float, default=0.1)
    parser.add_argument("--output", type=Path, help="also write the figures as JSON")
    arguments = parser.parse_args()
    results = [compare(case) for case in CASES if case.name in arguments.cases]
    if arguments.output:
        arguments.output.write_text(json.dumps({"torch": torch.__version__, "results": results}, indent=2) + "\n")
    if max(abs(result["error"]) for result in results) > arguments.tolerance:
        sys.exit(1)


if __name__ == "__main__":
    main()
