"""`train.epochs` for a dataset of one's own: steps follow from its length."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from headway import Trainer, override
from headway.config import Config


class Points(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


def test_epochs_of_a_dataset_become_steps(tmp_path: Path) -> None:
    config = override(
        Config(), ["train.epochs=2", "train.global_batch=10", f"runs={tmp_path}", "telemetry.report=false"]
    )
    run = Trainer(nn.Linear(4, 1), Points(), lambda model, batch: model(batch / 50).square().mean(), config).fit()
    assert run.step == 10
