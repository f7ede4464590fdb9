"""One training step: the only place that does forward, backward and update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from headway.config import Config
from headway.core.faults import fault_point
from headway.core.heartbeat import Phase, beat, exchanging
from headway.core.random import derive_seed
from headway.core.types import MicroBatch
from headway.parallel.norms import norm_parts, total_norm
from headway.parallel.pipeline import AroundBackward, Pipeline
from headway.parallel.strategy import Strategy
from headway.parallel.world import World
from headway.training.health import Decision, decide, is_left_out, judge, remember
from headway.training.loss_scale import update_scale
from headway.training.optimizer import set_learning_rate, update
from headway.training.precision import autocast
from headway.training.queued_update import begin_reading, mean_norm, queue_update, queues_update
from headway.training.replay import replay_is_due, replayed
from headway.training.schedule import learning_rate
from headway.training.state import TrainState
from headway.training.task import Task, to_device


@dataclass(frozen=True)
class StepResult:
    """What one step did, the same on every worker."""

    loss: float
    """Mean over all items of the global batch."""
    items: int
    grad_norm: float
    """Global norm before clipping."""
    learning_rate: float
    skipped: bool
    """The update was left out: loss or gradient was not finite, or no item took part in the loss."""
    flags: Sequence[bool]
    """The caller's flags, as agreed by all workers (see `train_step`)."""
    model_metrics: Mapping[str, float] = field(default_factory=dict)
    """What the model itself, and a comparison with the steps before, say of the step."""
    decision: Decision | None = None
    """What is to be done about a step that is not well."""
    left_out: bool = False
    """The step was not computed, since its rows are left out."""


def train_step(
    config: Config,
    task: Task,
    state: TrainState,
    strategy: Strategy,
    world: World,
    batches: Mapping[int, Sequence[MicroBatch]],
    flags: Sequence[bool] = (),
    pipeline: Pipeline | None = None,
) -> StepResult:
    """Train on this worker's lanes of the current step and move the cursor on.

    Args:
        batches: The micro-batches of each of this worker's lanes, by lane number.
        flags: Wishes of this worker (to stop, to save). They travel with the losses, so that agreeing on them costs
            nothing; the result holds for each whether any worker wished it.
        pipeline: The stages of the model that this worker has, when others have the rest.
    """
    if is_left_out(state.skipped_ranges, state.cursor.step):
        return _leave_out(config, state, world, flags)
    beat(Phase.COMPUTE)  # also while gradients are cleared
    _counted(state.model)  # by passes that were no part of a step
    gradients = partial(_gradients, config, task, state, strategy, world, batches, pipeline)
    rate = learning_rate(config, state.cursor.step)
    replays = replay_is_due(config.health.replay_every, state.cursor.step)
    queued = not replays and queues_update(config, state, world)
    if queued:
        losses, items = gradients()
        sums = _queue_and_read(config, state, strategy, world, losses, items, flags, rate)
        counts = _counted(state.model)  # of passes that the host has waited for by now
    else:
        compute = partial(_read, gradients, world)
        read = replayed(compute, partial(_counted, state.model), state, world) if replays else compute()
        counts = _counted(state.model)  # while the device has nothing queued that it would be waited for
        sums = _exchange(config, state, strategy, world, pipeline, *read, flags)

    health = judge(config.health, state.history, sums.loss, sums.grad_norm)
    decision = decide(config.health, health, state.cursor.step)
    finite = math.isfinite(sums.loss) and math.isfinite(sums.grad_norm)
    good = well = finite and (decision is None or decision.action == "warn")
    if well:
        remember(config.health, state.history, sums.loss, sums.grad_norm)
        good = queued or _update(config, state, strategy, sums, rate)
    elif state.engine is not None:
        state.engine.skip()
    model_metrics = _after_step(state.model, counts, world, updated=good)

    cursor = state.cursor
    cursor.step += 1
    cursor.skipped_steps += not good
    scale = cursor.loss_scale
    explained = update_scale(cursor, overflow=math.isfinite(sums.loss) and (well > good or not finite))
    cursor.skipped_in_row = 0 if good else cursor.skipped_in_row + (not explained)
    if explained or well > good:  # it has left the update out, whatever health would do about such a step
        reason = "the gradient overflowed" + (f" at the loss scale {scale:,}" if scale else "")
        decision = Decision(cursor.step - 1, "skip", reason, cursor.step - 1, quiet=explained)
    return StepResult(
        loss=sums.loss,
        items=sums.items,
        grad_norm=sums.grad_norm,
        learning_rate=rate,
        skipped=not good,
        flags=sums.flags,
        model_metrics={**model_metrics, **health.metrics},
        decision=decision,
    )


@dataclass(frozen=True)
class _Sums:
    """What a step's passes have given, over all workers."""

    loss: float
    """Mean over all items; NaN without any, or where a lane's is not finite."""
    items: int
    grad_norm: float
    """Of the mean gradient, before clipping."""
    flags: Sequence[bool]
    """As agreed."""


def _queue_and_read(
    config: Config,
    state: TrainState,
    strategy: Strategy,
    world: World,
    losses: torch.Tensor,
    items: int,
    flags: Sequence[bool],
    rate: float,
) -> _Sums:
    """Have the device update by itself, and read loss and norm when that is queued: see `queued_update`."""
    everyone = world.gather([float(items), *map(float, flags)])  # while the device computes
    items = int(sum(worker[0] for worker in everyone))
    beat(Phase.UPDATE)
    set_learning_rate(state.optimizer, rate)
    norm = mean_norm(world, _counted_by(strategy, state, None), losses, items, _injected_fault(state))
    read = begin_reading(torch.cat([losses.double(), norm[None]]))
    queue_update(config, state, norm, items)
    strategy.after_update()
    *lane_losses, grad_norm = _numbers(world, read)
    loss = exact_sum([loss for worker in world.gather(lane_losses) for loss in worker])
    return _Sums(loss / (items or math.nan), items, grad_norm, _agreed(everyone, len(flags)))


def _exchange(
    config: Config,
    state: TrainState,
    strategy: Strategy,
    world: World,
    pipeline: Pipeline | None,
    lane_losses: list[float],
    items: int,
    flags: Sequence[bool],
) -> _Sums:
    """Agree on flags, and sum losses, items and norms in ways whose result does not depend on the number of workers."""
    if state.engine is None:
        norms = norm_parts(_counted_by(strategy, state, pipeline), exact=config.determinism == "elastic")
    else:
        norms = state.engine.norm_parts()
    everyone = world.gather([float(items), *map(float, flags), *norms, *lane_losses])
    beat(Phase.UPDATE)
    first_norm, first_loss = 1 + len(flags), 1 + len(flags) + len(norms)
    total = exact_sum([loss for worker in everyone for loss in worker[first_loss:]])
    items = int(sum(worker[0] for worker in everyone))
    norm = total_norm([worker[first_norm:first_loss] for worker in everyone])
    # Of no items there is no mean.
    grad_norm = norm / ((items or math.nan) * (state.cursor.loss_scale or 1)) * _injected_fault(state)
    return _Sums(total / (items or math.nan), items, grad_norm, _agreed(everyone, len(flags)))


def _agreed(everyone: Sequence[Sequence[float]], flags: int) -> list[bool]:
    """Whether any worker wishes it, for each of the flags, which come behind the number of its items."""
    return [any(worker[1 + i] for worker in everyone) for i in range(flags)]


def _counted_by(strategy: Strategy, state: TrainState, pipeline: Pipeline | None) -> Iterator[nn.Parameter]:
    """Parameters whose gradient this worker counts into the norm."""
    for group in state.optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and strategy.owns_for_norm(p) and (pipeline is None or pipeline.owns_for_norm(p)):
                yield p


def _injected_fault(state: TrainState) -> float:
    """What a test wants the norm multiplied by."""
    fault = fault_point("gradient", state.cursor.step + 1)
    return 1.0 if fault is None else {"nan": math.nan, "spike": 1e4}[fault]


def _update(config: Config, state: TrainState, strategy: Strategy, sums: _Sums, rate: float) -> bool:
    """Gradients are sums over all items; the mean and the clipping are one multiplication. Returns whether the update
    was done, which a library may leave out."""
    limit = config.train.max_grad_norm
    clip = 1.0 if limit is None else min(1.0, limit / (sums.grad_norm + 1e-6))
    factor = clip / (sums.items * (state.cursor.loss_scale or 1))
    set_learning_rate(state.optimizer, rate)
    if state.engine is not None:
        return state.engine.update(factor)
    update(state.optimizer, factor)
    strategy.after_update()
    return True


def _leave_out(config: Config, state: TrainState, world: World, flags: Sequence[bool]) -> StepResult:
    """A step whose rows are left out: nothing but the cursor moves, and workers agree on their wishes."""
    everyone = world.gather([float(flag) for flag in flags] or [0.0])
    rate = learning_rate(config, state.cursor.step)
    state.cursor.step += 1
    state.cursor.left_out_steps += 1
    agreed = [any(worker[i] for worker in everyone) for i in range(len(flags))]
    return StepResult(math.nan, 0, math.nan, rate, skipped=True, flags=agreed, left_out=True)


def _gradients(
    config: Config,
    task: Task,
    state: TrainState,
    strategy: Strategy,
    world: World,
    batches: Mapping[int, Sequence[MicroBatch]],
    pipeline: Pipeline | None,
) -> tuple[torch.Tensor, int]:
    """Leave the sum of gradients over the global batch where the strategy wants it.

    Returns:
        The loss sum of each of this worker's lanes, (lanes,), and the number of items; zeros where another worker of
        the pipeline tells them.
    """
    strategy.begin()
    prepare_own_losses(state.model, state.cursor.loss_scale)
    losses, items = _forward_backward(config, task, state, strategy, world, batches, pipeline)
    beat(Phase.REDUCE)
    strategy.reduce()
    if pipeline is not None:
        pipeline.reduce_shared()
    return losses, items


def _read(gradients: Callable[[], tuple[torch.Tensor, int]], world: World) -> tuple[list[float], int]:
    """What `_gradients` gives, as numbers."""
    losses, items = gradients()
    return _numbers(world, losses.tolist), items


def _numbers(world: World, read: Callable[[], list[float]]) -> list[float]:
    """Values of the device. Reading waits for it, and with it for other workers, so all that it has to do up to here is
    queued before."""
    with exchanging("sum of gradients", observed=False) if world.queues_exchanges else nullcontext():
        return read()


def _forward_backward(
    config: Config,
    task: Task,
    state: TrainState,
    strategy: Strategy,
    world: World,
    batches: Mapping[int, Sequence[MicroBatch]],
    pipeline: Pipeline | None,
) -> tuple[torch.Tensor, int]:
    """Accumulate gradients of this worker's lanes.

    Returns:
        The loss sum of each lane, (lanes,), and the number of items; zeros where another worker of the pipeline tells
        them.
    """
    losses: list[torch.Tensor] = []
    items = 0
    last_lane = max(batches)
    for lane, micro_batches in sorted(batches.items()):
        beat(Phase.COMPUTE)
        if world.counts_items:
            items += sum(map(task.objective.count_items, micro_batches))
        place = _rng_coordinates(state.model, world)
        seeds = [
            derive_seed(config.seed, "dropout", state.cursor.step, lane, i, *place) for i in range(len(micro_batches))
        ]
        around = partial(_around, strategy, lane == last_lane)
        if pipeline is None:
            loss = _lane(config, task, state, world, micro_batches, seeds, around)
        else:
            loss = pipeline.train(to_device(list(micro_batches), world.device), seeds, around)
        losses.append(loss if world.counts_loss else torch.zeros_like(loss))
        strategy.end_lane()
    return torch.stack(losses), items


def _rng_coordinates(model: nn.Module, world: World) -> tuple[int, ...]:
    """What tells this worker's random numbers from those of others that compute the same rows.

    They have other positions, and masks that repeat there would be no masks at random. A model must declare by
    `draws_by_position = True` that it draws for nothing else; of what all have whole they must draw the same.
    """
    if world.mesh.cp * world.mesh.tp == 1 or not getattr(model, "draws_by_position", False):
        return ()
    places = world.mesh.coordinates(world.rank)
    return places["cp"], places["tp"]


def _around(strategy: Strategy, last_lane: bool, last_of_lane: bool) -> AbstractContextManager[None]:
    return strategy.micro_batch(last_of_lane, last=last_of_lane and last_lane)


def _lane(
    config: Config,
    task: Task,
    state: TrainState,
    world: World,
    batches: Sequence[MicroBatch],
    seeds: Sequence[int],
    around: AroundBackward,
) -> torch.Tensor:
    """One lane, a micro-batch after the other; returns its summed loss."""
    total = torch.zeros((), device=world.device)
    for index, batch in enumerate(batches):
        beat(Phase.COMPUTE)
        world.seed(seeds[index])
        with around(index == len(batches) - 1):
            with autocast(config.train.precision, world.device):
                loss = task.objective.summed_loss(state.trained, to_device(batch, world.device))
            to_differentiate = scaled(loss, state.cursor.loss_scale)
            beat(Phase.BACKWARD)
            if state.engine is None:
                to_differentiate.backward()
            else:
                state.engine.backward(to_differentiate)
        total += loss.detach()
    return total


def prepare_own_losses(model: nn.Module, scale: int | None) -> None:
    """Tell a model whose own losses join in the backward pass what the loss is multiplied by (`scaled`).

    A model declares that by `scale_losses(scale)`.
    """
    declared = getattr(model, "scale_losses", None)
    if declared is not None:
        declared(float(scale or 1))


def _counted(model: nn.Module) -> torch.Tensor | None:
    """What this worker's passes have counted, as int64 on the CPU; None of a model that counts nothing."""
    take = getattr(model, "take_counts", None)
    counts: torch.Tensor | None = take() if take is not None else None
    return counts


def _after_step(model: nn.Module, counts: torch.Tensor | None, world: World, updated: bool) -> dict[str, float]:
    """Let a model change state of its own, by integers that it has counted over the whole global batch.

    A model declares that by `take_counts() -> tensor or None` and `after_step(counts, updated) -> metrics`. Integers
    add up to the same in any order, so every worker gives its copy the same state, whatever their number.
    """
    if counts is None:
        return {}
    metrics: dict[str, float] = model.after_step(world.sum_integers(counts), updated)  # type: ignore[operator]
    return metrics


def exact_sum(values: Sequence[float]) -> float:
    """Sum without rounding on the way; NaN when a value is not finite."""
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan


def scaled(loss: torch.Tensor, scale: int | None) -> torch.Tensor:
    """The loss whose gradient is computed; in fp32, where every scale has a place."""
    return loss if scale is None else loss.float() * scale
