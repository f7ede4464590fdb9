"""Loss on held-out text, with the same bits for any number of workers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from headway.core.coordination.heartbeat import Phase, beat
from headway.core.statistics import perplexity
from headway.core.types import MicroBatch
from headway.parallel.pipeline import Pipeline
from headway.parallel.world import World
from headway.training.figures import Counts
from headway.training.setup.precision import autocast
from headway.training.step import exact_sum
from headway.training.task import BatchList, HasReplay, Objective, to_device

#: About how often workers ask each other whether one of them was asked to stop. In between they do not wait.
_AGREE_SECONDS = 1.0
#: They also ask after at most this many batches, in case batches become slow.
_AGREE_BATCHES = 32


@dataclass(frozen=True)
class Evaluation:
    """Result of one evaluation."""

    loss: float
    """Mean over all evaluated items, in nats; NaN when no item took part in the loss."""
    items: int
    replay: Evaluation | None = None
    """The loss on replayed sources, which the other numbers leave out; None if there are none."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Metrics of a task of the user's own, and the parts of its loss, by their whole names."""

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
    *,
    precision: str = "fp32",
    pipeline: Pipeline | None = None,
    stopped: Callable[[], bool] = lambda: False,
    advance: Callable[[], None] = lambda: None,
) -> Evaluation | None:
    """Compute the loss over a list of micro-batches, which are dealt out in turns and summed in order.

    Every worker computes equally many, since a forward pass may need all of them: some results are discarded.

    Args:
        stopped: Whether this worker was asked to stop. If any was, all leave before the same batch.
        advance: Called after each batch of this worker.

    Returns:
        The loss; None if the evaluation was stopped early.
    """
    batches = len(feed)
    size = world.mesh.data
    sums = [0.0] * batches
    items = [0.0] * batches
    agreement = _Agreement(world, stopped)
    left = False
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    figures = objective.figures
    counted = Counts()
    if figures is not None:
        figures.take()  # discards those of passes outside of evaluations
    mine = range(world.data_rank, -(-batches // size) * size, size)
    read = in_order(feed, [min(index, batches - 1) for index in mine])
    for index in mine:
        left = agreement.stop_requested()
        if left:
            break
        beat(Phase.DATA)  # reading waits here, too, when the store is unavailable for a while
        batch = next(read)
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
        if figures is not None:
            found = figures.take()
            counted += found if index < batches else []
        advance()
    read.close()
    for module, mode in modes:  # one by one: a frozen module may have been in evaluation mode before
        module.training = mode
    if left:
        return None
    # The sum is exact, so it does not matter which worker computed which batch.
    workers = world.gather(sums + items)

    def over(first: int, last: int, replay: Evaluation | None = None) -> Evaluation:
        total = exact_sum([value for worker in workers for value in worker[first:last]])
        count = int(sum(value for worker in workers for value in worker[batches + first : batches + last]))
        return Evaluation(total / count if count else math.nan, count, replay)

    if not isinstance(feed, HasReplay):
        whole = over(0, batches)
        if figures is None:
            return whole
        everyone = [row for worker in world.gather_json(counted) for row in worker]
        return replace(whole, figures=figures.of_evaluation(everyone))
    return over(0, feed.replay_from, over(feed.replay_from, batches))


def in_order(feed: BatchList, indices: Sequence[int]) -> Generator[MicroBatch]:
    """Yield micro-batches of a list, read ahead where it can do that."""
    if hasattr(feed, "ahead"):
        yield from feed.ahead(indices)
    else:
        yield from map(feed.batch, indices)


class _Agreement:
    """Has workers leave an evaluation together: the next forward pass would wait for one that had left alone."""

    def __init__(self, world: World, stopped: Callable[[], bool]) -> None:
        self._world = world
        self._stopped = stopped
        self._every = self._next = 1
        self._since = time.monotonic()

    def stop_requested(self) -> bool:
        """Return whether any worker was asked to stop, before every batch and with one answer for all workers."""
        if self._world.size == 1:
            return self._stopped()
        self._next -= 1
        if self._next:
            return False
        everyone = self._world.gather([float(self._stopped()), time.monotonic() - self._since])
        # Use the slowest clock, which all workers know, so that all ask again before the same batch.
        seconds = max(worker[1] for worker in everyone)
        within = int(self._every * _AGREE_SECONDS / seconds) if seconds > 0 else _AGREE_BATCHES
        self._every = self._next = max(1, min(within, 2 * self._every, _AGREE_BATCHES))
        self._since = time.monotonic()
        return any(worker[0] for worker in everyone)
