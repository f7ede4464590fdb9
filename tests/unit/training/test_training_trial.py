"""A trial before the first step changes nothing, and what does not fit is said; what fits is found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from headway.checkpoint.store import CheckpointInfo
from headway.config import Config, LaneGrid, MeshShape, resolve
from headway.core.errors import ConfigError
from headway.core.machine.system import Machine
from headway.parallel.strategy import Strategy, make_strategy
from headway.parallel.world import World
from headway.run.session.grid import choose_micro_batch
from headway.training.assembled import Assembled
from headway.training.optimizer import build_optimizer
from headway.training.setup import trial
from headway.training.setup.trial import (
    LiveBytes,
    explain_out_of_memory,
    is_out_of_memory,
    largest_micro_batch,
    largest_that_fits,
    trial_step,
)
from headway.training.state import TrainState
from headway.training.step import TrainStep
from headway.training.task import Objective, Task
from support.states import parts

CPU = torch.device("cpu")
WORLD = World(0, 1, 0, CPU)


def config(**values: Any) -> Config:
    train = {"steps": 8, "global_batch": 24, **values.pop("train", {})}
    optimizer = {"learning_rate": 0.05, **values.pop("optimizer", {})}
    return resolve(Config.model_validate({"train": train, "optimizer": optimizer, **values}))


class Rows:
    """Micro-batches of as many rows as the grid says."""

    def __init__(self, grid: LaneGrid) -> None:
        self.grid = grid

    def batch(self, step: int, lane: int) -> list[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(100 * step + lane)
        return [
            {"x": torch.randn(self.grid.micro_batch, 64, generator=generator)} for _ in range(self.grid.micro_batches)
        ]


def setup(c: Config, grid: LaneGrid, tracked: bool = False) -> tuple[Task, TrainState, Strategy]:
    torch.manual_seed(0)
    norm: nn.Module = nn.BatchNorm1d(256) if tracked else nn.LayerNorm(256)
    model = nn.Sequential(nn.Linear(64, 256), norm, nn.Dropout(0.5), nn.Linear(256, 1))
    objective = Objective(lambda m, batch: m(batch["x"]).square().sum(), lambda batch: len(batch["x"]))
    task = Task(model, Rows(grid), objective, recut=lambda grid: (Rows(grid), None))  # type: ignore[arg-type]
    strategy = make_strategy(c, model, WORLD)
    return task, TrainState(model, build_optimizer(c.optimizer, model, CPU)), strategy


def run(c: Config, task: Task, state: TrainState, strategy: Strategy, steps: int) -> None:
    for _ in range(steps):
        batches = {0: task.feed.batch(state.cursor.step, 0)}
        TrainStep(parts(c, task, state, strategy, WORLD)).run(batches)


@pytest.mark.parametrize("name", ["adamw", "muon", "lion", "adafactor"])
@pytest.mark.parametrize("determinism", ["run", "elastic"])
def test_a_trial_changes_nothing(name: str, determinism: str) -> None:
    c = config(optimizer={"name": name}, determinism=determinism)
    tracked = determinism == "run"
    states = []
    for trial_at in (None, 0, 2):
        task, state, strategy = setup(c, LaneGrid(1, 3, 8), tracked)
        for step in range(4):
            if step == trial_at:
                random = torch.get_rng_state()
                trial_step(parts(c, task, state, strategy, WORLD), task.feed.batch(7, 0)[0])
                assert torch.equal(random, torch.get_rng_state())
                assert all(p.grad is None or not p.grad.any() for p in task.model.parameters())
            run(c, task, state, strategy, 1)
        states.append({name: block.local for name, block in state.blocks().items()})
    for other in states[1:]:
        assert states[0].keys() == other.keys()
        assert not [key for key, tensor in states[0].items() if not torch.equal(tensor, other[key])]


@pytest.mark.parametrize(("strategy", "sums"), [("auto", False), ("ddp", False), ("zero1", False), ("zero2", True)])
def test_no_worker_waits_for_another_whose_memory_may_have_run_out(
    monkeypatch: pytest.MonkeyPatch, strategy: str, sums: bool
) -> None:
    """Where gradients can be summed afterwards."""
    task, state, own = setup(config(), LaneGrid(1, 3, 8))
    c = config(parallel={"strategy": strategy, "workers": 2})
    told: list[Any] = []
    monkeypatch.setattr(own, "reduce", lambda: told.append("summed"))
    monkeypatch.setattr(own, "micro_batch", lambda lane, last: told.append(last) or nullcontext())
    world = World(0, 2, 0, CPU, MeshShape(dp_shard=2))
    trial_step(parts(c, task, state, own, world), task.feed.batch(0, 0)[0])
    assert told == ([True, "summed"] if sums else [False])


def failing(c: Config, error: BaseException) -> tuple[Task, TrainState, Strategy, list[int]]:
    task, state, strategy = setup(c, LaneGrid(1, 3, 8))
    moments: list[int] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        moments.append(len(state.optimizer.state))
        raise error

    task.objective = Objective(loss, len)
    return task, state, strategy, moments


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError("no memory"),
    ],
)
def test_memory_that_runs_out_is_an_error_that_names_what_takes_less(error: BaseException) -> None:
    c = config()
    task, state, strategy, moments = failing(c, error)
    with pytest.raises(ConfigError, match=r"8 x 64.*does not fit") as caught:
        trial_step(parts(c, task, state, strategy, WORLD), task.feed.batch(0, 0)[0])
    assert moments == [6], "the moments were there"
    assert not state.optimizer.state, "and are gone"
    assert caught.value.where == "train.micro_batch"
    for knob in ("train.micro_batch", "activation_checkpointing=full", "precision=bf16", "adamw8bit"):
        assert knob in caught.value.fix
    assert "zero2" not in caught.value.fix, "there is one worker"


def test_other_errors_stay_what_they_are() -> None:
    c = config()
    task, state, strategy, _ = failing(c, RuntimeError("shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="multiplied"):
        trial_step(parts(c, task, state, strategy, WORLD), task.feed.batch(0, 0)[0])
    assert not is_out_of_memory(ValueError("can allocate"))


def test_real_memory_that_runs_out_on_the_cpu_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55)
    assert is_out_of_memory(caught.value)


def test_the_longest_rows_are_tried() -> None:
    feed = SimpleNamespace(longest_step=lambda first, last: 5, batch=lambda step, lane: [(step, lane)])
    assert largest_micro_batch(feed, 3, 0, 8) == (5, 3)  # type: ignore[arg-type, comparison-overlap]
    plain = SimpleNamespace(batch=lambda step, lane: [(step, lane)])
    assert largest_micro_batch(plain, 1, 2, 8) == (2, 1)  # type: ignore[arg-type, comparison-overlap]


def test_live_bytes_are_those_of_tensors_that_live() -> None:
    with LiveBytes() as live:
        a = torch.zeros(1000)
        view = a[10:]
        b = a + 1
        del a, view
        assert live.now == 4000
        c = b.view(10, 100) * 2
        assert (live.now, live.peak) == (8000, 8000)
        c.mul_(2)
        del b, c
    assert (live.now, live.peak) == (0, 8000)
    weight = torch.nn.Parameter(torch.ones(10, 10))
    with LiveBytes() as live:
        weight.t().sum()
    assert live.peak == 4, "a view of a parameter is no memory of its own"


def activations(rows: int) -> int:
    """Bytes that a trial of some rows takes at most, as measured."""
    c = config()
    task, state, strategy = setup(c, LaneGrid(1, 1, rows))
    return trial._peak(
        lambda n: trial_step(parts(c, task, state, strategy, WORLD), task.feed.batch(0, 0)[0]), rows, state, WORLD
    )


@pytest.mark.parametrize("rows", [1, 4, 6, 24])
def test_the_largest_that_fits_is_what_a_measurement_of_each_would_choose(rows: int) -> None:
    c = config(train={"micro_batch": "auto"})
    task, state, strategy = setup(c, LaneGrid(1, 3, 8))

    def attempt(n: int) -> None:
        feed = Rows(LaneGrid(1, 1, n))
        trial_step(parts(c, task, state, strategy, WORLD), feed.batch(0, 0)[0])  # type: ignore[arg-type]

    limit = activations(rows) + 200
    assert largest_that_fits([1, 2, 3, 4, 6, 8, 12, 24], attempt, state, WORLD, limit) == rows


def test_no_other_number_is_tried_where_others_wait_for_this_workers_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's sharded units, left in the middle of a pass, give no gradients any more."""
    monkeypatch.setattr(trial, "_peak", lambda attempt, rows, state, world: 10 * rows)
    world: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"), gather=lambda numbers: [numbers])
    tried: list[int] = []

    def attempt(rows: int) -> None:
        tried.append(rows)
        if rows > 3:
            cause = MemoryError() if rows < 9 else None
            raise ConfigError(f"{rows} rows do not fit", where="train.micro_batch", fix="something else") from cause

    arguments: tuple[Any, ...] = ([1, 2, 4, 8], attempt, None, world, 1000)
    with pytest.raises(ConfigError, match="8 rows do not fit") as caught:
        largest_that_fits(*arguments, again=False)
    assert tried == [8] and caught.value.fix == "train.micro_batch=4, or less"
    with pytest.raises(ConfigError, match="9 rows") as caught:
        largest_that_fits([1, 2, 9], *arguments[1:], again=False)
    assert caught.value.fix == "something else", "which is no question of memory"
    tried.remove(9)
    assert largest_that_fits(*arguments) == 2 and tried == [8, 8, 4, 2]


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda size: monkeypatch.setattr("headway.run.session.grid.memory_limit_bytes", lambda world: size)


def settle(c: Config, start: Any = None, recut: bool = True) -> tuple[LaneGrid, Task]:
    grid = LaneGrid(1, 3, 8)
    task, state, strategy = setup(c, grid)
    if not recut:
        task.recut = None
    info: CheckpointInfo | None = start
    return choose_micro_batch(Assembled(c, task, state, strategy, WORLD, grid), info).grid, task


def test_auto_cuts_the_same_rows_into_micro_batches_that_fit(limit: Callable[[int], None]) -> None:
    limit(activations(6) + 200)
    grid, task = settle(config(train={"micro_batch": "auto"}))
    assert grid == LaneGrid(1, 4, 6)
    assert [len(batch["x"]) for batch in task.feed.batch(0, 0)] == [6] * 4
    limit(2**40)
    assert settle(config(train={"micro_batch": "auto"}))[0] == LaneGrid(1, 1, 24)
    assert settle(config())[0] == LaneGrid(1, 3, 8), "only when asked"


def test_a_resumed_run_keeps_its_micro_batch(limit: Callable[[int], None]) -> None:
    limit(2**40)
    auto = {"micro_batch": "auto"}
    start = SimpleNamespace(context={"micro_batch": 4})
    assert settle(config(train=auto), start)[0] == LaneGrid(1, 6, 4)
    assert settle(config(train=auto, determinism="off"), start)[0] == LaneGrid(1, 1, 24)
    assert settle(config(train=auto), SimpleNamespace(context={"micro_batch": 5}))[0] == LaneGrid(1, 1, 24)


def test_auto_is_refused_where_it_would_break_a_promise_or_cannot_be() -> None:
    with pytest.raises(ConfigError, match="depends on it"):
        config(train={"micro_batch": "auto"}, determinism="elastic")
    with pytest.raises(ConfigError, match="one size only"):
        settle(config(train={"micro_batch": "auto"}), recut=False)


def test_workers_of_a_machine_share_what_they_may_have_of_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limit(world: World = WORLD, **files: str) -> int:
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return trial.memory_limit_bytes(world, Machine(tmp_path)) // 2**30

    assert limit(proc__meminfo=f"MemTotal: {64 * 2**20} kB\n") == 32
    eight = World(0, 8, 0, torch.device("cpu"))
    assert limit(eight) == 4, "an agent that does not say how many are here may have all of them here"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert limit(eight) == 8 and limit() == 32
    # A scheduler's job has a group of its own, below the one that is seen first.
    job = tmp_path / "sys/fs/cgroup/slurm/job_7/memory.max"
    job.parent.mkdir(parents=True)
    job.write_text(str(16 * 2**30))
    assert limit(eight, proc__self__cgroup="0::/slurm/job_7\n") == 2
    assert trial.memory_limit_bytes(WORLD, Machine(tmp_path / "nowhere")) > 0, "not on Linux"


def test_a_gpu_is_not_filled_with_what_others_have_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gib, gpu = 2**30, torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 * gib)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * gib))
    # 10 GiB are another's: CUDA's, NCCL's, or another process's.
    assert trial.memory_limit_bytes(World(0, 1, 0, gpu)) == int(0.92 * 70 * gib)


def test_batches_of_any_form_can_fail() -> None:
    c = config()
    sections = (c.train, c.parallel, c.optimizer)
    with (
        pytest.raises(ConfigError, match="3 x 2"),
        explain_out_of_memory(*sections, (torch.ones(()), [torch.ones(3, 2)])),
    ):  # type: ignore[arg-type]
        raise MemoryError("none left")


def test_no_advice_moves_to_the_host_what_is_there() -> None:
    c = config()
    host = c.train.model_copy(update={"weights": "bf16", "precision": "bf16"})
    for train, moves in ((c.train, True), (host, False)):
        with (
            pytest.raises(ConfigError) as raised,
            explain_out_of_memory(train, c.parallel, c.optimizer, torch.ones(3, 2)),
        ):
            raise MemoryError("none left")
        assert ("optimizer.offload=true" in str(raised.value)) == moves
