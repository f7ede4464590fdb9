"""Train any torch module with Headway's loop: a small image classifier on pictures that it draws itself.

python examples/image_classifier.py
torchrun --nproc-per-node 2 examples/image_classifier.py

Kill it at any moment and start it again: it goes on from its newest checkpoint, bit for bit.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import Dataset

import headway

SIZE, CLASSES = 16, 4


class Shapes(Dataset):
    """Noisy pictures of a horizontal bar, a vertical bar, a square and a cross; picture `i` is a function of `i`."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        label = index % CLASSES
        row, column = (int(x) for x in torch.randint(4, SIZE - 4, (2,), generator=generator))
        image = torch.randn(1, SIZE, SIZE, generator=generator) * 0.4
        if label in (0, 3):
            image[0, row, column - 3 : column + 4] += 1
        if label in (1, 3):
            image[0, row - 3 : row + 4, column] += 1
        if label == 2:
            image[0, row - 2 : row + 3, column - 2 : column + 3] += 1
        return {"image": image, "label": torch.tensor(label)}


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.GroupNorm(4, 32),
        nn.GELU(),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(32, CLASSES),
    )


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["image"]), batch["label"])


def main(overrides: list[str]) -> headway.Run:
    config = headway.Config.model_validate(
        {
            "name": "shapes",
            "train": {"steps": 200, "global_batch": 64},
            "optimizer": {"learning_rate": 3e-3, "weight_decay": 0.01},
            "checkpoint": {"every": "50 steps"},
            "evaluation": {"every": "50 steps"},
        }
    )
    config = headway.override(config, overrides)
    trainer = headway.Trainer(build_model(), Shapes(4096, seed=1), loss, config, validation=Shapes(512, seed=2))
    return trainer.fit()


if __name__ == "__main__":
    run = main(sys.argv[1:])
    print(f"{run.directory}: step {run.step}, validation loss {run.validation_loss:.3f}")
