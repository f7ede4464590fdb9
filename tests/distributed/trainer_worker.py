"""Run under torchrun: two runs in one process, on a model whose workers are made differently."""

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from headway import Callback, Config, Trainer


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3), nn.Linear(4, 1)
        self.register_buffer("frequencies", torch.randn(2, dtype=torch.complex64), persistent=False)
        self.register_buffer("mask", torch.rand(4) > 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.conv(x * self.frequencies.real[:, None, None]).relu().mean((2, 3)) * self.mask)
        return y


class Images:
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(index))


class SameEverywhere(Callback):
    def on_step(self, job: Any, step: int, metrics: dict[str, float]) -> None:
        tensors = [*(block.local for block in job.state.blocks().values()), *job.state.model.buffers()]
        mine = [float(torch.view_as_real(t).sum() if t.is_complex() else t.sum()) for t in tensors]
        everyone = job.world.gather(mine)
        assert everyone[0] == everyone[1], (step, everyone)


for name in ("first", "second"):
    config = Config.model_validate(
        {
            "name": name,
            "runs": sys.argv[1],
            "train": {"steps": 3, "global_batch": 4, "device": "cpu"},
            "parallel": {"timeout_seconds": 120},
            "telemetry": {"report": False},
        }
    )
    model = Model().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    Trainer(model, Images(), lambda m, x: (m(x) - 1).square().mean(), config, callbacks=[SameEverywhere()]).fit()
    assert not dist.is_initialized()
    if os.environ["RANK"] == "0":
        time.sleep(1)  # the others come first to the second meeting, where this worker's old address must not be
