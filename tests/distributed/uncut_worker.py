"""Run under torchrun: `Trainer` refuses a pipeline for a module that does not say where it may be cut."""

import sys
from pathlib import Path

import torch
from torch import nn

from headway import Config, Trainer
from headway.core.errors import ConfigError

config = Config.model_validate(
    {
        "runs": str(Path(sys.argv[1]) / "runs"),
        "model": {"dim": 8, "layers": 2, "heads": 1, "ffn_dim": 8},
        "train": {"steps": 1, "global_batch": 2, "micro_batch": 1, "device": "cpu"},
        "parallel": {"pipeline": 2},
    }
)
dataset = [torch.zeros(2), torch.ones(2)]
try:
    Trainer(nn.Linear(2, 1), dataset, lambda model, x: model(x).mean(), config).fit()
except ConfigError as error:
    assert "Linear does not declare" in error.what
    assert "parallel.pipeline=1" in str(error.fix)
else:
    raise AssertionError("not refused")
