"""The Trainer of Hugging Face, saving a checkpoint to resume from; told by `save.py` where to."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments


class Stack(PreTrainedModel):
    """Matrices, trained for one step so that the optimizer has its moments."""

    config_class = PretrainedConfig

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1024, 1024, bias=False) for _ in range(config.layers))
        self.post_init()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Gradients for all."""
        return {"loss": sum((layer(x).square().mean() for layer in self.layers), torch.zeros(()))}


def main() -> None:
    """Train a step, then save to each folder that is named."""
    answers, sys.stdout = sys.stdout, sys.stderr
    layers = max(1, round(int(sys.argv[1]) * 1e6 / (3 * 4 * 1024**2)))
    rows = [{"x": torch.randn(1024)} for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True
        )
        trainer = Trainer(Stack(PretrainedConfig(layers=layers)), arguments, train_dataset=rows)
        trainer.train()
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            trainer.args.output_dir = str(Path(line.strip()))
            start = time.perf_counter()
            trainer._save_checkpoint(trainer.model, trial=None)
            print(json.dumps({"seconds": time.perf_counter() - start}), file=answers, flush=True)


if __name__ == "__main__":
    main()
