"""Forecasts of time and cost, and the choice between offers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.cost.forecast import Range, cheapest_within, fastest_within, forecast
from headway.cost.offers import make_offer

OFFER = make_offer(
    {"cloud": "a", "region": "b", "instance": "c", "gpu": "H100", "gpus": 8, "spot": True, "usd_per_hour": 10.0}
)


def test_lost_time_takes_longer_and_costs_more() -> None:
    found = forecast(OFFER, 2, Range(8.0, 12.0), Range(0.8, 0.96))
    assert (found.hours.low, found.hours.high) == pytest.approx((8 / 0.96, 12 / 0.8))
    assert (found.usd.low, found.usd.high) == pytest.approx((20 * 8 / 0.96, 20 * 15.0))
    assert found.gpus == 16 and found.hours.middle == pytest.approx((8 / 0.96 + 15) / 2)
    unknown = forecast(OFFER, 1, Range(8.0, 12.0), None)
    assert (unknown.hours, unknown.goodput) == (Range(8.0, 12.0), None)


def test_the_choice_holds_even_if_all_goes_slowly() -> None:
    slow = forecast(OFFER, 1, Range(8.0, 12.0), None)  # $80 to $120
    fast = forecast(replace(OFFER, usd_per_hour=25.0, region="d"), 1, Range(4.0, 6.0), None)  # $100 to $150
    both = [slow, fast]
    assert cheapest_within(both, 12.0) is slow
    assert cheapest_within(both, 11.9) is fast and cheapest_within(both, 5.9) is None
    assert fastest_within(both, 150.0) is fast
    assert fastest_within(both, 149.0) is slow and fastest_within(both, 119.0) is None
