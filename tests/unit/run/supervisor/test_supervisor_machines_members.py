"""Who may join, who is lost, and who works, with machines and a clock that are only numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.config import load_config, usable_machines
from headway.core.errors import ConfigError
from headway.run.supervisor.machines.members import ClockOffset, Expected, Member, Members, choose_machines
from headway.run.supervisor.machines.messages import Hello, Refused

HELLO = Hello(1, "p1", "b", workers=2, version="1", identity="i")


@pytest.fixture
def members() -> Members:
    return Members(Expected(most=4, workers=2, version="1", identity="i"))


def admitted(members: Members, now: float = 0.0, **changed: Any) -> Member:
    member = members.admit(replace(HELLO, **changed), now)
    assert isinstance(member, Member), member
    return member


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"node": 0}, "machines 1 to 3"),
        ({"node": 4}, "machines 1 to 3"),
        ({"version": "2"}, r"machine 1 \(b\) has Headway 2, and the lead 1"),
        ({"workers": 3}, "started with 3 workers, and the lead with 2"),
        ({"identity": "j"}, "another config"),
    ],
)
def test_a_machine_that_does_not_fit_is_refused(members: Members, changed: dict[str, Any], words: str) -> None:
    found = members.admit(replace(HELLO, **changed), 0.0)
    assert isinstance(found, Refused)
    assert members.joined == {} and members.refusals == [found]
    assert re.search(words, found.what)


def test_a_machine_that_comes_back_replaces_itself_and_its_old_connection_is_known_to_be_gone(members: Members) -> None:
    old = admitted(members)
    new = admitted(members, now=1.0)  # the same process, after its cable was cut
    assert members.joined == {1: new} and new.session != old.session
    assert members.departed[old.session] and new.session not in members.departed


def test_two_machines_with_one_number_are_told_apart_from_one_that_was_started_again(members: Members) -> None:
    admitted(members).heard = 10.0
    found = members.admit(replace(HELLO, process="p2", host="c"), 11.0)
    assert isinstance(found, Refused) and "two machines" in found.what
    again = admitted(members, now=14.0, process="p2")
    assert members.joined[1] is again


def test_a_machine_is_silent_after_its_time_and_not_before(members: Members) -> None:
    one, two = admitted(members), admitted(members, node=2, process="p2")
    one.heard, two.heard = 100.0, 110.0
    assert members.silent(114.9, 15.0) == []
    assert members.silent(115.0, 15.0) == [one]
    assert members.silent(125.0, 15.0) == [one, two]


def test_the_lead_works_and_of_the_others_those_that_have_worked() -> None:
    assert choose_machines([1, 2, 3], 4) == [0, 1, 2, 3]
    assert choose_machines([1, 2, 3], 2) == [0, 1]
    assert choose_machines([1, 2, 3], 2, before=[3]) == [0, 3]
    assert choose_machines([3, 2], 1) == [0]


@pytest.mark.parametrize(
    ("machines", "workers", "determinism", "usable"),
    [
        ("3", 1, "elastic", [0, 1, 2, 2]),  # three workers cannot share eight lanes
        ("2:4", 1, "elastic", [0, 0, 2, 2, 4]),
        ("4", 2, "elastic", [0, 1, 2, 2, 4]),
        ("2", 1, "run", [0, 0, 2, 2]),
    ],
)
def test_a_run_uses_as_many_machines_as_can_share_its_lanes(
    tiny: Callable[..., Path], machines: str, workers: int, determinism: str, usable: list[int]
) -> None:
    config = load_config(tiny(parallel={"machines": machines, "workers": workers}, determinism=determinism))
    assert [usable_machines(config, available) for available in range(len(usable))] == usable


def test_a_range_of_machines_needs_a_promise_that_holds_for_it(tiny: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="waited for, never left out"):
        load_config(tiny(parallel={"machines": "1:2"}))
    with pytest.raises(ConfigError, match="come and go as a whole"):
        load_config(tiny(parallel={"machines": 2, "workers": "1:2"}, determinism="elastic"))
    with pytest.raises(ConfigError, match="min_machines"):
        load_config(tiny(parallel={"machines": "3:2"}, determinism="elastic"))


def test_the_difference_of_two_clocks_is_that_of_the_fastest_message_and_stays_where_it_is() -> None:
    clock = ClockOffset()
    assert clock.update(105.0, 5.5) == 99.5  # half a second late
    assert clock.update(106.0, 6.0) == 99.5, "a little faster: beats keep their times"
    assert clock.update(107.0, 7.9) == 99.1, "much faster"
    assert clock.update(112.0, 8.0) == 99.1, "late"


def test_a_clock_that_drifts_is_followed() -> None:
    clock = ClockOffset()
    for second in range(400):
        found = clock.update(1000.0 + second * 1.01, float(second))
    assert abs(found - (1000.0 + 400 * 0.01)) < 0.6
