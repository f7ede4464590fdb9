"""Shares, limits on epochs and stages, as segments; and the rows that follow from them."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config import Config, load_config, resolve
from headway.core.errors import ConfigError, DataError
from headway.data.feeding.mixture import RAMP_PARTS, Mixture, is_mixed, plan_mixture, powered
from headway.data.feeding.plan import MixedPlan
from headway.text.reading.sources import Source, find_sources

ROWS = {"a": 1000, "b": 300, "c": 50}
LENGTH = 64


def config_of(sources: dict[str, dict[str, Any]], train: dict[str, Any] | None = None, **mixture: Any) -> Config:
    """100 steps of 8 rows of 64 tokens."""
    values = [{"path": f"{name}.txt", "name": name, **settings} for name, settings in sources.items()]
    return resolve(
        Config.model_validate(
            {
                "data": {"sources": values, "mixture": mixture},
                "train": {"steps": 100, "sequence_length": LENGTH, "global_batch": 8, **(train or {})},
            }
        )
    )


def mixture_of(config: Config, rows: dict[str, int] | None = None) -> Mixture:
    rows = rows or {source.name or "": ROWS[source.name or ""] for source in config.data.sources}
    return plan_mixture(
        config.data, config.train, list(rows), lambda length: [count * LENGTH // length for count in rows.values()]
    )


def find_stored(config: Config) -> list[Source]:
    """The sources as preparation calls them."""
    for source in config.data.sources:
        Path(source.path).write_text("text")
    return find_sources(config.data.sources)


def weighted(**weights: float) -> dict[str, dict[str, Any]]:
    return {name: {"weight": weight} for name, weight in weights.items()}


def counted(plan: MixedPlan, first: int, last: int) -> list[int]:
    """Rows per source by looking at every one."""
    counts = np.zeros(len(plan.sources), dtype=np.int64)
    for step in range(first, last):
        counts += np.bincount(plan.picks(step, 0, plan.step_rows(step)).sources, minlength=len(counts))
    return counts.tolist()  # type: ignore[no-any-return]


def test_only_what_is_asked_for_makes_a_mixture() -> None:
    assert not is_mixed(config_of({"a": {}, "b": {}}).data)
    assert is_mixed(config_of(weighted(a=1, b=1)).data)
    assert is_mixed(config_of({"a": {"max_epochs": 3}, "b": {}}).data)
    assert is_mixed(config_of({"a": {}}, temperature=2).data)
    assert is_mixed(config_of({"a": {}}, stages=[{"start": 0, "sequence_length": 32}]).data)


def test_weights_are_relative() -> None:
    (segment,) = mixture_of(config_of(weighted(a=3, b=0.1))).segments
    assert segment.shares == (Fraction(30, 31), Fraction(1, 31))
    assert (segment.first_step, segment.last_step, segment.used) == (0, 100, (0, 0))


def test_weights_that_hold_for_no_step_need_no_rows() -> None:
    stage = {"start": 0, "weights": {"a": 1, "b": 0}}
    rows = {"a": 100, "b": 0}
    assert mixture_of(config_of(weighted(a=1, b=1), stages=[stage]), rows).segments[0].shares == (1, 0)
    for stages in ([], [{**stage, "change": "linear"}]):
        with pytest.raises(DataError, match="source 'b' has the weight 1"):
            mixture_of(config_of(weighted(a=1, b=1), stages=stages), rows)


def test_a_source_is_known_by_its_folder_too() -> None:
    names = {"my corpus": {"weight": 3}, "my-corpus": {"weight": 1, "max_epochs": 0.5}}
    config = config_of(names, stages=[{"start": 0.5, "weights": {"my corpus": 1, "my-corpus": 1}}])
    stored = [source.name for source in find_stored(config)]
    mixture = mixture_of(config, dict.fromkeys(stored, 100))
    assert stored == ["my-corpus", "my-corpus-2"] == list(mixture.sources)
    assert mixture.segments[0].shares == (Fraction(3, 4), Fraction(1, 4))
    assert mixture.counts(0, 100)[1] == 50


def test_temperature_flattens_the_shares_of_sources_without_weights() -> None:
    (segment,) = mixture_of(config_of({"a": {}, "b": {}}, temperature=2), {"a": 900, "b": 100}).segments
    assert [float(share) for share in segment.shares] == pytest.approx([0.75, 0.25], abs=1e-15)
    with pytest.raises(ConfigError, match="temperature is for sources without weights"):
        _refused(config_of, weighted(a=1), temperature=2)


def _refused(make: Any, *arguments: Any, **values: Any) -> None:
    """Errors of the schema as the loader words them."""
    from pydantic import ValidationError

    try:
        make(*arguments, **values)
    except ValidationError as error:
        raise ConfigError(str(error)) from None


@given(count=st.integers(1, 10**10), temperature=st.floats(0.2, 10))
@settings(max_examples=50, deadline=None)
def test_powers_are_near_those_of_floating_point(count: int, temperature: float) -> None:
    assert float(powered(count, 1 / Fraction(temperature))) == pytest.approx(count ** (1 / temperature), rel=1e-9)


def test_a_power_is_the_same_number_everywhere() -> None:
    assert powered(10, Fraction(1, 2)) == Fraction("3.16227766016837933199889354443")
    assert powered(10, Fraction(1)) == 10


@given(
    weights=st.lists(st.integers(0, 50), min_size=3, max_size=3).filter(any),
    later=st.lists(st.integers(0, 50), min_size=3, max_size=3).filter(any),
    start=st.integers(1, 99),
    change=st.sampled_from(["step", "linear"]),
    rows=st.integers(1, 24),
)
@settings(max_examples=60, deadline=None)
def test_counts_and_rows_agree_at_any_step(
    weights: list[int], later: list[int], start: int, change: str, rows: int
) -> None:
    stages = [
        {"start": 0.0, "weights": dict(zip("abc", weights, strict=True))},
        {"start": f"{start} steps", "weights": dict(zip("abc", later, strict=True)), "change": change},
    ]
    plan = MixedPlan(mixture_of(config_of({"a": {}, "b": {}, "c": {}}, {"global_batch": rows}, stages=stages)), 3)
    for first, last in ((0, 100), (0, start), (start, 100), (7, 31), (50, 51)):
        assert plan.counts(first, last) == counted(plan, first, last)
        assert sum(plan.counts(first, last)) == (last - first) * rows
    for step in (0, start, 99):
        assert plan.mixture.used(step) == counted(plan, 0, step)


def test_a_source_goes_through_its_epochs_without_losing_a_row() -> None:
    plan = MixedPlan(mixture_of(config_of(weighted(a=1, b=1, c=1))), seed=3)
    seen: dict[tuple[int, int], Counter[int]] = {}
    for step in range(100):
        picks = plan.picks(step, 0, 8)
        for source, row, epoch in zip(picks.sources.tolist(), picks.rows.tolist(), picks.epochs.tolist(), strict=True):
            seen.setdefault((source, epoch), Counter())[row] += 1
    assert {key for key in seen if key[0] == 2} == {(2, epoch) for epoch in range(6)}
    for (source, epoch), rows in seen.items():
        assert max(rows.values()) == 1, "no row twice"
        assert max(rows) < list(ROWS.values())[source]
        if (source, epoch + 1) in seen:
            assert len(rows) == list(ROWS.values())[source], "no row left out"
    orders = [tuple(rows) for (source, _), rows in seen.items() if source == 2][:5]
    assert len(set(orders)) == 5, "each epoch is shuffled anew"


def test_another_source_or_another_share_does_not_reshuffle_a_source() -> None:
    def sequence(plan: MixedPlan, name: str) -> list[int]:
        number, rows = plan.sources.index(name), []
        for step in range(100):
            picks = plan.picks(step, 0, 8)
            rows += picks.rows[picks.sources == number].tolist()
        return rows

    few = sequence(MixedPlan(mixture_of(config_of(weighted(a=1, b=1))), 3), "b")
    more = sequence(MixedPlan(mixture_of(config_of(weighted(c=1, b=1, a=2))), 3), "b")
    assert len(more) < len(few) and few[: len(more)] == more
    other_seed = sequence(MixedPlan(mixture_of(config_of(weighted(a=1, b=1))), 4), "b")
    assert other_seed[:50] != few[:50]


def test_a_used_up_source_gives_its_share_to_the_others() -> None:
    sources = weighted(a=1, b=1, c=2)
    sources["c"]["max_epochs"] = 3.5
    mixture = mixture_of(config_of(sources))
    before, ending, after = mixture.segments
    assert before.shares == (Fraction(1, 4), Fraction(1, 4), Fraction(1, 2))
    assert after.shares == (Fraction(1, 2), Fraction(1, 2), 0)
    # 175 rows at 4 a step: 43 steps, 3 rows in the 44th, none from then on.
    assert (before.last_step, ending.last_step) == (43, 44)
    assert mixture.counts(43, 44)[2] == 3
    plan = MixedPlan(mixture, 3)
    assert plan.counts(0, 100) == counted(plan, 0, 100)
    assert plan.counts(0, 100)[2] == int(3.5 * ROWS["c"])
    assert plan.counts(44, 100) == [224, 224, 0]


@given(caps=st.lists(st.floats(0.5, 4), min_size=3, max_size=3), rows=st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_limits_on_epochs_are_met_to_the_row(caps: list[float], rows: int) -> None:
    sources = weighted(a=5, b=2, c=1)
    for name, cap in zip("abc", caps, strict=True):
        sources[name]["max_epochs"] = cap
    allowed = [int(Fraction(repr(cap)) * count) for cap, count in zip(caps, ROWS.values(), strict=True)]
    config = config_of(sources, {"global_batch": rows})
    if sum(allowed) < 100 * rows:
        with pytest.raises(ConfigError, match=f": {(100 * rows - sum(allowed)) * LENGTH:,} tokens are missing"):
            mixture_of(config)
        return
    mixture = mixture_of(config)
    counts = mixture.counts(0, 100)
    assert sum(counts) == 100 * rows
    assert all(count <= most for count, most in zip(counts, allowed, strict=True))
    assert counts == counted(MixedPlan(mixture, 1), 0, 100)
    first_short = next((s for s in mixture.segments if 0 in s.shares), None)
    if first_short is not None:
        spent = first_short.shares.index(0)
        assert first_short.used[spent] == allowed[spent], "all that was allowed was used before the others took over"


def test_sources_used_up_before_the_end_are_refused() -> None:
    sources = {"a": {"max_epochs": 0.5}, "b": {"max_epochs": 1}}
    with pytest.raises(ConfigError, match=r"used up at step 100 of 125: 12,800 tokens are missing") as caught:
        mixture_of(config_of(sources, {"steps": 125}))
    assert "train.steps=100" in str(caught.value.fix)
    # 800 rows for 100 steps of 8: enough to the row.
    assert mixture_of(config_of(sources)).counts(0, 100) == [500, 300]


def test_a_stage_without_its_only_source_left_is_refused() -> None:
    sources = weighted(a=1, b=1)
    sources["b"]["max_epochs"] = 1
    stages = [{"start": "40 steps", "weights": {"a": 0, "b": 1}}]
    with pytest.raises(ConfigError, match="tokens are missing"):
        mixture_of(config_of(sources, stages=stages))


def test_linear_changes_go_from_share_to_share_in_even_parts() -> None:
    stages = [
        {"start": 0.1, "weights": {"a": 0, "b": 4}, "change": "linear"},
        {"start": "80 steps", "weights": {"a": 1, "b": 3}},
    ]
    mixture = mixture_of(config_of(weighted(a=1, b=1), stages=stages))
    ramp = [s for s in mixture.segments if 10 <= s.first_step < 80]
    assert (mixture.segments[0].last_step, len(ramp), len(mixture.segments)) == (10, RAMP_PARTS, RAMP_PARTS + 2)
    assert [segment.shares[0] for segment in ramp] == [Fraction(127 - 2 * part, 256) for part in range(RAMP_PARTS)]
    assert {segment.last_step - segment.first_step for segment in ramp} == {1, 2}
    assert mixture.segments[-1].shares == (Fraction(1, 4), Fraction(3, 4))
    asked = sum(8 * segment.shares[0] * (segment.last_step - segment.first_step) for segment in ramp)
    assert float(asked) == pytest.approx(8 * 70 / 4, rel=0.02) and abs(mixture.counts(10, 80)[0] - asked) < 3


def test_a_short_ramp_has_a_part_per_step() -> None:
    stages = [{"start": 97 / 100, "weights": {"a": 1, "b": 0}, "change": "linear"}]
    mixture = mixture_of(config_of(weighted(a=0.5, b=0.5), stages=stages))
    assert [segment.shares[0] for segment in mixture.segments] == [Fraction(n, 12) for n in (6, 7, 9, 11)]


def test_stages_begin_at_steps_tokens_or_shares() -> None:
    stages: list[dict[str, Any]] = [
        {"start": "20 steps", "weights": {"a": 1, "b": 0}},
        {"start": f"{30 * 8 * LENGTH} tokens", "weights": {"a": 0, "b": 1}},
        {"start": 0.4, "weights": {"a": 1, "b": 3}},
        {"start": "500 steps", "weights": {"a": 1, "b": 0}},
    ]
    mixture = mixture_of(config_of(weighted(a=1, b=1), stages=stages))
    assert [segment.first_step for segment in mixture.segments] == [0, 20, 30, 40], "the last begins after the end"
    assert mixture.counts(20, 40) == [80, 80]


def test_shorter_rows_make_more_of_them_and_start_a_new_pass() -> None:
    stages = [{"start": 0.5, "sequence_length": 16}]
    plan = MixedPlan(mixture_of(config_of(weighted(a=1, b=1), stages=stages)), 3)
    assert [plan.sequence_length(step) for step in (0, 49, 50, 99)] == [64, 64, 16, 16]
    assert [plan.step_rows(step) for step in (49, 50)] == [8, 32]
    assert plan.counts(0, 100) == [50 * 4 + 50 * 16] * 2
    assert plan.epoch_rows(50) == [4000, 1200]
    assert plan.mixture.used(50) == [0, 0] and plan.epochs(49) == [200 / 1000, 200 / 300]
    assert plan.epochs(99) == [800 / 4000, 800 / 1200]
    assert list(plan.stretches(10, 90)) == [(10, 50), (50, 90)]
    assert not set(plan.picks(0, 0, 8).rows.tolist()) & set(plan.picks(50, 0, 8).rows.tolist())


def test_limits_on_epochs_reach_across_a_change_of_length() -> None:
    sources = weighted(a=1, b=1)
    sources["b"]["max_epochs"] = 1
    stages = [{"start": 0.5, "sequence_length": 32}]
    mixture = mixture_of(config_of(sources, stages=stages))
    # 200 of 300 rows before; of the 600 half as long ones a third is left.
    assert mixture.counts(0, 50)[1] == 200 and mixture.counts(50, 100)[1] == 200


def test_a_step_that_is_not_of_the_run_is_refused() -> None:
    plan = MixedPlan(mixture_of(config_of(weighted(a=1, b=1))), 3)
    with pytest.raises(IndexError):
        plan.picks(100, 0, 8)


def test_what_does_not_fit_the_store_is_refused() -> None:
    with pytest.raises(DataError, match="source 'b' has the weight 1, but not the 65 tokens"):
        mixture_of(config_of(weighted(a=1, b=1)), {"a": 10, "b": 0})
    with pytest.raises(DataError, match="source 'b' has the weight 1"):
        mixture_of(config_of(weighted(a=1, b=1)), {"a": 10})
    with pytest.raises(ConfigError, match="no weight: c"):
        mixture_of(config_of(weighted(a=1, b=1)), {"a": 10, "b": 10, "c": 10})
    # Without weights a source without rows is left out, as it is without a mixture.
    assert mixture_of(config_of({"a": {}, "b": {}}, temperature=3), {"a": 10, "b": 0}).counts(0, 9) == [72, 0]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"start": 0.5}, {"start": "20 steps"}], "begins at step 20 comes after one that begins at step 50"),
        ([{"start": 0.5}, {"start": "50 steps"}], "begins at step 50 comes after one that begins at step 50"),
        ([{"start": 0.5, "weights": {"a": 1, "bb": 1}}], "there is no source 'bb'"),
        ([{"start": 0.5, "weights": {"a": 1}}], "none for: b"),
        ([{"start": 0.5, "weights": {"a": 0, "b": 0}}], "no source with a weight"),
        ([{"start": 0.5, "sequence_length": 24}], "cannot be cut into rows of 24"),
    ],
)
def test_stages_that_contradict_themselves_are_refused(stages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(weighted(a=1, b=1), stages=stages)


def test_a_refusal_names_the_line_and_the_nearest_length(tmp_path: Any) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "data:\n  sources: [a.txt]\n  mixture:\n    stages:\n      - start: 0.5\n        sequence_length: 500\n"
        "train: {steps: 10}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert "run.yaml:6" in str(caught.value.where) and caught.value.fix == "sequence_length: 512"


def test_a_stage_cannot_begin_at_a_time() -> None:
    with pytest.raises(ConfigError, match="not a time"):
        _refused(config_of, weighted(a=1), stages=[{"start": "10 min"}])


#: (source, row) of the first rows of two steps: a change here changes what runs with a mixture are trained on.
RECORDED = {
    0: [(0, 130), (0, 279), (1, 294), (0, 346), (0, 836), (1, 183), (0, 701), (0, 181)],
    77: [(1, 49), (1, 492), (0, 693), (1, 296), (0, 1251), (1, 451), (1, 250), (1, 568)],
}


def test_the_order_of_a_mixture_never_changes() -> None:
    stages = [{"start": 0.5, "weights": {"a": 1, "b": 3}, "sequence_length": 32}]
    plan = MixedPlan(mixture_of(config_of(weighted(a=2, b=1), stages=stages)), seed=11)
    recorded = {step: list(zip(*(x.tolist() for x in _arrays(plan, step)), strict=True)) for step in (0, 77)}
    assert recorded == RECORDED


def _arrays(plan: MixedPlan, step: int) -> tuple[Any, Any]:
    picks = plan.picks(step, 0, 8)
    return picks.sources, picks.rows
