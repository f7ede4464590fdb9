"""A diffusion toy: points on two moons, learnt as the noise that was added to them (Ho et al. 2020).

The loss has two parts with weights: the noise, and a classifier on the side. Evaluations use the averaged weights, as
samples of a diffusion model do.

    cd examples/tasks
    headway train diffusion.yaml
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import headway

STEPS = 50
KEPT = torch.cumprod(1 - torch.linspace(1e-3, 0.2, STEPS), 0)  # share of the signal that is left


class Moons(Dataset):
    """Point `i` on one of two moons, with a time and noise that are drawn anew in every epoch."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        drawn, moon = np.random.default_rng([self.seed, index]), index % 2
        angle = drawn.uniform(0, np.pi)
        point = [np.cos(angle) + moon, (1 - 2 * moon) * np.sin(angle) + 0.5 * moon]
        return {
            "point": torch.tensor(point, dtype=torch.float32),
            "moon": torch.tensor(moon),
            "time": torch.tensor(int(rng.integers(STEPS))),
            "noise": torch.from_numpy(rng.normal(size=2).astype(np.float32)),
        }


class Denoiser(nn.Module):
    """Gives the noise in a point, (B, 2), and which moon it came from, (B, 2)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.time = nn.Embedding(STEPS, width)
        self.first = nn.Linear(2, width)
        self.rest = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 4))

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        noise, moon = self.rest(self.first(x) + self.time(time)).chunk(2, dim=-1)
        return noise, moon


def loss(model: nn.Module, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    kept = KEPT.to(batch["point"].device)[batch["time"]].unsqueeze(-1)
    noisy = kept.sqrt() * batch["point"] + (1 - kept).sqrt() * batch["noise"]
    noise, moon = model(noisy, batch["time"])
    return {"noise": F.mse_loss(noise, batch["noise"]), "moon": F.cross_entropy(moon, batch["moon"])}


def build(config: headway.Config) -> headway.Task:
    return headway.Task(
        Denoiser(), Moons(8192, seed=1), loss, validation=Moons(512, seed=2), loss_weights={"noise": 1.0, "moon": 0.1}
    )
