"""AdamW with moments in 8 bits, through torchao."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from headway.core.errors import ConfigError

if TYPE_CHECKING:
    from headway.config import OptimizerConfig


def eight_bit_adamw(config: OptimizerConfig, groups: Sequence[dict[str, Any]], device: torch.device) -> Optimizer:
    """AdamW whose moments are quantised in blocks of 256 values (Dettmers et al. 2022, "8-bit optimizers").

    Parameters of fewer than 4,096 elements, and those whose size is no multiple of 256, keep moments in fp32. On the
    CPU updates run without compilation: nothing is gained there but memory.

    Raises:
        ConfigError: torchao is not installed.
    """
    with _quiet():
        try:
            from torchao.optim import AdamW8bit
        except ImportError:
            raise ConfigError(
                "optimizer 'adamw8bit' needs torchao, which is not installed",
                where="optimizer.name",
                fix="pip install 'headway[torchao]', or optimizer.name=adamw",
            ) from None

    compiled = device.type == "cuda"

    class EightBitAdamW(AdamW8bit):  # type: ignore[misc]
        """torchao's, compiled only where that is worth its time."""

        def step(self, closure: None = None) -> None:
            with nullcontext() if compiled else torch.compiler.set_stance("force_eager"):
                super().step(closure)

    optimizer: Optimizer = EightBitAdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps)
    return optimizer


@contextmanager
def _quiet() -> Iterator[None]:
    """torchao says at import which of its kernels are not for this machine; none of them is needed here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
