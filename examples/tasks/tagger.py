"""A sequence tagger: a word is a name if it follows a title, or another name that does.

Sentences differ in length, so the loss is a mean over words, not over sentences; the quality is the F1 score of names.
The embeddings learn with a rate and a limit of their own.

    cd examples/tasks
    headway train tagger.yaml
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import headway

WORDS, TITLES, NAMES, PAD = 64, 4, 24, -100  # words 0 to 3 are titles, 4 to 23 may be names


class Sentences(Dataset):
    """Sentence `i` is a function of `i`: its words and a tag for each, (length,)."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = np.random.default_rng([self.seed, index])
        words = drawn.integers(0, NAMES if index % 2 else WORDS, drawn.integers(4, 24))
        tags, follows = [], False
        for word in words:
            is_name = follows and TITLES <= word < NAMES
            tags.append(int(is_name))
            follows = bool(word < TITLES) or is_name
        return torch.from_numpy(words), torch.tensor(tags)


def collate(sentences: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    words, tags = zip(*sentences, strict=True)
    padded = pad_sequence(list(tags), batch_first=True, padding_value=PAD)
    return {"words": pad_sequence(list(words), batch_first=True), "tags": padded}


class Tagger(nn.Module):
    """Two layers of convolutions over words."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 5, padding=2) for _ in range(2))
        self.output = nn.Linear(width, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words).transpose(1, 2)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        logits: torch.Tensor = self.output(x.transpose(1, 2))
        return logits


def count_words(batch: dict[str, torch.Tensor]) -> int:
    return int((batch["tags"] != PAD).sum())


def loss(model: nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(batch["words"])
    return F.cross_entropy(logits.flatten(0, 1), batch["tags"].flatten(), ignore_index=PAD), logits


def names(logits: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    """Count names that were found rightly, names that were found, and names that there are."""
    found, wanted = (logits.argmax(-1) == 1) & (batch["tags"] != PAD), batch["tags"] == 1
    return torch.stack([(found & wanted).sum(), found.sum(), wanted.sum()])


def groups(model: nn.Module) -> list[dict[str, Any]]:
    assert isinstance(model, Tagger)
    return [{"params": model.embedding.parameters(), "lr_scale": 3.0, "weight_decay": 0.0, "max_grad_norm": 0.5}]


def build(config: headway.Config) -> headway.Task:
    return headway.Task(
        Tagger(32),
        Sentences(4096, seed=1),
        loss,
        validation=Sentences(256, seed=2),
        collate=collate,
        count_items=count_words,
        metrics={"f1": headway.Metric(names, lambda sums: 2 * sums[0] / (sums[1] + sums[2]))},
        parameter_groups=groups,
    )
