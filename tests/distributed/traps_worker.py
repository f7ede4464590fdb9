"""Run under torchrun with two workers: data that tempt workers to do different things, under every strategy.

Rows have unequally many targets, in one step those of one worker have none, in another they are not finite on one of
them alone; a matrix is shared by two layers, one parameter takes no part, one is frozen, one does not lie row by row in
memory, each micro-batch chooses one of two layers in a block, some leave a block out, and every gradient is clipped.
All workers must end with the same bits of everything that they have copies of, and with what one alone computes.
"""

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from headway.checkpoint.format.manifest import hash_tensors
from headway.config import Config, LaneGrid, MeshShape, resolve
from headway.core.types import IGNORE_TARGET, MicroBatch
from headway.parallel.blocks import gather_whole
from headway.parallel.strategy import make_strategy
from headway.parallel.world import World, open_world
from headway.training.health import queued_update
from headway.training.optimizer import build_optimizer
from headway.training.state import TrainState
from headway.training.step import StepResult, TrainStep
from headway.training.task import Objective, Task
from support.states import parts

WIDTH, VOCABULARY, LENGTH, STEPS, POISONED, EMPTY = 24, 40, 10, 6, 2, 4
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.either = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        x = x + self.either[choice](x).tanh()
        return x + F.dropout(self.inner(self.norm(x)).tanh(), 0.2, self.training)


class Net(nn.Module):
    """Tied, and with a frozen vector."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.unused = nn.Parameter(torch.ones(3, WIDTH))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.turned = nn.Parameter((torch.randn(2 * WIDTH, WIDTH) / 4).t())

    def forward(self, ids: torch.Tensor, blocks: int) -> torch.Tensor:
        x = self.embedding(ids) * self.frozen
        x = x + (x @ self.turned).tanh() @ self.turned.T
        for block in self.blocks[:blocks]:
            x = block(x, int(ids[0, 0]) % 2)
        return x @ self.embedding.weight.T


def summed_loss(model: nn.Module, batch: MicroBatch) -> torch.Tensor:
    logits = model(batch["ids"], int(batch["blocks"].max())).flatten(0, 1)
    loss = F.cross_entropy(logits, batch["targets"].flatten(), ignore_index=IGNORE_TARGET, reduction="sum")
    return loss * batch["factor"].max()


def rows(step: int, lane: int) -> list[MicroBatch]:
    """Two micro-batches of a lane. The last two of four lanes are the second worker's; every other has one block."""
    batches = []
    for number in range(2):
        generator = torch.Generator().manual_seed(100 * step + 10 * lane + number)
        tokens = torch.randint(VOCABULARY, (3, LENGTH + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[:, 1 + (step + 3 * lane + 5 * number) % LENGTH :] = IGNORE_TARGET
        if step == EMPTY and lane >= 2:
            targets[:] = IGNORE_TARGET
        factor = torch.full((3,), torch.inf if step == POISONED and lane == 2 and number == 0 else 1.0)
        blocks = torch.full((3,), 2 - lane % 2)
        batches.append({"ids": tokens[:, :-1], "targets": targets, "factor": factor, "blocks": blocks})
    return batches


def train(config: Config, world: World, model: nn.Module, lanes: range) -> tuple[TrainState, list[StepResult]]:
    class Feed:
        def batch(self, step: int, lane: int) -> list[MicroBatch]:
            return rows(step, lane)

    feed: Any = Feed()
    objective = Objective(summed_loss, lambda batch: int((batch["targets"] != IGNORE_TARGET).sum()))
    strategy = make_strategy(config, model, world)
    elastic = config.determinism == "elastic"
    optimizer = build_optimizer(config.optimizer, model, world.device, strategy.owns_for_update, elastic=elastic)
    state, task = TrainState(model, optimizer), Task(model, feed, objective)
    results = []
    for step in range(STEPS):
        batches = {lane: rows(step, lane) for lane in lanes}
        results.append(TrainStep(parts(config, task, state, strategy, world)).run(batches))
    return state, results


def config_of(strategy: str, workers: int, determinism: str) -> Config:
    values = {
        "seed": 5,
        "determinism": determinism,
        "train": {"steps": STEPS, "global_batch": 24, "micro_batch": 3, "lanes": 4, "max_grad_norm": 0.2},
        "optimizer": {"learning_rate": 0.05},
        "schedule": {"warmup": "1 steps"},
        "parallel": {"strategy": strategy if workers > 1 else "auto", "workers": workers},
    }
    return resolve(Config.model_validate(values))


def check(world: World, model: nn.Module, strategy: str, determinism: str, expected: Any) -> None:
    weights, results = expected
    lanes = LaneGrid(4, 2, 3).of_worker(world.rank, world.size)
    state, found = train(config_of(strategy, 2, determinism), world, copy.deepcopy(model), lanes)
    name = f"{strategy} {determinism}"
    for step, (mine, right) in enumerate(zip(found, results, strict=True)):
        assert (mine.items, mine.skipped) == (right.items, right.skipped), (name, step)
        assert mine.skipped or abs(mine.loss - right.loss) < 1e-5 * right.loss, (name, step, mine.loss, right.loss)
        assert mine.skipped or abs(mine.grad_norm - right.grad_norm) < 1e-4 * right.grad_norm, (name, step)
    # Every worker tells what it has; nobody may have another copy of anything.
    if strategy != "zero3":
        own = hash_tensors({key: value.detach().clone() for key, value in state.model.named_parameters()})
        first, *others = world.gather_json(own)
        assert all(other == first for other in others), (name, "workers have drifted apart")
    together = gather_whole(state.blocks(), world)
    if world.is_first:
        for key, value in weights.items():
            torch.testing.assert_close(together[f"model.{key}"], value, rtol=1e-4, atol=1e-5, msg=f"{name}: {key}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(1)
    net = Net()
    alone = World(0, 1, 0, torch.device("cpu"))
    reference, told = train(config_of("auto", 1, "run"), alone, copy.deepcopy(net), range(4))
    assert [result.skipped for result in told] == [step == POISONED for step in range(STEPS)]
    assert (
        len({result.items for result in told}) > 3
        and min(result.grad_norm for result in told if not result.skipped) > 0.2
    )
    whole = {key: value.detach().clone() for key, value in reference.model.named_parameters()}
    assert torch.equal(whole["frozen"], net.frozen)
    wide = copy.deepcopy(net).double()
    in_fp64, told_in_fp64 = train(config_of("auto", 1, "run"), alone, copy.deepcopy(wide), range(4))
    with open_world("cpu", 120, MeshShape(dp_shard=2)) as here:
        for way in STRATEGIES:
            for promise in ("run", "elastic"):
                check(here, net, way, promise, (whole, told))
            check(here, wide, way, "run", (dict(in_fp64.model.named_parameters()), told_in_fp64))
        queued_update._QUEUES = ("cpu",)  # as on GPUs, where the device leaves an update out by itself
        for way in STRATEGIES:
            check(here, net, way, "run", (whole, told))
