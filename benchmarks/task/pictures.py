"""The workload of `images.py`: pictures that take some work to decode, and a small convolutional network."""

from __future__ import annotations

import io
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

SIZE, CLASSES, ROWS, SAMPLES = 48, 4, 64, 4096


class Pictures:
    """JPEG files in memory, decoded and cropped by chance; the label is the colour of the brightest part."""

    def __init__(self, count: int = SAMPLES) -> None:
        drawn = np.random.default_rng(0)
        self.files: list[bytes] = []
        for index in range(count):
            picture = drawn.integers(0, 120, (SIZE + 8, SIZE + 8, 3), dtype=np.uint8)
            label = index % CLASSES
            picture[12:40, 12:40, : label or 3] += np.uint8(100)
            file = io.BytesIO()
            Image.fromarray(picture).save(file, "JPEG")
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return len(self.files)

    def decode(self, index: int, rng: np.random.Generator) -> tuple[torch.Tensor, int]:
        """Return a picture, (3, SIZE, SIZE), and its label."""
        picture = np.asarray(Image.open(io.BytesIO(self.files[index])).convert("RGB"))
        row, column = rng.integers(0, 9, 2)
        cropped = picture[row : row + SIZE, column : column + SIZE].astype(np.float32) / 128 - 1
        return torch.from_numpy(cropped.transpose(2, 0, 1).copy()), index % CLASSES

    def __getitem__(self, index: int, rng: np.random.Generator) -> tuple[torch.Tensor, int]:
        return self.decode(index, rng)


class Plain(Pictures):
    """The same for PyTorch's `DataLoader`, whose workers bring a generator of their own."""

    rng: np.random.Generator | None = None

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:  # type: ignore[override]
        self.rng = self.rng or np.random.default_rng(torch.initial_seed() % 2**32)
        return self.decode(index, self.rng)


def make_model() -> nn.Module:
    """Return the network."""
    widths = (3, 16, 32, 64)
    layers: list[nn.Module] = []
    for given, made in pairwise(widths):
        layers += [nn.Conv2d(given, made, 3, stride=2, padding=1), nn.GroupNorm(4, made), nn.GELU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean cross-entropy of a batch."""
    return F.cross_entropy(model(batch[0]), batch[1])


def build(config: Any) -> Any:
    """Return the task for Headway."""
    import headway

    return headway.Task(make_model(), Pictures(), loss)
