"""Policies for spot machines: thresholds, hysteresis, minimum times; and what they come to on recorded prices."""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path

import pytest

from headway.clouds.spot.made_trace import as_csv, make_trace
from headway.clouds.spot.policy import SpotDecider, SpotPolicy
from headway.clouds.spot.simulate import Outcome, Work, simulate
from headway.clouds.spot.traces import Trace, read_trace
from headway.core.errors import ConfigError
from support.runs import headway_in_copy

POLICY = SpotPolicy(2.5, 2.0, 1.2, min_run_seconds=600.0, min_pause_seconds=300.0)


def states(prices: list[float], step: float = 1000.0, policy: SpotPolicy = POLICY) -> list[str]:
    decider = SpotDecider(policy, 0.0)
    return [decider.decide(price, step * number) for number, price in enumerate(prices, 1)]


def test_a_price_between_the_thresholds_changes_nothing() -> None:
    assert states([2.0, 2.6, 2.4, 2.0, 1.99, 2.4, 2.5]) == [
        "running", "paused", "paused", "paused", "running", "running", "running",
    ]  # fmt: skip
    assert states([1.1, 1.3, 1.9, 2.0, 1.3, 1.1, 3.0, 1.1]) == [
        "grown", "grown", "grown", "running", "running", "grown", "paused", "grown",
    ]  # fmt: skip


def test_a_state_lasts_its_minimum_time() -> None:
    decider = SpotDecider(POLICY, 0.0)
    found = [decider.decide(price, now) for now, price in ((599.0, 9.0), (600.0, 9.0), (899.0, 1.5), (900.0, 1.5))]
    assert found == ["running", "paused", "paused", "running"]


@pytest.mark.parametrize(
    ("policy", "where"),
    [
        (SpotPolicy(2.0, 2.5), "--resume-below, --pause-above"),
        (SpotPolicy(2.5, 2.0, 2.1), "--grow-below, --resume-below"),
        (SpotPolicy(-1.0, 2.0), "--pause-above"),
        (SpotPolicy(2.5, 0.0), "--resume-below"),
        (SpotPolicy(float("nan"), 2.0), "--pause-above"),
        (SpotPolicy(2.5, 2.0, float("inf")), "--grow-below"),
    ],
)
def test_thresholds_that_contradict_each_other_are_refused(policy: SpotPolicy, where: str) -> None:
    with pytest.raises(ConfigError) as error:
        policy.check()
    assert error.value.where == where and error.value.fix


HOUR = 3600.0


def by_policy(trace: Trace, work: Work, policy: SpotPolicy, on_demand: float = 10.0) -> dict[str, Outcome]:
    return {outcome.policy: outcome for outcome in simulate(trace, work, policy, on_demand)}


def test_a_pause_saves_money_and_takes_time() -> None:
    """Two hours of work; the price is 2, for the second hour 8, then 2 again. All is counted by hand."""
    trace = Trace((0.0, HOUR, 2 * HOUR, 10 * HOUR), (2.0, 8.0, 2.0, 2.0))
    work = Work(2 * HOUR, start_seconds=0.0, save_seconds=60.0, save_every_seconds=600.0)
    found = by_policy(trace, work, SpotPolicy(5.0, 3.0, min_run_seconds=60.0, min_pause_seconds=60.0))
    always, never = found["on demand"], found["spot, never paused"]
    assert (always.usd, always.seconds, always.interruptions) == pytest.approx((20.0, 2 * HOUR, 0))
    assert (never.usd, never.seconds, never.interruptions) == pytest.approx((10.0, 2 * HOUR, 0))
    paused = found["spot, by the policy"]
    assert paused.usd == pytest.approx(2.0 + 8.0 / 60 + 2.0), "an hour, a minute of saving at 8, an hour"
    assert (paused.seconds, paused.interruptions, paused.lost_seconds) == pytest.approx((3 * HOUR, 1, 0.0))


def test_a_machine_that_is_taken_away_loses_the_work_since_the_newest_save() -> None:
    trace = Trace((0.0, 1500.0, HOUR, 10 * HOUR), (2.0, 50.0, 2.0, 2.0))
    work = Work(HOUR, start_seconds=120.0, save_seconds=0.0, save_every_seconds=600.0)
    never = by_policy(trace, work, SpotPolicy(60.0, 60.0))["spot, never paused"]
    # 1380 seconds are done when the price rises, 1200 of them saved; then a start and the other 2400 seconds.
    assert never.lost_seconds == pytest.approx(180.0, abs=60.0) and never.interruptions == 1
    assert never.usd == pytest.approx(2.0 * (1500 + 120 + 2400) / HOUR, rel=0.02)


def test_more_workers_cost_more_and_are_sooner_done() -> None:
    trace = Trace((0.0, 10 * HOUR), (1.0, 1.0))
    work = Work(2 * HOUR, 0.0, 0.0, 600.0, growth=4.0)
    grown = by_policy(trace, work, SpotPolicy(5.0, 3.0, 2.0, min_run_seconds=0.0))["spot, by the policy"]
    assert (grown.usd, grown.seconds) == pytest.approx((2.0, HOUR / 2), rel=0.02)


def test_a_price_that_is_too_high_at_first_is_waited_for_as_by_the_holder() -> None:
    """Nothing has begun that a pause could interrupt, and no minimum time runs: wait an hour, then work one at 2."""
    trace = Trace((0.0, HOUR, 10 * HOUR), (8.0, 2.0, 2.0))
    work = Work(HOUR, start_seconds=0.0, save_seconds=600.0, save_every_seconds=600.0)
    found = by_policy(trace, work, SpotPolicy(5.0, 3.0), on_demand=6.0)
    for name in ("spot, by the policy", "spot, never paused"):
        outcome = found[name]
        assert (outcome.usd, outcome.seconds) == pytest.approx((2.0, 2 * HOUR)), name
        assert (outcome.interruptions, outcome.lost_seconds) == (0, 0.0), name
    decider = SpotDecider.begin(SpotPolicy(5.0, 3.0), 8.0, 100.0)
    assert [decider.decide(price, 100.0 + now) for now, price in enumerate((8.0, 4.0, 2.0))] == [
        "paused", "paused", "running",
    ]  # fmt: skip


def test_a_made_week_is_a_function_of_its_seed_within_its_bounds(tmp_path: Path) -> None:
    """Without a spike at most 1.35 times the usual price, in each of the spikes at least 1.48 times."""
    file = tmp_path / "week.csv"
    file.write_text(as_csv(make_trace(7)))
    assert read_trace(file) == make_trace(7) != make_trace(8)
    assert hashlib.sha256(file.read_bytes()).hexdigest().startswith("ae2545afb120ee3a"), "the same in every version"
    for seed in range(30):
        prices = make_trace(seed, usual_usd=2.0).prices
        above = [price > 2.8 for price in prices]
        assert sum(after and not before for before, after in pairwise(above)) == 3
        assert all(price <= 2.70 or price >= 2.96 for price in prices)
    with pytest.raises(ConfigError, match="do not fit"):
        make_trace(days=1.0)


def test_savings_are_told_against_on_demand_and_against_never_pausing(tmp_path: Path) -> None:
    """The hand-made case above: $4.13 by the policy against $20 on demand and $10 without a pause."""
    file = tmp_path / "own.csv"
    file.write_text("time,usd_per_hour\n0,2\n3600,8\n7200,2\n36000,2\n")
    words = ("--hours", "2", "--on-demand", "10", "--pause-above", "5", "--resume-below", "3", "--start", "1 s",
             "--save", "60 s", "--min-run", "60 s", "--min-pause", "60 s")  # fmt: skip
    code, printed = headway_in_copy("cost", "simulate", file, *words, "--json")
    assert code == 0, printed
    paused = json.loads(printed)[-1]
    assert (paused["saving_on_demand"], paused["saving_never_paused"]) == pytest.approx(
        (1 - 4.1333 / 20, 1 - 4.1333 / 10), abs=1e-4
    )
    code, printed = headway_in_copy("cost", "simulate", file, *words)
    assert code == 0 and printed.splitlines()[-1].split()[-2:] == ["79%", "59%"], printed


def test_a_policy_that_never_resumes_is_not_done() -> None:
    found = by_policy(Trace((0.0, HOUR), (9.0, 9.0)), Work(HOUR, 0.0, 0.0, 600.0), SpotPolicy(1.0, 0.5, None, 0.0, 0.0))
    assert not found["spot, by the policy"].finished and found["on demand"].finished


def test_a_trace_in_csv_and_from_the_aws_cli(tmp_path: Path) -> None:
    table, history = tmp_path / "t.csv", tmp_path / "t.json"
    table.write_text("time,usd_per_hour\n2026-01-01T01:00:00Z,3.5\n2026-01-01T00:00:00+00:00,2.5\n")
    entries = [
        {
            "Timestamp": f"2026-01-01T0{hour}:00:00+00:00",
            "SpotPrice": price,
            "AvailabilityZone": zone,
            "InstanceType": "p5",
        }
        for hour, price, zone in ((1, "3.500000", "a"), (0, "2.5", "a"), (0, "9.0", "b"))
    ]
    history.write_text(json.dumps({"SpotPriceHistory": entries}))
    trace = read_trace(table)
    assert trace == read_trace(history, "a") == Trace((1767225600.0, 1767229200.0), (2.5, 3.5))
    start = trace.times[0]
    assert [trace.price_at(start + seconds) for seconds in (-5.0, 0.0, HOUR - 1, HOUR, 9e9)] == [
        2.5,
        2.5,
        2.5,
        3.5,
        3.5,
    ]
    with pytest.raises(ConfigError, match="2 kinds of machines or zones"):
        read_trace(history)
    with pytest.raises(ConfigError, match="no prices of the zone 'c'"):
        read_trace(history, "c")


@pytest.mark.parametrize(
    ("text", "words", "place"),
    [
        ("time,usd_per_hour\n1,2\n2,-3\n", "not above zero", "line 3"),
        ("time,usd_per_hour\n1,nan\n", "not a number", "line 2"),
        ("time,usd_per_hour\n1,two\n", "not a number", "line 2"),
        ("time,usd_per_hour\nyesterday,2\n", "neither a date nor a number", "line 2"),
        ("time,usd_per_hour\n1e300,2\n", "neither a date nor a number", "line 2"),
        ("time,usd_per_hour\n1," + "2" * 200_000, "larger than field limit", "line 2"),
        ("time" * 50_000, "larger than field limit", "line 1"),
        ("time,price\n1,2\n", "does not name the columns", "line 1"),
        ("time,usd_per_hour\n", "there are no prices", "t.csv"),
        ('{"SpotPriceHistory": [{"Timestamp": "2026-01-01", "SpotPrice": "0"}]}', "entry 1 is broken", "t.csv"),
        ("{}", "no SpotPriceHistory", "t.csv"),
        ("[", "is not JSON", "t.csv"),
    ],
)
def test_a_broken_trace_is_named(tmp_path: Path, text: str, words: str, place: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_trace(tmp_path / "t.csv")
    lines = error.value.render().splitlines()
    assert len(lines) == 3 and words in lines[0] and place in lines[1], lines
