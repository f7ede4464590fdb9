"""Learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.config import Config, Interval


def learning_rate(config: Config, step: int) -> float:
    """Learning rate of the update that follows `step` finished ones (so the first update has step 0).

    Warm-up is linear from peak / warmup to the peak. `cosine` then follows half a cosine (Loshchilov & Hutter 2017,
    equation 5), `linear` a straight line, and `wsd` stays level and falls linearly over its last part (Hu et al. 2024,
    section 4); all three reach `min_ratio` of the peak at the last update. `rsqrt` is the peak times
    sqrt(warmup / step), counting updates from 1 (Vaswani et al. 2017, section 5.3), and never below `min_ratio` of it.
    """
    schedule, peak, steps = config.schedule, config.optimizer.learning_rate, config.train.steps
    assert steps is not None, "the config is resolved"
    warmup = _length(config, schedule.warmup)
    done = step + 1
    if done <= warmup:
        return peak * done / warmup
    floor = peak * schedule.min_ratio
    progress = min(1.0, (done - warmup) / max(1, steps - warmup))
    if schedule.name == "cosine":
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    if schedule.name == "linear":
        return peak + (floor - peak) * progress
    if schedule.name == "rsqrt":
        return max(floor, peak * math.sqrt(max(1, warmup) / done))
    if schedule.name == "wsd":
        decay = _length(config, schedule.decay)
        left = max(0, steps - done)
        return peak if left >= decay else floor + (peak - floor) * left / decay
    return peak


def _length(config: Config, value: Interval | float) -> int:
    """A part of the schedule in steps."""
    steps = config.train.steps
    assert steps is not None
    if isinstance(value, float):
        return round(value * steps)
    length = value.in_steps(config.train.tokens_per_step)
    assert length is not None, "the schema refuses times in schedules"
    return length
