"""An image classifier: pictures that are drawn from their numbers, and shifted by chance in every epoch.

cd examples/tasks
headway train shapes.yaml --workers 2 data.processes=2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import headway

SIZE, CLASSES = 16, 4


@dataclass
class Options:
    """`task.options` of the config."""

    width: int = 16
    samples: int = 4096


class Shapes:
    """Noisy pictures of a horizontal bar, a vertical bar, a square and a cross; picture `i` is a function of `i`."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        drawn, label = np.random.default_rng([self.seed, index]), index % CLASSES
        image = drawn.normal(0, 0.4, (1, SIZE, SIZE)).astype(np.float32)
        row, column = drawn.integers(4, SIZE - 4, 2)
        if label in (0, 3):
            image[0, row, column - 3 : column + 4] += 1
        if label in (1, 3):
            image[0, row - 3 : row + 4, column] += 1
        if label == 2:
            image[0, row - 2 : row + 3, column - 2 : column + 3] += 1
        shifted = np.roll(image, rng.integers(-2, 3, 2), axis=(1, 2))
        return {"image": torch.from_numpy(shifted), "label": torch.tensor(label)}


def loss(model: nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(batch["image"])
    return F.cross_entropy(logits, batch["label"]), logits


def accuracy(logits: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    return logits.argmax(-1) == batch["label"]


def build(config: headway.Config, options: Options) -> headway.Task:
    width = options.width
    model = nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.GroupNorm(4, 2 * width),
        nn.GELU(),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(2 * width, CLASSES),
    )
    training, held_out = Shapes(options.samples, seed=1), Shapes(512, seed=2)
    return headway.Task(model, training, loss, validation=held_out, metrics={"accuracy": accuracy})
