"""One step on a tiny module: what the update is, what is skipped, what the loss means."""

import math
from collections import UserDict
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from headway.config import Config, MeshShape, resolve
from headway.core.coordination import heartbeat
from headway.core.coordination.heartbeat import Heartbeat, Phase, Reading, read_heartbeat
from headway.models.decoder import Decoder
from headway.parallel.strategy import make_strategy
from headway.parallel.world import World
from headway.run.supervisor.watchdog import stragglers
from headway.training.evaluation.evaluate import evaluate
from headway.training.health import queued_update
from headway.training.optimizer import (
    build_optimizer,
    hidden_matrices,
    materialize,
    optimizer_tensors,
    set_learning_rate,
)
from headway.training.setup.precision import begin_scaling
from headway.training.state import Cursor, TrainState, model_tensors, parameter_names
from headway.training.step import TrainStep, _rng_coordinates, exact_sum
from headway.training.task import Objective, Task, to_device
from support.states import parts

WORLD = World(0, 1, 0, torch.device("cpu"))


@pytest.fixture(autouse=True, params=["read first", "queued"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the update is queued before loss and norm are read; all that is promised of a step holds either way."""
    if request.param == "queued":
        monkeypatch.setattr(queued_update, "_QUEUES", ("cpu",))


def config(**values: object) -> Config:
    base = {"train": {"steps": 10}, "optimizer": {"learning_rate": 0.1, "weight_decay": 0.0}, "schedule": {"warmup": 0}}
    return resolve(Config.model_validate({**base, **values}))


def make_task(model: nn.Module) -> Task:
    def summed_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (model(batch["x"]) - batch["y"]).square().sum()

    return Task(model, None, Objective(summed_loss, lambda batch: len(batch["x"])))  # type: ignore[arg-type]


def setup(c: Config, model: nn.Module) -> tuple[Task, TrainState]:
    return make_task(model), TrainState(model, build_optimizer(c.optimizer, model, torch.device("cpu")))


def batch(rows: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 3, generator=generator), "y": torch.randn(rows, 1, generator=generator)}


def test_losses_are_read_when_the_reduction_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them waits for the device, which would have nothing to do meanwhile."""
    c = config()
    task, state = setup(c, nn.Linear(3, 1))
    strategy, order = make_strategy(c, task.model, WORLD), []
    reduce, tolist = strategy.reduce, torch.Tensor.tolist

    def reducing() -> None:
        order.append("reduce")
        reduce()

    def reading(tensor: torch.Tensor) -> object:
        order.append("read")
        return tolist(tensor)

    monkeypatch.setattr(strategy, "reduce", reducing)
    monkeypatch.setattr(torch.Tensor, "tolist", reading)
    TrainStep(parts(c, task, state, strategy, WORLD)).run({0: [batch(2, 0)]})
    assert order[:2] == ["reduce", "read"]


class Told:
    """An observer of waits."""

    def __init__(self, told: list[str]) -> None:
        self._told = told

    def phase(self, phase: Phase) -> None:
        pass

    def waits(self, exchange: str) -> None:
        self._told.append(exchange)

    def goes_on(self) -> None:
        self._told.append("goes on")


class OnGpu(World):
    """One of several workers on GPUs, where exchanges go on when they have been called."""

    @property
    def queues_exchanges(self) -> bool:
        return True


def test_on_a_gpu_losses_are_read_in_an_exchange_and_who_does_not_get_there_is_to_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There all wait for each other where they read what the device has. Without an exchange the first worker would be
    blamed for whoever hangs."""
    c, page, told = config(), tmp_path / "heartbeat-0", list[str]()
    task, state = setup(c, nn.Linear(3, 1))
    monkeypatch.setattr(heartbeat, "_heartbeat", Heartbeat(page))
    monkeypatch.setattr(heartbeat, "_observer", Told(told))
    seen: dict[str, Reading | None] = {}
    tolist, summed_loss = torch.Tensor.tolist, task.objective.summed_loss

    def reading(tensor: torch.Tensor) -> object:
        seen.setdefault("reads", read_heartbeat(page))
        return tolist(tensor)

    def computing(*arguments: Any) -> torch.Tensor:
        seen.setdefault("computes", read_heartbeat(page))
        return summed_loss(*arguments)

    monkeypatch.setattr(torch.Tensor, "tolist", reading)
    on_device = replace(task, objective=replace(task.objective, summed_loss=computing))
    world = OnGpu(0, 1, 0, torch.device("cpu"))
    TrainStep(parts(c, on_device, state, make_strategy(c, task.model, world), world)).run({0: [batch(2, 0)]})
    reads, computes, after = seen["reads"], seen["computes"], read_heartbeat(page)
    assert reads is not None and computes is not None and after is not None
    assert (reads.waits_for, after.waits_for, after.finished.name) == ("sum of gradients", "", "sum of gradients")
    assert stragglers({0: reads, 1: computes, 2: reads}) == [1]
    assert told == []  # a profile has what the device did
    places = ((1, "cuda"), (2, "cpu"), (2, "cuda"))
    queue = [World(0, size, 0, torch.device(kind)).queues_exchanges for size, kind in places]
    assert queue == [False, False, True]


def test_micro_batches_of_different_sizes_weigh_by_their_items() -> None:
    c = config(train={"steps": 10, "max_grad_norm": None})
    pieces = [batch(1, 0), batch(5, 1), batch(2, 2)]
    together = {key: torch.cat([part[key] for part in pieces]) for key in ("x", "y")}
    weights = []
    for batches in ({0: pieces}, {0: [pieces[0]], 1: pieces[1:]}, {0: [together]}):
        torch.manual_seed(0)
        task, state = setup(c, nn.Linear(3, 1))
        result = TrainStep(parts(c, task, state, make_strategy(c, task.model, WORLD), WORLD)).run(batches)
        mean = nn.functional.mse_loss(task.model(together["x"]), together["y"])
        assert result.items == 8
        assert result.loss > float(mean)  # measured before the update
        weights.append(torch.cat([p.detach().flatten() for p in task.model.parameters()]))
    torch.testing.assert_close(weights[0], weights[1])
    torch.testing.assert_close(weights[0], weights[2])


def tensors(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: block.local for name, block in state.blocks().items()}


def test_the_gradient_is_clipped_to_the_mean_gradients_norm() -> None:
    c = config(train={"steps": 10, "max_grad_norm": 0.01})
    torch.manual_seed(0)
    task, state = setup(c, nn.Linear(3, 1))
    data = batch(8, 0)
    expected = torch.autograd.grad(
        (task.model(data["x"]) - data["y"]).square().sum() / 8, list(task.model.parameters())
    )
    result = TrainStep(parts(c, task, state, make_strategy(c, task.model, WORLD), WORLD)).run({0: [data]})
    norm = float(torch.cat([g.flatten() for g in expected]).norm())
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    clipped = torch.cat([p.grad.flatten() for p in task.model.parameters()])
    assert float(clipped.norm()) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_nothing_but_the_cursor(poison: float) -> None:
    c = config()
    torch.manual_seed(0)
    task, state = setup(c, nn.Linear(3, 1))
    strategy = make_strategy(c, task.model, WORLD)
    TrainStep(parts(c, task, state, strategy, WORLD)).run({0: [batch(4, 0)]})
    before = {name: tensor.clone() for name, tensor in tensors(state).items()}
    bad = batch(4, 1)
    bad["x"][2, 1] = poison
    result = TrainStep(parts(c, task, state, strategy, WORLD)).run({0: [bad]})
    assert result.skipped
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors(state).items())
    assert state.cursor == Cursor(step=2, skipped_steps=1, skipped_in_row=1)
    result = TrainStep(parts(c, task, state, strategy, WORLD)).run({0: [batch(4, 2)]})
    assert not result.skipped
    assert state.cursor == Cursor(step=3, skipped_steps=1, skipped_in_row=0)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("action", ["skip", "stop", "rollback"])
def test_a_step_without_a_target_is_no_divergence(precision: str, action: str) -> None:
    """Neither the limit of skipped steps nor a rule of health counts it, nor does a series of others end with it."""
    c = config(train={"steps": 10, "precision": precision}, health={"on_nonfinite": action})
    task, state = setup(c, nn.Linear(3, 1))
    begin_scaling(state.cursor, precision)
    scale, strategy = state.cursor.loss_scale, make_strategy(c, task.model, WORLD)
    state.cursor.skipped_in_row = 2
    before = {name: tensor.clone() for name, tensor in tensors(state).items()}
    result = TrainStep(parts(c, task, state, strategy, WORLD)).run({0: [batch(0, 0)]}, flags=(True, False))
    assert result.skipped and result.items == 0 and math.isnan(result.loss)
    assert result.decision is None and result.flags == [True, False]
    assert state.cursor == Cursor(step=1, skipped_in_row=2, loss_scale=scale, steps_without_target=1)
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors(state).items())


def test_dropout_depends_on_step_lane_and_micro_batch_only() -> None:
    c = config()
    data = batch(4, 0)
    losses = []
    for noise in (1, 2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5), nn.Linear(64, 1))
        task, state = setup(c, model)
        strategy = make_strategy(c, model, WORLD)
        torch.manual_seed(noise)  # whatever else used random numbers
        run = [TrainStep(parts(c, task, state, strategy, WORLD)).run({0: [data], 1: [data]}).loss for _ in range(3)]
        losses.append(run)
    assert losses[0] == losses[1]


def test_workers_with_other_positions_of_a_row_draw_other_masks() -> None:
    """Under tensor and context parallelism; data-parallel workers differ by their lanes, stages by their number."""
    mesh = MeshShape(dp_shard=2, cp=2, tp=2)
    workers = [World(rank, 8, rank, torch.device("cpu"), mesh) for rank in range(8)]
    model = nn.Linear(1, 1)
    assert {_rng_coordinates(model, worker) for worker in workers} == {()}, "what all have whole has the same mask"
    model.draws_by_position = True  # type: ignore[assignment]
    places = [_rng_coordinates(model, worker) for worker in workers]
    assert len(set(places)) == 4
    assert all((places[a] == places[b]) == (a % 4 == b % 4) for a in range(8) for b in range(8))
    # A worker that has whole rows draws what one alone does, so that lanes may go to any worker.
    assert _rng_coordinates(model, World(1, 2, 1, torch.device("cpu"), MeshShape(dp_shard=2))) == ()
    assert Decoder.draws_by_position


def test_flags_of_workers_are_agreed() -> None:
    c = config()
    task, state = setup(c, nn.Linear(3, 1))
    result = TrainStep(parts(c, task, state, make_strategy(c, task.model, WORLD), WORLD)).run(
        {0: [batch(4, 0)]}, (True, False)
    )
    assert result.flags == [True, False]


def test_decay_is_for_matrices_only() -> None:
    c = config(optimizer={"learning_rate": 0.1, "weight_decay": 0.5})
    optimizer = build_optimizer(c.optimizer, nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), torch.device("cpu"))
    decays = {p.ndim: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {2: 0.5, 1: 0.0}


def test_materialized_state_has_the_shape_of_the_real_one_and_leaves_weights_alone() -> None:
    c = config(optimizer={"learning_rate": 0.1, "weight_decay": 0.5})
    torch.manual_seed(0)
    task, state = setup(c, nn.Linear(3, 1))
    before = {name: tensor.clone() for name, tensor in model_tensors(task.model).items()}
    materialize(state.optimizer)
    assert all(torch.equal(before[name], tensor) for name, tensor in model_tensors(task.model).items())
    names = parameter_names(task.model)
    shapes = {name: t.shape for name, t in optimizer_tensors(state.optimizer, names).items()}
    assert state.optimizer.param_groups[0]["lr"] == 0.1
    assert state.optimizer.param_groups[0]["weight_decay"] == 0.5
    TrainStep(parts(c, task, state, make_strategy(c, task.model, WORLD), WORLD)).run({0: [batch(4, 0)]})
    assert {name: t.shape for name, t in optimizer_tensors(state.optimizer, names).items()} == shapes


class Tied(nn.Module):
    """An embedding that is the output projection too, with one matrix between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.middle = nn.Linear(4, 4)

    def output_projection(self) -> torch.Tensor:
        return self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.middle(self.embedding(ids)) @ self.embedding.weight.T


def test_muon_takes_the_matrices_between_layers_only() -> None:
    tied = Tied()
    assert [p is tied.middle.weight for p in hidden_matrices(tied)] == [True]
    stack = nn.Sequential(nn.Linear(3, 4), nn.Conv1d(4, 4, 1), nn.Linear(4, 5), nn.Linear(5, 2))
    assert [p is q for p, q in zip(hidden_matrices(stack), (stack[0].weight, stack[2].weight), strict=True)] == [
        True
    ] * 2
    c = config(optimizer={"name": "muon", "learning_rate": 0.1, "weight_decay": 0.5})
    optimizer = build_optimizer(c.optimizer, tied, torch.device("cpu"))
    set_learning_rate(optimizer, 0.25)
    assert {g["lr"] for part in optimizer.parts for g in part.param_groups} == {0.25}
    muon = optimizer.parts[1]
    assert isinstance(muon, torch.optim.Muon)
    assert [p is tied.middle.weight for g in muon.param_groups for p in g["params"]] == [True]


def test_muon_resumes_exactly() -> None:
    c = config(optimizer={"name": "muon", "learning_rate": 0.05})
    ids = torch.arange(8)

    def setup_tied() -> TrainState:
        torch.manual_seed(0)
        model = Tied()
        return TrainState(model, build_optimizer(c.optimizer, model, torch.device("cpu")))

    def update(state: TrainState, times: int) -> None:
        for _ in range(times):
            state.model.zero_grad()
            nn.functional.cross_entropy(state.model(ids), ids.roll(1)).backward()
            state.optimizer.step()

    whole = setup_tied()
    update(whole, 3)
    saved = {name: tensor.clone() for name, tensor in tensors(whole).items()}
    assert "optimizer.momentum_buffer.middle.weight" in saved
    update(whole, 2)
    resumed = setup_tied()
    for name, block in resumed.prepare_to_load().items():
        block.local.copy_(saved[name])
    update(resumed, 2)
    for name, tensor in tensors(whole).items():
        assert torch.equal(tensor, tensors(resumed)[name]), name


def test_optimizer_state_that_a_checkpoint_cannot_carry_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter]["history"] = [1, 2]
    with pytest.raises(TypeError, match="history"):
        optimizer_tensors(optimizer, {parameter: "weight"})


def test_tied_weights_are_saved_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    assert list(model_tensors(model)) == ["model.0.weight"]


def test_state_that_is_no_tensor_is_refused() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 1}

        def set_extra_state(self, state: dict[str, int]) -> None:
            pass

    with pytest.raises(TypeError, match=r"0\._extra_state"):
        model_tensors(nn.Sequential(Extra(2, 2)))


def test_opposite_infinities_are_a_skipped_step() -> None:
    assert math.isnan(exact_sum([math.inf, -math.inf]))
    assert exact_sum([1e16, 1.0, -1e16]) == 1.0


def test_an_evaluation_leaves_every_module_in_its_mode() -> None:
    model = nn.Sequential(nn.Linear(3, 1), nn.Dropout())
    model[1].eval()  # frozen on purpose

    class Held:
        def __len__(self) -> int:
            return 2

        def batch(self, index: int) -> dict[str, torch.Tensor]:
            return batch(4, index)

    evaluate(make_task(model).objective, model, Held(), WORLD)
    assert [module.training for module in model.modules()] == [True, True, False]
    # Without an item in the loss there is no mean, least of all the best one there can be.
    nothing = Objective(make_task(model).objective.summed_loss, lambda batch: 0)
    assert math.isnan(evaluate(nothing, model, Held(), WORLD).loss)


class Pair(NamedTuple):
    x: torch.Tensor
    y: list[torch.Tensor]


class Movable:
    def to(self, device: torch.device) -> "tuple[str, torch.device]":
        return ("moved", device)


def test_an_evaluation_that_waits_for_data_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor has more patience with that than with a forward pass."""
    page = Heartbeat(tmp_path / "heartbeat")
    phases: list[Phase] = []
    monkeypatch.setattr(heartbeat, "_heartbeat", page)

    class Batches:
        def __len__(self) -> int:
            return 2

        def batch(self, index: int) -> dict[str, torch.Tensor]:
            phases.append(page._phase)
            return {"x": torch.ones(2, 3)}

    def summed_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        phases.append(page._phase)
        return model(batch["x"]).sum()  # type: ignore[no-any-return]

    objective = Objective(summed_loss, lambda batch: len(batch["x"]))
    evaluate(objective, nn.Linear(3, 1), Batches(), WORLD)
    assert phases == [Phase.DATA, Phase.EVALUATION] * 2


def test_batches_of_any_form_go_to_the_device() -> None:
    meta = torch.device("meta")
    moved = to_device(Pair(torch.ones(1), [torch.ones(2)]), meta)
    assert isinstance(moved, Pair) and moved.x.is_meta and moved.y[0].is_meta
    assert to_device(UserDict(x=torch.ones(1)), meta)["x"].is_meta
    assert to_device((Movable(), "text", 3), meta) == (("moved", meta), "text", 3)
