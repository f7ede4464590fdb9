"""What a worker has between two steps, and what its update must move at least."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from headway.config import Config, MeshShape, resolve
from headway.lab.profiling.profiler import _kept_bytes, _work
from headway.parallel.strategy import make_strategy
from headway.parallel.world import World
from headway.training.optimizer import build_optimizer, materialize, update
from headway.training.state import TrainState

ONE = World(0, 1, 0, torch.device("cpu"))
TWO = World(0, 2, 0, torch.device("cpu"), MeshShape(dp_shard=2))
#: Of fp32.
WIDTH = 4


def after_a_step(world: World, strategy: str, optimizer: str = "adamw") -> Any:
    """A worker whose optimizer has its moments, and whose gradients are where the reduction has left them."""
    config = resolve(
        Config.model_validate(
            {"train": {"steps": 1}, "parallel": {"strategy": strategy}, "optimizer": {"name": optimizer}}
        )
    )
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    spread = make_strategy(config, model, world)
    state = TrainState(model, build_optimizer(config.optimizer, model, world.device, spread.owns_for_update))
    materialize(state.optimizer)
    spread.begin()
    with spread.micro_batch(last_of_lane=True, last=True):
        model(torch.ones(2, 8)).sum().backward()
    spread.end_lane()
    spread.reduce()
    return SimpleNamespace(state=state, config=config, assembled=SimpleNamespace(strategy=spread))


@pytest.mark.parametrize(("strategy", "gradients", "moments"), [("ddp", 2, 4), ("zero1", 2, 2), ("zero2", 1, 2)])
def test_between_two_steps_a_worker_has_the_gradients_that_the_reduction_has_left_to_it(
    monkeypatch: pytest.MonkeyPatch, strategy: str, gradients: int, moments: int
) -> None:
    """Of two equal matrices on two workers each of which updates one; what all others do is left out."""
    done = SimpleNamespace(wait=lambda: None)
    for exchange in ("reduce", "all_reduce", "broadcast"):
        monkeypatch.setattr(dist, exchange, lambda *_, **__: done)
    job = after_a_step(TWO, strategy)
    matrix, steps = 64 * WIDTH, WIDTH * moments // 2
    assert _kept_bytes(job) == (2 + gradients + moments) * matrix + steps


@pytest.mark.parametrize(("optimizer", "passes", "moments"), [("adamw", 2, 2), ("lion", 3, 1)])
def test_gradients_are_read_again_only_where_clipping_is_a_pass_of_its_own(
    monkeypatch: pytest.MonkeyPatch, optimizer: str, passes: int, moments: int
) -> None:
    job = after_a_step(ONE, "single", optimizer)
    parameters = list(job.state.model.parameters())
    weights = sum(p.nbytes for p in parameters)
    steps = sum(s["step"].nbytes for s in job.state.optimizer.state.values() if "step" in s)
    assert _work(job).update_bytes == (passes + 2 + 2 * moments) * weights + 2 * steps
    # The update does what is said of it: a pass over all gradients before, or none.
    scaled: list[int] = []
    foreach = torch._foreach_mul_

    def counted(tensors: Any, *arguments: Any) -> Any:
        scaled.extend(tensor.data_ptr() for tensor in tensors)
        return foreach(tensors, *arguments)

    monkeypatch.setattr(torch, "_foreach_mul_", counted)
    update(job.state.optimizer, 0.5)
    gradients = {p.grad.data_ptr() for p in parameters}
    assert bool(gradients & set(scaled)) == (passes == 3)
