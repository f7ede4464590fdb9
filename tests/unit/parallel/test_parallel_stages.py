"""Which layers make a stage."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config import Config, ParallelConfig, TrainConfig
from headway.core.errors import ConfigError
from headway.parallel.stages import plan_stages, split_evenly, stages_of_worker


def config(**parallel: object) -> Config:
    return Config.model_validate({"train": {"steps": 1}, "parallel": parallel})


def slowest(costs: list[float], cuts: list[range]) -> float:
    return max(sum(costs[n] for n in cut) for cut in cuts)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.data())
def test_no_other_cut_is_faster(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    found = split_evenly(costs, stages)
    assert [n for cut in found for n in cut] == list(range(len(costs)))
    assert len(found) == stages and all(found)
    others = [
        slowest(list(costs), [range(a, b) for a, b in pairwise((0, *inner, len(costs)))])
        for inner in combinations(range(1, len(costs)), stages - 1)
    ]
    assert slowest(list(costs), found) == min(others)


def sections(**parallel: object) -> tuple[ParallelConfig, TrainConfig]:
    whole = config(**parallel)
    return whole.parallel, whole.train


def test_the_head_makes_the_last_stage_shorter() -> None:
    stages = plan_stages(*sections(pipeline=2), [1.0] * 8, embedding=0.0, head=2.0)
    assert stages == [range(5), range(5, 8)]


def test_a_head_that_outweighs_the_layers_leaves_the_rest_even() -> None:
    stages = plan_stages(*sections(pipeline=3), [1.0] * 7, embedding=0.0, head=50.0)
    assert stages == [range(3), range(3, 6), range(6, 7)]


def test_a_split_of_ones_own() -> None:
    assert plan_stages(*sections(pipeline=2, pipeline_split=[1, 3]), [1.0] * 4, 0.0, 0.0) == [range(1), range(1, 4)]
    with pytest.raises(ConfigError, match="4 layers, but the model has 5"):
        plan_stages(*sections(pipeline=2, pipeline_split=[1, 3]), [1.0] * 5, 0.0, 0.0)


def test_stages_that_only_the_checkpoint_of_the_model_shows_to_be_too_many() -> None:
    with pytest.raises(ConfigError, match="2 layers cannot be cut into 4"):
        plan_stages(*sections(pipeline=4), [1.0] * 2, 0.0, 0.0)


def test_stages_are_dealt_out_in_turns() -> None:
    assert [list(stages_of_worker(place, 2, 4)) for place in range(2)] == [[0, 2], [1, 3]]
