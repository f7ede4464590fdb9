"""Offers of clouds for a plan."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.cost.forecast import Range
from headway.cost.offers import make_offer
from headway.cost.price_book import save_offers
from headway.cost.pricing import Price
from headway.lab.plan.accelerators import parse_machines
from headway.lab.plan.offers import forecasts, measured_goodput
from support.runs import headway_in_copy, write_config


@pytest.fixture(autouse=True)
def own_prices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def plan(machines: str, hours: float | None, measured: float | None = None) -> Any:
    return SimpleNamespace(
        machines=parse_machines(machines),
        recommendation=SimpleNamespace(option=object()),
        hours=lambda option: hours,
        measured_tokens_per_second=measured,
    )


def test_only_machines_like_the_planned_ones_count() -> None:
    """A plan for machines of eight says nothing of sixteen machines with one accelerator each."""
    found = forecasts(plan("16xH100", 6.0), {True: Range(0.5, 0.75)})
    assert found and {(one.offer.gpu, one.offer.gpus, one.machines) for one in found} == {("H100", 8, 2)}
    spot = next(one for one in found if one.offer.spot)
    assert (spot.hours.low, spot.hours.high) == pytest.approx((6 / 1.2 / 0.75, 6 / 0.8 / 0.5))
    listed = next(one for one in found if not one.offer.spot)
    assert (listed.hours.low, listed.hours.high, listed.goodput) == pytest.approx((5.0, 7.5, None))


def test_a_speed_that_was_measured_and_machines_of_your_own() -> None:
    own = Price(3.0, "cost.usd_per_hour")
    mine = next(one for one in forecasts(plan("8xH100", 6.0, 1000.0), {}, own) if one.offer.cloud == "own")
    assert (mine.hours, mine.usd) == (Range(6.0, 6.0), Range(18.0, 18.0))
    assert forecasts(plan("8xH100", None), {}, own) == []


def test_goodput_is_that_of_earlier_runs_that_took_long_enough(tmp_path: Path) -> None:
    def write(name: str, seconds: float, lost: float, offer: str | None) -> None:
        attempt = tmp_path / "runs" / name / "attempts" / "001"
        attempt.mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").write_text("{}")
        times = {"started": 1000.0, "ended": 1000.0 + seconds, "seconds": seconds, "outcome": "finished"}
        (attempt / "attempt.json").write_text(json.dumps({"number": 1, **times, "offer": offer}))
        step = {"step": 1, "attempt": 1, "time": 1000.0 + seconds, "train/loss": 1.0}
        line = json.dumps({**step, "speed/step_seconds": seconds - lost})
        (tmp_path / "runs" / name / "metrics.jsonl").write_text(line + "\n")

    assert measured_goodput(tmp_path / "runs") == {}
    write("one", 1000.0, 100.0, "aws/us-east-1/p5.48xlarge/spot")
    write("two", 1000.0, 300.0, "aws/us-east-1/p5.48xlarge/spot")
    write("short", 500.0, 499.0, None)
    found = measured_goodput(tmp_path / "runs")
    assert found.keys() == {True}
    assert (found[True].low, found[True].high) == pytest.approx((0.7, 0.9))


def test_the_command_names_the_cheapest_and_the_fastest(tmp_path: Path) -> None:
    cheap = {"cloud": "hand-made", "region": "r", "instance": "i", "gpu": "H100", "gpus": 8, "usd_per_hour": 0.5}
    save_offers("test", [make_offer({**cheap, "spot": False, "date": "2026-11-26"})])
    config = write_config(tmp_path, model={"vocab_size": 320})
    code, printed = headway_in_copy("plan", config, "--gpus", "8xH100", "--deadline", "12h", "--budget", "$200")
    assert code == 0, printed
    assert "cheapest for a deadline of 12 h 0 m: hand-made/r/i/on-demand" in printed
    assert "fastest for $200.00: " in printed and "goodput on on-demand machines: n/a" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--deadline", "12h"), "offers are compared for named machines"),
        (("--gpus", "8xH100", "--deadline", "soon"), "not a quantity"),
        (("--gpus", "8xH100", "--budget", "-3"), "not an amount of dollars above zero"),
    ],
)
def test_limits_that_are_none_are_refused(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    code, printed = headway_in_copy("plan", write_config(tmp_path), *words)
    assert code == 2 and message in printed, printed
