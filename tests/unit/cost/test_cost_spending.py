"""What a run has spent, and when it has to stop to stay within its budget. Right values are computed by hand."""

from __future__ import annotations

import pytest

from headway.core.format import format_usd
from headway.cost.spending import BilledAttempt, CostBudget, RunCost, SpendMeter, run_cost, storage_cost

HOUR = 3600.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def attempt(number: int, started: float, ended: float, price: float | None, held: bool = False) -> BilledAttempt:
    return BilledAttempt(number, started, ended, ended - started, price, held)


def test_every_attempt_has_its_own_price_and_held_machines_are_billed_at_that_of_the_one_before() -> None:
    cost = run_cost(
        [
            attempt(1, 0.0, HOUR, 2.0),
            attempt(2, HOUR + 1800, 2 * HOUR, 10.0, held=True),  # half an hour at $2 lies between them
            attempt(3, 9 * HOUR, 10 * HOUR, 1.0),  # a new command: nobody knows who had the machines
        ],
        storage_usd=0.25,
    )
    assert cost.attempts_usd == pytest.approx({1: 2.0, 2: 5.0, 3: 1.0})
    assert (cost.compute_usd, cost.idle_usd, cost.storage_usd) == pytest.approx((8.0, 1.0, 0.25))
    assert cost.total_usd == pytest.approx(9.25)
    assert str(cost) == "cost $9.25 · compute $8.00 · held between attempts $1.00 · storage $0.25"


def test_what_has_no_price_or_no_end_costs_nothing_known() -> None:
    cost = run_cost([attempt(1, 0.0, HOUR, None), BilledAttempt(2, 0.0, None, None, 5.0, True)])
    assert cost.total_usd == 0.0 and not cost.is_known


def test_clocks_that_were_set_back_give_no_money_back() -> None:
    assert run_cost([attempt(1, 0.0, HOUR, 1.0), attempt(2, 1800.0, HOUR, 1.0, held=True)]).idle_usd == 0.0


def test_a_month_of_a_gibibyte() -> None:
    assert storage_cost(2 * 2**30, 365.25 / 12 * 86400, 0.03) == pytest.approx(0.06)
    assert storage_cost(2**30, -5.0, 0.03) == 0.0


def test_the_meter_counts_on_from_what_was_spent_before() -> None:
    clock = Clock()
    month = 365.25 / 12 * 86400
    before = RunCost(8.0, 1.0, 0.25)
    meter = SpendMeter(
        before, 6.0, 600.0, storage_usd_per_gib_month=month / HOUR, stored_bytes=2.0**30, clock=clock
    )  # a GiB costs a dollar an hour
    assert meter.now().total_usd == pytest.approx(9.25 + 1.0)
    clock.now += 1800.0
    assert meter.now().total_usd == pytest.approx(9.25 + 4.0 + 0.5)
    meter.stored(3 * 2.0**30)
    clock.now += 1800.0
    assert meter.now().storage_usd == pytest.approx(0.25 + 0.5 + 1.5)
    assert meter.in_seconds(HOUR) == pytest.approx(meter.now().total_usd + 6.0 + 3.0)
    assert meter.metrics() == pytest.approx(
        {"cost/spent_usd": 18.25, "cost/usd_per_hour": 6.0, "cost/idle_usd": 1.0, "cost/storage_usd": 2.25}
    )


def test_a_meter_without_idle_time_and_storage_has_no_metrics_of_them() -> None:
    assert SpendMeter(RunCost(0.0, 0.0, 0.0), 6.0).metrics().keys() == {"cost/spent_usd", "cost/usd_per_hour"}


def test_the_run_stops_while_there_is_enough_for_the_save() -> None:
    clock, budget = Clock(), CostBudget(10.0, 0.8)
    meter = SpendMeter(RunCost(0.0, 0.0, 0.0), HOUR, clock=clock)  # a dollar a second
    clock.now += 7.0
    assert not budget.is_near(meter.now().total_usd) and not budget.must_stop(meter, 2.9)
    assert budget.must_stop(meter, 3.0), "seven and three"
    clock.now += 1.0
    assert budget.is_near(meter.now().total_usd) and not budget.must_stop(meter, -5.0)
    clock.now += 2.0
    assert budget.must_stop(meter, 0.0)


@pytest.mark.parametrize(("spent", "enough"), [(0.0, 220.0), (199.0, 220.0), (512.3, 570.0)])
def test_the_amount_that_is_suggested_suffices(spent: float, enough: float) -> None:
    assert CostBudget(200.0, 0.8).enough_usd(spent) == enough


def test_small_amounts_are_not_shown_as_nothing() -> None:
    assert [format_usd(amount) for amount in (0.0, 0.00123, 0.5, 1234.5)] == ["$0.00", "$0.0012", "$0.50", "$1,234.50"]
