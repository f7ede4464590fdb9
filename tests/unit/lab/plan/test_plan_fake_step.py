"""A second opinion on planned memory: the real training step at the widths of 8 B parameters, on fake tensors.

Fake tensors have sizes and no memory. The step, the strategy and the optimizer are those of a run, and every storage
that an operation makes is counted until nothing refers to it; with several workers, collectives go to a process group
that sends nothing. Sharded weights are left out: propagation of their placements makes fake tensors of its own.
`benchmarks/plan/memory.py` measures those on real workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from headway.config import Config, resolve, resolve_lanes, resolve_mesh
from headway.lab.plan.layout import Layout
from headway.lab.plan.memory import plan_memory
from headway.lab.plan.trace import LiveStorages
from headway.models.build import build_without_memory
from headway.parallel.strategy import make_strategy
from headway.parallel.world import World
from headway.training.optimizer import build_optimizer
from headway.training.state import TrainState
from headway.training.step import TrainStep
from headway.training.task import LANGUAGE_MODELLING, Task
from support.states import parts

LENGTH = 4096
VOCABULARY = 128_256
LLAMA_8B: dict[str, Any] = {
    "dim": 4096, "layers": 2, "heads": 32, "kv_heads": 8, "ffn_dim": 14336, "vocab_size": VOCABULARY,
    "max_sequence_length": LENGTH,
}  # fmt: skip


class _Counted(LiveStorages):
    """Answers what a step reads from a tensor (its loss, whether gradients are finite), which has no value here."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def workers_without_others(count: int) -> Iterator[World]:
    """The first of several workers, whose exchanges end at once."""
    if count == 1:
        yield World(0, 1, 0, torch.device("cpu"))
        return
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield World(0, count, 0, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def config(strategy: str, workers: int, micro_batches: int, **train: Any) -> Config:
    return resolve(Config.model_validate({
        "model": LLAMA_8B,
        "train": {
            "steps": 1, "sequence_length": LENGTH, "micro_batch": 1, "global_batch": micro_batches * workers,
            "lanes": workers, "device": "cpu", **train,
        },
        "parallel": {"strategy": strategy, "workers": workers, "threads": 1},
    }))  # fmt: skip


def most_bytes(asked: Config, workers: int) -> int:
    """The most that lives at a time in the second of two steps; the first one makes the moments."""
    grid = resolve_lanes(asked, workers)
    model = build_without_memory(asked.model, vocab_size=VOCABULARY, seed=0)[0].train()
    model.set_activation_checkpointing(asked.train.activation_checkpointing)
    with workers_without_others(workers) as world, FakeTensorMode(allow_non_fake_inputs=True), _Counted([]) as live:
        model.to_empty(device="cpu")
        strategy = make_strategy(asked, model, World(**{**vars(world), "mesh": resolve_mesh(asked, workers)}))
        optimizer = build_optimizer(asked.optimizer, model, world.device, strategy.owns_for_update, elastic=False)
        state, task = TrainState(model, optimizer), Task(model, None, LANGUAGE_MODELLING)  # type: ignore[arg-type]
        for _ in range(2):
            live.restart()
            batches = {0: [_rows() for _ in range(grid.micro_batches)]}
            TrainStep(parts(asked, task, state, strategy, world, None)).run(batches)
            batches.clear()
        return live.restart()


def _rows() -> dict[str, torch.Tensor]:
    return {name: torch.zeros((1, LENGTH), dtype=torch.int64) for name in ("ids", "targets")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "workers", "micro_batches", "train"),
    [
        ("single", 1, 1, {"precision": "bf16", "activation_checkpointing": "full"}),
        ("single", 1, 1, {"precision": "bf16", "activation_checkpointing": "none"}),
        ("single", 1, 2, {"precision": "fp32", "activation_checkpointing": "full"}),
        ("ddp", 4, 2, {"precision": "bf16", "activation_checkpointing": "full"}),
        ("zero1", 4, 2, {"precision": "bf16", "activation_checkpointing": "full"}),
        ("zero2", 4, 2, {"precision": "bf16", "activation_checkpointing": "full"}),
    ],
)
def test_a_step_on_fake_tensors_takes_what_is_planned(
    strategy: str, workers: int, micro_batches: int, train: dict[str, Any]
) -> None:
    asked = config(strategy, workers, micro_batches, **train)
    planned = plan_memory(asked, asked.model, Layout.of(asked, workers), "cpu", gloo=False).peak_bytes
    assert planned == pytest.approx(most_bytes(asked, workers), rel=0.03)
