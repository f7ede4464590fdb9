"""Loss on held-out text, with the same bits for any number of workers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
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

#: Workers ask each other about so often whether one of them was told to stop. In between none waits for the others.
_AGREE_SECONDS = 1.0
#: At the most after so many batches, should they become slow.
_AGREE_BATCHES = 32


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
    stopped: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Loss over a list of micro-batches; they are dealt out in turns and summed in order.

    Every worker computes equally many, since a forward pass may take all of them: some compute one in vain.

    Args:
        stopped: Whether this worker was told to stop. When any was, all leave before the same batch.

    Returns:
        The loss; None when the evaluation was left.
    """
    batches, size = len(feed), world.mesh.data
    sums, items = [0.0] * batches, [0.0] * batches
    agreement, left = _Agreement(world, stopped), False
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    for index in range(world.data_rank, -(-batches // size) * size, size):
        left = agreement.to_leave()
        if left:
            break
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
    if left:
        return None
    # The sum is exact, so it does not matter who computed what.
    workers = world.gather(sums + items)
    total = exact_sum([value for worker in workers for value in worker[:batches]])
    count = int(sum(value for worker in workers for value in worker[batches:]))
    return Evaluation(total / count if count else math.nan, count)


class _Agreement:
    """Workers leave an evaluation together: one that left alone would be waited for in the next forward pass."""

    def __init__(self, world: World, stopped: Callable[[], bool]) -> None:
        self._world, self._stopped = world, stopped
        self._every = self._next = 1
        self._since = time.monotonic()

    def to_leave(self) -> bool:
        """Asked before every batch, of which all workers have equally many; the same answer on all of them."""
        if self._world.size == 1:
            return self._stopped()
        self._next -= 1
        if self._next:
            return False
        everyone = self._world.gather([float(self._stopped()), time.monotonic() - self._since])
        # By the slowest clock, which all have heard of, so that all ask again before the same batch.
        seconds = max(worker[1] for worker in everyone)
        within = int(self._every * _AGREE_SECONDS / seconds) if seconds > 0 else _AGREE_BATCHES
        self._every = self._next = max(1, min(within, 2 * self._every, _AGREE_BATCHES))
        self._since = time.monotonic()
        return any(worker[0] for worker in everyone)
