"""Plans of runs that were changed on the way, held against a recount of the text of every row."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import ConfigError
from headway.data.feeding.plan import PlainPlan
from headway.run.directory.row_count import count_by_looking, count_by_plan
from support.segments import CHANGES, Run, changed_run, config_of, pieces


def test_a_changed_batch_goes_on_in_the_same_sequence() -> None:
    config = config_of()
    run = Run(config, {"a": [1601]})
    whole = PlainPlan(["a"], [100], config.seed, config.train.batches, 16)
    wanted = [int(row) for step in range(40) for row in whole.picks(step, 0, 4).rows]
    for batch in (2, 8):
        changed = Run(config, run.tokens)
        changed.change(10, config_of(train={"global_batch": batch}))
        plan = changed.plan
        found = [int(r) for step in range(20) for r in plan.picks(step, 0, plan.step_rows(step)).rows]
        assert found == wanted[: len(found)] and len(found) == 40 + 10 * batch


def test_data_that_has_joined_is_used_with_what_is_left() -> None:
    run = Run(config_of(), {"a": [1601]})  # 100 rows
    run.change(10, config_of(), {"a": 801, "b": 161})  # 50 and 10 more
    assert set(run.uses(0, 40).values()) == {1} and run.uses(0, 40).keys() == pieces(run.tokens, 16)
    assert set(run.uses(0, 80).values()) == {2}
    # What has joined is not put at the end, nor at the beginning.
    joined = [sum(n for (name, part, _), n in run.uses(s, s + 5).items() if part or name == "b") for s in (10, 20, 30)]
    assert all(joined)


def test_another_length_cuts_what_is_left() -> None:
    run = Run(config_of(), {"a": [1609]})  # 100 rows and 8 tokens, of which rows of 4 make two more
    run.change(10, config_of(train={"sequence_length": 4, "global_batch": 24}))
    uses = run.uses(0, 10 + (60 * 4 + 2) // 24)
    assert set(uses.values()) == {1}
    assert set(run.uses(0, 21).values()) == {1, 2}
    assert run.uses(0, 21).keys() == pieces(run.tokens, 4)


def test_what_was_used_must_be_told() -> None:
    for changed in (
        {"train": {"sequence_length": 32}},
        {"train": {"sequence_length": 12}},
        {"data": {"packing": "best_fit"}},
    ):
        run = Run(config_of(), {"a": [1601]})
        run.change(10, config_of(**changed))
        with pytest.raises(ConfigError, match=r"row|packed") as error:
            _ = run.plan
        assert "--start-epoch" in (error.value.fix or "")
        run.change(10, config_of(**changed), new_epoch=True)
        assert run.plan.picks(10, 0, 4).epochs.tolist() == [1] * 4


def test_weights_given_and_taken_on_the_way() -> None:
    run = Run(config_of(sources={"a": {}, "b": {}}), {"a": [801], "b": [801]})
    weighted = config_of(sources={"a": {"weight": 3}, "b": {"weight": 1}})
    run.change(5, weighted)
    # 30 rows are left of 'a' after about 20 were used together; three of four rows are its.
    uses = run.uses(0, 15)
    assert max(uses.values()) <= 2
    for name in "ab":
        used = [n for (source, _, _), n in run.uses(0, 40).items() if source == name]
        assert max(used) - min(used) <= 1, "no row is used again before all others were"
    run.change(20, config_of(sources={"a": {}, "b": {}}))
    before, plan = run.uses(0, 20), run.plan
    left = (
        sum(
            max(n for (s, _, _), n in before.items() if s == name) * 50 * 4
            - sum(n for (s, _, _), n in before.items() if s == name)
            for name in "ab"
        )
        // 4
    )
    after = run.uses(20, 20 + left // 4)
    assert set(after.values()) == {1}
    total = before + after
    for name in "ab":
        used = [n for (source, _, _), n in total.items() if source == name]
        assert max(used) - min(used) <= 1
    assert plan.begun(39) == 0


def test_shares_of_all_steps_move_with_their_number() -> None:
    stages = {"mixture": {"stages": [{"start": 0.5, "weights": {"a": 1, "b": 3}}]}}
    sources = {"a": {"weight": 1}, "b": {"weight": 1}}
    run = Run(config_of(sources=sources, data=stages), {"a": [3201], "b": [3201]})
    run.change(30, config_of(sources=sources, data=stages, train={"steps": 100}))
    plan = run.plan
    assert plan.counts(20, 30) == [10, 30] and plan.counts(30, 50) == [40, 40] and plan.counts(50, 60) == [10, 30]
    assert max(run.uses(0, 100).values()) - min(run.uses(0, 100).values()) <= 1


def test_limits_on_epochs_count_what_was_used_before() -> None:
    sources = {"a": {"weight": 1, "max_epochs": 1}, "b": {"weight": 1}}
    run = Run(config_of(sources=sources), {"a": [801], "b": [8001]})  # 50 rows of 'a'
    run.change(10, config_of(sources=sources, train={"global_batch": 8}))  # 20 of them are used
    assert run.plan.counts(0, 40)[0] == 50
    assert {n for (name, _, _), n in run.uses(0, 40).items() if name == "a"} == {1}


@settings(max_examples=15, deadline=None)
@given(
    tokens=st.dictionaries(st.sampled_from("abc"), st.integers(50, 900), min_size=1),
    changes=st.lists(CHANGES, max_size=5),
)
def test_whatever_is_changed_no_text_is_used_again_before_all_of_its_source(
    tokens: dict[str, int], changes: list[dict[str, Any]]
) -> None:
    """Of every part of a source, text that joined together is used as often, to within one, at every border.

    And between two borders of a plain plan no row comes twice in an epoch.
    """
    changed = changed_run(tokens, changes)
    if changed is None:
        return
    run, step = changed
    last = step + 25
    plan = run.plan
    assert sum(plan.counts(0, last)) == sum(plan.step_rows(s) for s in range(last))
    ranges = [(0, step), (step, last)] if step else [(0, last)]
    looked = count_by_looking(plan, ranges)
    assert all(epoch.sound for epoch in looked.epochs), looked.epochs
    assert looked.by_range == count_by_plan(plan, ranges).by_range == [plan.counts(*steps) for steps in ranges]
    uses = run.uses(0, last)
    joined: dict[tuple[str, int, int], int] = {}
    for number, segment in enumerate(run.segments):  # shorter rows hold the end of a source, too
        for piece in pieces(run.history[number], segment.sequence_length):
            joined.setdefault(piece, number)
    groups: dict[tuple[str, int], list[int]] = {}
    for piece, number in joined.items():
        groups.setdefault((piece[0], number), []).append(uses[piece])
    for of in groups.values():
        assert max(of) - min(of) <= 1, groups
