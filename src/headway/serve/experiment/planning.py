"""How long an experiment will take, by simulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from headway.core.errors import ConfigError
from headway.serve.experiment.sequential import SequentialTest, simulate
from headway.serve.experiment.split import Split

#: Simulated experiments; those without a difference are more, since few of them decide.
EXPERIMENTS = 400
_WITHOUT = 1000


@dataclass(frozen=True)
class Assumed:
    """What a plan assumes."""

    base_rate: float
    """Share of successes of the first arm."""
    difference: float
    """How much more the second arm has."""
    horizon: int
    """Outcomes after which an experiment is given up."""
    seed: int = 0

    def check(self) -> None:
        """Check that both proportions are some.

        Raises:
            ConfigError: one is not.
        """
        if not (0 < self.base_rate < 1 and 0 < self.base_rate + self.difference < 1):
            raise ConfigError(
                "both arms need a share of successes between 0 and 1",
                where=f"--base-rate {self.base_rate:g} --difference {self.difference:g}",
                fix="for example --base-rate 0.3 --difference 0.02",
            )


def plan(split: Split, test: SequentialTest, assumed: Assumed) -> dict[str, Any]:
    """Return how many outcomes a decision takes, and how often there is one, with and without the difference.

    Raises:
        ConfigError: as `Assumed.check`.
    """
    assumed.check()
    rates = (assumed.base_rate, assumed.base_rate + assumed.difference)
    common: dict[str, Any] = {"horizon": assumed.horizon, "seed": assumed.seed}
    found = simulate(test, rates, split.share, experiments=EXPERIMENTS, **common)
    none = simulate(test, (rates[0], rates[0]), split.share, experiments=_WITHOUT, **common)
    low, median, high = np.quantile(found, [0.05, 0.5, 0.95], method="closest_observation").tolist()
    return {
        "split": dict(zip(split.arms, split.shares, strict=True)),
        "rates": dict(zip(split.arms, rates, strict=True)),
        "effect": test.effect,
        "alpha": test.alpha,
        "horizon": assumed.horizon,
        "outcomes": {"low": int(low), "median": int(median), "high": int(high), "mean": float(found.mean())},
        "decided": float((found <= assumed.horizon).mean()),
        "false_alarms": float((none <= assumed.horizon).mean()),
        "experiments": EXPERIMENTS,
    }
