"""Updates that are queued before the host has read loss and norm: the same bits, and the same steps left out."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from headway.checkpoint.format.manifest import hash_tensors
from headway.config import Config, resolve
from headway.core.process import faults
from headway.models.build import build_model
from headway.parallel.strategy import make_strategy
from headway.parallel.world import World
from headway.training import step
from headway.training.health import queued_update
from headway.training.health.queued_update import queues_update
from headway.training.optimizer import build_optimizer
from headway.training.setup.precision import begin_scaling
from headway.training.state import TrainState
from headway.training.step import StepResult, TrainStep
from headway.training.task import LANGUAGE_MODELLING, Task
from support.states import parts

WORLD = World(0, 1, 0, torch.device("cpu"))
SHAPE = {"dim": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_dim": 64}


def config(**values: Any) -> Config:
    return resolve(Config.model_validate({"train": {"steps": 20}, "model": SHAPE, **values}))


def rows(step: int, lane: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + lane)
    tokens = torch.randint(64, (2, 17), generator=generator)
    return {"ids": tokens[:, :-1], "targets": tokens[:, 1:]}


def train(c: Config, orders: dict[int, str] | None = None) -> tuple[dict[str, str], list[StepResult], TrainState]:
    """A few steps; returns hashes of weights and moments too."""
    model = build_model(c.model, vocab_size=64, seed=0)
    state = TrainState(model, build_optimizer(c.optimizer, model, WORLD.device))
    strategy = make_strategy(c, model, WORLD)

    def summed_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = LANGUAGE_MODELLING.summed_loss(model, batch)
        order = (orders or {}).get(state.cursor.step)
        if order == "gradient":  # that of one weight only
            loss = loss + math.nan * next(model.parameters()).sum()
        return loss.detach() * math.inf + 0 * loss if order == "loss" else loss

    task = Task(model, None, replace(LANGUAGE_MODELLING, summed_loss=summed_loss))
    results = [
        TrainStep(parts(c, task, state, strategy, WORLD)).run({lane: [rows(number, lane)] for lane in (0, 1)})
        for number in range(6)
    ]
    return hash_tensors({name: block.local for name, block in state.blocks().items()}), results, state


def both(monkeypatch: pytest.MonkeyPatch, c: Config, orders: dict[int, str] | None = None) -> list[Any]:
    """As the host decides, and as the device does."""
    read_first = train(c, orders)
    monkeypatch.setattr(queued_update, "_QUEUES", ("cpu",))
    asked: list[int] = []
    queue = step.queue_update
    monkeypatch.setattr(step, "queue_update", lambda *given: asked.append(1) or queue(*given))
    queued = train(c, orders)
    assert len(asked) == 6, "the other way was not taken"
    return [read_first, queued]


@pytest.mark.parametrize("limit", [None, 0.5, 1e9])
def test_one_worker_gets_the_same_bits(monkeypatch: pytest.MonkeyPatch, limit: float | None) -> None:
    (hashes, results, state), (again, told, other) = both(
        monkeypatch, config(train={"steps": 20, "max_grad_norm": limit})
    )
    assert hashes == again and state.cursor == other.cursor
    assert results == told
    assert not any(result.skipped for result in results)


@pytest.mark.parametrize("order", ["gradient", "loss"])
def test_the_same_steps_are_left_out(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    (hashes, results, state), (again, told, other) = both(monkeypatch, config(), {1: order, 4: order})
    assert hashes == again and state.cursor == other.cursor
    assert [result.skipped for result in told] == [number in (1, 4) for number in range(6)]
    assert [(r.loss, r.grad_norm) for r in told if not r.skipped] == [
        (r.loss, r.grad_norm) for r in results if not r.skipped
    ]
    assert not any(map(math.isfinite, (told[1].loss if order == "loss" else told[1].grad_norm,)))


def test_the_first_step_may_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments are there then, and as if there had been no step."""
    (_, _, state), (_, told, other) = both(monkeypatch, config(), {0: "gradient"})
    assert told[0].skipped
    for name, block in state.blocks().items():
        assert torch.equal(block.local, other.blocks()[name].local), name


def test_faults_on_request_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_FAULTS", "nan@gradient=3")
    monkeypatch.setattr(faults, "_passed", type(faults._passed)())
    monkeypatch.setattr(queued_update, "_QUEUES", ("cpu",))
    _, told, _ = train(config())
    assert [result.skipped for result in told] == [number == 2 for number in range(6)]


def test_what_the_host_decides_about_is_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queued_update, "_QUEUES", ("cpu",))

    def queues(c: Config, **changes: Any) -> bool:
        model = build_model(c.model, vocab_size=64, seed=0)
        state = TrainState(model, build_optimizer(c.optimizer, model, WORLD.device))
        begin_scaling(state.cursor, c.train.precision)
        assembled: Any = SimpleNamespace(config=c, state=replace(state, **changes), world=WORLD)
        return queues_update(assembled)

    assert queues(config())
    assert not queues(config(), decides=True), "a spike may be left out"
    assert not queues(config(train={"steps": 20, "precision": "fp16"})), "the loss scale follows from it"
    assert not queues(config(optimizer={"name": "lion"})), "no kernel that can be told to do nothing"
    assert not queues(config(determinism="elastic"))
    model = build_model(config().model, vocab_size=64, seed=0)
    state = TrainState(model, build_optimizer(config().optimizer, model, WORLD.device))
    offloading = config(optimizer={"offload": True})
    assembled: Any = SimpleNamespace(config=offloading, state=state, world=WORLD)
    assert not queues_update(assembled), "gradients and norm are in host memory"
    monkeypatch.undo()
    assert not queues(config()), "a CPU has nothing queued"
