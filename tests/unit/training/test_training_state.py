"""States without an update: they have no moments yet, and are saved and loaded so."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

import headway
from headway import Callback, Config
from headway.checkpoint.store import CheckpointInfo, CheckpointStore
from headway.config import OptimizerSpec, resolve
from headway.core.errors import CheckpointError
from headway.parallel.strategy import make_strategy
from headway.parallel.world import World
from headway.run.directory.restore import restore
from headway.run.directory.rewind import load_state
from headway.run.directory.run_directory import RunDirectory
from headway.training.optimizer import build_optimizer
from headway.training.state import TrainState
from headway.training.step import TrainStep
from headway.training.task import Objective, Task
from support.states import parts

OWN = "own_moments:SPEC"
OPTIMIZERS = ["adamw", "muon", "lion", "adafactor", *(["adamw8bit"] if find_spec("torchao") else []), OWN]


class Drifting(Optimizer):
    """Its state is not zero at first: the mean of the weights, which begins with them."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", p.detach().clone())
                    p.sub_(p.grad, alpha=group["lr"]).lerp_(mean, 0.1)
                    mean.lerp_(p, 0.5)


@pytest.fixture(autouse=True)
def own_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("own_moments")
    module.build = lambda inputs: Drifting(inputs.groups(), {"lr": inputs.config.learning_rate})  # type: ignore[attr-defined]
    module.SPEC = OptimizerSpec(  # type: ignore[attr-defined]
        name="drifting", build="own_moments:build", moment_bytes=lambda name, size: 4 * math.prod(size)
    )
    monkeypatch.setitem(sys.modules, "own_moments", module)


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(64, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x[:1].sin()}


class Stop(Callback):
    """Ends the attempt in a step, as a mistake does, before the step is saved."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step(self, job: Any, step: int, metrics: dict[str, float]) -> None:
        if step == self.at:
            raise KeyError("stopped")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32), nn.Linear(32, 1))


def fit(folder: Path, name: str, factors: dict[int, float], *callbacks: Callback, **sections: Any) -> Path:
    """Train to step 4, with losses of some steps (from 1) times a factor."""
    values: dict[str, Any] = {
        "name": name,
        "runs": str(folder),
        "train": {"steps": 4, "global_batch": 4, "device": "cpu"},
        "parallel": {"threads": 1},
        "checkpoint": {"every": "1 steps", "keep": 9},
        "telemetry": {"report": False},
    }
    for key, section in sections.items():
        values[key] = {**values.get(key, {}), **section}
    config, step = Config.model_validate(values), [0]

    class Count(Callback):
        def on_start(self, job: Any) -> None:
            step[0] = job.state.cursor.step

        def on_step(self, job: Any, now: int, metrics: dict[str, float]) -> None:
            step[0] = job.state.cursor.step

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (model(batch["x"]) - batch["y"]).square().mean() * factors.get(step[0] + 1, 1.0)

    headway.train(config, model=make_model(), dataset=Rows(), loss=loss, callbacks=[Count(), *callbacks])
    return config.run_directory


def info(run: Path, step: int) -> CheckpointInfo:
    return CheckpointStore(run / "checkpoints").info(step)


def moments(run: Path, step: int) -> list[str]:
    return [name for name in info(run, step).manifest.tensors if name.startswith("optimizer.")]


NAN = {1: math.nan, 2: math.nan}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stopped", [2, 3])
def test_a_run_stopped_before_its_first_update_continues(tmp_path: Path, optimizer: str, stopped: int) -> None:
    """Stopped in the second step, which is skipped too, and in the third, whose update is lost."""
    whole = fit(tmp_path, "whole", NAN, optimizer={"name": optimizer})
    with pytest.raises(KeyError, match="stopped"):
        fit(tmp_path, "stopped", NAN, Stop(stopped), optimizer={"name": optimizer})
    again = fit(tmp_path, "stopped", NAN, optimizer={"name": optimizer})
    assert not moments(again, stopped - 1) and moments(again, 4)
    assert [info(again, step).state_sha256 for step in (2, 3, 4)] == [
        info(whole, step).state_sha256 for step in (2, 3, 4)
    ]


def test_a_linear_layer_continues_after_losses_that_are_nan(tmp_path: Path) -> None:
    """With the public interface alone."""
    data = [{"x": torch.randn(8), "y": torch.ones(1)} for _ in range(8)]

    def train(name: str, steps: int, factor: float) -> Path:
        torch.manual_seed(0)
        config = Config.model_validate(
            {"name": name, "runs": str(tmp_path), "schedule": {"name": "constant"}, "train": {"steps": steps}}
        )
        run = headway.train(
            config,
            model=nn.Linear(8, 1),
            dataset=data,
            loss=lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean() * factor,
            accept_changes=True,
        )
        return run.directory

    ended = train("run", 2, math.nan)
    assert info(ended, 2).cursor["skipped_steps"] == 2 and not moments(ended, 2)
    ended = train("run", 4, 1.0)
    assert info(ended, 4).cursor["skipped_steps"] == 2 and moments(ended, 4)


def test_a_run_restored_to_before_its_first_update_has_the_same_bits_again(tmp_path: Path) -> None:
    run = fit(tmp_path, "run", NAN)
    before = info(run, 4).state_sha256
    restore(RunDirectory(run), 2)
    assert info(fit(tmp_path, "run", NAN), 4).state_sha256 == before


def test_gradients_that_overflow_in_fp16_from_the_start_leave_a_run_that_continues(tmp_path: Path) -> None:
    """The loss scale begins at 1,024, and a gradient of fp16 ends at 65,504."""
    options = {"train": {"precision": "fp16"}, "optimizer": {"name": "lion"}}
    large = {1: 1e8, 2: 1e8}
    whole = fit(tmp_path, "whole", large, **options)
    with pytest.raises(KeyError, match="stopped"):
        fit(tmp_path, "stopped", large, Stop(3), **options)
    assert not moments(tmp_path / "stopped", 2)
    again = fit(tmp_path, "stopped", large, **options)
    assert info(again, 4).cursor["loss_scale"] == 256 and info(again, 4).cursor["skipped_steps"] == 2
    assert info(again, 4).state_sha256 == info(whole, 4).state_sha256


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_rollback_to_before_the_first_update_has_no_moments(tmp_path: Path, optimizer: str) -> None:
    """Its first two steps are left out, after the first had its update; in the other run both are skipped."""
    sections = {"optimizer": {"name": optimizer}, "health": {"on_nonfinite": "rollback", "leave_out_steps": 2}}
    back = info(fit(tmp_path, "back", {2: math.nan}, **sections), 4)
    skipped = info(fit(tmp_path, "skipped", NAN, optimizer=sections["optimizer"]), 4)
    assert back.cursor["left_out_steps"] == skipped.cursor["skipped_steps"] == 2
    assert hashes(back) == hashes(skipped)


def hashes(found: CheckpointInfo) -> dict[str, str]:
    return {name: entry.sha256 for name, entry in found.manifest.tensors.items()}


CPU, CONFIG = torch.device("cpu"), Config.model_validate({})


@pytest.fixture
def lost(tmp_path: Path) -> Callable[..., CheckpointInfo]:
    """A checkpoint without moments, by a cursor of one's own."""
    store = CheckpointStore(tmp_path / "lost")

    def make(**cursor: int) -> CheckpointInfo:
        tensors = {f"model.{name}": tensor.detach() for name, tensor in make_model().named_parameters()}
        store.save(cursor["step"], tensors, cursor, {})
        return store.info(cursor["step"])

    return make


@pytest.mark.parametrize(
    ("cursor", "fits"),
    [
        ({"step": 4, "skipped_steps": 4}, True),
        ({"step": 4, "skipped_steps": 3, "left_out_steps": 1}, True),
        ({"step": 0}, True),
        ({"step": 4, "skipped_steps": 3}, False),
        ({"step": 4, "skipped_steps": 5}, False),
        ({"step": 4}, False),
    ],
)
def test_moments_may_be_absent_only_if_the_cursor_counts_no_update(
    lost: Callable[..., CheckpointInfo], cursor: dict[str, int], fits: bool
) -> None:
    found = lost(**cursor)
    model = make_model()
    state = TrainState(model, build_optimizer(CONFIG.optimizer, model, CPU))
    state.prepare_to_load()  # moments of later steps, as before a rollback
    store, world = CheckpointStore(found.path.parent), World(0, 1, 0, CPU)
    if fits:
        load_state(state, store, found, world)
        assert not state.optimizer.state and state.cursor.step == cursor["step"]
        return
    with pytest.raises(CheckpointError, match=r"'optimizer\..* is not in the checkpoint"):
        load_state(state, store, found, world)


def test_moments_that_a_checkpoint_holds_before_any_update_are_loaded(tmp_path: Path) -> None:
    """Kernels that skip an update by themselves have created them."""
    saved, loaded = (TrainState(m, build_optimizer(CONFIG.optimizer, m, CPU)) for m in (make_model(), make_model()))
    tensors = {name: block.local for name, block in saved.prepare_to_load().items()}
    store = CheckpointStore(tmp_path)
    store.save(2, tensors, {"step": 2, "skipped_steps": 2}, {})
    load_state(loaded, store, store.info(2), World(0, 1, 0, CPU))
    assert loaded.blocks().keys() == tensors.keys()


@pytest.mark.parametrize("kind", ["no item", "nan", "left out"])
def test_whatever_leaves_an_update_out_leaves_a_state_that_loads(tmp_path: Path, kind: str) -> None:
    """Each kind is counted in the cursor, which alone can prove that moments may be absent."""
    config = resolve(Config.model_validate({"train": {"steps": 4}}))
    model, world = make_model(), World(0, 1, 0, CPU)

    def summed_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = model(batch["x"]).square().sum()
        return loss * math.nan if kind == "nan" else loss

    task = Task(model, None, Objective(summed_loss, lambda batch: len(batch["x"])))  # type: ignore[arg-type]
    state = TrainState(model, build_optimizer(config.optimizer, model, CPU))
    state.skipped_ranges = ((0, 1),) if kind == "left out" else ()
    rows = torch.zeros(0 if kind == "no item" else 4, 64)
    result = TrainStep(parts(config, task, state, make_strategy(config, model, world), world)).run({0: [{"x": rows}]})
    assert result.skipped and state.cursor.step == 1
    store, tensors = CheckpointStore(tmp_path), {name: block.local for name, block in state.blocks().items()}
    store.save(1, tensors, state.cursor_record(), {})
    other = make_model()
    loaded = TrainState(other, build_optimizer(config.optimizer, other, CPU))
    load_state(loaded, store, store.info(1), world)
    assert loaded.cursor == state.cursor and loaded.blocks().keys() == tensors.keys()
