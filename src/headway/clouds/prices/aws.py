"""Prices of AWS: the spot price history of EC2, the price list, and how often spot machines are interrupted.

Sources: `DescribeSpotPriceHistory` in the EC2 API reference; `GetProducts` in the Price List API; the data of the Spot
Instance Advisor, which is public. The first two need credentials as every AWS tool finds them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any

from headway.clouds.prices.http import get_json, offer_of_today, unexpected_answer
from headway.core.errors import ConfigError, needing
from headway.core.files.foreign import parse_json
from headway.cost.offers import Offer, cheapest_per_region, number_of

#: The data behind the Spot Instance Advisor page.
SPOT_ADVISOR = "https://spot-bid-advisor.s3.amazonaws.com/spot-advisor-data.json"

#: Machines with accelerators (EC2 user guide, accelerated computing): accelerator, and their number.
MACHINES = {
    "p6-b300.48xlarge": ("B300", 8),
    "p6-b200.48xlarge": ("B200", 8),
    "p5en.48xlarge": ("H200", 8),
    "p5e.48xlarge": ("H200", 8),
    "p5.48xlarge": ("H100", 8),
    "p5.4xlarge": ("H100", 1),
    "p4de.24xlarge": ("A100", 8),
    "p4d.24xlarge": ("A100-40GB", 8),
    "g6e.xlarge": ("L40S", 1),
    "g6e.12xlarge": ("L40S", 4),
    "g6e.48xlarge": ("L40S", 8),
    "g6.xlarge": ("L4", 1),
    "g6.12xlarge": ("L4", 4),
    "g6.48xlarge": ("L4", 8),
    "g5.xlarge": ("A10G", 1),
    "g5.48xlarge": ("A10G", 8),
    "g4dn.xlarge": ("T4", 1),
    "g4dn.12xlarge": ("T4", 4),
}
REGIONS = ("us-east-1", "us-east-2", "us-west-2", "eu-west-1", "eu-central-1", "eu-north-1", "ap-northeast-1")
#: The Price List API answers in few regions only.
_PRICE_LIST_REGION = "us-east-1"
_HISTORY_DAYS = 14
_LINUX = ("Linux/UNIX", "Linux/UNIX (Amazon VPC)")

MakeClient = Callable[[str, str], Any]


def refresh_aws(
    regions: Sequence[str] = (), *, make_client: MakeClient | None = None, get: Callable[[str], Any] = get_json
) -> list[Offer]:
    """Return the present prices of EC2's machines with accelerators, spot ones with their history.

    Args:
        regions: Names of regions; `REGIONS` when empty.
        make_client: Makes a client of a service in a region.
        get: Returns the JSON value at a URL.

    Raises:
        ConfigError: botocore or credentials are missing, or an answer is not as documented.
    """
    regions = regions or REGIONS
    make = make_client or _clients()
    rates: dict[tuple[str, str], str] = {}
    with suppress(ConfigError):  # informative only
        rates = dict(_interruptions(get(SPOT_ADVISOR)))
    offers: list[Offer] = []
    for region in regions:
        with _explaining(region):
            offers += _spot(make("ec2", region), region, rates)
    with _explaining(_PRICE_LIST_REGION):
        offers += _on_demand(make("pricing", _PRICE_LIST_REGION), regions)
    return cheapest_per_region(offers)


def _clients() -> MakeClient:
    with needing("botocore", "aws", "refreshing prices of AWS"):
        from botocore.session import get_session
    session = get_session()

    def make(service: str, region: str) -> Any:
        return session.create_client(service, region_name=region)

    return make


@contextmanager
def _explaining(region: str) -> Iterator[None]:
    """Turn errors of botocore into deliberate ones, without importing it."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith("botocore"):
            raise
        raise ConfigError(
            f"AWS gives no prices: {error}",
            where=f"region {region}",
            fix="credentials may need ec2:DescribeSpotPriceHistory and pricing:GetProducts; `aws sts"
            " get-caller-identity` shows whose they are",
        ) from None


def _spot(client: Any, region: str, rates: dict[tuple[str, str], str]) -> Iterator[Offer]:
    start = datetime.now(UTC) - timedelta(days=_HISTORY_DAYS)
    pages = client.get_paginator("describe_spot_price_history").paginate(
        InstanceTypes=list(MACHINES), ProductDescriptions=list(_LINUX), StartTime=start
    )
    zones: dict[tuple[str, str], list[tuple[datetime, float]]] = defaultdict(list)
    for page in pages:
        for item in page.get("SpotPriceHistory", []):
            price = number_of(item.get("SpotPrice"))
            moment = item.get("Timestamp")
            if item.get("InstanceType") not in MACHINES or price is None or not isinstance(moment, datetime):
                what = f"has an entry of the spot price history without a price: {item!r:.100}"
                raise unexpected_answer("AWS", what, region)
            zones[item["InstanceType"], str(item.get("AvailabilityZone"))].append((moment, price))
    for (machine, _), prices in zones.items():
        prices.sort(key=lambda entry: entry[0])
        days: dict[date, float] = {}
        for moment, price in prices:
            days[moment.date()] = price  # the last of a day
        offer = _offer(machine, region, prices[-1][1], spot=True, source="EC2 DescribeSpotPriceHistory")
        yield replace(offer, interruption=rates.get((region, machine)), history=tuple(sorted(days.items())))


def _on_demand(client: Any, regions: Sequence[str]) -> Iterator[Offer]:
    for machine in MACHINES:
        wanted = {"instanceType": machine, "operatingSystem": "Linux", "preInstalledSw": "NA", "tenancy": "Shared",
                  "capacitystatus": "Used"}  # fmt: skip
        filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()]
        for page in client.get_paginator("get_products").paginate(ServiceCode="AmazonEC2", Filters=filters):
            for text in page.get("PriceList", []):
                yield from _product(text, machine, regions)


def _product(text: Any, machine: str, regions: Sequence[str]) -> Iterator[Offer]:
    try:
        product = parse_json(text) if isinstance(text, str) else text
        region = product["product"]["attributes"]["regionCode"]
        terms = product["terms"].get("OnDemand", {})
        prices = [
            number_of(dimension["pricePerUnit"]["USD"])
            for term in terms.values()
            for dimension in term["priceDimensions"].values()
            if dimension["unit"] == "Hrs"
        ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        what = f"has a product without a price: {type(error).__name__} {error}"
        raise unexpected_answer("AWS", what, machine) from None
    if region in regions:
        yield from (_offer(machine, region, price, spot=False, source="AWS Price List") for price in prices if price)


def _interruptions(advice: Any) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield the monthly frequency of interruptions by region and machine, as the Spot Instance Advisor has it."""
    if not isinstance(advice, dict) or not isinstance(advice.get("spot_advisor"), dict):
        return
    ranges = advice.get("ranges")
    labels = {
        entry.get("index"): str(entry.get("label"))
        for entry in (ranges if isinstance(ranges, list) else [])
        if isinstance(entry, dict)
    }
    for region, systems in advice["spot_advisor"].items():
        machines = systems.get("Linux") if isinstance(systems, dict) else None
        for machine, entry in (machines if isinstance(machines, dict) else {}).items():
            if machine in MACHINES and isinstance(entry, dict) and entry.get("r") in labels:
                yield (str(region), str(machine)), labels[entry["r"]]


def _offer(machine: str, region: str, price: float, *, spot: bool, source: str) -> Offer:
    gpu, count = MACHINES[machine]
    record = {"region": region, "instance": machine, "gpu": gpu, "gpus": count, "spot": spot}
    record |= {"usd_per_hour": price, "source": source}
    return offer_of_today("AWS", record, f"{region}, {machine}")
