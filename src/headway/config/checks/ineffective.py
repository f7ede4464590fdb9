"""Settings that a run cannot act on, although none of them is a mistake by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


#: Passes over a text up to which repeating it is about as good as new text (Muennighoff et al. 2023, section 6).
MANY_EPOCHS = 4
#: Bytes of text for a token below which a large vocabulary is one of other text: a good one has 3 to 6.
_FEW_BYTES = 2.2
_LARGE_VOCABULARY = 4096


def repeated_data(epochs: float) -> list[str]:
    """Say that a run repeats its data more often than helps; nothing otherwise.

    Args:
        epochs: Passes over the source that is repeated most.
    """
    if epochs <= MANY_EPOCHS:
        return []
    return [
        f"the run goes {epochs:.1f} times over its data; beyond {MANY_EPOCHS} passes each teaches less, and a model may"
        " learn the text by heart (watch evaluation/loss): give it more text, or fewer steps"
    ]


def unfit_vocabulary(manifest: Mapping[str, Any]) -> list[str]:
    """Say that the tokenizer of a store was made for other text; nothing otherwise, or if that is unknown.

    Args:
        manifest: Of the store.
    """
    sources = manifest.get("sources", [])
    tokens, size = (sum(source.get(key) or 0 for source in sources) for key in ("tokens", "text_bytes"))
    vocabulary = manifest["tokenizer"]["vocab_size"]
    if not tokens or not size or vocabulary < _LARGE_VOCABULARY or size / tokens >= _FEW_BYTES:
        return []
    return [
        f"the tokenizer fits this text badly: {size / tokens:.1f} bytes for a token of {vocabulary:,}, where 3 to 6 are"
        " usual, so rows hold little text (headway tokenizer compare shows others)"
    ]


def _schedule(config: Config) -> list[str]:
    schedule = config.schedule
    steps = config.train.steps
    assert steps is not None, "the config is resolved"
    batches = config.train.batches
    found = []
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
