"""What pipeline parallelism asks of a config, and what is said where it does not get it."""

from __future__ import annotations

from typing import Any

import pytest

from headway.config import Config, resolve, resolve_grid, resolve_mesh
from headway.config.derived.pipeline import idle_share
from headway.core.errors import ConfigError

SHAPE = {"dim": 32, "layers": 4, "heads": 4, "ffn_dim": 64}


def config(parallel: dict[str, Any], train: dict[str, Any] | None = None, **sections: Any) -> Config:
    values = {"train": {"steps": 1, "global_batch": 8, "micro_batch": 1, **(train or {})}, "model": SHAPE, **sections}
    return Config.model_validate({**values, "parallel": {"workers": 2, "pipeline": 2, **parallel}})


@pytest.mark.parametrize(
    "given",
    [
        config({}),
        config({"pipeline_schedule": "gpipe"}, {"micro_batch": 8}),
        config({"pipeline_schedule": "interleaved"}),
        config({"pipeline_split": [1, 3]}),
        config({"workers": 4, "pipeline": 4}),
        config({"workers": 4}, {"lanes": 2}),
        config({"workers": 8, "tensor": 2, "context": 2}),
    ],
)
def test_what_fits(given: Config) -> None:
    resolved = resolve(given)
    assert resolve_mesh(resolved, resolved.parallel.workers).pp == given.parallel.pipeline


def test_workers_of_a_pipeline_share_their_lanes() -> None:
    given = config({"workers": 4}, {"lanes": 2})
    assert resolve_grid(given, 4).lanes == 2
    mesh = resolve_mesh(given, 4)
    # Worker numbers count through the data first: stages are apart, and each has both halves of the batch.
    assert [mesh.coordinates(rank)["pp"] for rank in range(4)] == [0, 0, 1, 1]
    assert [mesh.data_rank(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert [mesh.ranks_along(rank, "pp") for rank in range(4)] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_the_share_of_time_idle() -> None:
    # The slots of Narayanan et al. 2021, figure 4: 8 micro-batches on 4 devices, with 1 and 2 stages each.
    assert idle_share(config({"workers": 4, "pipeline": 4}).parallel, 8) == pytest.approx(3 / 11)
    assert idle_share(config({"pipeline": 4, "pipeline_schedule": "interleaved"}).parallel, 8) == pytest.approx(3 / 19)


@pytest.mark.parametrize(
    ("given", "what", "fix"),
    [
        (config({"workers": 8, "pipeline": 8}), "4 layers cannot be cut into 8", "parallel.pipeline=4"),
        (
            config({"pipeline_schedule": "interleaved", "virtual_stages": 3}),
            "4 layers cannot be cut into 6",
            "parallel.virtual_stages=2",
        ),
        (
            config({"workers": 4, "pipeline": 4, "pipeline_schedule": "interleaved"}),
            "4 layers cannot be cut into 8",
            "parallel.pipeline_schedule=1f1b",
        ),
        (config({"virtual_stages": 2}), "one stage per worker, not 2", "parallel.pipeline_schedule=interleaved"),
        (
            config({"pipeline_schedule": "interleaved", "virtual_stages": 1}),
            "nothing to interleave",
            "parallel.pipeline_schedule=1f1b",
        ),
        (config({"pipeline_split": [1, 2, 1]}), "names 3 stages, but there are 2", "give 2 numbers"),
        (config({"pipeline_split": [2, 1]}), "3 layers, but the model has 4", "parallel.pipeline_split=[2, 2]"),
        (config({"pipeline_split": [5, 1]}), "6 layers, but the model has 4", "leave parallel.pipeline_split out"),
        (config({}, {"micro_batch": 8}), "1 micro-batches in each lane, fewer than", "train.micro_batch=4"),
        (config({}, {"global_batch": 1}), "1 micro-batches in each lane", "train.global_batch=2"),
        (
            config({"pipeline_schedule": "interleaved"}, {"global_batch": 12, "micro_batch": 4}),
            "3 micro-batches in each lane, not a multiple",
            "train.micro_batch=3",
        ),
        (config({}, determinism="elastic"), "elastic", "determinism=run"),
        (config({"workers": 3}), "3 workers cannot be arranged as pipeline 2", "parallel.workers=4"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_nearest_that_does(given: Config, what: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(given)
    text = f"{caught.value.what} {caught.value.fix}"
    assert what in text and fix in text, text
