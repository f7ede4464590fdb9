"""Refreshing prices of AWS and Azure, from hand-made answers in the form that their documentation gives."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from headway.core.errors import ConfigError
from headway.cost.aws import MACHINES, refresh_aws
from headway.cost.azure import refresh_azure
from headway.cost.http import get_json

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
