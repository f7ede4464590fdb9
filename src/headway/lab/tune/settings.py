"""What a study is: its space, objective, sampler and stopping, read from a YAML file and options of the command."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from headway.config.base import Section
from headway.config.loading.document import Entry
from headway.config.loading.load import parse_override, read_document, set_entry, validate
from headway.config.sections.cost import BudgetConfig
from headway.core.errors import ConfigError

#: Keys that a study may change when it is continued: how much is done at once, and how much in all.
MAY_CHANGE = frozenset({"trials", "at_a_time", "budget", "keep"})


class Objective(Section):
    """One figure that is made as small, or as large, as possible."""

    metric: str = "evaluation/loss"
    """Name of a metric, as in `metrics.jsonl`."""
    direction: Literal["minimize", "maximize"] = "minimize"
    of: Literal["last", "best"] = "last"
    """Which value of a finished run counts: its last one, or its best one."""
    diverged: Annotated[float, Field(allow_inf_nan=True)] | None = None
    """Value of a run that diverged, or whose figure is not finite; the worst number when not given."""

    @property
    def worst(self) -> float:
        """The value of a run that diverged."""
        if self.diverged is not None:
            return self.diverged
        return math.inf if self.direction == "minimize" else -math.inf

    def value_in(self, values: Sequence[float]) -> float | None:
        """Return what counts among the recorded values; None if there are none."""
        if not values:
            return None
        finite = [value for value in values if math.isfinite(value)]
        if self.of == "last" or not finite:
            return values[-1] if math.isfinite(values[-1]) else self.worst
        return min(finite) if self.direction == "minimize" else max(finite)


class SamplerSettings(Section):
    """What proposes the values of the next trial."""

    name: str = "tpe"
    """`tpe`, `random`, `grid`, or another of Optuna's: `nsgaii`, `nsgaiii`, `gp`, `qmc`, `bruteforce`."""
    options: dict[str, Any] = {}
    """Keyword arguments of Optuna's class."""


class StoppingSettings(Section):
    """What ends trials that are worse than others."""

    name: Literal["none", "median", "asha", "hyperband", "pbt"] = "none"
    first_steps: PositiveInt | None = None
    """The first step at which trials are compared; when not given, a ninth of `train.steps`."""
    factor: Annotated[int, Field(ge=2)] = 3
    """ASHA and HyperBand: a trial goes on to this many times its steps if it is among the best one of so many."""
    every_steps: PositiveInt | None = None
    """Median: steps between two comparisons; when not given, as `first_steps`. Population based training: steps of a
    generation; when not given, an eighth of `train.steps`."""
    population: Annotated[int, Field(ge=2)] = 8
    """Population based training: members, each of which is a trial in every generation."""
    quantile: Annotated[float, Field(gt=0, le=0.5)] = 0.25
    """Population based training: the share of members that take over the state of one of the best."""
    resample: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Population based training: the chance that such a member draws a value anew."""
    factors: Annotated[list[PositiveFloat], Field(min_length=1)] = [0.8, 1.2]
    """Population based training: one of them multiplies a value that is not drawn anew."""
    options: dict[str, Any] = {}
    """More keyword arguments of Optuna's pruner."""


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _objectives(value: Any) -> Any:
    """Accept a name, a mapping, and a list of them."""
    items = value if isinstance(value, list) else [value]
    return [{"metric": item} if isinstance(item, str) else item for item in items]


class StudySettings(Section):
    """A study, apart from the config that it starts from."""

    space: dict[str, Any]
    """Ranges by dotted key of the config."""
    constraints: list[str] = []
    """Expressions over keys that must hold, as `model.dim % model.heads == 0`."""
    objective: Annotated[list[Objective], BeforeValidator(_objectives), Field(min_length=1)] = [Objective()]
    sampler: Annotated[SamplerSettings, BeforeValidator(_named)] = SamplerSettings()
    stopping: Annotated[StoppingSettings, BeforeValidator(_named)] = StoppingSettings()
    seed: NonNegativeInt = 0
    """Equal seeds give equal trials."""
    trials: PositiveInt | None = None
    """How many trials to make; all points of a grid, or 20, when not given."""
    at_a_time: PositiveInt = 1
    """How many trials run together."""
    workers_per_trial: PositiveInt | None = None
    """`parallel.workers` of every trial."""
    launcher: str = "local"
    """`local`, or where trials are launched: `slurm`, `kubernetes`, `ray`, and the others of `headway launch`."""
    keep: NonNegativeInt = 3
    """Trials whose checkpoints are kept, the best ones; those of the others are removed when they have ended."""
    budget: BudgetConfig = BudgetConfig()
    """What all trials together may cost."""

    @field_validator("stopping")
    @classmethod
    def _usable(cls, stopping: StoppingSettings) -> StoppingSettings:
        if stopping.every_steps is not None and stopping.name not in ("median", "pbt"):
            raise ValueError("every_steps is of the stopping rules median and pbt")
        return stopping


def load_settings(path: Path, options: Mapping[str, Any]) -> StudySettings:
    """Read a study's file: a mapping of keys to ranges, or one with `space` and the rest of `StudySettings`.

    Args:
        path: The YAML file.
        options: What the command line says instead, by dotted key; None says nothing.

    Raises:
        ConfigError: the file cannot be read, or something in it is wrong.
    """
    tree = read_document(path, "space")
    if not isinstance(tree.value, dict):
        raise ConfigError(
            "a space is a mapping of keys to ranges",
            where=str(path),
            fix="optimizer.learning_rate: {log: [1e-5, 1e-2]}",
        )
    if "space" not in tree.value:
        tree = Entry({"space": tree}, str(path))
    for key, value in options.items():
        if value is not None:
            parent = tree.child(key.partition(".")[0])
            if "." in key and parent is not None and not isinstance(parent.value, dict):
                parent.value = {"name": Entry(parent.value, parent.place)}
            set_entry(tree, key, parse_override(f"{key}={value}")[1])
    return validate(tree, StudySettings)
