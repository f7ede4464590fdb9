"""Present prices of clouds, fetched once or on a timer, and kept for later commands."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from headway.clouds.prices.aws import refresh_aws
from headway.clouds.prices.azure import refresh_azure
from headway.clouds.prices.gcp import refresh_gcp
from headway.core.console import warning
from headway.core.errors import ConfigError, HeadwayError
from headway.cost.offers import Offer
from headway.cost.price_book import save_offers

#: Clouds whose prices can be fetched.
CLOUDS: Mapping[str, Callable[[Sequence[str]], list[Offer]]] = {
    "aws": refresh_aws, "azure": refresh_azure, "gcp": refresh_gcp,
}  # fmt: skip


def refresh_prices(cloud: str, regions: Sequence[str] = ()) -> tuple[list[Offer], Path]:
    """Fetch the present prices of a cloud and keep them; those of regions that were not asked for stay.

    Returns:
        The offers, and the file that has them.

    Raises:
        ConfigError: the cloud gives no prices, or they cannot be kept.
    """
    found = CLOUDS[cloud](regions)
    name = f"refreshed-{cloud}"
    if not found:
        raise ConfigError("there are no prices of machines with accelerators", where=name, fix="name another region")
    return found, save_offers(name, found, only_regions=regions)


class PriceTimer:
    """Refreshes the prices of some offers on a thread, every so often; a cloud that gives none is reported once.

    Args:
        offers: Names of offers, of whose clouds and regions prices are fetched.
        every_seconds: Time between two refreshes.
        refresh: Fetches and keeps the prices of a cloud.

    Raises:
        ConfigError: the prices of a cloud cannot be fetched.
    """

    def __init__(
        self,
        offers: Iterable[str],
        every_seconds: float,
        refresh: Callable[[str, Sequence[str]], object] = refresh_prices,
    ) -> None:
        self._regions: dict[str, set[str]] = {}
        for cloud, region in (offer.split("/")[:2] for offer in offers):
            if cloud not in CLOUDS:
                what = f"the prices of {cloud} cannot be fetched"
                raise ConfigError(what, where="--refresh", fix=f"leave it out; of {', '.join(CLOUDS)} they can")
            self._regions.setdefault(cloud, set()).add(region)
        self._every = every_seconds
        self._refresh = refresh
        self._thread: threading.Thread | None = None
        self._next = -float("inf")
        self._silent: set[str] = set()

    def look(self, wait: bool = False) -> None:
        """Begin a refresh if it is time to and none is under way; `wait` waits for it."""
        is_busy = self._thread is not None and self._thread.is_alive()
        if not is_busy and time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every
            self._thread = threading.Thread(target=self._work, name="headway-prices", daemon=True)
            self._thread.start()
        if wait and self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        for cloud, regions in self._regions.items():
            try:
                self._refresh(cloud, sorted(regions))
                self._silent.discard(cloud)
            except HeadwayError as error:
                if cloud not in self._silent:
                    warning(f"no new prices of {cloud}: {error.what}; those of before count")
                self._silent.add(cloud)
