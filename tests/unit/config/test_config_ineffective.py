"""Settings that a run never acts on are told of, and only these."""

from __future__ import annotations

import pytest

from headway.config import ineffective_settings, load_config

BEST = ["evaluation.every=10", "checkpoint.every=10", "checkpoint.keep_best=1"]


@pytest.mark.parametrize(
    ("overrides", "evaluates", "told"),
    [
        ([], True, []),
        ([], False, ["evaluation.every is 500 steps, but there are no data for validation"]),
        (["evaluation.every=null"], False, []),
        (BEST, True, []),
        (BEST, False, ["evaluation.every is 10 steps", "checkpoint.keep_best goes by evaluation/loss, but"]),
        ([*BEST, "checkpoint.keep_metric=train/loss"], False, ["evaluation.every is 10 steps"]),
        (["train.steps=50"], True, []),
        (["train.steps=49"], True, ["schedule.warmup of 50 steps is longer than the run of 49 steps"]),
        (["train.steps=49", "schedule.warmup=10k tokens"], True, []),
        (["train.steps=49", "schedule.warmup=1M tokens"], True, ["schedule.warmup of 1000000 tokens is longer"]),
        (["train.steps=90", "schedule.decay=41 steps"], True, []),
        (["train.steps=90", "schedule.decay=40 steps", "schedule.name=wsd"], True, []),
        (
            ["train.steps=90", "schedule.decay=41 steps", "schedule.name=wsd"],
            True,
            ["schedule.decay of 41 steps does not fit into the run of 90 steps, so it begins where the warm-up ends"],
        ),
    ],
)
def test_what_a_run_never_acts_on(overrides: list[str], evaluates: bool, told: list[str]) -> None:
    lines = ineffective_settings(load_config("quickstart", overrides), evaluates)
    assert len(lines) == len(told), lines
    for line, beginning in zip(lines, told, strict=True):
        assert line.startswith(beginning)
