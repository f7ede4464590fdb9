"""The rows of every step are a function of the step, and everything that counts tokens agrees with counting steps."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headway.checkpoint.contents import crossed
from headway.config import (
    Batches,
    BatchStage,
    Config,
    Interval,
    dump_config,
    identity,
    load_resolved,
    resolve,
    resolve_lanes,
)
from headway.core.errors import ConfigError


def config(**train: Any) -> Config:
    values = {"steps": 40, "sequence_length": 16, "global_batch": 32, **train}
    return Config.model_validate({"train": values})


RAMP = [{"global_batch": 8, "until": "5 steps"}, {"global_batch": "256 tokens", "until": "2560 tokens"}]


@st.composite
def ramps(draw: st.DrawFn) -> Batches:
    rows = sorted(draw(st.sets(st.integers(1, 40), min_size=1, max_size=4)))
    starts = [0, *sorted(draw(st.sets(st.integers(1, 30), min_size=len(rows) - 1, max_size=len(rows) - 1)))]
    return Batches(tuple(zip(starts, rows, strict=True)), draw(st.sampled_from([1, 16])))


EVERY = st.builds(Interval, st.integers(1, 900), st.sampled_from(["steps", "tokens"]))


@given(ramps(), EVERY, EVERY, st.integers(1, 60))
def test_two_events_meet_at_the_first_step_that_has_both(
    batches: Batches, one: Interval, other: Interval, end: int
) -> None:
    due = [[step for step in range(1, end) if batches.is_due(every, step)] for every in (one, other)]
    assert [list(batches.due_steps(every, end)) for every in (one, other)] == due
    assert batches.first_meeting(one, other, end) == min({*due[0]} & {*due[1]}, default=None)


@given(ramps(), EVERY, EVERY, st.integers(1, 60))
def test_the_steps_of_uploads_are_those_that_the_remote_tier_sends(
    batches: Batches, saved: Interval, sent: Interval, end: int
) -> None:
    due: list[int] = []
    for step in batches.due_steps(saved, end):
        if not due or crossed(Interval(sent.amount, sent.unit), (due[-1], 0.0), (step, 0.0), batches):
            due.append(step)
    assert list(batches.thinned(batches.due_steps(saved, end), sent)) == due


@given(ramps(), st.integers(1, 4000), st.integers(1, 50))
def test_all_agrees_with_going_through_the_steps(batches: Batches, tokens: int, last: int) -> None:
    length = batches.sequence_length
    before = [0, *accumulate(batches.rows(step) for step in range(4100))]
    assert [batches.rows_before(step) for step in range(60)] == before[:60]
    assert batches.tokens_before(last) == length * before[last]
    assert batches.steps_for(tokens) == next(n for n, rows in enumerate(before) if rows * length >= tokens)
    near = min(abs(rows * length - tokens) for rows in before[1:])
    assert abs(batches.tokens_before(batches.steps_of(Interval(tokens, "tokens"))) - tokens) == near
    # What is due every so many tokens comes once for each multiple that is passed, and not before it.
    every = Interval(tokens, "tokens")
    due = sum(batches.is_due(every, step) for step in range(1, last + 1))
    assert due == len({next(n for n in range(60) if before[n] * length >= k) for k in
                       range(tokens, before[last] * length + 1, tokens)})  # fmt: skip


@given(ramps(), st.integers(1, 4000), st.sampled_from(["steps", "tokens"]), st.integers(0, 50), st.integers(1, 51))
def test_what_is_due_on_the_way_is_due_after_some_step_there(
    batches: Batches, amount: int, unit: Any, step: int, end: int
) -> None:
    every = Interval(amount, unit)
    expected = any(batches.is_due(every, between) for between in range(step + 1, end))
    assert batches.is_due_between(every, step, end) == expected


@given(ramps(), st.integers(1, 50), st.integers(1, 4000))
def test_the_last_steps_of_an_amount_are_counted_from_the_end(batches: Batches, steps: int, tokens: int) -> None:
    total = batches.tokens_before(steps)
    tokens = min(tokens, total)
    found = batches.last_steps_of(Interval(tokens, "tokens"), steps)
    errors = {n: abs(total - batches.tokens_before(steps - n) - tokens) for n in range(1, steps + 1)}
    assert errors[found] == min(errors.values())
    assert batches.last_steps_of(Interval(7, "steps"), steps) == 7


def test_a_config_says_how_many_rows_each_step_has() -> None:
    batches = config(batch_ramp=RAMP).train.batches
    assert batches.parts == ((0, 8), (5, 16), (13, 32))  # 640 tokens in 5 steps, then 7.5 steps of 256 to 2560
    assert batches.in_words(20) == "8 rows from step 0, 16 rows from step 5, 32 rows from step 13"


def test_a_resolved_config_has_whole_steps_and_stays_what_it_is(tmp_path: Any) -> None:
    resolved = resolve(config(steps=None, tokens=10_000, batch_ramp=RAMP))
    assert resolved.train.batch_ramp[1].global_batch == 16 and str(resolved.train.batch_ramp[1].until) == "13 steps"
    # 5 * 128 + 8 * 256 = 2688 tokens in the ramp; 7312 more in steps of 512.
    assert resolved.train.steps == 13 + 15
    (tmp_path / "config.yaml").write_text(dump_config(resolved))
    assert identity(load_resolved(tmp_path / "config.yaml")) == identity(resolved)
    assert identity(resolve(config(batch_ramp=[]))) != identity(resolve(config(batch_ramp=RAMP)))


def test_lanes_and_micro_batches_divide_every_batch() -> None:
    ramp = [{"global_batch": 24, "until": "5 steps"}, {"global_batch": 40, "until": "9 steps"}]
    values = {"train": {"steps": 40, "global_batch": 64, "batch_ramp": ramp}, "determinism": "elastic"}
    grid = resolve_lanes(Config.model_validate(values), 2)
    assert (grid.lanes, grid.micro_batch, grid.micro_batches) == (8, 1, 8)
    assert [grid.micro_batches_of(rows) for rows in (24, 40, 64)] == [3, 5, 8]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"train": {"batch_ramp": [{"global_batch": 32, "until": "5 steps"}]}}, "not followed by more"),
        ({"train": {"batch_ramp": [{"global_batch": 8, "until": "10 min"}]}}, "not a time"),
        ({"train": {"batch_ramp": [*RAMP, {"global_batch": 24, "until": "3 steps"}]}}, "order"),
        ({"train": {"batch_ramp": RAMP, "micro_batch": 16}}, "not divisible by micro_batch"),
        ({"train": {"batch_ramp": RAMP}, "parallel": {"workers": 16}}, "8, 16, 32 rows have 8 in common"),
        ({"train": {"batch_ramp": RAMP, "lanes": 16}}, "multiples of 16 rows"),
        ({"train": {"batch_ramp": RAMP, "micro_batch": 8}, "parallel": {"workers": 2, "pipeline": 2}}, "cannot run 1"),
        ({"train": {"batch_ramp": RAMP}, "parallel": {"strategy": "deepspeed_zero1"}}, "one global batch"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(values: dict[str, Any], said: str) -> None:
    train = {"steps": 40, "sequence_length": 16, "global_batch": 32, **values["train"]}
    with pytest.raises((ConfigError, ValueError)) as error:
        resolve(Config.model_validate({**values, "train": train}))
    assert said in str(error.value)


@example(Batches(((0, 1),), 16), 600, 7)  # 37 steps and a half
@given(ramps(), st.integers(1, 4000), st.integers(0, 50))
def test_an_amount_is_as_many_steps_wherever_a_run_was_changed(batches: Batches, tokens: int, begins: int) -> None:
    changed = Batches(batches.parts, batches.sequence_length, before=batches, begins=begins)
    amount = Interval(tokens, "tokens")
    assert changed.steps_of(amount) == batches.steps_of(amount)
    assert changed.steps_for(tokens) == batches.steps_for(tokens)


def test_batches_of_a_run_that_was_changed() -> None:
    first = Batches(((0, 2), (10, 4)), 8)
    changed = Batches(((0, 6),), 4, before=first, begins=20)
    steps = [first.rows(step) * 8 for step in range(20)] + [6 * 4] * 30
    assert [changed.tokens_before(step) for step in range(51)] == [sum(steps[:step]) for step in range(51)]
    assert [changed.rows(step) for step in (0, 9, 10, 19, 20, 49)] == [2, 2, 4, 4, 6, 6]
    assert changed.sizes == [6] and changed.common_rows == 6
    assert list(changed.stretches(5, 30)) == [(5, 10, 2), (10, 20, 4), (20, 30, 6)]
    assert changed.token_parts() == [(0, 16), (10, 32), (20, 24)]
    for tokens in (1, 16, 161, 480, 481, 600):
        assert changed.steps_for(tokens) == next(n for n in range(99) if sum(steps[:n]) >= tokens)
    assert [step for step in range(1, 40) if changed.is_due(Interval(100, "tokens"), step)] == [
        step for step in range(1, 40) if sum(steps[:step]) // 100 > sum(steps[: step - 1]) // 100
    ]
    # A ramp that tokens end counts those of the steps before.
    stages = [BatchStage(global_batch=2, until="560 tokens")]
    ramp = Batches.planned(stages, 8, 4, before=first, begins=20)
    assert ramp.parts[1] == (30, 8) and ramp.rows(29) == 2
