"""The choice between places that a run may be in: the price of each, of a move, and of traffic to the remote tier."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway.config.sections.cost import OFFER_PATTERN
from headway.core.errors import ConfigError

#: A spot price is taken to hold for so long, or to the end of the run if that is nearer.
HOLDS_SECONDS = 6 * 3600.0
#: A move must save this share of what staying costs: prices that hardly differ would move the run to and fro.
_LEAST_SAVING = 0.05


@dataclass(frozen=True)
class Place:
    """An offer of a machine, and how the run gets there."""

    offer: str
    """Name of the offer, `cloud/region/instance/spot`."""
    overrides: tuple[str, ...] = ()
    """What it changes in the config of the launch, as `key=value`."""
    traffic_usd_per_gib: float | None = None
    """Price of traffic between the place and the remote tier; None if it was not given."""

    @property
    def cloud(self) -> str:
        """Cloud of the offer."""
        return self.offer.split("/")[0]

    @property
    def region(self) -> str:
        """Region of the offer."""
        return self.offer.split("/")[1]


def parse_place(text: str) -> Place:
    """Parse `OFFER [traffic=USD_PER_GIB] [KEY=VALUE ...]`.

    Raises:
        ConfigError: it has another form.
    """
    offer, *words = text.split()
    example = "'aws/us-west-2/p5.48xlarge/spot traffic=0.02 launch.sky.infra=aws/us-west-2'"
    wrong = [word for word in words if "=" not in word]
    if not re.fullmatch(OFFER_PATTERN, offer) or wrong:
        what = f"'{wrong[0]}' is no KEY=VALUE" if wrong else f"'{offer}' is no offer"
        raise ConfigError(what, where="--place", fix=f"--place {example}; headway prices lists the offers")
    traffic = [word.partition("=")[2] for word in words if word.startswith("traffic=")]
    try:
        usd = float(traffic[-1]) if traffic else None
    except ValueError:
        usd = math.nan
    if usd is not None and not 0 <= usd < math.inf:
        raise ConfigError(f"'{traffic[-1]}' is no price of a GiB", where="--place", fix="traffic=0.02, in dollars")
    return Place(offer, tuple(word for word in words if not word.startswith("traffic=")), usd)


@dataclass(frozen=True)
class Moving:
    """What a move of a run takes, and how much it sends to the remote tier."""

    save_seconds: float
    """Of saving and uploading, during which the old place is paid."""
    start_seconds: float
    """Of starting and fetching the state, during which the new place is paid."""
    state_gib: float
    """Size of a checkpoint."""
    uploads_per_hour: float


def usd_of_place(place: Place, usd_per_hour: float, moving: Moving | None, seconds: float) -> float:
    """Return what it costs to be in a place for a time, with the traffic of its uploads."""
    traffic = 0.0
    if moving is not None:
        traffic = (place.traffic_usd_per_gib or 0.0) * moving.state_gib * moving.uploads_per_hour
    return (usd_per_hour + traffic) * seconds / 3600


def usd_of_move(place: Place, usd_per_hour: float, moving: Moving, *, left_usd_per_hour: float | None = None) -> float:
    """Return what it costs to get to a place.

    Args:
        place: The place.
        usd_per_hour: Its price.
        moving: What a move takes.
        left_usd_per_hour: Price of the place that is left, which is paid until the state is uploaded; None if no
            machine runs there.
    """
    paid = (left_usd_per_hour or 0.0) * moving.save_seconds + usd_per_hour * moving.start_seconds
    return paid / 3600 + (place.traffic_usd_per_gib or 0.0) * moving.state_gib


def choose_place(
    prices: Mapping[Place, float],
    here: Place | None,
    moving: Moving | None,
    *,
    running: bool,
    left_seconds: float | None = None,
) -> Place:
    """Return the place that costs least until its price no longer holds, the move to it included.

    Args:
        prices: Price of the machines in each place, in dollars per hour.
        here: Where the run is, or has saved last; None if it has not begun.
        moving: What a move takes; None if unknown, and then a run that has begun stays.
        running: It trains there now.
        left_seconds: Time until the run is done; None if unknown.
    """
    if here is None or here not in prices:
        return min(prices, key=lambda place: (usd_of_place(place, prices[place], moving, HOLDS_SECONDS), place.offer))
    if moving is None:
        return here
    seconds = min(HOLDS_SECONDS, math.inf if left_seconds is None else left_seconds)
    left = prices[here] if running else None

    def usd_by_moving(place: Place) -> float:
        stay = usd_of_place(place, prices[place], moving, seconds)
        return stay + usd_of_move(place, prices[place], moving, left_usd_per_hour=left)

    staying = usd_of_place(here, prices[here], moving, seconds)
    others = [place for place in prices if place != here]
    best = min(others, key=lambda place: (usd_by_moving(place), place.offer), default=here)
    return best if best != here and usd_by_moving(best) < (1 - _LEAST_SAVING) * staying else here


def regions_of(places: Sequence[Place]) -> dict[str, list[str]]:
    """Return the regions of places by cloud."""
    found: dict[str, list[str]] = {}
    for place in places:
        found.setdefault(place.cloud, [])
        if place.region not in found[place.cloud]:
            found[place.cloud].append(place.region)
    return found
