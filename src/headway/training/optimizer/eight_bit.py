"""AdamW with moments in 8 bits, through torchao."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from headway.training.torchao_import import importing_torchao

if TYPE_CHECKING:
    from headway.config import OptimizerConfig


def eight_bit_adamw(config: OptimizerConfig, groups: Sequence[dict[str, Any]], device: torch.device) -> Optimizer:
    """AdamW whose moments are quantised in blocks of 256 values (Dettmers et al. 2022, "8-bit optimizers").

    Parameters of fewer than 4,096 elements, and those whose size is no multiple of 256, keep moments in fp32. On the
    CPU updates run without compilation: nothing is gained there but memory.

    Raises:
        ConfigError: torchao is not installed.
    """
    with importing_torchao("optimizer 'adamw8bit'", "optimizer.name", "adamw"):
        from torchao.optim import AdamW8bit

    compiled = device.type == "cuda"

    class EightBitAdamW(AdamW8bit):  # type: ignore[misc]
        """torchao's, compiled only where that is worth its time."""

        def step(self, closure: None = None) -> None:
            with nullcontext() if compiled else torch.compiler.set_stance("force_eager"):
                super().step(closure)

    optimizer: Optimizer = EightBitAdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps)
    return optimizer
