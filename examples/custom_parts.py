"""A loss, a callback and a cleaning function of your own, named in a config or given from Python.

    cd examples
    headway train custom_parts.yaml
    python custom_parts.py           # the same run, to the same bits

The config names all three. From Python the loss and the callback may be objects instead; text is cleaned by processes
of its own, so the cleaning function always has a name.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch.nn import functional as F

import headway


def without_rulers(text: str) -> str | bool:
    """Leave out lines of dashes and equals signs, and documents that consist of nothing else."""
    kept = "\n".join(line for line in text.splitlines() if line.strip("-= \t"))
    return kept if kept.strip() else False


def smoothed(logits: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    """The cross-entropy with a tenth of the probability spread over all tokens (Szegedy et al. 2016), summed."""
    targets = batch["targets"].flatten()
    return F.cross_entropy(
        logits.flatten(0, 1).float(), targets, ignore_index=-100, label_smoothing=0.1, reduction="sum"
    )


class Confidence(headway.Callback):
    """Records the probability that the geometric mean of a step's losses stands for, and counts evaluations."""

    def on_start(self, job: Any) -> None:
        self.evaluations = 0

    def on_step(self, job: Any, step: int, metrics: dict[str, float]) -> None:
        if "train/loss" in metrics:  # a step without a trained token has none
            metrics["mine/confidence"] = math.exp(-metrics["train/loss"])

    def on_evaluation(self, job: Any, step: int, result: Any) -> None:
        self.evaluations += 1


def main(overrides: list[str]) -> headway.Run:
    """Train as the config says, with objects in place of the names."""
    import custom_parts  # under the name that a resumed run finds, not as __main__

    config = headway.load_config("custom_parts.yaml", ["loss=null", "callbacks=[]", *overrides])
    return headway.train(config, loss=custom_parts.smoothed, callbacks=[custom_parts.Confidence()])


if __name__ == "__main__":
    run = main(sys.argv[1:])
    print(f"validation loss {run.validation_loss:.4f}")
