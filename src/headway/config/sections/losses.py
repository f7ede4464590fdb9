"""Losses of a language model other than the cross-entropy: a function of the user's own, and a teacher."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from headway.config.base import Section
from headway.config.sections.model import ModelConfig
from headway.config.sections.parallel import ParallelConfig
from headway.config.sections.pretrained import PretrainedSource
from headway.config.strategies import find_strategy
from headway.core.errors import ConfigError


class DistillConfig(Section):
    """Distillation: the model learns the next-token probabilities of a frozen teacher (Hinton et al. 2015)."""

    teacher: PretrainedSource
    """A Hugging Face folder, or `hf://organisation/name@revision`, which a run pins to a commit. Its tokenizer must be
    that of the data. Every worker holds all of it, in bf16 where `train.precision` is bf16."""
    implementation: Literal["auto", "native", "transformers"] = "auto"
    """Code that computes the teacher, as `model.implementation` is for the model. A run keeps what it began with."""
    weight: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Share of the teacher in the loss: `(1 - weight) * loss + weight * temperature**2 * KL(teacher || model)`."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Divides the logits of both before the softmax."""


def loss_problems(key: str, parallel: ParallelConfig, model: ModelConfig) -> Iterator[ConfigError]:
    """Yield what a loss on whole logits does not go with; the shape of a pretrained model may be known only later.

    Args:
        key: The key of that loss (`Config.logits_key`).
    """
    for name in ("tensor", "context", "pipeline"):
        if getattr(parallel, name) > 1:
            yield ConfigError(
                f"{key} needs the logits of whole rows, and parallel.{name} leaves a worker a part of them",
                where=f"{key}, parallel.{name}",
                fix=f"parallel.{name}=1",
            )
    if find_strategy(parallel.strategy).is_deepspeed:
        yield ConfigError(
            f"{key} is computed outside of the model, where DeepSpeed does not see it",
            where=f"{key}, parallel.strategy",
            fix=f"parallel.strategy={find_strategy(parallel.strategy).counterpart}",
        )
    if model.implementation != "transformers" and model.experts is not None:
        yield ConfigError(
            f"{key} would leave out the losses that balance the experts of the native decoder",
            where=f"{key}, model.experts",
            fix=f"leave {key} out, or train a dense model",
        )
    if model.router_aux_weight:
        yield ConfigError(
            f"{key} would leave out the routers' loss",
            where=f"{key}, model.router_aux_weight",
            fix="model.router_aux_weight=0",
        )
