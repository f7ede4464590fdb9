"""How a model gets its weights around a strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from headway.config import Config
from headway.parallel.world import World
from headway.run.session import assemble
from headway.training.task import Objective, Task

CPU = torch.device("cpu")


def test_first_values_are_released_once_a_model_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "make_strategy", lambda *_: None)
    no_feed: Any = None
    model = nn.Linear(2, 3, device="meta")
    objective = Objective(lambda m, batch: m(batch["x"]).sum(), lambda batch: len(batch["x"]))
    task = Task(model, no_feed, objective, first_value=lambda name, size: torch.ones(tuple(size)))
    assemble._cut(Config.model_validate({}), task, World(0, 1, 0, CPU), fresh=True)
    assert torch.equal(model.weight.detach(), torch.ones(3, 2))
    assert task.first_value is None, "it may hold a whole model"
