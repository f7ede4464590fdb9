"""Loss on held-out text, with the same bits for any number of workers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from headway.core.heartbeat import Phase, beat
from headway.core.statistics import perplexity
from headway.parallel.pipeline import Pipeline
from headway.parallel.world import World
from headway.training.precision import autocast
from headway.training.step import exact_sum
from headway.training.task import BatchList, Objective, to_device


@dataclass(frozen=True)
class Evaluation:
    """Result of one evaluation."""

    loss: float
    """Mean over all evaluated items, in nats; NaN when no item took part in the loss."""
    items: int

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return perplexity(self.loss)


@torch.no_grad()
def evaluate(
    objective: Objective,
    model: nn.Module,
    feed: BatchList,
    world: World,
    precision: str = "fp32",
    pipeline: Pipeline | None = None,
) -> Evaluation:
    """Loss over a list of micro-batches; they are dealt out in turns and summed in order.

    Every worker computes equally many, since a forward pass may take all of them: some compute one in vain.
    """
    batches, size = len(feed), world.mesh.data
    sums, items = [0.0] * batches, [0.0] * batches
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    for index in range(world.data_rank, -(-batches // size) * size, size):
        beat(Phase.DATA)  # a store that is away for a while is waited for here too
        batch = feed.batch(min(index, batches - 1))
        beat(Phase.EVALUATION)
        here = to_device(batch, world.device)
        if pipeline is not None:
            loss = pipeline.loss(here)
        else:
            with autocast(precision, world.device):
                loss = objective.summed_loss(model, here)
        if index < batches:
            sums[index] = float(loss) if world.counts_loss else 0.0
            items[index] = float(objective.count_items(batch)) if world.counts_items else 0.0
    for module, mode in modes:  # one by one: a frozen part may have been in evaluation mode before
        module.training = mode
    # The sum is exact, so it does not matter who computed what.
    workers = world.gather(sums + items)
    total = exact_sum([value for worker in workers for value in worker[:batches]])
    count = int(sum(value for worker in workers for value in worker[batches:]))
    return Evaluation(total / count if count else math.nan, count)
