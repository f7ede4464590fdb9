"""The price of the machines that a config names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headway.config.sections.cost import OLD_PRICE_KEY, BudgetConfig, CostConfig
from headway.core.errors import BudgetReached
from headway.core.user_command import suggest
from headway.cost.offers import Offer
from headway.cost.price_book import price_of_offer
from headway.cost.spending import CostBudget


@dataclass(frozen=True)
class Price:
    """The price of all machines of an attempt."""

    usd_per_hour: float
    key: str
    """The key of the config that gives it."""
    offer: Offer | None = None
    machines: int | None = None
    """Number of machines of the offer."""

    @property
    def is_stale(self) -> bool:
        """Whether it is that of an offer whose price is stale; a price of your own has no date."""
        return self.offer is not None and self.offer.is_stale()

    def __str__(self) -> str:
        if self.offer is None:
            return f"${self.usd_per_hour:,.2f} an hour ({self.key})"
        many = "" if self.machines == 1 else f"{self.machines} x "
        return f"${self.usd_per_hour:,.2f} an hour ({many}{self.offer.key}, {self.offer.age_text()})"


def price_of(cost: CostConfig, given: float | None, workers: int) -> Price | None:
    """Return the price of as many machines as some workers need; None if the config gives none.

    Args:
        given: `Config.usd_per_hour`.

    Raises:
        ConfigError: the offer that it names is not known.
    """
    if cost.offer is not None:
        offer, total = price_of_offer(cost.offer, workers)
        return Price(total, "cost.offer", offer, offer.machines(workers))
    key = "cost.usd_per_hour" if cost.usd_per_hour is not None else OLD_PRICE_KEY
    return None if given is None else Price(given, key)


def budget_of(budget: BudgetConfig) -> CostBudget | None:
    """Return the budget of a run; None if it has none."""
    return None if budget.usd is None else CostBudget(budget.usd, budget.warn)


def budget_reached(settings: BudgetConfig, run: Path, what: str, spent_usd: float = 0.0) -> BudgetReached:
    """Return the error of a run whose budget is spent, with the override that continues it.

    Args:
        settings: Its budget.
        run: Its directory.
        what: What has happened.
        spent_usd: What it has spent, if that may be more than the budget.
    """
    budget = budget_of(settings)
    assert budget is not None, "there is one"
    return BudgetReached(
        what,
        where=f"budget.usd of {run}",
        fix=f"a larger budget continues it: {suggest('train', f'budget.usd={budget.enough_usd(spent_usd):g}')}",
    )
