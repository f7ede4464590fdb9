"""Public price lists over HTTPS: JSON, with limits of time and size."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Mapping
from datetime import date
from typing import Any
from urllib.parse import urlsplit

from headway.core.credentials.http import open_url
from headway.core.errors import ConfigError
from headway.core.files.foreign import parse_json
from headway.cost.offers import BadOffer, Offer, make_offer

_TIMEOUT_SECONDS = 30.0
_MOST_BYTES = 64 * 2**20
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def get_json(url: str, *, headers: Mapping[str, str] | None = None, access: str | None = None) -> Any:
    """Return the JSON value at a URL.

    Args:
        url: The address.
        headers: Headers with a credential.
        access: How to get access, for an answer that refuses it.

    Raises:
        ConfigError: it is not HTTPS, there is no answer, or the answer is not JSON.
    """
    place = urlsplit(url)
    if place.scheme != "https" and not (place.scheme == "http" and place.hostname in _LOOPBACK):
        raise ConfigError("prices are read over HTTPS only", where=url[:200], fix="https://...")
    fix = "check the network and its proxy (HTTPS_PROXY); known prices stay as they are"
    try:
        request = urllib.request.Request(url, headers={"Accept": "application/json", **(headers or {})})
        with open_url(request, _TIMEOUT_SECONDS) as response:
            content = response.read(_MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        fix = access if access is not None and error.code in (400, 401, 403) else fix
        raise ConfigError(f"the price list answers with status {error.code}", where=url[:200], fix=fix) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = getattr(error, "reason", None) or error
        raise ConfigError(f"the price list does not answer: {why}", where=url[:200], fix=fix) from None
    if len(content) > _MOST_BYTES:
        raise ConfigError("the price list is too long", where=url[:200], fix="fewer regions or machines at a time")
    try:
        return parse_json(content)
    except ValueError as error:
        raise ConfigError(f"the answer of the price list {error}", where=url[:200], fix=fix) from None


def offer_of_today(cloud: str, record: Mapping[str, Any], where: str) -> Offer:
    """Make an offer of what a cloud's price list says now.

    Raises:
        ConfigError: it is no offer.
    """
    try:
        return make_offer({"cloud": cloud.lower(), **record, "date": date.today().isoformat()})
    except BadOffer as error:
        raise unexpected_answer(cloud, f"has an offer that {error}", where) from None


def unexpected_answer(cloud: str, what: str, url: str) -> ConfigError:
    """Return the error for a price list that does not answer as documented."""
    return ConfigError(
        f"the answer of {cloud}'s price list {what}",
        where=url[:300],
        fix="try again later; known prices stay as they are",
    )
