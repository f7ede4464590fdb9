"""The prices that are known here: the snapshot of this version, and what the user has imported or refreshed since.

Imported and refreshed prices lie in the user's cache folder, one JSON file per origin. A newer price of the same offer
wins.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

from headway.core.errors import ConfigError, fix_for
from headway.core.files.atomic import write_json
from headway.core.files.foreign import SETTINGS_BYTES, read_json_object
from headway.core.files.paths import user_cache
from headway.cost.offers import BadOffer, Offer, find_offer, make_offer, nearest_fix

_SNAPSHOT = Path(__file__).with_name("snapshot.json")


def price_folder() -> Path:
    """Return the folder of imported and refreshed prices."""
    return user_cache() / "prices"


@cache
def snapshot() -> tuple[Offer, ...]:
    """Return the offers that come with this version, each with its source and date."""
    content = json.loads(_SNAPSHOT.read_text(encoding="utf-8"))
    sources: dict[str, dict[str, Any]] = content["sources"]
    places = {name: f"{s['url']} (by {s['via']})" if "via" in s else s["url"] for name, s in sources.items()}
    return tuple(
        make_offer({**record, "source": places[record["source"]], "date": sources[record["source"]]["date"]})
        for record in content["offers"]
    )


def known_offers() -> list[Offer]:
    """Return all known offers, each at its newest price.

    Raises:
        ConfigError: a file in the user's price folder is broken.
    """
    newest: dict[str, Offer] = {}
    for offer in [*snapshot(), *_imported()]:
        known = newest.get(offer.key)
        if known is None or (offer.as_of or date.min) >= (known.as_of or date.min):
            newest[offer.key] = offer
    return list(newest.values())


def save_offers(name: str, offers: Sequence[Offer], *, only_regions: Sequence[str] = ()) -> Path:
    """Keep offers for later commands, in place of earlier ones of this origin; return the file.

    Args:
        name: The origin.
        offers: The offers.
        only_regions: The regions that they are of; earlier ones of other regions stay. All when empty.

    Raises:
        ConfigError: it cannot be written.
    """
    path = price_folder() / f"{name}.json"
    kept = [offer for offer in _read(path) if offer.region not in only_regions] if only_regions else []
    records = [
        {
            name: value
            for name, value in offer.as_json().items()
            if name not in ("usd_per_gpu_hour", "age_days", "stale")
        }
        for offer in [*kept, *offers]
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"offers": records})
    except OSError as error:
        what = f"the prices cannot be kept: {error.strerror or error}"
        fix = fix_for(error, "free space there, or set XDG_CACHE_HOME to a folder that can be written")
        raise ConfigError(what, where=str(path), fix=fix) from None
    return path


def _imported() -> list[Offer]:
    folder = price_folder()
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    return [offer for path in files for offer in _read(path)]


def _read(path: Path) -> list[Offer]:
    """Return the offers of a file, none if there is none."""
    offers: list[Offer] = []
    try:
        records = read_json_object(path, SETTINGS_BYTES).get("offers")
        if not isinstance(records, list):
            raise ValueError("has no list of offers")
        for number, record in enumerate(records, 1):
            if not isinstance(record, dict):
                raise ValueError(f"offer {number} is not a JSON object")
            try:
                offers.append(make_offer(record))
            except BadOffer as error:
                raise ValueError(f"offer {number} {error}") from None
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(
            f"prices that were imported cannot be read: {why}", where=str(path), fix=f"remove it: rm {path}"
        ) from None
    return offers


def price_of_offer(key: str, workers: int, where: str = "cost.offer") -> tuple[Offer, float]:
    """Return an offer, and the price in dollars per hour of as many of its machines as some workers need.

    Raises:
        ConfigError: there is no such offer.
    """
    offer = find_offer(known_offers(), key, where)
    return offer, offer.usd_per_hour * offer.machines(workers)


def select(
    gpu: str | None = None, *, spot: bool | None = None, cloud: str | None = None, region: str | None = None
) -> list[Offer]:
    """Return the known offers that match, by rising price of an accelerator.

    Raises:
        ConfigError: no offer has this accelerator or is of this cloud; the error names the nearest.
    """
    offers = known_offers()
    for option, wanted, name in (("--gpu", gpu, "gpu"), ("--cloud", cloud, "cloud"), ("--region", region, "region")):
        if wanted is None:
            continue
        known = sorted({getattr(offer, name) for offer in offers})
        matching = {value for value in known if value.lower() == wanted.lower()}
        if not matching:
            fix = nearest_fix(wanted, known, f"known: {', '.join(known)}")
            raise ConfigError(f"no known offer has the {name} '{wanted}'", where=option, fix=fix)
        offers = [offer for offer in offers if getattr(offer, name) in matching]
    if spot is not None:
        offers = [offer for offer in offers if offer.spot == spot]
    return sorted(offers, key=lambda offer: (offer.usd_per_gpu_hour, offer.key))
