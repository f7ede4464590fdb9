"""Refreshing prices of AWS, Azure and GCP, from hand-made answers in the form that their documentation gives."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from headway.clouds.prices import refresh
from headway.clouds.prices.aws import MACHINES, refresh_aws
from headway.clouds.prices.azure import refresh_azure
from headway.clouds.prices.gcp import KEY, refresh_gcp
from headway.clouds.prices.http import get_json
from headway.clouds.prices.refresh import PriceTimer
from headway.core.credentials.secrets import redact
from headway.core.errors import ConfigError
from headway.cost.offers import Offer
from headway.cost.price_book import known_offers, save_offers
from support.local_server import LocalServer
from support.places import EAST, WEST, offer

NOW = datetime.now(UTC)


class HandMadeAws:
    """Answers of EC2 and of the Price List API."""

    def __init__(self, service: str, region: str, history: list[dict[str, Any]] | None = None) -> None:
        self._service, self._region, self._history = service, region, history
        self.asked: dict[str, Any] = {}

    def get_paginator(self, name: str) -> HandMadeAws:
        assert name == {"ec2": "describe_spot_price_history", "pricing": "get_products"}[self._service]
        return self

    def paginate(self, **asked: Any) -> list[dict[str, Any]]:
        if self._service == "pricing":
            machine = next(f["Value"] for f in asked["Filters"] if f["Field"] == "instanceType")
            return [{"PriceList": [product(machine)] if machine == "p5.48xlarge" else []}]
        assert "p5.48xlarge" in asked["InstanceTypes"]
        return [
            {"SpotPriceHistory": self._history or [spot(20.0, 3), spot(14.5, 1)]},
            {"SpotPriceHistory": [spot(25.0, 2, "b")]},
        ]


def spot(price: float, days: int, zone: str = "a") -> dict[str, Any]:
    return {
        "AvailabilityZone": f"us-east-1{zone}",
        "InstanceType": "p5.48xlarge",
        "ProductDescription": "Linux/UNIX",
        "SpotPrice": f"{price:.6f}",
        "Timestamp": NOW - timedelta(days=days),
    }


def product(machine: str) -> str:
    dimension = {"unit": "Hrs", "pricePerUnit": {"USD": "55.0400000000"}}
    terms = {"OnDemand": {"X.Y": {"priceDimensions": {"X.Y.Z": dimension}}}}
    attributes = {"instanceType": machine, "regionCode": "us-east-1"}
    return json.dumps({"product": {"attributes": attributes}, "terms": terms})


ADVICE = {
    "ranges": [{"index": 0, "label": "<5%"}, {"index": 3, "label": "15-20%"}],
    "spot_advisor": {"us-east-1": {"Linux": {"p5.48xlarge": {"s": 60, "r": 3}}, "Windows": {}}},
}


def test_aws_has_spot_prices_with_their_history_and_list_prices() -> None:
    found = refresh_aws(["us-east-1"], make_client=HandMadeAws, get=lambda url: ADVICE)
    offers = {offer.key: offer for offer in found}
    assert offers.keys() == {"aws/us-east-1/p5.48xlarge/spot", "aws/us-east-1/p5.48xlarge/on-demand"}
    now = offers["aws/us-east-1/p5.48xlarge/spot"]
    assert (now.usd_per_hour, now.gpu, now.gpus, now.interruption, now.as_of) == (
        14.5,
        "H100",
        8,
        "15-20%",
        date.today(),
    )
    days = [(NOW - timedelta(days=days)).date() for days in (3, 1)]
    assert now.history == ((days[0], 20.0), (days[1], 14.5)), "of the cheapest zone"
    assert offers["aws/us-east-1/p5.48xlarge/on-demand"].usd_per_hour == 55.04


def test_aws_without_the_advisor_does_not_know_how_often_machines_are_interrupted() -> None:
    def no_answer(url: str) -> Any:
        raise ConfigError("the price list does not answer")

    found = refresh_aws(["us-east-1"], make_client=HandMadeAws, get=no_answer)
    assert [offer.interruption for offer in found if offer.spot] == [None]


def test_an_answer_of_aws_without_a_price_is_refused() -> None:
    def make(service: str, region: str) -> HandMadeAws:
        return HandMadeAws(service, region, [{**spot(1.0, 1), "SpotPrice": "free"}])

    with pytest.raises(ConfigError, match="without a price"):
        refresh_aws(["us-east-1"], make_client=make, get=lambda url: ADVICE)


def test_the_clients_of_botocore_take_these_requests() -> None:
    """The real library checks the names and types of what is asked for, and of what is answered."""
    session = pytest.importorskip("botocore.session").get_session()
    stub = pytest.importorskip("botocore.stub")

    def make(service: str, region: str) -> Any:
        client = session.create_client(service, region_name=region, aws_access_key_id="x", aws_secret_access_key="x")
        stubber = stub.Stubber(client)
        if service == "ec2":
            stubber.add_response("describe_spot_price_history", {"SpotPriceHistory": [spot(14.5, 1)]})
        else:
            for machine in MACHINES:
                stubber.add_response("get_products", {"PriceList": [product(machine)]})
        stubber.activate()
        return client

    found = refresh_aws(["us-east-1"], make_client=make, get=lambda url: ADVICE)
    assert sum(offer.spot for offer in found) == 1 and sum(not offer.spot for offer in found) == len(MACHINES)


def meter(**more: Any) -> dict[str, Any]:
    return {
        "currencyCode": "USD",
        "retailPrice": 98.32,
        "armRegionName": "eastus",
        "meterName": "ND96isrH100v5",
        "productName": "Virtual Machines NDsr H100 v5 Series",
        "skuName": "ND96isrH100v5",
        "unitOfMeasure": "1 Hour",
        "type": "Consumption",
        **more,
    }


def test_azure_has_linux_by_the_hour_on_all_pages() -> None:
    pages = {
        "first": {
            "Items": [
                meter(),
                meter(productName="Virtual Machines NDsr H100 v5 Series Windows", retailPrice=102.7),
                meter(meterName="ND96isrH100v5 Low Priority", retailPrice=41.0),
                meter(type="Reservation", retailPrice=350400.0),
                meter(currencyCode="EUR", retailPrice=1.0),
                meter(retailPrice=0.0),
            ],
            "NextPageLink": "second",
        },
        "second": {"Items": [meter(meterName="ND96isrH100v5 Spot", retailPrice=18.17)], "NextPageLink": None},
    }
    asked: list[str] = []

    def get(url: str) -> Any:
        asked.append(url)
        if url == "second":
            return pages["second"]
        return pages["first"] if "Standard_ND96isr_H100_v5" in url else {"Items": [], "NextPageLink": None}

    found = refresh_azure(["eastus", "westeurope"], get=get)
    assert {offer.key: (offer.usd_per_hour, offer.gpus) for offer in found} == {
        "azure/eastus/Standard_ND96isr_H100_v5/on-demand": (98.32, 8),
        "azure/eastus/Standard_ND96isr_H100_v5/spot": (18.17, 8),
    }
    assert "armRegionName%20eq%20%27eastus%27%20or%20armRegionName%20eq%20%27westeurope%27" in asked[0]


@pytest.mark.parametrize("answer", [[], {"Items": 3}, {"Items": [meter(retailPrice=1e9)]}])
def test_another_answer_of_azure_is_refused(answer: Any) -> None:
    with pytest.raises(ConfigError, match="the answer of Azure's price list"):
        refresh_azure(get=lambda url: answer)


def test_a_list_without_end_is_given_up() -> None:
    with pytest.raises(ConfigError, match="has more than 200 pages"):
        refresh_azure(get=lambda url: {"Items": [], "NextPageLink": url})


def test_prices_are_read_over_https_only() -> None:
    for url in ("http://prices.example.org/x", "file:///etc/passwd"):
        with pytest.raises(ConfigError, match="over HTTPS only"):
            get_json(url)


def sku(description: str, price: float, kind: str = "OnDemand", **more: Any) -> dict[str, Any]:
    """A SKU of Compute Engine, made by hand."""
    unit = more.pop("unit", "GiBy.h" if " Ram " in description else "h")
    nanos = round(price % 1 * 1e9)
    rate = {"startUsageAmount": 0, "unitPrice": {"currencyCode": "USD", "units": str(int(price)), "nanos": nanos}}
    return {
        "skuId": "0000-AAAA-0000",
        "description": description,
        "category": {"resourceFamily": "Compute", "resourceGroup": "GPU", "usageType": kind},
        "serviceRegions": ["us-central1"],
        "pricingInfo": [{"pricingExpression": {"usageUnit": unit, "tieredRates": [rate]}}],
        **more,
    }


def gcp(*pages: list[dict[str, Any]], regions: tuple[str, ...] = ()) -> dict[str, float]:
    """The offers of pages of SKUs, by their names."""

    def get(url: str, *, headers: Mapping[str, str], access: str) -> Any:
        assert headers == {"X-Goog-Api-Key": "Gk7canary42"} and "Gk7canary42" not in url
        number = int(url.partition("pageToken=")[2] or 0)
        return {"skus": pages[number], "nextPageToken": str(number + 1) if number + 1 < len(pages) else ""}

    return {offer.key: offer.usd_per_hour for offer in refresh_gcp(regions, get=get)}


A2 = [
    sku("A2 Instance Core running in Americas", 0.031611),
    sku("A2 Instance Ram running in Americas", 0.004237),
    sku("Nvidia Tesla A100 GPU running in Americas", 2.933908),
]
A2_SPOT = [
    sku("Spot Preemptible A2 Instance Core running in Americas", 0.01, "Preemptible"),
    sku("Spot Preemptible A2 Instance Ram running in Americas", 0.001, "Preemptible"),
    # Google gives it the kind of those on demand.
    sku("Nvidia Tesla A100 GPU attached to Spot Preemptible VMs running in Americas", 1.0, "OnDemand"),
]


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "Gk7canary42")


def test_a_machine_of_gcp_is_the_sum_of_its_parts(key: None) -> None:
    found = gcp(A2[:2], [*A2[2:], *A2_SPOT])
    assert found["gcp/us-central1/a2-highgpu-1g/on-demand"] == 3.673385  # 2.933908 + 12 * 0.031611 + 85 * 0.004237
    assert found["gcp/us-central1/a2-highgpu-8g/spot"] == pytest.approx(8 + 96 * 0.01 + 680 * 0.001)
    assert len(found) == 10 and not any("ultragpu" in name for name in found), "A100s of 80 GB have no price"


def test_other_skus_of_gcp_are_no_prices(key: None) -> None:
    others = [
        sku("Nvidia Tesla A100 GPU attached to DWS Defined Duration VMs running in Americas", 99.0),
        sku("Reserved Nvidia Tesla A100 GPU in Americas in Calendar Mode", 99.0),
        sku("Commitment v1: A2 Core in Americas for 1 Year", 99.0, "Commit1Yr"),
        sku("A2 Instance Core running in Americas", 99.0, "Commit1Yr"),
        sku("A2 Custom Instance Core running in Americas", 99.0),
        sku("A2 Instance Core running in Americas", 99.0, unit="mo"),
        sku("A2 Instance Ram running in Americas", 0.0),
        {"description": "N1 Predefined Instance Core running in Americas"},
    ]
    assert gcp([*others, *A2]) == gcp(A2)
    dearer = sku("A2 Instance Core running in Iowa", 0.05)
    assert gcp([dearer, *A2]) == gcp([*A2, dearer]) != gcp(A2), "the order does not matter"


def test_mega_is_plus_and_no_other_h100(key: None) -> None:
    parts = [
        sku("A3Plus Instance Core running in Americas", 0.026924),
        sku("A3Plus Instance Ram running in Americas", 0.002344),
        sku("A3 Instance Core running in Americas", 0.02),
        sku("A3 Instance Ram running in Americas", 0.002),
    ]
    mega = [sku(f"Nvidia H100 80GB {word} GPU running in Americas", 10.344276) for word in ("Mega", "Plus")]
    price = pytest.approx(8 * 10.344276 + 208 * 0.026924 + 1872 * 0.002344)
    expected = {"gcp/us-central1/a3-megagpu-8g/on-demand": price}
    assert gcp([*parts, mega[0]]) == gcp([*parts, mega[1]]) == expected


def test_regions_of_gcp_are_chosen(key: None) -> None:
    everywhere = [{**one, "serviceRegions": ["us-central1", "europe-west4"]} for one in A2]
    assert len(gcp(everywhere)) == 10
    assert {name.split("/")[1] for name in gcp(everywhere, regions=("europe-west4",))} == {"europe-west4"}


def test_gcp_needs_a_key_that_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY, raising=False)
    with pytest.raises(ConfigError, match="no key for the price list of GCP"):
        refresh_gcp(get=lambda url, **_: {})
    monkeypatch.setenv(KEY, "Gk7canary42")

    class Refuses(BaseHTTPRequestHandler):
        seen: list[str | None]
        code = 400

        def do_GET(self) -> None:
            self.seen.append(self.headers.get("X-Goog-Api-Key"))
            self.send_response(self.code)
            self.send_header("Location", f"http://localhost:{self.headers['Host'].partition(':')[2]}/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    for code in (400, 302):
        seen: list[str | None] = []
        server = LocalServer(Refuses, seen=seen, code=code)
        try:
            with pytest.raises(ConfigError, match=f"status {code}") as raised:
                refresh_gcp(endpoint=f"{server.endpoint}/skus")
        finally:
            server.close()
        assert seen == ["Gk7canary42"], "another server gets no key"
        assert "Gk7canary42" not in str(raised.value) and (KEY in str(raised.value.fix)) == (code == 400)
    assert "Gk7canary42" not in redact("key Gk7canary42")


def test_a_timer_refreshes_the_regions_of_offers_and_keeps_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cloud that does not answer is reported once in a row."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save_offers("refreshed-aws", [offer(EAST, 20.0), offer(WEST, 21.0)])
    answers: list[list[Offer] | None] = [[offer(EAST, 9.0)], None, None, [offer(EAST, 8.0)]]

    def fetch(regions: Sequence[str]) -> list[Offer]:
        assert regions == ["us-east-1"]
        if (answer := answers.pop(0)) is None:
            raise ConfigError("no answer")
        return answer

    monkeypatch.setattr(refresh, "CLOUDS", {"aws": fetch})
    timer = PriceTimer([EAST, EAST], 0.0)
    found = []
    for _ in range(4):
        timer.look(wait=True)
        known = {one.key: one.usd_per_hour for one in known_offers()}
        found.append((known[EAST], known[WEST]))
    assert found == [(9.0, 21.0), (9.0, 21.0), (9.0, 21.0), (8.0, 21.0)]
    assert capsys.readouterr().err.count("no new prices of aws: no answer") == 1
    with pytest.raises(ConfigError, match="prices of azure cannot be fetched"):
        PriceTimer(["azure/eastus/x/spot"], 60.0)


WITHOUT_PRICE = sku("A2 Instance Core running in Americas", 1.0, pricingInfo=[])


@pytest.mark.parametrize("answer", [[], {"skus": 3}, {"skus": [WITHOUT_PRICE]}])
def test_another_answer_of_gcp_is_refused(answer: Any, key: None) -> None:
    with pytest.raises(ConfigError, match="the answer of GCP's price list"):
        refresh_gcp(get=lambda url, **_: answer)
    with pytest.raises(ConfigError, match="has more than 200 pages"):
        refresh_gcp(get=lambda url, **_: {"skus": [], "nextPageToken": "again"})
