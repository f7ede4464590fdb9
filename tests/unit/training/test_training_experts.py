"""What a step does with a model that counts: the sum over workers, the update, and passes that are no part of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.config import Config, resolve
from headway.core.types import IGNORE_TARGET
from headway.models.build import build_model
from headway.models.decoder import Decoder
from headway.parallel.strategy import make_strategy
from headway.parallel.world import World
from headway.training import step
from headway.training.optimizer import build_optimizer
from headway.training.setup.precision import begin_scaling
from headway.training.state import TrainState, model_tensors
from headway.training.step import StepResult, TrainStep
from headway.training.task import LANGUAGE_MODELLING, Task
from support.states import parts

MODEL = {
    "dim": 24,
    "layers": 1,
    "heads": 2,
    "ffn_dim": 20,
    "experts": 4,
    "router_score": "sigmoid",
    "balance_bias_rate": 0.125,
    "router_z_loss": 0.5,
}


class Crowded(World):
    """A worker whose peers send all their 1,000 tokens to the first two experts."""

    def sum_integers(self, counts: torch.Tensor) -> torch.Tensor:
        return counts + torch.tensor([[1000, 1000, 0, 0, 1000, 0, 0]])


def batch(rows: int, seed: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(64, (rows, 17), generator=torch.Generator().manual_seed(seed))
    targets = tokens[:, 1:].clone()
    targets[0, 4:] = IGNORE_TARGET
    return {"ids": tokens[:, :-1], "targets": targets}


def run(
    batches: dict[int, list[dict[str, torch.Tensor]]], before: Any = None, world: type[World] = World, **train: Any
) -> tuple[Decoder, StepResult]:
    values = {"train": {"steps": 10, **train}, "model": MODEL, "optimizer": {"learning_rate": 0.01}}
    config = resolve(Config.model_validate(values))
    here = world(0, 1, 0, torch.device("cpu"))
    model = build_model(config.model, vocab_size=64, seed=0)
    if before is not None:
        before(model)
    task = Task(model, None, LANGUAGE_MODELLING)  # type: ignore[arg-type]
    state = TrainState(model, build_optimizer(config.optimizer, model, here.device))
    begin_scaling(state.cursor, config.train.precision)
    result = TrainStep(parts(config, task, state, make_strategy(config, model, here), here)).run(batches)
    return model, result


def biases(model: Decoder) -> list[float]:
    bias = model.mixtures()[0].bias_E
    assert bias is not None
    return bias.tolist()  # type: ignore[no-any-return]


def test_counts_are_read_once_and_not_behind_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them waits for all that a GPU has been given by then."""
    order, take, read, update = list[str](), Decoder.take_counts, torch.Tensor.cpu, step.update

    def taking(model: Decoder) -> torch.Tensor | None:
        order.append("take")
        return take(model)

    def reading(tensor: torch.Tensor) -> torch.Tensor:
        order.append("read")
        return read(tensor)

    def updating(*arguments: Any) -> None:
        order.append("update")
        update(*arguments)

    monkeypatch.setattr(Decoder, "take_counts", taking)
    monkeypatch.setattr(torch.Tensor, "cpu", reading)
    monkeypatch.setattr(step, "update", updating)
    monkeypatch.setitem(MODEL, "layers", 3)
    run({0: [batch(2, 0)]})
    assert order == ["take", "read", "take", "read", "update"]  # before the passes, and after them


def test_a_step_moves_biases_once_by_the_whole_batch() -> None:
    model, result = run({0: [batch(1, 0), batch(3, 1)], 1: [batch(2, 2)]})
    assert set(map(abs, biases(model))) <= {0.125, 0.0} and any(biases(model))
    assert result.model_metrics["train/dropped_share"] == 0.0
    assert "model.layers.0.feed_forward.selection_bias" in model_tensors(model)
    # The loss that is reported is that of the tokens alone.
    with torch.no_grad():
        fresh = build_model(model.config, vocab_size=64, seed=0)
        loss = sum(float(fresh(b["ids"], b["targets"])) for b in (batch(1, 0), batch(3, 1), batch(2, 2)))
    assert result.loss == pytest.approx(loss / result.items, rel=1e-5)


def test_how_rows_are_cut_changes_neither_losses_of_routers_nor_biases() -> None:
    parts = [batch(1, 0), batch(3, 1), batch(2, 2)]
    together = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    (a, first), (b, second) = run({0: parts}), run({0: [together]})
    assert biases(a) == biases(b)
    z = "train/router_z_loss"
    assert first.model_metrics[z] == pytest.approx(second.model_metrics[z], rel=1e-4)
    assert first.grad_norm == pytest.approx(second.grad_norm, rel=1e-4)


def test_counts_of_all_workers_are_added() -> None:
    batches = {0: [batch(2, 0)]}
    model, result = run(batches, world=Crowded)
    assert biases(model) == [-0.125, -0.125, 0.125, 0.125]
    assert result.model_metrics["train/expert_load_max"] > 1.9


def test_passes_that_are_no_part_of_a_step_do_not_count() -> None:
    def stray(model: Decoder) -> None:
        for seed in range(5, 10):
            model(ids_BT=batch(4, seed)["ids"], targets_BT=batch(4, seed)["targets"]).backward()

    batches = {0: [batch(2, 0)]}
    (a, first), (b, second) = run(batches), run(batches, before=stray)
    assert biases(a) == biases(b) and first.model_metrics == second.model_metrics


def test_a_skipped_step_leaves_the_biases_and_says_nothing() -> None:
    def spoil(model: Decoder) -> None:
        with torch.no_grad():
            model.norm.weight.fill_(torch.nan)

    model, result = run({0: [batch(2, 0)]}, before=spoil)
    assert result.skipped and not any(biases(model)) and result.model_metrics == {}


def test_in_fp16_the_losses_of_routers_are_scaled_as_the_loss_is() -> None:
    """Without that they would be as good as not there: the norm would be that of a run without them."""
    batches = {0: [batch(2, 0)]}
    norms = {precision: run(batches, precision=precision)[1].grad_norm for precision in ("fp32", "fp16")}

    def without(model: Decoder) -> None:
        for mixture in model.mixtures():
            mixture.z_weight = 0.0

    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=0.01)
    assert run(batches, before=without)[1].grad_norm != pytest.approx(norms["fp32"], rel=0.05)
