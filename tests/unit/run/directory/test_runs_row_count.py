"""Counting rows finds what was used twice or left out, and looking agrees with counting."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config import Batches, Config, resolve
from headway.data.feeding.mixture import plan_mixture
from headway.data.feeding.plan import MixedPlan, Picks, PlainPlan
from headway.run.directory.row_count import EpochCount, count_by_looking, count_by_plan, merged


def mixed(rows: list[int], batches: Batches, shorter: bool) -> MixedPlan:
    names = "abc"[: len(rows)]
    config = resolve(
        Config.model_validate(
            {
                "data": {
                    "sources": [{"path": name, "weight": 1 + number} for number, name in enumerate(names)],
                    "mixture": {"stages": [{"start": 0.5, "sequence_length": 16}] if shorter else []},
                },
                "train": {
                    "steps": 60,
                    "sequence_length": 32,
                    "global_batch": batches.parts[-1][1],
                    "batch_ramp": [
                        {"global_batch": rows, "until": f"{end} steps"}
                        for (_, rows), (end, _) in pairwise(batches.parts)
                    ],
                },
            }
        )
    )
    return MixedPlan(
        plan_mixture(config.data, config.train, [*names], lambda length: [n * 32 // length for n in rows]), 1
    )


@given(
    rows=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    step_rows=st.sets(st.integers(1, 12), min_size=1, max_size=3),
    changes=st.sets(st.integers(1, 70), min_size=2, max_size=2),
    cuts=st.sets(st.integers(1, 59), max_size=4),
    kind=st.sampled_from(["plain", "mixed", "shorter"]),
)
@settings(max_examples=80, deadline=None)
def test_looking_and_counting_agree(
    rows: list[int], step_rows: set[int], changes: set[int], cuts: set[int], kind: str
) -> None:
    batches = Batches(tuple(zip([0, *sorted(changes)], sorted(step_rows), strict=False)))
    plan = PlainPlan([*"abc"][: len(rows)], rows, 1, batches)
    plan = plan if kind == "plain" else mixed(rows, batches, kind == "shorter")  # type: ignore[assignment]
    ends = [*sorted(cuts), 60]
    ranges = list(zip([0, *ends], ends, strict=False))
    looked, counted = count_by_looking(plan, ranges), count_by_plan(plan, ranges)
    assert looked.by_range == counted.by_range
    assert sorted(map(dataclasses.astuple, merged(_apart(looked.epochs)))) == sorted(
        map(dataclasses.astuple, merged(_apart(counted.epochs)))
    )
    assert all(epoch.sound for epoch in looked.epochs)


def _apart(epochs: list[EpochCount]) -> list[EpochCount]:
    """Each epoch by itself: in a plain plan the last one may be as full as those before, though it goes on."""
    return [
        dataclasses.replace(e, first_epoch=number, last_epoch=number)
        for e in epochs
        for number in range(e.first_epoch, e.last_epoch + 1)
    ]


class Tampered(PlainPlan):
    """Takes one row in place of another."""

    def __init__(self, *arguments: Any, swap: tuple[int, int]) -> None:
        super().__init__(*arguments)
        self.swap = swap

    def picks(self, step: int, start: int, stop: int) -> Picks:
        picks = super().picks(step, start, stop)
        right, wrong = self.swap
        return dataclasses.replace(picks, rows=np.where(picks.rows == right, wrong, picks.rows))


def test_a_row_used_twice_and_one_left_out_are_found() -> None:
    counted = count_by_looking(Tampered(["a"], [40], 1, Batches(((0, 4),)), swap=(7, 9)), [(0, 15)])
    assert counted.epochs == [EpochCount(0, "a", 0, 0, 40, 39, twice=1, skipped=1), counted.epochs[1]]
    assert not counted.epochs[0].sound
    assert counted.epochs[1].used + counted.epochs[1].twice == 20


class Skipping(PlainPlan):
    """Leaves an epoch out."""

    def picks(self, step: int, start: int, stop: int) -> Picks:
        picks = super().picks(step, start, stop)
        return dataclasses.replace(picks, epochs=np.where(picks.epochs > 0, picks.epochs + 1, 0))


def test_an_epoch_left_out_is_found() -> None:
    counted = count_by_looking(Skipping(["a"], [40], 1, Batches(((0, 4),))), [(0, 15)])
    assert [(e.first_epoch, e.used, e.skipped) for e in counted.epochs] == [(0, 40, 0), (1, 0, 40), (2, 20, 0)]


def test_progress_is_told() -> None:
    told: list[int] = []
    count_by_looking(PlainPlan(["a"], [40], 1, Batches(((0, 4),))), [(0, 3), (3, 10)], told.append)
    assert sum(told) == 40


@pytest.mark.parametrize("rows", [10, 7])
def test_epochs_that_went_alike_are_one_line(rows: int) -> None:
    epochs = count_by_looking(PlainPlan(["a"], [rows], 1, Batches(((0, 10),))), [(0, 20)]).epochs
    whole = 200 // rows
    assert epochs[0] == EpochCount(0, "a", 0, whole - 1, rows, rows)
    assert len(epochs) == (1 if rows == 10 else 2)
