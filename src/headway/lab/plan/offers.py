"""What a planned run takes on machines of clouds: forecasts with intervals, for a deadline or a budget."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date
from pathlib import Path

from headway.cost.forecast import Forecast, Range, forecast
from headway.cost.offers import Offer
from headway.cost.price_book import known_offers
from headway.cost.pricing import Price
from headway.lab.plan.prepare import Plan
from headway.lab.plan.speed import RANGE
from headway.telemetry.goodput import goodput_of
from headway.telemetry.record import Run, is_run

#: Runs that took less say nothing about interruptions: most of their time is the start.
_LEAST_SECONDS = 600.0
#: Number of the newest runs that are looked at.
_RUNS = 20


def measured_goodput(folder: Path) -> dict[bool, Range]:
    """Return the goodput that earlier runs in a folder had, without and with spot machines (True)."""
    found: dict[bool, list[float]] = {}
    paths = [path for path in folder.iterdir() if is_run(path)] if folder.is_dir() else []
    for path in sorted(paths, key=lambda path: -path.stat().st_mtime)[:_RUNS]:
        run = Run(path)
        good = goodput_of(run)
        if good is not None and good.wall_seconds >= _LEAST_SECONDS and good.ratio > 0:
            spot = any(str(record.get("offer")).endswith("/spot") for record in run.attempt_records.values())
            found.setdefault(spot, []).append(good.ratio)
    return {spot: Range(min(ratios), max(ratios)) for spot, ratios in found.items()}


def forecasts(plan: Plan, goodput: dict[bool, Range], own: Price | None = None) -> list[Forecast]:
    """Forecast the recommended option of a plan on every known offer of such a machine.

    Args:
        plan: A plan; without a recommendation, or with an unknown speed, there is nothing to forecast.
        goodput: As `measured_goodput`.
        own: A price of all these machines together, as of your own.
    """
    option = plan.recommendation.option
    machines = plan.machines
    hours = None if option is None else plan.hours(option)
    if hours is None:
        return []
    known = plan.measured_tokens_per_second is not None
    taken = Range(hours, hours) if known else Range(hours / RANGE[1], hours / RANGE[0])
    name = machines.accelerator.name
    offers = [offer for offer in known_offers() if (offer.gpu, offer.gpus) == (name, machines.per_node)]
    found = [forecast(offer, machines.count // offer.gpus, taken, goodput.get(offer.spot)) for offer in offers]
    if own is not None and own.offer is None:
        mine = Offer("own", "config", own.key, name, machines.count, False, own.usd_per_hour, own.key, date.today())
        found.append(forecast(mine, 1, taken, goodput.get(False)))
    return found


def as_json(found: Iterable[Forecast]) -> list[dict[str, object]]:
    """Return forecasts as JSON, the cheapest first."""
    return [
        {
            "offer": one.offer.key,
            "machines": one.machines,
            "gpu": one.offer.gpu,
            "gpus": one.gpus,
            "usd_per_hour": one.machines * one.offer.usd_per_hour,
            "hours": [one.hours.low, one.hours.high],
            "cost_usd": [one.usd.low, one.usd.high],
            "goodput": None if one.goodput is None else [one.goodput.low, one.goodput.high],
            "price": one.offer.age_text(),
        }
        for one in sorted(found, key=lambda one: (one.usd.high, one.offer.key))
    ]
