"""Losses on the logits of a language model: a function of the user's own, and distillation from a teacher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from headway.config import ModelConfig
from headway.config.sections.losses import DistillConfig
from headway.core.errors import ConfigError
from headway.core.functions import load_function
from headway.core.types import IGNORE_TARGET, MicroBatch
from headway.models.build import build_pretrained

#: (logits (B, T, V), micro-batch) -> fp32 scalar: the loss summed over the targets that count.
LogitsLoss = Callable[[torch.Tensor, MicroBatch], torch.Tensor]
#: (model, micro-batch) -> logits (B, T, V), each document of a row by itself where the micro-batch tells them apart.
ComputeLogits = Callable[[nn.Module, MicroBatch], torch.Tensor]


def logits_loss(
    name: str | None, distill: DistillConfig | None, precision: str, compute_logits: ComputeLogits
) -> LogitsLoss | None:
    """Return the loss that a config asks for; None for the cross-entropy, which needs no whole logits.

    Args:
        name: `loss` of the config.
        precision: `train.precision`.

    Raises:
        ConfigError: there is no such function, or the teacher cannot be loaded.
        CheckpointError: the teacher's weights are damaged.
    """
    loss: LogitsLoss | None = None
    if name is not None:
        loss = checked(load_function(name, "loss")[1], name)
    if distill is None:
        return loss
    teacher = load_teacher(distill, precision)
    return Distillation(teacher, distill, compute_logits, loss or cross_entropy)


def checked(function: Callable[..., Any], name: str) -> LogitsLoss:
    """Wrap a function of the user's own, so that what it returns is a loss.

    Raises:
        ConfigError: when called, if it is none.
    """

    def loss(logits_BTV: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        found = function(logits_BTV, batch)
        if not isinstance(found, torch.Tensor) or found.ndim or not found.dtype.is_floating_point:
            kind = f"a tensor {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
            raise ConfigError(
                f"{name} returned {kind}, not one number",
                where="loss",
                fix="return the sum of the losses of all targets that count",
            )
        check_differentiable(found, name)
        return found.float()

    return loss


def check_differentiable(loss: torch.Tensor, name: str) -> None:
    """Check that a loss can be differentiated, where gradients are computed.

    Raises:
        ConfigError: it does not depend on the weights, as far as PyTorch knows.
    """
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ConfigError(
            f"the loss that {name} returned has no gradient: nothing that it was computed from depends on the weights",
            where="loss",
            fix="compute it from what the model returned, by operations of PyTorch, without detach(), item(), numpy()"
            " or no_grad()",
        )


def cross_entropy(logits_BTV: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Sum the cross-entropies of all targets that count."""
    return F.cross_entropy(
        logits_BTV.flatten(0, 1).float(), batch["targets"].flatten(), ignore_index=IGNORE_TARGET, reduction="sum"
    )


def teacher_config(settings: DistillConfig) -> ModelConfig:
    """Return the config of a teacher as a model; it may be incomplete."""
    return ModelConfig(from_pretrained=settings.teacher, implementation=settings.implementation)


def load_teacher(settings: DistillConfig, precision: str) -> nn.Module:
    """Load a teacher on the CPU: frozen, in evaluation mode.

    Raises:
        ConfigError, CheckpointError: as `build_pretrained`.
    """
    model = build_pretrained(teacher_config(settings))
    for p in model.parameters():
        # Buffers keep their type: angles of rotary embeddings do not survive 16 bits.
        p.data = p.data.to(torch.bfloat16) if precision == "bf16" else p.data
        p.requires_grad_(False)
    return cast(nn.Module, model).eval()


class Distillation:
    """The loss of a model that learns from a teacher's next-token probabilities, computed on the same rows.

    Args:
        teacher: Frozen, in evaluation mode. It is no part of the model that is trained, and of no checkpoint.
        settings: Weight and temperature.
        compute_logits: How logits are computed.
        loss: The other part of the loss.
    """

    def __init__(
        self, teacher: nn.Module, settings: DistillConfig, compute_logits: ComputeLogits, loss: LogitsLoss
    ) -> None:
        self._teacher = teacher
        self._settings = settings
        self._compute_logits = compute_logits
        self._loss = loss

    def __call__(self, logits_BTV: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the loss of a micro-batch, summed over the targets that count."""
        with torch.no_grad():
            taught_BTV = self._compute_logits(self._teacher.to(logits_BTV.device), batch)
        weight = self._settings.weight
        temperature = self._settings.temperature
        divergence = temperature**2 * divergence_from(taught_BTV, logits_BTV, batch["targets"], temperature)
        if weight == 1.0:
            return divergence
        return (1 - weight) * self._loss(logits_BTV, batch) + weight * divergence


def divergence_from(
    taught_BTV: torch.Tensor, logits_BTV: torch.Tensor, targets_BT: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Sum KL(teacher || model) over the positions whose targets count, in fp32.

    Vocabularies may be padded differently: rows that only one of the two has are left out of both softmaxes.
    """
    V = min(taught_BTV.shape[-1], logits_BTV.shape[-1])
    theirs_BTV = F.log_softmax(taught_BTV[..., :V].float() / temperature, dim=-1)
    ours_BTV = F.log_softmax(logits_BTV[..., :V].float() / temperature, dim=-1)
    divergence_BT = F.kl_div(ours_BTV, theirs_BTV, reduction="none", log_target=True).sum(-1)
    return divergence_BT.where(targets_BT != IGNORE_TARGET, 0.0).sum()
