"""Settings that a run cannot act on, although none of them is a mistake by itself."""

from __future__ import annotations

from headway.config.schema import Config
from headway.config.sections.checkpoint import EVALUATED
from headway.config.units import Interval


def ineffective_settings(config: Config, evaluates: bool) -> list[str]:
    """Describe each setting that this run never acts on, one line each.

    Args:
        config: Resolved.
        evaluates: Whether there are data for validation.
    """
    return [*_schedule(config), *([] if evaluates else _evaluation(config))]


def _schedule(config: Config) -> list[str]:
    schedule, steps = config.schedule, config.train.steps
    assert steps is not None, "the config is resolved"
    batches, found = config.train.batches, []
    warmup = batches.steps_of(schedule.warmup) if isinstance(schedule.warmup, Interval) else schedule.warmup * steps
    if warmup > steps:
        found.append(
            f"schedule.warmup of {schedule.warmup} is longer than the run of {steps:,} steps, so the learning rate"
            " never reaches its peak"
        )
    elif (
        schedule.name in ("wsd", "infinite")
        and isinstance(schedule.decay, Interval)
        and batches.last_steps_of(schedule.decay, steps) > steps - warmup
    ):
        found.append(
            f"schedule.decay of {schedule.decay} does not fit into the run of {steps:,} steps, so it begins where the"
            " warm-up ends"
        )
    return found


def _evaluation(config: Config) -> list[str]:
    why = "but there are no data for validation"
    found = []
    if config.evaluation.every is not None:
        found.append(f"evaluation.every is {config.evaluation.every}, {why}, so nothing is evaluated")
    remote = config.checkpoint.remote
    for key, rules in (("checkpoint", config.checkpoint), ("checkpoint.remote", remote)):
        if rules is not None and rules.keep_best and rules.keep_metric in EVALUATED:
            found.append(f"{key}.keep_best goes by {rules.keep_metric}, {why}, so no checkpoint is kept by it")
    return found
