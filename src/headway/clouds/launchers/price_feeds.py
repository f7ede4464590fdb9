"""Where a policy has its prices from: a file, a command, or the known offers of several places."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from headway.clouds.launchers.record import progress_of
from headway.clouds.prices.refresh import PriceTimer
from headway.clouds.spot.places import Moving, Place, choose_place
from headway.clouds.spot.traces import is_old, read_trace
from headway.config.units import Interval
from headway.core.console import warning
from headway.core.errors import ConfigError
from headway.cost.offers import BadOffer, check_price, find_offer
from headway.cost.price_book import known_offers
from headway.run.directory.account import measured_saves, save_seconds, start_seconds
from headway.telemetry.record import Run, is_run
from headway.telemetry.summary import median

#: A price command may take so long.
_COMMAND_SECONDS = 60.0
_GIB = 2**30

Feed = Callable[[], float]


def file_feed(path: Path, zone: str | None = None) -> Feed:
    """Return a feed that gives the newest price in a file, which others append to."""

    told = False

    def price() -> float:
        nonlocal told
        trace = read_trace(path, zone)
        if not told and is_old(trace.times[-1], time.time()):
            told = True
            day = datetime.fromtimestamp(trace.times[-1], UTC).date()
            warning(f"the newest price in {path} is of {day}: it counts until a newer one is added")
        return trace.prices[-1]

    return price


def replay_feed(path: Path, speed: float, zone: str | None = None) -> Feed:
    """Return a feed that plays recorded prices from their beginning, so many times as fast; the last one stays."""
    trace = read_trace(path, zone)
    began = time.monotonic()
    return lambda: trace.price_at(trace.times[0] + (time.monotonic() - began) * speed)


def command_feed(words: str) -> Feed:
    """Return a feed that gives the number which a shell command prints."""

    def price() -> float:
        try:
            done = subprocess.run(
                words, shell=True, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=True
            )
            return check_price(float(done.stdout.strip()))
        except (OSError, subprocess.SubprocessError, ValueError, BadOffer) as error:
            raise ConfigError(
                f"the price command gives no price: {error}", where=words, fix="it should print one number, $/hour"
            ) from None

    return price


class PlaceFeed:
    """A feed that knows several places: it chooses the one to be in, and gives the price of the machines there.

    Args:
        places: The places.
        workers: Number of workers, by which machines are counted.
        moving: Returns what a move takes; None if unknown.
        run: The run directory, whose pace says how much is left, where it can be reached.
        timer: Fetches newer prices, if any are to be fetched.
    """

    def __init__(
        self,
        places: Sequence[Place],
        workers: int = 1,
        *,
        moving: Callable[[], Moving | None] = lambda: None,
        run: Path | None = None,
        timer: PriceTimer | None = None,
    ) -> None:
        self.places = places
        self._workers = workers
        self._timer = timer
        self._moving = moving
        self._run = run
        self.here: Place | None = None
        """Where the run is, or has saved last."""
        self.running = False
        self.wanted = places[0]
        self._told: set[str] = set()
        if timer is not None:
            timer.look(wait=True)

    def __call__(self) -> float:
        """Choose the place, and return the price of its machines in dollars per hour."""
        if self._timer is not None:
            self._timer.look()
        offers = known_offers()
        prices: dict[Place, float] = {}
        for place in self.places:
            offer = find_offer(offers, place.offer, "--place")
            prices[place] = offer.usd_per_hour * offer.machines(self._workers)
            if offer.is_stale():
                self._tell(f"the price of {offer.key} is {offer.age_text()}: it counts until there is a newer one")
        moving = self._moving() if len(prices) > 1 else None
        if moving is None and len(prices) > 1 and self.here is not None:
            self._tell(
                f"n/a: what a move would take; no upload of {self.here.offer} is measured here, so the run stays"
                " (--move-time and --state-gib say it)"
            )
        left = None if self._run is None else progress_of(self._run).eta_seconds
        self.wanted = choose_place(prices, self.here, moving, running=self.running, left_seconds=left)
        return prices[self.wanted]

    def _tell(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            warning(what)


def moving_of(run: Path, every: Interval | None, given: tuple[float, float] | None) -> Moving | None:
    """Return what a move of a run takes; None if unknown.

    Measured are its saves, its uploads and its starts, where its directory can be reached; fetching a state is taken
    to last as long as uploading it.

    Args:
        run: The run directory.
        every: Time between uploads by the config, where it gives one.
        given: Time of a move in seconds, and size of a checkpoint in GiB, which count where nothing is measured.
    """
    by_config = 3600 / every.amount if every is not None and every.unit == "seconds" else None
    by_hand = None if given is None or by_config is None else Moving(given[0], 0.0, given[1], by_config)
    if not is_run(run):
        return by_hand
    found = Run(run)
    history = found.newest_metrics()
    saves = measured_saves(history)
    sizes = [one.bytes for one in found.checkpoints if one.bytes]
    if not saves["upload"] or not sizes:
        return by_hand
    steps, _ = history.finite("checkpoint/upload_seconds")
    pace = median(history, "speed/step_seconds")
    per_hour = by_config
    if len(steps) > 1 and pace:
        per_hour = 3600 / (pace * float(steps[-1] - steps[0]) / (len(steps) - 1))
    if per_hour is None:
        return None
    return Moving(save_seconds(saves), start_seconds(found) + max(saves["upload"]), sizes[-1] / _GIB, per_hour)
