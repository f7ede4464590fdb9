"""Learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.config import Interval, ScheduleConfig, TrainConfig


def learning_rate(schedule: ScheduleConfig, peak: float, train: TrainConfig, step: int) -> float:
    """Return the learning rate of the update that follows `step` finished ones (the first update has step 0).

    Warm-up is linear from peak / warmup to the peak. `cosine` then follows half a cosine (Loshchilov & Hutter 2017,
    equation 5), `linear` a straight line. `wsd` stays level and falls linearly over its last part (Hu et al. 2024,
    section 4), which begins where warm-up ends at the earliest. All three reach `min_ratio` of the peak at the last
    update. `rsqrt` is the peak times sqrt(warmup / step), counting updates from 1 (Vaswani et al. 2017, section 5.3),
    and never below `min_ratio` of it. `infinite` falls by half a cosine over `cooldown` to `constant_ratio` of the
    peak, stays there however long the run is, and falls exponentially to `min_ratio` over `decay` (Ibrahim et al. 2024,
    section 7.4); a run that continues from its constant part is not warmed up again. The warm-up of a model that has
    been trained before is its re-warming, the rest its re-decay (Gupta et al. 2023); it may begin at `start_ratio`.

    With `unit: tokens` all of these count tokens instead of steps. `batch_scaling: sqrt` multiplies the rate by
    sqrt(rows of the step / `train.global_batch`).
    """
    rate = _unscaled(schedule, peak, train, step)
    if schedule.batch_scaling == "none":
        return rate
    return rate * math.sqrt(train.batches.rows(step) / train.global_batch_rows)


def _unscaled(schedule: ScheduleConfig, peak: float, train: TrainConfig, step: int) -> float:
    steps = train.steps
    assert steps is not None, "the config is resolved"
    batches = train.batches
    at = batches.tokens_before if schedule.unit == "tokens" else int
    one = at(1)
    done = at(step + 1)
    end = at(steps)

    def length(value: Interval | float) -> int:
        return round(value * end) if isinstance(value, float) else at(batches.steps_of(value))

    warmup = length(schedule.warmup)
    if done <= warmup:
        if schedule.start_ratio:
            return peak * (schedule.start_ratio + (1 - schedule.start_ratio) * done / warmup)
        return peak * done / warmup
    floor = peak * schedule.min_ratio
    progress = min(1.0, (done - warmup) / max(one, end - warmup))
    if schedule.name == "cosine":
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    if schedule.name == "linear":
        return peak + (floor - peak) * progress
    if schedule.name == "rsqrt":
        return max(floor, peak * math.sqrt(max(one, warmup) / done))
    if schedule.name == "infinite":
        level = peak * schedule.constant_ratio
        cooldown = length(schedule.cooldown)
        decay = min(_decay(schedule, train, end), end - warmup)
        left = max(0, end - done)
        if left < decay:
            from_here = _cooled(peak, level, end - decay - warmup, cooldown)
            share: float = (floor / from_here) ** (1 - left / decay)
            return from_here * share
        return _cooled(peak, level, done - warmup, cooldown)
    if schedule.name == "wsd":
        decay = min(_decay(schedule, train, end), end - warmup)
        left = max(0, end - done)
        return peak if left >= decay else floor + (peak - floor) * left / decay
    return peak


def _cooled(peak: float, level: float, done: int, cooldown: int) -> float:
    """Return the rate of `infinite` so long after the warm-up, without the final decay."""
    return level + (peak - level) * 0.5 * (1 + math.cos(math.pi * min(1.0, done / max(1, cooldown))))


def _decay(schedule: ScheduleConfig, train: TrainConfig, end: int) -> int:
    """Return the length of the last part of `wsd`, in the unit in which the run ends at `end`."""
    assert train.steps is not None
    if isinstance(schedule.decay, float):
        return round(schedule.decay * end)
    last = train.batches.last_steps_of(schedule.decay, train.steps)
    return last if schedule.unit == "steps" else end - train.batches.tokens_before(max(0, train.steps - last))
