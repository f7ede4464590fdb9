"""The choice between places that a run may be in: the price of each, of a move, and of traffic to the remote tier."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from headway.config.sections.cost import OFFER_PATTERN
from headway.core.errors import ConfigError
from headway.cost.offers import number_of

#: A spot price is taken to hold for so long, or to the end of the run if that is nearer.
HOLDS_SECONDS = 6 * 3600.0
#: A move must save this share of what staying costs: prices that hardly differ would move the run to and fro.
_LEAST_SAVING = 0.05
_TRAFFIC = "traffic="


@dataclass(frozen=True)
class Place:
    """An offer of a machine, and how the run gets there."""

    offer: str
    """Name of the offer, `cloud/region/instance/spot`."""
    overrides: tuple[str, ...] = ()
    """What it changes in the config of the launch, as `key=value`."""
    traffic_usd_per_gib: float | None = None
    """Price of traffic between the place and the remote tier; None if it was not given."""


def parse_place(text: str) -> Place:
    """Parse `OFFER [traffic=USD_PER_GIB] [KEY=VALUE ...]`.

    Raises:
        ConfigError: it has another form.
    """
    try:
        offer, *words = shlex.split(text) or [""]
    except ValueError:  # a quote is open
        offer, *words = [text]
    traffic = [word.removeprefix(_TRAFFIC) for word in words if word.startswith(_TRAFFIC)]
    usd = number_of(traffic[-1]) if traffic else None
    wrong = [word for word in words if "=" not in word]
    if not re.fullmatch(OFFER_PATTERN, offer):
        wrong = [offer]
    elif traffic and (usd is None or not 0 <= usd < math.inf):
        wrong = [_TRAFFIC + traffic[-1]]
    if wrong:
        raise ConfigError(
            f"'{wrong[0]}' is not part of a place",
            where="--place",
            fix="--place 'aws/us-west-2/p5.48xlarge/spot traffic=0.02 launch.sky.infra=aws/us-west-2'; headway prices"
            " lists the offers",
        )
    return Place(offer, tuple(word for word in words if not word.startswith(_TRAFFIC)), usd)


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
    if here is not None and here not in prices:
        here = None
    if moving is None and here is not None:
        return here
    hours = min(HOLDS_SECONDS, math.inf if left_seconds is None else left_seconds) / 3600

    def usd(place: Place) -> float:
        if moving is None:
            return prices[place]
        state_usd = moving.state_gib * (place.traffic_usd_per_gib or 0.0)
        training = (prices[place] + state_usd * moving.uploads_per_hour) * hours
        start = prices[place] * moving.start_seconds / 3600
        if here is None or place == here:
            return training if running else training + start
        left = prices[here] * moving.save_seconds / 3600 if running else 0.0
        return training + start + left + state_usd

    best = min(prices, key=lambda place: (usd(place), place.offer))
    if here is not None and usd(best) > (1 - _LEAST_SAVING) * usd(here):
        return here
    return best
