"""Prices of Azure from its Retail Prices API, which needs no account.

Source: https://learn.microsoft.com/rest/api/cost-management/retail-prices/azure-retail-prices. Linux and Windows share
meters and differ in the name of the product; spot and low-priority meters say so in their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import quote

from headway.clouds.prices.http import get_json, offer_of_today, unexpected_answer
from headway.core.files.foreign import as_number
from headway.cost.offers import Offer, cheapest_per_region

AZURE_PRICES = "https://prices.azure.com/api/retail/prices"

#: Machines with accelerators (Azure's documentation of the ND, NC and NG series): accelerator, and their number.
MACHINES = {
    "Standard_NC40ads_H100_v5": ("H100-NVL", 1),
    "Standard_NC80adis_H100_v5": ("H100-NVL", 2),
    "Standard_ND96isr_H100_v5": ("H100", 8),
    "Standard_ND96isr_H200_v5": ("H200", 8),
    "Standard_ND96isr_MI300X_v5": ("MI300X", 8),
    "Standard_ND96asr_v4": ("A100-40GB", 8),
    "Standard_ND96amsr_A100_v4": ("A100", 8),
    "Standard_NC24ads_A100_v4": ("A100-PCIe", 1),
    "Standard_NC48ads_A100_v4": ("A100-PCIe", 2),
    "Standard_NC96ads_A100_v4": ("A100-PCIe", 4),
    "Standard_NC4as_T4_v3": ("T4", 1),
    "Standard_NC64as_T4_v3": ("T4", 4),
    "Standard_NV36ads_A10_v5": ("A10", 1),
    "Standard_NV72ads_A10_v5": ("A10", 2),
}
_MOST_PAGES = 200


def refresh_azure(
    regions: Sequence[str] = (), *, endpoint: str = AZURE_PRICES, get: Callable[[str], Any] = get_json
) -> list[Offer]:
    """Return the present prices of Azure's machines with accelerators.

    Args:
        regions: Names of regions, e.g. `eastus`; all when empty.
        endpoint: Address of the API.
        get: Returns the JSON value at a URL.

    Raises:
        ConfigError: the API does not answer, or not as documented.
    """
    offers: list[Offer] = []
    for machine in MACHINES:
        offers += _machine(machine, regions, endpoint, get)
    return cheapest_per_region(offers)


def _machine(machine: str, regions: Sequence[str], endpoint: str, get: Callable[[str], Any]) -> Iterator[Offer]:
    places = " or ".join(f"armRegionName eq '{region}'" for region in regions)
    where = f"serviceName eq 'Virtual Machines' and priceType eq 'Consumption' and armSkuName eq '{machine}'"
    if places:
        where = f"{where} and ({places})"
    url: str | None = f"{endpoint}?$filter={quote(where)}"
    for _ in range(_MOST_PAGES):
        answer = get(str(url))
        items = answer.get("Items") if isinstance(answer, dict) else None
        if not isinstance(items, list):
            raise unexpected_answer("Azure", "has no list of items", str(url))
        for item in items:
            if isinstance(item, dict) and _is_linux_by_the_hour(item):
                yield _offer(item, machine, endpoint)
        url = answer.get("NextPageLink")
        if not url:
            return
    raise unexpected_answer("Azure", f"has more than {_MOST_PAGES} pages", str(url))


def _is_linux_by_the_hour(item: dict[str, Any]) -> bool:
    names = f"{item.get('productName')} {item.get('meterName')} {item.get('skuName')}"
    return (
        item.get("type", "Consumption") == "Consumption"
        and item.get("currencyCode") == "USD"
        and item.get("unitOfMeasure") == "1 Hour"
        and "Windows" not in names
        and "Low Priority" not in names
        and bool(as_number(item.get("retailPrice")))
    )


def _offer(item: dict[str, Any], machine: str, endpoint: str) -> Offer:
    gpu, count = MACHINES[machine]
    is_spot = "Spot" in f"{item.get('meterName')} {item.get('skuName')}"
    record = {"region": item.get("armRegionName"), "instance": machine, "gpu": gpu, "gpus": count, "spot": is_spot}
    record |= {"usd_per_hour": item.get("retailPrice"), "source": endpoint}
    return offer_of_today("Azure", record, endpoint)
