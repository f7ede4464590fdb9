"""The sections `cost` and `budget`."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.config import identity, load_config, override
from headway.config.sections.cost import parse_budget
from headway.core.errors import ConfigError

BASE = "train: {steps: 1}\n"


def load(tmp_path: Path, text: str, *overrides: str):  # type: ignore[no-untyped-def]
    path = tmp_path / "c.yaml"
    path.write_text(BASE + text)
    return load_config(path, overrides)


def test_a_share_is_a_number_or_a_percentage(tmp_path: Path) -> None:
    given = "cost: {usd_per_hour: 1}\nbudget: {usd: 5, warn: 65 %}"
    assert load(tmp_path, given).budget.warn == 0.65
    assert load(tmp_path, given, "budget.warn=0.5").budget.warn == 0.5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("budget: {usd: -3}", "budget.usd: should be greater than 0"),
        ("budget: {usd: .inf}", "budget.usd"),
        ("budget: {usd: 3}", "a budget needs the price of the machines"),
        ("cost: {usd_per_hour: 1}\nbudget: {usd: 3, warn: 80}", "budget.warn"),
        ("cost: {usd_per_hour: 1}\nbudget: {usd: 3, warn: lots}", "budget.warn"),
        ("cost: {usd_per_hour: 1}\nbudget: {usd: 3, warn: 101 %}", "budget.warn"),
        ("cost: {usd_per_hour: -1}", "cost.usd_per_hour"),
        ("cost: {usd_per_hour: true}", "usd_per_hour is a number, not true"),
        ("cost: {offer: p5.48xlarge}", "cost.offer: should be cloud/region/instance/spot"),
        ("cost: {offer: a/b/c/reserved}", "cost.offer: should be cloud/region/instance/spot"),
        ("cost: {offer: a/b/c/spot, usd_per_hour: 1}", "each give a price of the machines"),
        ("cost: {usd_per_hour: 1}\ntelemetry: {usd_per_hour: 1}", "each give a price of the machines"),
        ("budget: {dollars: 3}", "unknown key 'budget.dollars'"),
    ],
)
def test_mistakes_are_named_with_their_keys(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)
    assert words in error.value.what and "c.yaml:" in str(error.value.where)


def test_the_older_name_of_the_price_still_works(tmp_path: Path) -> None:
    config = load(tmp_path, "telemetry: {usd_per_hour: 2}\nbudget: {usd: 5}")
    assert config.usd_per_hour == 2.0
    newer = override(config, ["cost.usd_per_hour=3"])
    assert (newer.usd_per_hour, newer.telemetry.usd_per_hour) == (3.0, None), "what is given later counts"
    assert override(newer, ["cost.offer=a/b/c/spot"]).usd_per_hour is None
    assert override(newer, ["telemetry.usd_per_hour=4"]).usd_per_hour == 4.0


def test_money_is_no_part_of_what_a_run_computes(tmp_path: Path) -> None:
    plain = load(tmp_path, "")
    paid = load(tmp_path, "cost: {usd_per_hour: 2, storage_usd_per_gib_month: 1}\nbudget: {usd: 5}")
    assert identity(plain) == identity(paid)


@pytest.mark.parametrize(("text", "amount"), [("200", 200.0), ("$1,250.50", 1250.5), (" 3 USD", 3.0)])
def test_an_amount_as_people_write_it(text: str, amount: float) -> None:
    assert parse_budget(text) == amount


@pytest.mark.parametrize("text", ["0", "-5", "nan", "inf", "much", "", "200,50", "1,2,3"])
def test_what_is_no_amount(text: str) -> None:
    with pytest.raises(ValueError, match="not an amount of dollars"):
        parse_budget(text)
