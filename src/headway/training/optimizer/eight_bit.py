"""AdamW with moments in 8 bits, through torchao."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from headway.config import OptimizerConfig
from headway.config.optimizers import DEFAULT_OPTIMIZER
from headway.core.eight_bit import block_size
from headway.parallel.blocks import cut_like, local_part
from headway.training.setup.torchao_import import importing_torchao


def eight_bit_adamw(config: OptimizerConfig, groups: Sequence[dict[str, Any]], device: torch.device) -> Optimizer:
    """Make an AdamW whose moments are quantised in blocks of 256 values (Dettmers et al. 2022, "8-bit optimizers").

    A block never crosses rows, so shards, which are whole rows, have the blocks of the whole matrix. Rows that 256 does
    not divide have blocks of the largest power of two that divides them. On the CPU updates run without compilation:
    there 8 bits save memory, not time.

    Raises:
        ConfigError: torchao is not installed.
    """
    with importing_torchao(f"optimizer '{config.name}'", "optimizer.name", DEFAULT_OPTIMIZER):
        from torchao.optim import AdamW8bit

    compiled = device.type == "cuda"

    class EightBitAdamW(AdamW8bit):  # type: ignore[misc]
        """torchao's optimizer, compiled only where that pays, and with blocks within rows."""

        def _new_buffer(self, p: torch.Tensor, signed: bool) -> torch.Tensor:
            block = block_size(tuple(p.shape))
            local = local_part(p)
            if block is None or not local.numel():
                return torch.zeros_like(p)
            moment: torch.Tensor = self._subclass_zeros(local, signed, block)
            return cut_like(p, moment)

        def step(self, closure: None = None) -> None:
            with nullcontext() if compiled else torch.compiler.set_stance("force_eager"):
                super().step(closure)

    optimizer: Optimizer = EightBitAdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps)
    return optimizer


def quantised_parts(moment: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the plain tensors of a quantised moment, cut as it is; scales are (..., rows, blocks of a row)."""
    local: Any = local_part(moment)
    yield "codes", cut_like(moment, local.codes)
    scales = local.scale.view(*local.shape[:-1], -1)
    yield "scale", cut_like(moment, scales, (*moment.shape[:-1], scales.shape[-1]))
    yield "qmap", local.qmap
