"""One training step: the only place that does forward, backward and update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import nn

from headway.core.coordination.heartbeat import Phase, beat, exchanging
from headway.core.model_protocol import DrawsByPosition, ScalesLosses, TakesCounts
from headway.core.process.faults import fault_point
from headway.core.random import derive_seed
from headway.core.startup.dtensors import is_dtensor
from headway.core.types import MicroBatch
from headway.models.decoder import Decoder
from headway.parallel.blocks import local_part
from headway.parallel.norms import norm_parts, total_norm
from headway.parallel.world import World
from headway.training.assembled import Assembled
from headway.training.health.decisions import Decision, decide, is_left_out, judge, remember
from headway.training.health.queued_update import begin_reading, mean_norm, queue_update, queues_update
from headway.training.health.replay import replay_is_due, replayed
from headway.training.optimizer import set_learning_rate, update
from headway.training.recording.copies import CopyMeter
from headway.training.schedule import learning_rate
from headway.training.setup.precision import autocast, casts_kept, update_scale
from headway.training.state import TrainState
from headway.training.task import LANGUAGE_MODELLING


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
    """The update was skipped: loss or gradient was not finite, or no item took part in the loss (`items` is 0)."""
    flags: Sequence[bool]
    """The caller's flags, as agreed by all workers (see `TrainStep.run`)."""
    model_metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the model itself, of the comparison with earlier steps, and of copies to the device."""
    decision: Decision | None = None
    """What to do about an unhealthy step."""
    left_out: bool = False
    """The step was not computed, because its rows are skipped."""


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
    group_norms: Sequence[float] = ()
    """Such norms of the groups of parameters that are clipped each by itself; none if all are clipped together."""


@dataclass(frozen=True)
class TrainStep:
    """One worker's part in every step of an attempt: what a step needs, and the method that takes the next one."""

    assembled: Assembled

    @cached_property
    def copies(self) -> CopyMeter:
        """What moves batches to the device."""
        return CopyMeter(self.assembled.config.telemetry.log_every)

    @cached_property
    def _keeps_casts(self) -> bool:
        """Whether all micro-batches of a step use one cast of each weight.

        The decoder uses a weight once in a pass, so no bit depends on it. Recomputation would hold casts that it frees
        otherwise. Compiled code and strategies that cut weights have casts of their own.
        """
        task = self.assembled.task
        return (
            self.assembled.config.train.activation_checkpointing == "none"
            and self.assembled.state.engine is None
            and task.objective is LANGUAGE_MODELLING
            and isinstance(task.model, Decoder)
            and not task.model.is_compiled
            and not any(map(is_dtensor, task.model.parameters()))
        )

    def run(self, batches: Mapping[int, Sequence[MicroBatch]], flags: Sequence[bool] = ()) -> StepResult:
        """Train on this worker's lanes of the current step and advance the cursor.

        Args:
            batches: The micro-batches of each of this worker's lanes, by lane number.
            flags: Requests of this worker (to stop, to save). They travel with the losses, so agreeing on them costs
                nothing. The result holds for each flag whether any worker has raised it.
        """
        config = self.assembled.config
        state = self.assembled.state
        world = self.assembled.world
        cursor = state.cursor
        rate = learning_rate(config.schedule, config.optimizer.learning_rate, config.train, cursor.step)
        if is_left_out(state.skipped_ranges, cursor.step):
            return self._leave_out(flags, rate)

        # Forward and backward, and what the passes of all workers yield together.
        beat(Phase.COMPUTE)  # covers clearing the gradients, too
        self._take_counts()  # discards what passes outside of steps have counted
        if self.assembled.task.objective.figures is not None:
            self.assembled.task.objective.figures.take()
        replays = replay_is_due(config.health.replay_every, cursor.step)
        # Not by the device alone, where the host averages weights or clips groups.
        decided_here = state.average is not None or bool(state.clip_limits)
        queued = not replays and not decided_here and queues_update(self.assembled)
        if queued:
            # The device skips the update by itself if it must, so the update is queued before anything is read.
            losses, items = self._gradients(batches)
            sums = self._queue_and_read(losses, items, flags, rate)
            counts = self._take_counts()  # the host has waited for these passes by now
        else:
            compute = partial(self._gradients_as_numbers, batches)
            read = replayed(compute, self._take_counts, state, world) if replays else compute()
            counts = self._take_counts()  # nothing is queued on the device, so reading does not wait
            sums = self._exchange(*read, flags)

        if not sums.items:
            return self._pass_over(sums, counts, rate)

        # Judge the step before its update.
        health = judge(config.health, state.history, sums.loss, sums.grad_norm)
        decision = decide(config.health, health, cursor.step)
        finite = math.isfinite(sums.loss) and math.isfinite(sums.grad_norm)
        accepted = finite and (decision is None or decision.action == "warn")

        # Update weights and moments, then the model's own state.
        updated = False
        if accepted:
            remember(config.health, state.history, sums.loss, sums.grad_norm)
            updated = queued or self._update(sums, rate)
        elif state.engine is not None:
            state.engine.skip()
        model_metrics = self._after_step(counts, updated)

        # Advance the cursor. The engine may skip an update that was accepted: then it has found an overflow that the
        # norm does not show.
        engine_skipped = accepted and not updated
        cursor.step += 1
        cursor.skipped_steps += not updated
        scale = cursor.loss_scale
        overflow = math.isfinite(sums.loss) and (engine_skipped or not finite)
        scale_to_blame = update_scale(cursor, overflow)
        cursor.skipped_in_row = 0 if updated else cursor.skipped_in_row + (not scale_to_blame)
        if scale_to_blame or engine_skipped:  # the update is skipped already, whatever health would do about the step
            reason = "the gradient overflowed" + (f" at the loss scale {scale:,}" if scale else "")
            decision = Decision(cursor.step - 1, "skip", reason, cursor.step - 1, quiet=scale_to_blame)
        return StepResult(
            loss=sums.loss,
            items=sums.items,
            grad_norm=sums.grad_norm,
            learning_rate=rate,
            skipped=not updated,
            flags=sums.flags,
            model_metrics={**model_metrics, **health.metrics, **self.copies.metrics(), **self._figures()},
            decision=decision,
        )

    def _pass_over(self, sums: _Sums, counts: torch.Tensor | None, rate: float) -> StepResult:
        """Finish a step without a target: there is nothing to learn and nothing to judge, and no sign of divergence."""
        state = self.assembled.state
        if state.engine is not None:
            state.engine.skip()
        metrics = {**self._after_step(counts, False), **self.copies.metrics()}
        state.cursor.step += 1
        state.cursor.steps_without_target += 1
        return StepResult(math.nan, 0, math.nan, rate, skipped=True, flags=sums.flags, model_metrics=metrics)

    def _leave_out(self, flags: Sequence[bool], rate: float) -> StepResult:
        """Skip a step whose rows are left out: only the cursor moves, and workers agree on their flags."""
        everyone = self.assembled.world.gather([float(flag) for flag in flags] or [0.0])
        cursor = self.assembled.state.cursor
        cursor.step += 1
        cursor.left_out_steps += 1
        agreed = [any(worker[i] for worker in everyone) for i in range(len(flags))]
        return StepResult(math.nan, 0, math.nan, rate, skipped=True, flags=agreed, left_out=True)

    def _gradients(self, batches: Mapping[int, Sequence[MicroBatch]]) -> tuple[torch.Tensor, int]:
        """Leave the sum of gradients over the global batch where the strategy wants it.

        Returns:
            The loss sum of each of this worker's lanes, (lanes,), and the number of items; zeros where another worker
            of the pipeline counts them.
        """
        state = self.assembled.state
        strategy = self.assembled.strategy
        world = self.assembled.world
        pipeline = self.assembled.pipeline
        self.copies.begin(state.cursor.step)  # of a step that is computed twice, one computation counts
        strategy.begin()
        prepare_own_losses(state.model, state.cursor.loss_scale)
        losses: list[torch.Tensor] = []
        items = 0
        last_lane = max(batches)
        place = _rng_coordinates(state.model, world)
        several = sum(map(len, batches.values())) > 1
        precision = self.assembled.config.train.precision
        with casts_kept(precision, world.device) if several and self._keeps_casts else nullcontext():
            for lane, micro_batches in sorted(batches.items()):
                beat(Phase.COMPUTE)
                if world.counts_items:
                    items += sum(map(self.assembled.task.objective.count_items, micro_batches))
                seeds = [
                    derive_seed(self.assembled.config.seed, "dropout", state.cursor.step, lane, i, *place)
                    for i in range(len(micro_batches))
                ]
                if pipeline is None:
                    loss = self._lane(micro_batches, seeds, lane == last_lane)
                else:
                    around = partial(self._around_backward, lane == last_lane)
                    loss = pipeline.train(self.copies.to_device(list(micro_batches), world.device), seeds, around)
                losses.append(loss if world.counts_loss else torch.zeros_like(loss))
                strategy.end_lane()
        lane_losses = torch.stack(losses)
        beat(Phase.REDUCE)
        strategy.reduce()
        if pipeline is not None:
            pipeline.reduce_shared()
        return lane_losses, items

    def _lane(self, batches: Sequence[MicroBatch], seeds: Sequence[int], last_lane: bool) -> torch.Tensor:
        """Compute one lane, micro-batch by micro-batch, and return its summed loss."""
        config = self.assembled.config
        state = self.assembled.state
        world = self.assembled.world
        objective = self.assembled.task.objective
        total = torch.zeros((), device=world.device)
        for index, batch in enumerate(batches):
            beat(Phase.COMPUTE)
            world.seed(seeds[index])
            with self._around_backward(last_lane, index == len(batches) - 1):
                with autocast(config.train.precision, world.device, keeps_casts=self._keeps_casts):
                    loss = objective.summed_loss(state.trained, self.copies.to_device(batch, world.device))
                beat(Phase.BACKWARD)
                backward(state, loss)
            total += loss.detach()
        return total

    def _around_backward(self, last_lane: bool, last_of_lane: bool) -> AbstractContextManager[None]:
        return self.assembled.strategy.micro_batch(last_of_lane, last=last_of_lane and last_lane)

    def _gradients_as_numbers(self, batches: Mapping[int, Sequence[MicroBatch]]) -> tuple[list[float], int]:
        """Compute gradients and return loss sums and items as Python numbers."""
        losses, items = self._gradients(batches)
        return self._numbers(losses.tolist), items

    def _numbers(self, read: Callable[[], list[float]]) -> list[float]:
        """Read values from the device.

        Reading waits for the device, and so for other workers: queue all work before it.
        """
        waits = self.assembled.world.queues_exchanges
        with exchanging("sum of gradients", observed=False) if waits else nullcontext():
            return read()

    def _queue_and_read(self, losses: torch.Tensor, items: int, flags: Sequence[bool], rate: float) -> _Sums:
        """Queue an update that the device may skip by itself, then read loss and norm (see `queued_update`)."""
        state = self.assembled.state
        world = self.assembled.world
        everyone = world.gather([float(items), *map(float, flags)])  # while the device computes
        items = int(sum(worker[0] for worker in everyone))
        beat(Phase.UPDATE)
        set_learning_rate(state.optimizer, rate)
        norm = mean_norm(world, self._counted(), losses, items, _injected_fault(state))
        read = begin_reading(torch.cat([losses.double(), norm[None]]))
        queue_update(state, norm, items, self.assembled.config.train.max_grad_norm)
        self.assembled.strategy.after_update()
        *lane_losses, grad_norm = self._numbers(read)
        loss = exact_sum([loss for worker in world.gather(lane_losses) for loss in worker])
        return _Sums(loss / (items or math.nan), items, grad_norm, _agreed(everyone, len(flags)))

    def _exchange(self, lane_losses: list[float], items: int, flags: Sequence[bool]) -> _Sums:
        """Agree on flags, and sum losses, items and norms so that the number of workers does not change the result."""
        state = self.assembled.state
        groups = range(max(1, len(state.clip_limits)))
        if state.engine is None:
            exact = self.assembled.config.determinism == "elastic"
            norms = [part for group in groups for part in norm_parts(self._counted(group), exact)]
        else:
            norms = state.engine.norm_parts()
        everyone = self.assembled.world.gather([float(items), *map(float, flags), *norms, *lane_losses])
        beat(Phase.UPDATE)
        first_norm = 1 + len(flags)
        first_loss = first_norm + len(norms)
        total = exact_sum([loss for worker in everyone for loss in worker[first_loss:]])
        items = int(sum(worker[0] for worker in everyone))
        size = len(norms) // len(groups)
        parts = [range(first_norm + size * group, first_norm + size * (group + 1)) for group in groups]
        found = [total_norm([worker[part.start : part.stop] for worker in everyone]) for part in parts]
        # There is no mean of zero items: dividing by NaN says so.
        per_item = _injected_fault(state) / ((items or math.nan) * (state.cursor.loss_scale or 1))
        grad_norm = (found[0] if len(found) == 1 else math.hypot(*found)) * per_item
        agreed = _agreed(everyone, len(flags))
        each = [norm * per_item for norm in found[: len(state.clip_limits)]]
        return _Sums(total / (items or math.nan), items, grad_norm, agreed, each)

    def _counted(self, own: int = 0) -> Iterator[nn.Parameter]:
        """Yield the parameters whose gradient this worker counts into the norm.

        Args:
            own: Number of the group that is clipped by itself, if there are any (`TrainState.clip_limits`).
        """
        strategy = self.assembled.strategy
        pipeline = self.assembled.pipeline
        state = self.assembled.state
        for group in state.optimizer.param_groups:
            if state.clip_limits and group.get("own", 0) != own:
                continue
            for p in group["params"]:
                if p.grad is not None and strategy.owns_for_norm(p) and (pipeline is None or pipeline.owns_for_norm(p)):
                    yield p

    def _update(self, sums: _Sums, rate: float) -> bool:
        """Apply the mean gradient, clipped, and return whether the update was done: an engine may skip it.

        Gradients are sums over all items, so the mean and the clipping are one multiplication.
        """
        state = self.assembled.state
        limit = self.assembled.config.train.max_grad_norm
        clip = 1.0 if sums.group_norms else _clipping(limit, sums.grad_norm)
        clip_groups(state, limit, sums.group_norms)
        factor = clip / (sums.items * (state.cursor.loss_scale or 1))
        set_learning_rate(state.optimizer, rate)
        if state.engine is not None:
            return state.engine.update(factor)
        update(state.optimizer, factor)
        self.assembled.strategy.after_update()
        if state.average is not None:
            state.average.update()
        return True

    def _take_counts(self) -> torch.Tensor | None:
        """Take what this worker's passes have counted, as int64 on the CPU; None if the model counts nothing."""
        model = self.assembled.state.model
        return model.take_counts() if isinstance(model, TakesCounts) else None

    def _figures(self) -> dict[str, float]:
        """Return the parts of a loss that has several, over all workers."""
        figures = self.assembled.task.objective.figures
        counts = figures.take() if figures is not None else []
        if figures is None or not counts:  # on every worker alike: the loss has parts, or none
            return {}
        return figures.of_step([row for worker in self.assembled.world.gather_json(counts) for row in worker])

    def _after_step(self, counts: torch.Tensor | None, updated: bool) -> dict[str, float]:
        """Let a model update state of its own from integers that it has counted over the whole global batch."""
        model = self.assembled.state.model
        if counts is None or not isinstance(model, TakesCounts):
            return {}
        return model.after_step(self.assembled.world.sum_integers(counts), updated)


def _clipping(limit: float | None, norm: float) -> float:
    """Return the factor that clips a gradient to a norm."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))


def clip_groups(state: TrainState, limit: float | None, norms: Sequence[float]) -> None:
    """Clip the gradients of each group of parameters by its own norm.

    Args:
        limit: That of groups without their own.
        norms: By number of group; none if all parameters are clipped together.
    """
    for number, (own, norm) in enumerate(zip(state.clip_limits, norms, strict=True) if norms else ()):
        factor = _clipping(limit if own is None else own, norm)
        gradients = [
            local_part(p.grad)
            for group in state.optimizer.param_groups
            if group.get("own", 0) == number
            for p in group["params"]
            if p.grad is not None
        ]
        if factor < 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)


def _agreed(everyone: Sequence[Sequence[float]], flags: int) -> list[bool]:
    """Return for each flag whether any worker has raised it. A worker's flags follow its number of items."""
    return [any(worker[1 + i] for worker in everyone) for i in range(flags)]


def _injected_fault(state: TrainState) -> float:
    """Return the factor by which a test wants the norm multiplied; 1 outside of tests."""
    fault = fault_point("gradient", state.cursor.step + 1)
    return 1.0 if fault is None else {"nan": math.nan, "spike": 1e4}[fault]


def _rng_coordinates(model: nn.Module, world: World) -> tuple[int, ...]:
    """Return what distinguishes this worker's random numbers from those of workers that compute the same rows.

    Such workers hold different positions of a row (`DrawsByPosition`).
    """
    if world.mesh.cp * world.mesh.tp == 1 or not (isinstance(model, DrawsByPosition) and model.draws_by_position):
        return ()
    places = world.mesh.coordinates(world.rank)
    return places["cp"], places["tp"]


def prepare_own_losses(model: nn.Module, scale: int | None) -> None:
    """Give the loss scale to a model that adds losses of its own in the backward pass (see `scaled`)."""
    if isinstance(model, ScalesLosses):
        model.scale_losses(float(scale or 1))


def backward(state: TrainState, loss: torch.Tensor) -> None:
    """Differentiate a loss, times the loss scale if there is one, by the engine if that manages the gradients."""
    to_differentiate = scaled(loss, state.cursor.loss_scale)
    if state.engine is None:
        to_differentiate.backward()
    else:
        state.engine.backward(to_differentiate)


def exact_sum(values: Sequence[float]) -> float:
    """Sum values without intermediate rounding; NaN if a value is not finite."""
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan


def scaled(loss: torch.Tensor, scale: int | None) -> torch.Tensor:
    """Return the loss to differentiate, times the scale; in fp32, which can hold every scale."""
    return loss if scale is None else loss.float() * scale
