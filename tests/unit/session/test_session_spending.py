"""What an attempt does about money before its first step."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.config import Config, load_config
from headway.core.errors import BudgetReached, ConfigError
from headway.runs.ledger import Ledger
from headway.session.attempt import RunOptions, price_facts
from headway.session.spending import check_cost, old_price_key

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
    assert price_facts(several) == {"usd_per_hour": 98.32, "offer": key}
    with pytest.raises(ConfigError, match="there is no offer"):
        check_cost(load_config(tiny(), ["cost.offer=azure/eastus/nothing/spot"]), RunOptions())


def test_the_older_key_is_mentioned(config: Config, tiny: Callable[..., Path]) -> None:
    assert old_price_key(config) == []
    assert "cost.usd_per_hour" in old_price_key(load_config(tiny(), ["telemetry.usd_per_hour=2"]))[0]
