"""Lightning, saving a model and AdamW's moments as its users do; told by `save.py` where to."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import lightning
import torch
from torch import nn


class Stack(lightning.LightningModule):
    """Matrices, trained for one step so that the optimizer has its moments."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(layers))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        """Gradients for all."""
        return sum((layer(batch).square().mean() for layer in self.layers), torch.zeros(()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As the state that the others save."""
        return torch.optim.AdamW(self.parameters())


def main() -> None:
    """Train a step, then save to each folder that is named."""
    model = Stack(max(1, round(int(sys.argv[1]) * 1e6 / (3 * 4 * 1024**2))))
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    answers, sys.stdout = sys.stdout, sys.stderr
    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(2, 1024)))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        trainer.save_checkpoint(Path(line.strip()) / "state.ckpt")
        print(json.dumps({"seconds": time.perf_counter() - start}), file=answers, flush=True)


if __name__ == "__main__":
    main()
