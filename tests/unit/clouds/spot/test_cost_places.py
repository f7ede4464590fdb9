"""The choice between places. All amounts are computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.clouds.spot.places import Moving, Place, choose_place, parse_place
from headway.core.errors import ConfigError
from support.places import EAST, WEST

HERE, THERE = Place(EAST, traffic_usd_per_gib=0.0), Place(WEST, traffic_usd_per_gib=0.02)
#: Leaving takes 6 minutes, arriving 12; the state of 100 GiB is uploaded once an hour.
MOVING = Moving(save_seconds=360.0, start_seconds=720.0, state_gib=100.0, uploads_per_hour=1.0)


def choose(
    here_usd: float,
    there_usd: float,
    moving: Moving | None = MOVING,
    *,
    running: bool = True,
    left_seconds: float | None = None,
) -> str:
    prices = {HERE: here_usd, THERE: there_usd}
    return choose_place(prices, HERE, moving, running=running, left_seconds=left_seconds).offer


def test_a_move_pays_for_its_save_its_start_and_all_traffic() -> None:
    """Six hours here are $120. There: 6 * (p + $2 of uploads) + $2 to fetch + 0.1 h here ($2) + 0.2 h there.

    With p = 16 that is 108 + 2 + 2 + 3.2 = 115.2, more than 95 % of 120; with 15.5 it is 105 + 4 + 3.1 = 112.1.
    """
    assert (choose(20.0, 16.0), choose(20.0, 15.5)) == (EAST, WEST)


def test_what_is_paid_while_nothing_runs_is_less() -> None:
    """Here is a start too, so 95 % of 124 is 117.8; there 6 * (16.6 + 2) + 2 + 3.32 = 116.92, and running 118.92."""
    assert (choose(20.0, 16.6), choose(20.0, 16.6, running=False)) == (EAST, WEST)


def test_a_run_that_is_nearly_done_stays() -> None:
    """Two hours here are $40; there 2 * (12 + 2) + 2 + 2 + 2.4 = 34.4, in half an hour 7 + 2 + 2 + 2.4 against 10."""
    assert choose(20.0, 12.0, left_seconds=7200.0) == WEST
    assert choose(20.0, 12.0, left_seconds=1800.0) == EAST


def test_what_is_unknown_moves_nothing_that_has_begun() -> None:
    assert choose(20.0, 1.0, None) == EAST
    assert choose_place({HERE: 20.0, THERE: 1.0}, None, None, running=False) == THERE
    assert choose_place({HERE: 3.0, THERE: 3.0}, None, None, running=False) == HERE, "the same on every machine"


def test_the_size_of_a_state_decides() -> None:
    assert choose(20.0, 15.5, replace(MOVING, state_gib=200.0)) == EAST
    assert choose(20.0, 15.5, replace(MOVING, uploads_per_hour=2.0)) == EAST


def test_a_place_is_an_offer_with_what_leads_there() -> None:
    place = parse_place(f"{WEST} traffic=0.02 launch.sky.infra=aws/us-west-2 'launch.environment={{A: b}}'")
    assert place == Place(WEST, ("launch.sky.infra=aws/us-west-2", "launch.environment={A: b}"), 0.02)
    assert parse_place(EAST) == Place(EAST)


@pytest.mark.parametrize(
    "text", ["", "aws", f"{EAST} 'a=b", f"{EAST} west", f"{EAST} traffic=much", f"{EAST} traffic=-1"]
)
def test_a_place_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not part of a place") as error:
        parse_place(text)
    assert error.value.where == "--place"
