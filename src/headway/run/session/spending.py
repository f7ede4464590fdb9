"""What an attempt does about money before its first step: the price, the budget, and the meter of its first worker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from headway.config import Config
from headway.config.sections.cost import OLD_PRICE_KEY
from headway.core.coordination.launched import world_size_from_environment
from headway.core.coordination.lease import seconds_run
from headway.core.files.foreign import as_number
from headway.core.format import format_seconds, format_usd
from headway.cost.pricing import budget_reached, price_of
from headway.cost.spending import SpendMeter
from headway.run.directory.account import account_of, measured_saves, save_seconds, start_seconds
from headway.run.directory.run_directory import PRICE_KEY
from headway.run.session.attempt import RunOptions, are_steps_done
from headway.telemetry.record import Run, is_run, stored_bytes


def check_cost(config: Config, options: RunOptions) -> None:
    """Check that the price is known, and that the run may still spend something.

    Raises:
        ConfigError: the offer is not known.
        BudgetReached: the budget is spent.
    """
    price = price_of(config.cost, config.usd_per_hour, world_size_from_environment() or config.parallel.all_workers)
    path = config.run_directory
    if config.budget.usd is None or options.restart or not is_run(path):
        return
    if are_steps_done(config):
        return
    run = Run(path)
    budget = config.budget.usd
    spent = account_of(run, config.usd_per_hour).total_usd
    if spent >= budget:
        what = f"the run has spent {format_usd(spent)} of its budget of {format_usd(budget)}"
        raise budget_reached(config.budget, path, what, spent)
    # Otherwise every start would spend a little more than is left.
    seconds = start_seconds(run) + save_seconds(measured_saves(run.metrics))
    needed = 0.0 if price is None else price.usd_per_hour * seconds / 3600
    if spent + needed >= budget:
        what = f"{format_usd(budget - spent)} of the budget of {format_usd(budget)} is left, and a start and a save"
        raise budget_reached(
            config.budget,
            path,
            f"{what} take {format_seconds(seconds)}, which cost {format_usd(needed)}",
            spent + needed,
        )


def meter_of(config: Config, run: Path, attempt: int) -> SpendMeter | None:
    """Return the meter of an attempt that has begun; None if it has no price."""
    record = Run(run)
    own = record.attempt_records[attempt]
    price = as_number(own.get(PRICE_KEY))
    if price is None:
        return None
    return SpendMeter(
        account_of(record, config.usd_per_hour, before=attempt),
        price,
        _seconds_until_now(run, attempt, as_number(own.get("started"))),
        storage_usd_per_gib_month=config.cost.storage_usd_per_gib_month,
        stored_bytes=stored_bytes(run),
    )


def _seconds_until_now(run: Path, attempt: int, started: float | None) -> float:
    """Return for how many seconds an attempt has run already; 0 if unknown."""
    now = time.time()
    ran = seconds_run(run, attempt, now)
    if ran is None and started is not None:
        ran = now - started
    return max(0.0, ran or 0.0)


def price_warnings(config: Config, workers: int) -> Iterator[str]:
    """Yield what a user should know of the price: that it is given by its old key, or is stale."""
    if config.telemetry.usd_per_hour is not None:
        yield f"{OLD_PRICE_KEY} is now called cost.usd_per_hour; the old name still works"
    price = price_of(config.cost, config.usd_per_hour, workers)
    if price is not None and price.is_stale:
        yield (
            f"cost is counted at {price}; headway prices refresh, or import, brings a newer price, and"
            " cost.usd_per_hour is one of your own"
        )
