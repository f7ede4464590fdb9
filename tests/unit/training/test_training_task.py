"""What a language model is trained on, as a config says it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.config import Config, load_config, resolve_grid
from headway.config.sections.supervise import SuperviseConfig
from headway.data import pinned, remote_cache
from headway.data.feeding.token_feed import TokenFeed
from headway.models.facts import flops_per_token
from headway.training.task import Task, language_model_task


def task_of(config: Config) -> Task:
    return language_model_task(config, resolve_grid(config, 1))


@pytest.mark.parametrize("mask", [False, True])
def test_flops_are_those_of_the_rows_of_a_step(tiny: Callable[..., Path], mask: bool) -> None:
    stages = [{"start": "2 steps", "sequence_length": 8}, {"start": "5 steps", "sequence_length": 32}]
    config = load_config(tiny(data={"mixture": {"stages": stages}, "document_mask": mask}))
    task = task_of(config)
    found = [task.item_flops(step) for step in range(10)]
    assert task.item_flops(0) == task.flops_per_item
    assert len(set(found[:2] + found[5:])) == len(set(found[2:5])) == 1
    longer, shorter = found[0], found[2]
    assert longer is not None and shorter is not None and longer > shorter
    if not mask:
        shape: Any = task.model.config
        assert (longer, shorter) == (flops_per_token(shape, 32), flops_per_token(shape, 8))


def test_sources_that_are_left_out_are_told_of(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[TokenFeed] = []
    monkeypatch.setattr(TokenFeed, "warn_of_short_sources", lambda feed: told.append(feed))
    task = task_of(load_config(tiny()))
    assert told == [task.feed]


def test_evaluation_rows_can_be_cut_as_the_workers_want_it(tiny: Callable[..., Path]) -> None:
    values = {"context": 2, "tensor": 2, "workers": 4}
    length = 4096
    config = load_config(
        tiny(parallel=values, train={"sequence_length": length}, model={"max_sequence_length": length, "dropout": 0.0})
    )
    evaluation = language_model_task(config, resolve_grid(config, 4)).evaluation
    assert evaluation is not None
    short = evaluation.batch(0)["ids"].shape[1]
    assert short < length and short % 8 == 0


def test_patience_with_a_store_ends_before_that_of_the_supervisor(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(pinned, "open_store", lambda data, **values: asked.append(values) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        task_of(load_config(tiny(supervise={"data_seconds": 100})))
    assert asked[0]["patience_seconds"] == 80
    assert SuperviseConfig().data_seconds > remote_cache.PATIENCE_SECONDS
