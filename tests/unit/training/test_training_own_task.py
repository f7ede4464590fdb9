"""Tasks of the user's own: what the function may return, what is computed of it, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from torch import nn
from torch.nn import functional as F

import headway
from headway.checkpoint.store import CheckpointStore
from headway.config import Config, resolve
from headway.core.errors import ConfigError
from headway.telemetry.metrics import read_metrics
from headway.training.figures import Figures, metric_of
from headway.training.optimizer.groups import own_groups
from headway.training.own_task import build_task, check_task, try_loss


class Points:
    """Points and the side of a line that they are on; point `i` is a function of `i`."""

    def __init__(self, count: int = 64) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return x, (x[0] > x[1]).long()


class NoLength:
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(4)


class Options(BaseModel):
    width: int = 8


@dataclass
class Sizes:
    width: int = 8


def make_model(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))


def entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def with_outputs(model: nn.Module, batch: Any) -> Any:
    logits = model(batch[0])
    return F.cross_entropy(logits, batch[1]), logits


def parts(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    logits = model(batch[0])
    return {"side": F.cross_entropy(logits, batch[1]), "size": logits.square().mean()}


def right(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    return logits.argmax(-1) == batch[1]


def hits(logits: torch.Tensor, batch: Any) -> list[Any]:
    found, wanted = logits.argmax(-1) == 1, batch[1] == 1
    return [(found & wanted).sum(), found.sum(), wanted.sum()]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": model.get_parameter("0.weight"), "lr_scale": 0.5, "weight_decay": 0.0, "max_grad_norm": 0.01}]


def plain(config: Config) -> headway.Task:
    return headway.Task(make_model(), Points(), entropy)


def full(config: Config) -> headway.Task:
    metrics = {"right": right, "f1": headway.Metric(hits, lambda sums: 2 * sums[0] / (sums[1] + sums[2]))}
    return headway.Task(make_model(), Points(), with_outputs, Points(20), metrics=metrics, parameter_groups=groups)


def of_parts(config: Config) -> headway.Task:
    return headway.Task(make_model(), Points(), parts, Points(20), loss_weights={"size": 0.1})


def nothing(config: Config) -> None: ...


def without_length(config: Config) -> headway.Task:
    return headway.Task(make_model(), NoLength(), entropy)


def with_options(config: Config, options: Options) -> headway.Task:
    return headway.Task(make_model(options.width), Points(), entropy)


def with_sizes(config: Config, options: Sizes) -> headway.Task:
    return headway.Task(make_model(options.width), Points(), entropy)


def config(folder: Path, function: Callable[..., Any], **more: Any) -> Config:
    options = more.pop("options", {})
    name = f"{function.__module__}:{function.__name__}"
    values = {
        "runs": folder,
        "task": {"function": name, "options": options},
        "train": {"steps": 6, "global_batch": 8, "micro_batch": 2, "device": "cpu", **more.pop("train", {})},
        "evaluation": {"every": "3 steps"},
        "supervise": {"enabled": False},
        "telemetry": {"report": False},
        **more,
    }
    return resolve(Config.model_validate(values))


@torch.no_grad()
def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    return float(F.cross_entropy(model(x), y))


def weights(run: headway.Run) -> dict[str, torch.Tensor]:
    store = CheckpointStore(run.directory / "checkpoints")
    return store.load(store.list()[-1])


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (nothing, {}, "nothing returned None, which is no task"),
        (without_length, {}, "NoLength has no length"),
        (plain, {"width": 3}, "plain takes no options: width"),
        (with_options, {"widht": 3}, "has no option widht"),
        (with_options, {"width": "many"}, "task.options.width: Input should be a valid integer"),
        (with_sizes, {"width": "many"}, "task.options.width: Input should be a valid integer"),
        (with_sizes, {"depth": 1}, "has no option depth"),
    ],
)
def test_what_is_no_task_is_refused(
    tmp_path: Path, function: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_task(config(tmp_path, function, options=options))


@pytest.mark.parametrize("function", [with_options, with_sizes])
def test_options_reach_the_function(tmp_path: Path, function: Callable[..., Any]) -> None:
    own = build_task(config(tmp_path, function, options={"width": "5"}))
    assert own.model.get_parameter("0.weight").shape == (5, 4)


def test_first_weights_follow_from_the_seed(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    one, same, other = (build_task(config(tmp_path, plain, seed=seed)).model for seed in (1, 1, 2))
    assert torch.equal(state, torch.get_rng_state())
    assert all(map(torch.equal, one.parameters(), same.parameters()))
    assert not torch.equal(next(one.parameters()), next(other.parameters()))


@pytest.mark.parametrize(
    ("loss", "more", "message"),
    [
        (lambda model, batch: None, {}, "the loss returned None, not one number"),
        (lambda model, batch: model(batch[0]), {}, r"the loss returned a tensor \(8, 2\), not one number"),
        (lambda model, batch: {"a": entropy(model, batch), "b": 3}, {}, "the loss returned int for 'b'"),
        (lambda model, batch: entropy(model, batch).detach(), {}, "has no gradient"),
        (lambda model, batch: model(batch["image"]).mean(), {}, "the loss cannot be computed: TypeError"),
        (entropy, {"metrics": {"right": right}}, "the loss returned Tensor alone, and the metrics need outputs"),
        (entropy, {"loss_weights": {"size": 1.0}}, "the loss has no part size"),
        (entropy, {"parameter_groups": lambda model: [{"params": [nn.Parameter(torch.ones(1))]}]}, "not the model's"),
        (entropy, {"parameter_groups": lambda model: [{"params": model.parameters(), "lr": 1}]}, "has the key lr"),
    ],
)
def test_what_cannot_be_trained_is_refused(tmp_path: Path, loss: Any, more: dict[str, Any], message: str) -> None:
    own = headway.Task(make_model(), Points(), loss, **more)
    check_task(own)
    with pytest.raises(ConfigError, match=message):
        try_loss(own, config(tmp_path, plain).seed, 8)


@pytest.mark.parametrize(
    "values",
    [
        {"data": {"packing": "pad"}},
        {"model": {"preset": "10m"}},
        {"loss": "module:loss"},
        {"train": {"tokens": 1000, "steps": None}},
    ],
)
def test_keys_of_language_models_are_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is for language models, and this run has a task of its own"):
        config(tmp_path, plain, **values)


def test_a_lambda_cannot_be_found_again(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no function of a module"):
        headway.train(config(tmp_path, plain), task=lambda config: plain(config))


def test_figures_are_exact_and_recorded(tmp_path: Path) -> None:
    run = headway.train(config(tmp_path, full))
    model = make_model()
    model.load_state_dict({name[6:]: tensor for name, tensor in weights(run).items() if name.startswith("model.")})
    x, y = map(torch.stack, zip(*(Points()[i] for i in range(20)), strict=True))
    found, wanted = model(x).argmax(-1) == 1, y == 1
    f1 = 2 * int((found & wanted).sum()) / (int(found.sum()) + int(wanted.sum()))
    metrics = read_metrics(run.directory)
    assert metrics.last("evaluation/f1") == f1
    assert metrics.last("evaluation/right") == int((found == wanted).sum()) / 20


def test_parts_of_a_loss_are_weighted_and_recorded(tmp_path: Path) -> None:
    metrics = read_metrics(headway.train(config(tmp_path, of_parts)).directory)
    for kind in ("train", "evaluation"):
        side, size = (metrics.series(f"{kind}/losses/{name}")[1] for name in ("side", "size"))
        losses = metrics.series(f"{kind}/loss")[1]
        assert len(losses) > 1
        assert losses == pytest.approx(side + 0.1 * size, rel=1e-6)


def test_sums_of_figures_do_not_round() -> None:
    figures = Figures({"mean": metric_of(lambda outputs, batch: outputs)})
    with torch.no_grad():
        for value in (1e16, 1.0, -1e16):
            figures.add({}, 1, torch.tensor([value], dtype=torch.float64), None)
    assert figures.of_evaluation(figures.take()) == {"evaluation/mean": 1 / 3}
    assert figures.take() == []


def test_a_metric_of_nothing_is_not_a_number() -> None:
    figures = Figures({"ratio": headway.Metric(lambda outputs, batch: [0, 0], lambda sums: sums[0] / sums[1])})
    with torch.no_grad():
        figures.add({}, 1, None, None)
    assert math.isnan(figures.of_evaluation(figures.take())["evaluation/ratio"])


def test_groups_have_their_own_rate_and_limit(tmp_path: Path) -> None:
    """Beside two steps of PyTorch's own optimizer with such groups, and its own clipping."""
    settings = {"name": "adamw", "learning_rate": 0.01, "weight_decay": 0.1}
    values = {"optimizer": settings, "schedule": {"name": "constant", "warmup": 0.0}, "evaluation": {}}
    run = headway.train(config(tmp_path, full, train={"steps": 2, "micro_batch": 8}, **values))
    found, order = weights(run), _rows_of_steps(tmp_path, 2)
    model = build_task(config(tmp_path, full)).model
    own = model.get_parameter("0.weight")
    rest = [p for p in model.parameters() if p is not own]
    matrices, vectors = [p for p in rest if p.ndim == 2], [p for p in rest if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": [own], "lr": 0.005, "weight_decay": 0.0},
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.9, 0.95),
        fused=True,
    )
    for rows in order:
        x, y = map(torch.stack, zip(*(Points()[i] for i in rows), strict=True))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_([own], 0.01)
        nn.utils.clip_grad_norm_(rest, 1.0)
        optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[f"model.{name}"], p.detach(), rtol=1e-5, atol=1e-7)


def _rows_of_steps(folder: Path, steps: int) -> list[list[int]]:
    from headway.data.feeding.segmented import dataset_plan

    plan = dataset_plan(config(folder, full).row_settings, 64)
    return [plan.picks(step, 0, 8).rows.tolist() for step in range(steps)]


def test_groups_may_have_another_optimizer(tmp_path: Path) -> None:
    own = own_groups(make_model(), lambda model: [{"params": model.get_parameter("2.weight"), "optimizer": "lion"}])
    assert set(own) == {"2.weight"}
    run = headway.train(config(tmp_path, with_lion))
    names = set(weights(run))
    assert {"optimizer.exp_avg.2.weight", "optimizer.exp_avg_sq.0.weight"} <= names
    assert "optimizer.exp_avg_sq.2.weight" not in names, "lion has one moment"


def with_lion(config: Config) -> headway.Task:
    def own(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": model.get_parameter("2.weight"), "optimizer": "lion", "lr_scale": 0.1}]

    return headway.Task(make_model(), Points(), entropy, parameter_groups=own)


def test_the_average_follows_the_weights(tmp_path: Path) -> None:
    kept = {"checkpoint": {"every": "1 steps", "keep": 10}}
    run = headway.train(config(tmp_path, plain, train={"ema": 0.75}, **kept))
    store = CheckpointStore(run.directory / "checkpoints")
    states = [store.load(info) for info in store.list()]
    assert len(states) >= 5
    for before, after in pairwise(states):
        for name in (name for name in after if name.startswith("ema.")):
            weight = after[f"model.{name[4:]}"]
            assert torch.equal(after[name], before[name] * 0.75 + weight * 0.25)
    assert not torch.equal(states[-1]["ema.0.weight"], states[-1]["model.0.weight"])


def test_evaluations_use_the_average(tmp_path: Path) -> None:
    run = headway.train(config(tmp_path, full, train={"ema": 0.75}))
    model = make_model()
    model.load_state_dict({name[4:]: tensor for name, tensor in weights(run).items() if name.startswith("ema.")})
    x, y = map(torch.stack, zip(*(Points()[i] for i in range(20)), strict=True))
    assert read_metrics(run.directory).last("evaluation/right") == int((model(x).argmax(-1) == y).sum()) / 20
    loss = read_metrics(run.directory).last("evaluation/loss")
    assert loss == pytest.approx(loss_of(model, x, y), rel=1e-6)


def test_a_run_may_begin_to_average(tmp_path: Path) -> None:
    headway.train(config(tmp_path, plain))
    longer = config(tmp_path, plain, train={"ema": 0.5, "steps": 8})
    state = weights(headway.train(longer, accept_changes=True))
    assert not torch.equal(state["ema.0.weight"], state["model.0.weight"])
