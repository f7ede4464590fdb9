"""What an attempt does about money before its first step."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

import headway
from headway.config import Config, load_config
from headway.core.errors import BudgetReached, ConfigError
from headway.core.format import format_usd
from headway.core.user_command import VARIABLE
from headway.cost.offers import Offer
from headway.cost.price_book import save_offers
from headway.run.directory.account import account_of, stopped_by_budget
from headway.run.directory.ledger import Ledger
from headway.run.session.attempt import RunOptions, price_facts
from headway.run.session.spending import check_cost, price_warnings
from headway.telemetry.record import Run

PAID = ("cost.usd_per_hour=1", "budget.usd=10")


@pytest.fixture
def config(tiny: Callable[..., Path]) -> Config:
    return load_config(tiny(), PAID)


def spend(config: Config, seconds: float, **record: Any) -> None:
    run = config.run_directory
    (run / "attempts" / "001").mkdir(parents=True)
    (run / "config.yaml").write_text("{}")
    now = time.time()
    ending = {"started": now - seconds, "ended": now, "seconds": seconds, "outcome": "preempted", "usd_per_hour": 1.0}
    (run / "attempts" / "001" / "attempt.json").write_text(json.dumps({"number": 1, **ending, **record}))


def test_a_budget_that_is_spent_refuses_to_start_with_the_key_to_raise(config: Config) -> None:
    check_cost(config, RunOptions())  # nothing is there yet
    spend(config, 10.5 * 3600)
    with pytest.raises(BudgetReached) as error:
        check_cost(config, RunOptions())
    lines = error.value.render().splitlines()
    assert lines[0] == "error: the run has spent $10.50 of its budget of $10.00"
    assert "headway train budget.usd=12" in lines[2] and error.value.exit_code == 6
    check_cost(config, RunOptions(restart=True))  # a run of its own


def test_what_is_left_has_to_pay_for_a_start_and_a_save(config: Config) -> None:
    """Otherwise every command would spend a little beyond the budget."""
    spend(config, 9.9 * 3600)
    check_cost(config, RunOptions())  # no start was measured
    run, began = config.run_directory, time.time() - 9.9 * 3600
    step = {"step": 1, "attempt": 1, "time": began + 900.0, "train/loss": 1.0, "speed/step_seconds": 300.0}
    (run / "metrics.jsonl").write_text(json.dumps({**step, "checkpoint/write_seconds": 60.0}) + "\n")
    with pytest.raises(BudgetReached, match="is left, and a start and a save take 11 m 0 s, which cost"):
        check_cost(config, RunOptions())


def test_a_finished_run_needs_no_more_money(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    spend(config, 10.5 * 3600, outcome="finished")
    with pytest.raises(BudgetReached):
        check_cost(config, RunOptions())  # it has more steps now
    monkeypatch.setattr(Ledger, "committed_step", config.train.steps)
    check_cost(config, RunOptions())


def test_an_attempt_records_its_price(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert price_facts(load_config(tiny())) == {"usd_per_hour": None}
    assert price_facts(load_config(tiny(), ["telemetry.usd_per_hour=2"])) == {"usd_per_hour": 2.0}
    key = "azure/eastus/Standard_ND96isr_H100_v5/on-demand"
    several = load_config(tiny(), [f"cost.offer={key}", "parallel.workers=8"])
    facts = price_facts(several)
    assert (facts["usd_per_hour"], facts["offer"]) == (98.32, key) and date.fromisoformat(facts["offer_date"])
    with pytest.raises(ConfigError, match="there is no offer"):
        check_cost(load_config(tiny(), ["cost.offer=azure/eastus/nothing/spot"]), RunOptions())


def test_the_older_key_is_mentioned(config: Config, tiny: Callable[..., Path]) -> None:
    assert [*price_warnings(config, 1)] == []
    assert "cost.usd_per_hour" in next(price_warnings(load_config(tiny(), ["telemetry.usd_per_hour=2"]), 1))


@pytest.mark.parametrize(("days", "words"), [(9, r"\$25.00 an hour \(aws/.*/spot, stale, of {day}, 9 d\)"), (3, None)])
def test_a_stale_price_says_its_date_where_it_is_used(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, days: int, words: str | None
) -> None:
    """When a run begins, and in what it keeps; a plan says it too (`test_plan_cli.py`)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    day = date.today() - timedelta(days=days)
    offer = Offer("aws", "us-east-1", "p5.48xlarge", "H100", 8, True, 25.0, "a test", day)
    save_offers("aws", [offer])
    paid = load_config(tiny(), [f"cost.offer={offer.key}"])
    told = list(price_warnings(paid, 1))
    assert len(told) == (words is not None)
    assert words is None or re.search(words.format(day=day), told[0]), told
    assert price_facts(paid)["offer_date"] == day.isoformat()


def test_what_stops_at_the_budget_names_what_is_spent_and_one_override(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "'my run.yaml' budget.usd=10 train.steps=5 budget.usd=9")
    spend(config, 12.1 * 3600)
    lines = stopped_by_budget(config, "stopped by its budget; step 4 is saved").render().splitlines()
    assert lines[0] == "error: the run has spent $12.10 of its budget of $10.00: stopped by its budget; step 4 is saved"
    assert lines[2].endswith("continues it: headway train 'my run.yaml' train.steps=5 budget.usd=14")


def test_a_run_that_its_budget_stops_says_what_its_record_says(tiny: Callable[..., Path]) -> None:
    """The save and the end of the attempt are counted, which the decision to stop came before."""
    config = load_config(tiny(train={"steps": 10_000}), ["cost.usd_per_hour=3600", "budget.usd=1", "name=stopped"])
    with pytest.raises(BudgetReached) as error:
        headway.train(config)
    spent = account_of(Run(config.run_directory)).total_usd
    assert error.value.what.startswith(f"the run has spent {format_usd(spent)} of its budget of $1.00: stopped by its")
