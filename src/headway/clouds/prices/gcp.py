"""Prices of GCP from the Cloud Billing Catalog API, which takes an API key.

Source: https://cloud.google.com/billing/docs/reference/rest/v1/services.skus/list. There is no price of a machine: its
processors, its memory and its accelerators have SKUs of their own, which their descriptions tell apart. The sizes of
machines are those of https://cloud.google.com/compute/docs/accelerator-optimized-machines; local disks are left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from headway.clouds.prices.http import get_json, offer_of_today, unexpected_answer
from headway.core.credentials.secrets import remember
from headway.core.errors import ConfigError
from headway.core.files.foreign import as_number
from headway.cost.offers import Offer, cheapest_per_region

#: The SKUs of Compute Engine.
GCP_PRICES = "https://cloudbilling.googleapis.com/v1/services/6F81-5844-456A/skus"
KEY = "GOOGLE_API_KEY"

#: Machines with accelerators: series in the descriptions of SKUs, accelerator there, its name, their number, virtual
#: processors and GiB of memory.
MACHINES = {
    "a2-highgpu-1g": ("A2", "Tesla A100", "A100-40GB", 1, 12, 85),
    "a2-highgpu-2g": ("A2", "Tesla A100", "A100-40GB", 2, 24, 170),
    "a2-highgpu-4g": ("A2", "Tesla A100", "A100-40GB", 4, 48, 340),
    "a2-highgpu-8g": ("A2", "Tesla A100", "A100-40GB", 8, 96, 680),
    "a2-megagpu-16g": ("A2", "Tesla A100", "A100-40GB", 16, 96, 1360),
    "a2-ultragpu-1g": ("A2", "Tesla A100 80GB", "A100", 1, 12, 170),
    "a2-ultragpu-2g": ("A2", "Tesla A100 80GB", "A100", 2, 24, 340),
    "a2-ultragpu-4g": ("A2", "Tesla A100 80GB", "A100", 4, 48, 680),
    "a2-ultragpu-8g": ("A2", "Tesla A100 80GB", "A100", 8, 96, 1360),
    "a3-highgpu-1g": ("A3", "H100 80GB", "H100", 1, 26, 234),
    "a3-highgpu-2g": ("A3", "H100 80GB", "H100", 2, 52, 468),
    "a3-highgpu-4g": ("A3", "H100 80GB", "H100", 4, 104, 936),
    "a3-highgpu-8g": ("A3", "H100 80GB", "H100", 8, 208, 1872),
    "a3-megagpu-8g": ("A3Plus", "H100 80GB Plus", "H100", 8, 208, 1872),
    "a3-ultragpu-8g": ("A3Ultra", "H200 141GB", "H200", 8, 224, 2952),
    "g2-standard-4": ("G2", "L4", "L4", 1, 4, 16),
    "g2-standard-8": ("G2", "L4", "L4", 1, 8, 32),
    "g2-standard-24": ("G2", "L4", "L4", 2, 24, 96),
    "g2-standard-48": ("G2", "L4", "L4", 4, 48, 192),
    "g2-standard-96": ("G2", "L4", "L4", 8, 96, 384),
}
_SPOT = "Spot Preemptible"
#: Whole descriptions: reservations, commitments, sole tenancy and queued machines (DWS) have more words in theirs.
_SKU = re.compile(
    rf"(?:{_SPOT} )?(?P<series>A2|A3|A3Plus|A3Ultra|G2) Instance (?P<part>Core|Ram) running in [^,]+"
    rf"|(?:Nvidia )?(?P<gpu>[A-Za-z0-9 ]+?) GPU (?:attached to {_SPOT} VMs )?running in [^,]+"
)
_UNITS = {"Core": "h", "Ram": "GiBy.h", "GPU": "h"}
_MOST_PAGES = 200
#: A price in dollars an hour by region, whether it is spot, and what is paid for: ("A2", "Core") or ("L4", "GPU").
_Rates = dict[tuple[str, bool, tuple[str, str]], float]


def refresh_gcp(
    regions: Sequence[str] = (), *, endpoint: str = GCP_PRICES, get: Callable[..., Any] = get_json
) -> list[Offer]:
    """Return the present prices of GCP's machines with accelerators.

    Args:
        regions: Names of regions, e.g. `us-central1`; all when empty.
        endpoint: Address of the list of SKUs.
        get: Returns the JSON value at a URL.

    Raises:
        ConfigError: there is no key, or the API does not answer, or not as documented.
    """
    key = os.environ.get(KEY)
    if not key:
        raise ConfigError(
            "there is no key for the price list of GCP",
            where=KEY,
            fix=f"export {KEY}=...: an API key of a project with the Cloud Billing API",
        )
    remember(key, KEY)
    rates: _Rates = {}
    for sku in _skus(endpoint, get, {"X-Goog-Api-Key": key}):  # in an address it would stand in logs of proxies
        for place, price in _rates(sku):
            # Where two SKUs are for the same, the dearer one is no promise that the bill breaks.
            rates[place] = max(price, rates.get(place, 0.0))
    return cheapest_per_region(_offers(rates, regions, endpoint))


def _skus(endpoint: str, get: Callable[..., Any], headers: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    query = {"currencyCode": "USD", "pageSize": "5000"}
    for _ in range(_MOST_PAGES):
        url = f"{endpoint}?{urlencode(query)}"
        answer = get(url, headers=headers, access=f"export {KEY}=..., of a project with the Cloud Billing API")
        items = answer.get("skus", []) if isinstance(answer, dict) else None
        if not isinstance(items, list):
            raise unexpected_answer("GCP", "has no list of SKUs", url)
        yield from (item for item in items if isinstance(item, dict))
        token = answer.get("nextPageToken")
        if not token:
            return
        query["pageToken"] = str(token)
    raise unexpected_answer("GCP", f"has more than {_MOST_PAGES} pages", endpoint)


def _rates(sku: dict[str, Any]) -> Iterator[tuple[tuple[str, bool, tuple[str, str]], float]]:
    """Yield what a SKU says of the price of a part, in each of its regions; nothing if it is for something else."""
    description = str(sku.get("description"))
    category = sku.get("category")
    found = _SKU.fullmatch(description)
    kind = category.get("usageType") if isinstance(category, dict) else None
    if found is None or kind not in ("OnDemand", "Preemptible"):
        return
    part = (found["series"], found["part"]) if found["series"] else (found["gpu"].replace("Mega", "Plus"), "GPU")
    price = _hourly(sku, _UNITS[part[1]])
    # Some SKUs of spot accelerators have the kind of those on demand.
    is_spot = kind == "Preemptible" or _SPOT in description
    regions = sku.get("serviceRegions")
    if price is not None and isinstance(regions, list):
        yield from (((str(region), is_spot, part), price) for region in regions)


def _hourly(sku: dict[str, Any], unit: str) -> float | None:
    """Return the price per unit of a SKU in dollars; None if it is free, or in other units."""
    try:
        expression = sku["pricingInfo"][-1]["pricingExpression"]
        amounts = [rate["unitPrice"] for rate in expression["tieredRates"]]
        prices = [
            (as_number(float(amount.get("units") or 0)) or 0.0) + (as_number(amount.get("nanos")) or 0.0) / 1e9
            for amount in amounts
            if amount.get("currencyCode", "USD") == "USD"
        ]
    except (LookupError, TypeError, ValueError, AttributeError):
        raise unexpected_answer("GCP", "has a SKU without a price", str(sku.get("skuId"))) from None
    return max(prices, default=0.0) or None if expression.get("usageUnit") == unit else None


def _offers(rates: _Rates, regions: Sequence[str], endpoint: str) -> Iterator[Offer]:
    for region, is_spot in sorted({(region, is_spot) for region, is_spot, _ in rates}):
        if regions and region not in regions:
            continue
        for machine, (series, sku, gpu, count, processors, memory) in MACHINES.items():
            amounts = {(sku, "GPU"): count, (series, "Core"): processors, (series, "Ram"): memory}
            parts = [(rates.get((region, is_spot, part)), amount) for part, amount in amounts.items()]
            if any(rate is None for rate, _ in parts):
                continue  # the machine is not offered there
            price = sum((rate or 0.0) * amount for rate, amount in parts)
            record = {"region": region, "instance": machine, "gpu": gpu, "gpus": count, "spot": is_spot}
            record |= {"usd_per_hour": round(price, 6), "source": endpoint}
            yield offer_of_today("GCP", record, endpoint)
