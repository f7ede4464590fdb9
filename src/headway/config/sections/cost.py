"""The sections `cost` and `budget`: the price of the machines, and how much a run may spend."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from headway.config.base import Section
from headway.config.units import PERCENT_OR_SHARE, parse_share
from headway.core.errors import ConfigError

#: Name of an offer: cloud, region, instance, contract.
OFFER_PATTERN = r"^[^/\s]+/[^/\s]+/[^/\s]+/(spot|on-demand)$"

#: A number with commas between its thousands.
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d*)?")

#: The key of the price in older configs, which is still read.
OLD_PRICE_KEY = "telemetry.usd_per_hour"


class CostConfig(Section):
    """The price of the machines ([cost.md](cost.md)). Cost is shown only if a price is given."""

    usd_per_hour: Annotated[float, Field(ge=0.0, le=1e6)] | None = None
    """Price of all machines together, as for machines of your own or a price that you have negotiated."""
    offer: Annotated[str, Field(pattern=OFFER_PATTERN)] | None = None
    """An offer whose price each attempt looks up when it begins: `cloud/region/instance/spot` or `.../on-demand`, as
    `headway prices` lists them. It counts as many machines as the workers need."""
    storage_usd_per_gib_month: Annotated[float, Field(ge=0.0, le=1e4)] = 0.0
    """Price of keeping checkpoints, for every place that keeps them together."""


class BudgetConfig(Section):
    """The most that a run may cost over all its attempts ([cost.md](cost.md#budget))."""

    usd: Annotated[float, Field(gt=0.0, le=1e9)] | None = None
    """The run is saved and stopped in time to stay within this amount; the command then ends with exit code 6. A
    larger amount lets it continue."""
    warn: Annotated[float, Field(gt=0.0, le=1.0), BeforeValidator(parse_share), WithJsonSchema(PERCENT_OR_SHARE)] = 0.8
    """A warning comes when this share is spent, e.g. `80 %`."""


def cost_problems(cost: CostConfig, budget: BudgetConfig, old_price: float | None) -> Iterator[ConfigError]:
    """Yield contradictions between the price and the budget.

    Args:
        old_price: The price by its old key.
    """
    given = {
        "cost.usd_per_hour": cost.usd_per_hour,
        "cost.offer": cost.offer,
        OLD_PRICE_KEY: old_price,
    }
    keys = [key for key, value in given.items() if value is not None]
    if len(keys) > 1:
        yield ConfigError(
            f"{' and '.join(keys)} each give a price of the machines",
            where=", ".join(keys),
            fix=f"keep one of them, for example {keys[0]}",
        )
    if budget.usd is not None and not keys:
        yield ConfigError(
            "a budget needs the price of the machines",
            where="budget.usd",
            fix="cost.usd_per_hour=12.50 for all machines together, or cost.offer=... (headway prices lists offers)",
        )


def parse_budget(value: Any) -> float:
    """Parse an amount of dollars: 200, "$200" or "200 USD".

    Raises:
        ValueError: it is not an amount above zero.
    """
    text = str(value).strip().lower().removeprefix("$").removesuffix("usd").strip()
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")  # any other comma may be meant as a decimal one: 200,50 is not 20,050
    try:
        amount = float(text)
    except ValueError:
        amount = 0.0
    if not 0 < amount <= 1e9:
        raise ValueError(f"'{value}' is not an amount of dollars above zero; write for example 200")
    return amount
