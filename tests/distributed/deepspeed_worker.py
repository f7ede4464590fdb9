"""Run under torchrun: one model with tensors of every kind under `ddp`, then under each strategy of DeepSpeed, from the
start and from the middle of the run before."""

import os
import sys
import time
from pathlib import Path

import torch
from strategies_worker import copy_run
from torch import nn

from headway import Config, Trainer


class Model(nn.Module):
    """A frozen part, one that no step uses, one that every other step uses, parameters of one element, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head, self.unused = nn.Conv2d(2, 5, 3), nn.Linear(5, 1), nn.Linear(3, 3)
        self.conv.bias.requires_grad_(False)
        self.sometimes, self.forwards = nn.Linear(1, 1), 0
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("mask", torch.tensor([1.0, 0.5, 1.0, 0.0, 1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.conv(x).relu().mean((2, 3)) * self.mask) * self.scale
        self.forwards += 1
        # Each of two workers has two micro-batches in a step.
        return self.sometimes(y) if (self.forwards - 1) // 2 % 2 == 0 else y


class Images:
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(index))


def train(runs: Path, name: str, strategy: str) -> None:
    config = Config.model_validate(
        {
            "name": name,
            "runs": str(runs),
            "train": {"steps": 4, "global_batch": 4, "lanes": 4, "device": "cpu"},
            "optimizer": {"learning_rate": 1e-2},
            "parallel": {"timeout_seconds": 60, "strategy": strategy},
            "checkpoint": {"every": "2 steps"},
            "telemetry": {"report": False},
        }
    )
    torch.manual_seed(5)
    model = Model().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    Trainer(model, Images(), lambda m, x: (m(x) - 1).square().mean(), config).fit()


runs = Path(sys.argv[1])
before = "ddp"
train(runs, before, before)
for strategy in ("deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3"):
    train(runs, strategy, strategy)
    resumed = runs / f"{strategy}-resumed"
    if os.environ["RANK"] == "0":
        copy_run(runs / before, resumed)
    while not resumed.exists():
        time.sleep(0.01)
    train(runs, resumed.name, strategy)
    before = strategy
