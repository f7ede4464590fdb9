"""Offers: what is refused, what is stale, and the known prices with their sources."""

from __future__ import annotations

import json
import math
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import ConfigError
from headway.cost.offers import BadOffer, find_offer, make_offer
from headway.cost.price_book import known_offers, price_folder, price_of_offer, save_offers, select, snapshot

GOOD: dict[str, Any] = {
    "cloud": "aws", "region": "us-east-1", "instance": "p5.48xlarge", "gpu": "H100", "gpus": 8, "spot": True,
    "usd_per_hour": 16.0, "source": "hand-made", "date": "2026-11-01",
    "history": [["2026-10-30", 15], ["2026-10-29", 14]],
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_an_offer_has_a_name_and_a_price_for_each_accelerator() -> None:
    offer = make_offer(GOOD)
    assert (offer.key, offer.usd_per_gpu_hour) == ("aws/us-east-1/p5.48xlarge/spot", 2.0)
    assert [offer.machines(workers) for workers in (1, 8, 9, 64)] == [1, 1, 2, 8]
    assert offer.history == ((date(2026, 10, 29), 14.0), (date(2026, 10, 30), 15.0))


def test_a_price_that_is_old_says_so() -> None:
    spot = make_offer(GOOD)
    assert [spot.age_text(date(2026, 11, day)) for day in (1, 8, 9)] == ["0 d", "7 d", "stale, of 2026-11-01, 8 d"]
    listed = make_offer({**GOOD, "spot": False})
    assert listed.age_text(date(2026, 11, 9)) == "8 d"
    assert make_offer({**GOOD, "date": None}).age_text() == "stale, undated"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"usd_per_hour": math.nan}, "not a number"),
        ({"usd_per_hour": math.inf}, "not a number"),
        ({"usd_per_hour": "12"}, "not a number"),
        ({"usd_per_hour": True}, "not a number"),
        ({"usd_per_hour": -1.0}, "not above zero"),
        ({"usd_per_hour": 0}, "not above zero"),
        ({"usd_per_hour": 1e300}, r"above \$10,000 an hour"),
        ({"gpus": 0}, "whole number"),
        ({"gpus": 2.5}, "whole number"),
        ({"gpus": 10**400}, "whole number"),
        ({"spot": "yes"}, "whether it is spot"),
        ({"region": "us east/1"}, "should be a word"),
        ({"cloud": None}, "should be a word"),
        ({"gpu": "H100\x1b[31m"}, "should be a word"),
        ({"date": "yesterday"}, "date"),
        ({"history": {"a": 1}}, "history"),
        ({"history": [["2026-10-30", -1]]}, "not above zero"),
        ({"history": [[None, 1]]}, "a date and a price"),
    ],
)
def test_what_is_not_a_price_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(BadOffer, match=words):
        make_offer({**GOOD, **change})


def test_every_price_of_the_snapshot_has_a_source_and_what_is_known_of_its_date() -> None:
    offers = snapshot()
    assert len(offers) >= 60 and len({offer.key for offer in offers}) >= 60
    assert {offer.cloud for offer in offers} == {"aws", "gcp", "azure", "oci", "lambda", "runpod"}
    assert all(offer.source.startswith("https://") for offer in offers)
    undated = [offer for offer in offers if offer.as_of is None]
    assert all("skypilot-catalog/blob/" in offer.source for offer in undated), "a commit names the moment"
    dated = {(offer.key, offer.usd_per_hour): offer.as_of for offer in offers}
    assert dated["azure/eastus/Standard_ND96isr_H100_v5/on-demand", 98.32] == date(2026, 9, 16)
    assert dated["aws/us-east-1/p5.48xlarge/on-demand", 55.04] == date(2026, 9, 10)
    assert dated["oci/any/BM.GPU.H100.8/on-demand", 80.0] == date(2026, 9, 18)


def test_the_newer_price_of_an_offer_wins() -> None:
    key = "aws/us-east-1/p5.48xlarge/on-demand"
    same = {**GOOD, "spot": False}
    save_offers("older", [make_offer({**same, "usd_per_hour": 1.0, "date": "2020-01-01"})])
    assert find_offer(known_offers(), key).usd_per_hour == 55.04
    save_offers("newer", [make_offer({**same, "usd_per_hour": 50.0, "date": "2026-11-01"})])
    offer, total = price_of_offer(key, workers=12)
    assert (offer.usd_per_hour, total, offer.as_of) == (50.0, 100.0, date(2026, 11, 1))


def test_what_is_kept_comes_back_as_it_was() -> None:
    kept = make_offer({**GOOD, "instance": "new.1", "interruption": "<5%"})
    save_offers("one", [kept])
    assert find_offer(known_offers(), kept.key) == kept


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError) as error:
        price_of_offer("aws/us-east-1/p5.48xlagre/spot", 1)
    assert error.value.render().splitlines() == [
        "error: there is no offer 'aws/us-east-1/p5.48xlagre/spot'",
        "  where: cost.offer",
        "  fix:   did you mean aws/us-east-1/p5.48xlarge/spot?",
    ]
    with pytest.raises(ConfigError, match="no known offer has the gpu 'H10'"):
        select("H10")


def test_offers_are_compared_by_the_price_of_an_accelerator() -> None:
    found = select("h100", spot=True)
    assert {offer.gpu for offer in found} == {"H100"} and all(offer.spot for offer in found)
    each = [offer.usd_per_gpu_hour for offer in found]
    assert each == sorted(each) and len({offer.cloud for offer in found}) >= 3
    assert all(offer.region == "eastus" for offer in select("H100", cloud="azure", region="eastus"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ('{"offers": 3}', "has no list of offers"),
        ('{"offers": [3]}', "offer 1 is not a JSON object"),
        (json.dumps({"offers": [GOOD, {**GOOD, "usd_per_hour": -3}]}), "offer 2 has the price -3"),
    ],
)
def test_a_broken_file_of_prices_is_named(content: str, words: str) -> None:
    price_folder().mkdir(parents=True)
    (price_folder() / "x.json").write_text(content)
    with pytest.raises(ConfigError) as error:
        known_offers()
    lines = error.value.render().splitlines()
    assert len(lines) == 3 and words in lines[0] and str(price_folder() / "x.json") in lines[1]
