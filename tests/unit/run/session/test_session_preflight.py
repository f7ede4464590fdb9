"""The examination that every way to a first step shares."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import headway
from headway.api.start.preview import preview
from headway.config import Config, load_config
from headway.core.errors import ConfigError
from headway.run.session.attempt import RunOptions
from headway.run.session.preflight import RunPlan, examine


def _train_own_module(config: Config) -> object:
    rows = [torch.zeros(2)] * 16
    return headway.Trainer(nn.Linear(2, 1), rows, lambda model, batch: model(batch).mean(), config).fit()


WAYS: dict[str, Callable[[Config], object]] = {
    "dry run": lambda config: preview(config, RunOptions()),
    "in this process": lambda config: headway.train(config, own_process=False),
    "several workers": lambda config: headway.train(
        config.model_copy(update={"parallel": config.parallel.model_copy(update={"workers": 2})})
    ),
    "own module": _train_own_module,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_key_that_would_not_be_used_stops_every_way_before_anything_is_written(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setenv("HEADWAY_SIGNING_KEY", "0" * 64)
    config = load_config(tiny())
    with pytest.raises(ConfigError, match="unsigned checkpoints are refused"):
        WAYS[way](config)
    assert not config.run_directory.exists()


def test_a_plan_has_what_a_checkpoint_is_compared_with(tiny: Callable[..., Path]) -> None:
    config = load_config(tiny(), ["parallel.workers=2", "train.micro_batch=2"])
    plan = examine(config, RunOptions())
    assert plan.store is not None and plan.fingerprints["data"] == plan.store.fingerprint
    assert (plan.mesh.size, plan.grid.lanes * plan.grid.micro_batches * plan.grid.micro_batch) == (2, 8)
    assert (plan.config.model.vocab_size or 0) >= plan.store.vocab_size == plan.facts()["vocab_size"]
    adopted = RunPlan.of(plan.config, RunOptions())
    assert (adopted.mesh, adopted.grid, adopted.store) == (plan.mesh, plan.grid, None)
    assert not config.run_directory.exists()
