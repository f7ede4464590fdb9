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
from headway.core.model_protocol import DrawsByPosition, ScalesLosses, TakesCounts
from headway.core.random import derive_seed
from headway.core.types import MicroBatch
from headway.parallel.norms import norm_parts, total_norm
from headway.parallel.pipeline import AroundBackward, Pipeline
from headway.parallel.strategy import Strategy
from headway.parallel.world import World
from headway.training.health import Decision, decide, is_left_out, judge, remember
from headway.training.optimizer import set_learning_rate, update
from headway.training.precision import autocast, update_scale
from headway.training.queued_update import begin_reading, mean_norm, queue_update, queues_update
from headway.training.replay import replay_is_due, replayed
from headway.training.schedule import learning_rate
from headway.training.state import TrainState
from headway.training.task import Task, to_device


@dataclass(frozen=True)
class StepResult:
    """What one step did; equal on every worker."""

    loss: float
    """Mean over all items of the global batch."""
    items: int
    grad_norm: float
    """Global norm before clipping."""
    learning_rate: float
    skipped: bool
    """The update was skipped: loss or gradient was not finite, or no item took part in the loss."""
    flags: Sequence[bool]
    """The caller's flags, as agreed by all workers (see `train_step`)."""
    model_metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the model itself, and of the comparison with earlier steps."""
    decision: Decision | None = None
    """What to do about an unhealthy step."""
    left_out: bool = False
    """The step was not computed, because its rows are skipped."""


def train_step(
    config: Config,
    task: Task,
    state: TrainState,
    strategy: Strategy,
    world: World,
    *,
    batches: Mapping[int, Sequence[MicroBatch]],
    flags: Sequence[bool] = (),
    pipeline: Pipeline | None = None,
) -> StepResult:
    """Train on this worker's lanes of the current step and advance the cursor.

    Args:
        batches: The micro-batches of each of this worker's lanes, by lane number.
        flags: Requests of this worker (to stop, to save). They travel with the losses, so agreeing on them costs
            nothing. The result holds for each flag whether any worker has raised it.
        pipeline: This worker's stages of the model, if other workers have the rest.
    """
    if is_left_out(state.skipped_ranges, state.cursor.step):
        return _leave_out(config, state, world, flags)
    beat(Phase.COMPUTE)  # covers clearing the gradients, too
    _take_counts(state.model)  # discards what passes outside of steps have counted
    gradients = partial(_gradients, config, task, state, strategy, world, batches=batches, pipeline=pipeline)
    rate = learning_rate(config, state.cursor.step)
    replays = replay_is_due(config.health.replay_every, state.cursor.step)
    queued = not replays and queues_update(config, state, world)
    if queued:
        losses, items = gradients()
        sums = _queue_and_read(config, state, strategy, world, losses, items=items, flags=flags, rate=rate)
        counts = _take_counts(state.model)  # the host has waited for these passes by now
    else:
        compute = partial(_read, gradients, world)
        read = replayed(compute, partial(_take_counts, state.model), state, world) if replays else compute()
        counts = _take_counts(state.model)  # nothing is queued on the device, so reading does not wait
        lane_losses, items = read
        sums = _exchange(config, state, strategy, world, pipeline, lane_losses=lane_losses, items=items, flags=flags)

    health = judge(config.health, state.history, sums.loss, sums.grad_norm)
    decision = decide(config.health, health, state.cursor.step)
    finite = math.isfinite(sums.loss) and math.isfinite(sums.grad_norm)
    accepted = finite and (decision is None or decision.action == "warn")
    updated = False
    if accepted:
        remember(config.health, state.history, sums.loss, sums.grad_norm)
        updated = queued or _update(config, state, strategy, sums, rate)
    elif state.engine is not None:
        state.engine.skip()
    model_metrics = _after_step(state.model, counts, world, updated)

    # The engine may skip an update that was accepted: then it has found an overflow that the norm does not show.
    engine_skipped = accepted and not updated
    cursor = state.cursor
    cursor.step += 1
    cursor.skipped_steps += not updated
    scale = cursor.loss_scale
    overflow = math.isfinite(sums.loss) and (engine_skipped or not finite)
    scale_to_blame = update_scale(cursor, overflow)
    cursor.skipped_in_row = 0 if updated else cursor.skipped_in_row + (not scale_to_blame)
    if scale_to_blame or engine_skipped:  # the update is already skipped, whatever health would do about such a step
        reason = "the gradient overflowed" + (f" at the loss scale {scale:,}" if scale else "")
        decision = Decision(cursor.step - 1, "skip", reason, cursor.step - 1, quiet=scale_to_blame)
    return StepResult(
        loss=sums.loss,
        items=sums.items,
        grad_norm=sums.grad_norm,
        learning_rate=rate,
        skipped=not updated,
        flags=sums.flags,
        model_metrics={**model_metrics, **health.metrics},
        decision=decision,
    )


@dataclass(frozen=True)
class _Sums:
    """What the passes of a step yield, summed over all workers."""

    loss: float
    """Mean over all items; NaN without items, or if the loss of a lane is not finite."""
    items: int
    grad_norm: float
    """Norm of the mean gradient before clipping."""
    flags: Sequence[bool]
    """For each flag, whether any worker has raised it."""


def _queue_and_read(
    config: Config,
    state: TrainState,
    strategy: Strategy,
    world: World,
    losses: torch.Tensor,
    *,
    items: int,
    flags: Sequence[bool],
    rate: float,
) -> _Sums:
    """Queue an update that the device may skip by itself, then read loss and norm (see `queued_update`)."""
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
    *,
    lane_losses: list[float],
    items: int,
    flags: Sequence[bool],
) -> _Sums:
    """Agree on flags, and sum losses, items and norms so that the result does not depend on the number of workers."""
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
    # There is no mean of zero items: dividing by NaN says so.
    grad_norm = norm / ((items or math.nan) * (state.cursor.loss_scale or 1)) * _injected_fault(state)
    return _Sums(total / (items or math.nan), items, grad_norm, _agreed(everyone, len(flags)))


def _agreed(everyone: Sequence[Sequence[float]], flags: int) -> list[bool]:
    """Return for each flag whether any worker has raised it. A worker's flags follow its number of items."""
    return [any(worker[1 + i] for worker in everyone) for i in range(flags)]


def _counted_by(strategy: Strategy, state: TrainState, pipeline: Pipeline | None) -> Iterator[nn.Parameter]:
    """Yield the parameters whose gradient this worker counts into the norm."""
    for group in state.optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and strategy.owns_for_norm(p) and (pipeline is None or pipeline.owns_for_norm(p)):
                yield p


def _injected_fault(state: TrainState) -> float:
    """Return the factor by which a test wants the norm multiplied; 1 outside of tests."""
    fault = fault_point("gradient", state.cursor.step + 1)
    return 1.0 if fault is None else {"nan": math.nan, "spike": 1e4}[fault]


def _update(config: Config, state: TrainState, strategy: Strategy, sums: _Sums, rate: float) -> bool:
    """Apply the mean gradient, clipped, and return whether the update was done: an engine may skip it.

    Gradients are sums over all items, so the mean and the clipping are one multiplication.
    """
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
    """Skip a step whose rows are left out: only the cursor moves, and workers agree on their flags."""
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
    *,
    batches: Mapping[int, Sequence[MicroBatch]],
    pipeline: Pipeline | None,
) -> tuple[torch.Tensor, int]:
    """Leave the sum of gradients over the global batch where the strategy wants it.

    Returns:
        The loss sum of each of this worker's lanes, (lanes,), and the number of items; zeros where another worker of
        the pipeline counts them.
    """
    strategy.begin()
    prepare_own_losses(state.model, state.cursor.loss_scale)
    losses, items = _forward_backward(config, task, state, strategy, world, batches=batches, pipeline=pipeline)
    beat(Phase.REDUCE)
    strategy.reduce()
    if pipeline is not None:
        pipeline.reduce_shared()
    return losses, items


def _read(gradients: Callable[[], tuple[torch.Tensor, int]], world: World) -> tuple[list[float], int]:
    """Compute gradients and return loss sums and items as Python numbers."""
    losses, items = gradients()
    return _numbers(world, losses.tolist), items


def _numbers(world: World, read: Callable[[], list[float]]) -> list[float]:
    """Read values from the device. Reading waits for the device, and so for other workers: queue all work before it."""
    with exchanging("sum of gradients", observed=False) if world.queues_exchanges else nullcontext():
        return read()


def _forward_backward(
    config: Config,
    task: Task,
    state: TrainState,
    strategy: Strategy,
    world: World,
    *,
    batches: Mapping[int, Sequence[MicroBatch]],
    pipeline: Pipeline | None,
) -> tuple[torch.Tensor, int]:
    """Accumulate gradients of this worker's lanes.

    Returns:
        The loss sum of each lane, (lanes,), and the number of items; zeros where another worker of the pipeline counts
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
            loss = _lane(config, task, state, world, micro_batches, seeds=seeds, around=around)
        else:
            loss = pipeline.train(to_device(list(micro_batches), world.device), seeds, around)
        losses.append(loss if world.counts_loss else torch.zeros_like(loss))
        strategy.end_lane()
    return torch.stack(losses), items


def _rng_coordinates(model: nn.Module, world: World) -> tuple[int, ...]:
    """Return what distinguishes this worker's random numbers from those of workers that compute the same rows.

    Such workers hold different positions of a row (`DrawsByPosition`).
    """
    if world.mesh.cp * world.mesh.tp == 1 or not (isinstance(model, DrawsByPosition) and model.draws_by_position):
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
    *,
    seeds: Sequence[int],
    around: AroundBackward,
) -> torch.Tensor:
    """Compute one lane, micro-batch by micro-batch, and return its summed loss."""
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
    """Give the loss scale to a model that adds losses of its own in the backward pass (see `scaled`)."""
    if isinstance(model, ScalesLosses):
        model.scale_losses(float(scale or 1))


def _take_counts(model: nn.Module) -> torch.Tensor | None:
    """Take what this worker's passes have counted, as int64 on the CPU; None if the model counts nothing."""
    return model.take_counts() if isinstance(model, TakesCounts) else None


def _after_step(model: nn.Module, counts: torch.Tensor | None, world: World, updated: bool) -> dict[str, float]:
    """Let a model update state of its own from integers that it has counted over the whole global batch."""
    if counts is None:
        return {}
    assert isinstance(model, TakesCounts)
    return model.after_step(world.sum_integers(counts), updated)


def exact_sum(values: Sequence[float]) -> float:
    """Sum values without intermediate rounding; NaN if a value is not finite."""
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan


def scaled(loss: torch.Tensor, scale: int | None) -> torch.Tensor:
    """Return the loss to differentiate, times the scale; in fp32, which can hold every scale."""
    return loss if scale is None else loss.float() * scale
