"""Memory of losses that are computed from whole logits, and of a teacher.

The loss is run on tensors without content, as models of transformers are (`lab/plan/trace.py`). A function of the
user's own counts as the cross-entropy. Of a teacher's forward pass only the logits are counted: its layers keep
nothing.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from headway.config import Config
from headway.lab.plan.pretrained import HALF
from headway.lab.plan.trace import LiveStorages
from headway.models.build import complete
from headway.models.facts import count_parameters
from headway.training.custom_loss import Distillation, cross_entropy, teacher_config


def logits_loss_bytes(config: Config, vocabulary: int, dim: int, tokens: int) -> tuple[int, int]:
    """Return the memory of logits and loss of a micro-batch, forward and backward, from hidden states to their
    gradient.

    Args:
        config: With `loss` or `distill`.
        vocabulary, dim: Sides of the output projection.
        tokens: Of a micro-batch.
    """
    half = HALF.get(config.train.precision)
    with FakeTensorMode():
        x = torch.empty(1, tokens, dim)
        projection = torch.empty(vocabulary, dim)
        batch: dict[str, Any] = {"targets": torch.zeros(1, tokens, dtype=torch.int64)}
        counter = LiveStorages([x, projection, batch["targets"]])
        leaves = [x.requires_grad_(), projection.requires_grad_()]

        def taught(*_: Any) -> torch.Tensor:
            return torch.empty(1, tokens, vocabulary, dtype=half or torch.float32)

        loss: Any = cross_entropy
        if config.distill is not None:
            loss = Distillation(nn.Identity(), config.distill, taught, cross_entropy)
        with counter:
            with nullcontext() if half is None else torch.autocast("cpu", half):
                logits = F.linear(*leaves)
                found = loss(logits, batch)
            del logits
            forward = counter.restart()
            found.backward()
            return forward, counter.most


def teacher_bytes(config: Config) -> int:
    """Return the bytes of a teacher's weights on every worker; 0 without one.

    Raises:
        ConfigError, CheckpointError: as `complete`.
    """
    if config.distill is None:
        return 0
    teacher = complete(teacher_config(config.distill), 1)
    return count_parameters(teacher).total * (2 if config.train.precision == "bf16" else 4)
