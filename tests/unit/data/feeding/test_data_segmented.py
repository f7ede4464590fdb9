"""Plans of runs that were changed on the way, held against a recount of the text of every row."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config import Config
from headway.config.segments import Segment
from headway.core.errors import ConfigError
from headway.data.feeding.mixture import is_mixed
from headway.data.feeding.plan import PlainPlan
from headway.data.feeding.segmented import SegmentedPlan

UNIT = 4  # tokens of the shortest row


def config_of(**values: Any) -> Config:
    sources = values.pop("sources", {"a": {}})
    train = {"steps": 40, "sequence_length": 16, "global_batch": 4, **values.pop("train", {})}
    data = {"sources": [{"path": name, "name": name, **of} for name, of in sources.items()], **values.pop("data", {})}
    return Config.model_validate({"train": train, "data": data, "model": {"preset": "1m"}, **values}).resolved()


def rows_of(config: Config, tokens: dict[str, list[int]]) -> dict[str, dict[int, list[int]]]:
    """What `concat` makes of sources with so many tokens in each part."""
    lengths = {config.train.sequence_length, *(s.sequence_length or 0 for s in config.data.mixture.stages)} - {0}
    return {name: {n: [max(0, p - 1) // n for p in parts] for n in lengths} for name, parts in tokens.items()}


class Run:
    """A run that is changed, and the text that its steps have used, counted by content."""

    def __init__(self, config: Config, tokens: dict[str, list[int]]) -> None:
        self.tokens = {name: list(parts) for name, parts in tokens.items()}
        self.segments = [Segment.of(config, 0, "data-0", rows_of(config, self.tokens))]
        self.history = [copy.deepcopy(self.tokens)]
        self.config = config

    def change(self, step: int, config: Config, grown: dict[str, int] | None = None, new_epoch: bool = False) -> None:
        if grown:
            parts = max(map(len, self.tokens.values()))
            for name, count in grown.items():
                self.tokens.setdefault(name, [0] * parts)
            for name, of in self.tokens.items():
                of.append(grown.get(name, 0))
        before = [segment for segment in self.segments if segment.first_step < step]
        self.history = [*self.history[: len(before)], copy.deepcopy(self.tokens)]
        data = f"data-{sum(map(len, self.tokens.values()))}"
        self.segments = [*before, Segment.of(config, step, data, rows_of(config, self.tokens), new_epoch=new_epoch)]
        self.config = config

    @property
    def plan(self) -> SegmentedPlan:
        return SegmentedPlan(self.config.with_segments(self.segments))

    def uses(self, first: int, last: int) -> Counter[tuple[str, int, int]]:
        """How often each smallest piece of text was used: (source, part, piece)."""
        plan, found = self.plan, Counter[tuple[str, int, int]]()
        for step in range(first, last):
            length = plan.sequence_length(step)
            segment = plan.segments[plan.number_at(step)]
            picks = plan.picks(step, 0, plan.step_rows(step))
            for source, row in zip(picks.sources.tolist(), picks.rows.tolist(), strict=True):
                name = plan.sources[source]
                for part, count in enumerate(segment.rows[name][length]):  # noqa: B007
                    if row < count:
                        break
                    row -= count
                for piece in range(row * length // UNIT, (row + 1) * length // UNIT):
                    found[name, part, piece] += 1
        return found


def pieces(tokens: dict[str, list[int]], length: int) -> set[tuple[str, int, int]]:
    """All text that rows of a length hold."""
    return {
        (name, part, piece)
        for name, parts in tokens.items()
        for part, count in enumerate(parts)
        for piece in range(max(0, count - 1) // length * (length // UNIT))
    }


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
        with pytest.raises(ConfigError, match="row|packed") as error:
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
    left = sum(
        max(n for (s, _, _), n in before.items() if s == name) * 50 * 4 - sum(n for (s, _, _), n in before.items() if s == name)
        for name in "ab"
    ) // 4
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
    assert set(n for (name, _, _), n in run.uses(0, 40).items() if name == "a") == {1}


CHANGES = st.fixed_dictionaries(
    {
        "after": st.integers(1, 12),
        "batch": st.sampled_from([2, 4, 8]),
        "length": st.sampled_from([16, 8, 4]),
        "seed": st.integers(0, 2),
        "mixed": st.booleans(),
        "grown": st.dictionaries(st.sampled_from("abc"), st.integers(0, 400), max_size=2),
    }
)


@settings(max_examples=80, deadline=None)
@given(tokens=st.dictionaries(st.sampled_from("abc"), st.integers(50, 900), min_size=1), changes=st.lists(CHANGES, max_size=5))
def test_whatever_is_changed_no_text_is_used_again_before_all_of_its_source(
    tokens: dict[str, int], changes: list[dict[str, Any]]
) -> None:
    """Of every part of a source, text that joined together is used as often, to within one, at every border.

    And between two borders of a plain plan no row comes twice in an epoch.
    """
    run = Run(config_of(sources={name: {} for name in tokens}), {name: [count] for name, count in tokens.items()})
    step, length = 0, 16
    for change in changes:
        step += change["after"]
        length = change["length"] if length % change["length"] == 0 else length
        names = dict.fromkeys([*run.tokens, *change["grown"]])
        weights = {name: {"weight": 1 + number} if change["mixed"] else {} for number, name in enumerate(names)}
        config = config_of(
            sources=weights, seed=change["seed"],
            train={"global_batch": change["batch"], "sequence_length": length, "steps": 500},
        )
        assert is_mixed(config.data) == change["mixed"]
        grown = {name: count for name, count in change["grown"].items()} or None
        try:
            run.change(step, config, grown)
            _ = run.plan
        except Exception as error:
            if "has the weight" in str(error):  # a source that is too small for a row
                return
            raise
    last = step + 25
    plan = run.plan
    assert sum(plan.counts(0, last)) == sum(plan.step_rows(s) for s in range(last))
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
