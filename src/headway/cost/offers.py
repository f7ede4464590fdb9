"""Offers of clouds: a machine in a region, on demand or spot, with its price and where the price comes from."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from difflib import get_close_matches
from typing import Any

from headway.core.errors import ConfigError
from headway.core.files.foreign import as_number

#: A price above this is a mistake: the dearest machine with accelerators costs a few hundred dollars an hour.
MOST_USD_PER_HOUR = 10_000.0
#: A price older than this is called stale. Spot prices move within hours, list prices a few times a year.
STALE_DAYS = {"spot": 7, "on-demand": 180}

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
_TERMS = ("on-demand", "spot")


@dataclass(frozen=True)
class Offer:
    """One machine of a cloud at a price."""

    cloud: str
    region: str
    instance: str
    gpu: str
    """Name of the accelerator, as `headway plan --gpus` has it."""
    gpus: int
    """Accelerators of one machine."""
    spot: bool
    usd_per_hour: float
    """Price of one machine."""
    source: str
    """Where the price was read: a URL, or the file that it was imported from."""
    as_of: date | None = None
    """When the price was valid; None if the source does not say."""
    interruption: str | None = None
    """How often such spot machines are interrupted, in the words of the cloud: `<5%` a month."""
    history: tuple[tuple[date, float], ...] = ()
    """Earlier prices, rising by date."""

    @property
    def term(self) -> str:
        """The kind of contract: `spot` or `on-demand`."""
        return _TERMS[self.spot]

    @property
    def key(self) -> str:
        """Name of the offer in a config: `aws/us-east-1/p5.48xlarge/spot`."""
        return f"{self.cloud}/{self.region}/{self.instance}/{self.term}"

    @property
    def usd_per_gpu_hour(self) -> float:
        """Price of one accelerator."""
        return self.usd_per_hour / self.gpus

    def machines(self, workers: int) -> int:
        """Return the number of machines that have an accelerator for each worker."""
        return max(1, -(-workers // self.gpus))

    def age_days(self, today: date | None = None) -> int | None:
        """Return the age of the price in days; None if it has no date."""
        return None if self.as_of is None else max(0, ((today or date.today()) - self.as_of).days)

    def is_stale(self, today: date | None = None) -> bool:
        """Return whether the price is older than such prices stay right, or has no date."""
        days = self.age_days(today)
        return days is None or days > STALE_DAYS[self.term]

    def age_text(self, today: date | None = None) -> str:
        """Return the age in words; that of a stale price has its date: `stale, of 2026-09-23, 66 d`."""
        days = self.age_days(today)
        if days is None:
            return "stale, undated"
        return f"stale, of {self.as_of}, {days} d" if self.is_stale(today) else f"{days} d"

    def as_json(self, today: date | None = None) -> dict[str, Any]:
        """Return the offer as JSON, with what follows from it."""
        return {
            "offer": self.key,
            "cloud": self.cloud,
            "region": self.region,
            "instance": self.instance,
            "gpu": self.gpu,
            "gpus": self.gpus,
            "spot": self.spot,
            "usd_per_hour": self.usd_per_hour,
            "usd_per_gpu_hour": self.usd_per_gpu_hour,
            "date": self.as_of and self.as_of.isoformat(),
            "age_days": self.age_days(today),
            "stale": self.is_stale(today),
            "source": self.source,
            "interruption": self.interruption,
            "history": [[day.isoformat(), price] for day, price in self.history],
        }


class BadOffer(ValueError):
    """A record that is not a valid offer; the message completes a sentence that begins with its place."""


def make_offer(record: dict[str, Any]) -> Offer:
    """Check a record from a file, which may have been written by others, and make an offer of it.

    Raises:
        BadOffer: a value is missing, or is not what it should be.
    """
    words = {name: _word(record, name) for name in ("cloud", "region", "instance", "gpu")}
    gpus = as_number(record.get("gpus"))
    price = as_number(record.get("usd_per_hour"))
    if gpus is None or not 1 <= gpus <= 1024 or gpus != int(gpus):
        raise BadOffer(f"has {record.get('gpus')!r:.40} accelerators, which should be a whole number from 1 to 1024")
    if not isinstance(record.get("spot"), bool):
        raise BadOffer("does not say whether it is spot (true or false)")
    interruption = record.get("interruption")
    return Offer(
        **words,
        gpus=int(gpus),
        spot=record["spot"],
        usd_per_hour=check_price(price, record.get("usd_per_hour")),
        source=str(record.get("source") or "")[:1000],
        as_of=_date(record.get("date")),
        interruption=None if interruption is None else str(interruption)[:40],
        history=tuple(sorted(_history(record.get("history") or []))),
    )


def number_of(value: Any) -> float | None:
    """Return a number that is given as such or as text, as CSV and the AWS CLI have it; None if it is neither."""
    if not isinstance(value, str):
        return as_number(value)
    try:
        return float(value)
    except ValueError:
        return None


def check_price(price: float | None, given: Any = None) -> float:
    """Return a price in dollars per hour if it is one.

    Raises:
        BadOffer: it is no number, not finite, not above zero, or too high.
    """
    shown = f"{price if given is None else given!r:.40}"
    if price is None or not math.isfinite(price):
        raise BadOffer(f"has the price {shown}, which is not a number")
    if price <= 0:
        raise BadOffer(f"has the price {shown}, which is not above zero")
    if price > MOST_USD_PER_HOUR:
        raise BadOffer(f"has the price {shown}, which is above ${MOST_USD_PER_HOUR:,.0f} an hour")
    return price


def _word(record: dict[str, Any], name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not _WORD.fullmatch(value):
        raise BadOffer(f"has the {name} {value!r:.60}, which should be a word")
    return value


def _date(value: Any) -> date | None:
    if value is None:
        return None
    try:
        return date.fromisoformat(str(value)[:10])
    except ValueError:
        raise BadOffer(f"has the date {value!r:.40}, which should be like 2026-01-31") from None


def _history(values: Any) -> Iterable[tuple[date, float]]:
    if not isinstance(values, list):
        raise BadOffer("has a history that is not a list")
    for value in values:
        if not isinstance(value, list) or len(value) != 2 or (day := _date(value[0])) is None:
            raise BadOffer(f"has {value!r:.60} in its history, which should be a date and a price")
        yield day, check_price(as_number(value[1]), value[1])


def cheapest_per_region(offers: Iterable[Offer]) -> list[Offer]:
    """Return the offers by rising price of an accelerator, without those that a zone of the same region undercuts."""
    best: dict[str, Offer] = {}
    for offer in offers:
        known = best.get(offer.key)
        if known is None or offer.usd_per_hour < known.usd_per_hour:
            best[offer.key] = offer
    return sorted(best.values(), key=lambda offer: (offer.usd_per_gpu_hour, offer.key))


def nearest_fix(word: str, known: Sequence[str], otherwise: str) -> str:
    """Return a hint at the nearest known name."""
    near = get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else otherwise


def find_offer(offers: Sequence[Offer], key: str, where: str = "cost.offer") -> Offer:
    """Return the offer of a name: the newest price if there are several.

    Raises:
        ConfigError: there is none; the error names the nearest.
    """
    found = [offer for offer in offers if offer.key == key]
    if not found:
        listed = "headway prices lists the known offers"
        keys = sorted({offer.key for offer in offers})
        raise ConfigError(f"there is no offer '{key}'", where=where, fix=nearest_fix(key, keys, listed))
    return max(found, key=lambda offer: offer.as_of or date.min)
