"""The cells of a suite: what each of them runs, and which of them cannot run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from math import prod
from typing import Any

from headway.config import Config, find_strategy, override
from headway.core.errors import ConfigError
from headway.core.files.hashes import fingerprint
from headway.core.process.faults import parse_orders
from headway.core.requirements import install_command
from headway.lab.bench.suite import OWN, Cell, CellPattern, Suite, flattened

#: Keys of the run that are not part of what is measured.
_OF_NO_MATTER = ("name", "runs")
#: Keys of the config that follow from the cell, and the key of the suite that sets them. Set separately, they would
#: override the axes, and every cell would measure something else than its name says.
_DECIDED_BY = {
    "model.preset": "model",
    "parallel.strategy": "strategy",
    "parallel.workers": "workers",
    "train.precision": "precision",
    "train.micro_batch": "micro_batch",
    "train.sequence_length": "sequence_length",
    "train.steps": "steps",
    "train.tokens": "steps",
    "train.global_batch": "micro_batches",
    "train.batch_ramp": "micro_batches",
    "seed": "seed",
}


@dataclass(frozen=True)
class PlannedCell:
    """A cell to measure, or the reason why it is not measured."""

    cell: Cell
    key: str
    """Key of the cell, how it is measured, and where: a result with this key is a result of the cell."""
    config: Config | None = None
    """The config of its workers; None if it is refused or left out."""
    refused: str | None = None
    """Why it cannot run, as the config's check says."""
    excluded: str | None = None
    """Why the suite leaves it out."""
    faults: str = ""
    """Faults to inject into its workers, as in `HEADWAY_FAULTS`."""


def cells_of(suite: Suite) -> Iterator[Cell]:
    """Return every combination; machines and workers change slowest, so that small cells come first."""
    axes = (suite.machines, suite.workers, suite.scaling, suite.model, suite.precision, suite.micro_batch,
            suite.sequence_length, suite.strategy)  # fmt: skip
    for machines, workers, scaling, model, precision, rows, length, strategy in product(*axes):
        yield Cell(
            strategy=strategy,
            workers=machines * workers,
            machines=machines,
            model=model,
            precision=precision,
            micro_batch=rows,
            sequence_length=length,
            scaling=scaling,
        )


def plan_matrix(suite: Suite, environment: Mapping[str, Any]) -> list[PlannedCell]:
    """Plan all cells, each with its config or the reason why there is none.

    Args:
        environment: The hardware and software that results depend on.

    Raises:
        ConfigError: no cell can run, all for one reason (an error in `suite.config` that affects every cell), or a
            fault is invalid.
    """
    for fault in suite.faults:
        parse_orders(fault.order)
    _check_not_decided_by_cells(suite)
    planned = [_planned(suite, cell, environment) for cell in cells_of(suite)]
    wanted = [one for one in planned if one.excluded is None]
    if len({one.refused for one in wanted}) == 1 and wanted[0].refused is not None:
        cell_config(suite, wanted[0].cell)  # raises the error that all cells share, with its place
    return planned


def unused_patterns(suite: Suite) -> Iterator[str]:
    """Describe exclusions and faults that match no cell of the matrix. Overrides may have removed their cells."""
    for key, patterns in (("exclude", suite.exclude), ("faults", suite.faults)):
        for pattern in patterns:
            if not any(pattern.fits(cell) for cell in cells_of(suite)):
                wanted = pattern.model_dump(include=set(CellPattern.model_fields), exclude_none=True)
                yield f"{key}: no cell has {', '.join(f'{name} {value}' for name, value in wanted.items())}"


def _check_not_decided_by_cells(suite: Suite) -> None:
    decided = {**_DECIDED_BY, **({"model.vocab_size": "vocab_size"} if suite.data == "synthetic" else {})}
    for key, value in flattened(suite.config):
        if (own := decided.get(key)) is not None:
            typed = value if isinstance(value, str) else json.dumps(value)
            told = f"{own}={typed}" if key.split(".")[-1] in (own, "preset") else f"{own}=..."
            raise ConfigError(
                f"{key} follows from the cell, by the suite's {own}", where=f"config.{key}", fix=f"{told} in its place"
            )


def _planned(suite: Suite, cell: Cell, environment: Mapping[str, Any]) -> PlannedCell:
    faults = ",".join(order.order for order in suite.faults if order.fits(cell))
    config = None
    refused = None
    excluded = next((exclusion.reason for exclusion in suite.exclude if exclusion.fits(cell)), None)
    if excluded is None:
        try:
            config = cell_config(suite, cell)
        except ConfigError as error:
            refused = error.what + (f" ({error.fix})" if error.fix else "")
    settings = {key: getattr(suite, key) for key in ("data", "vocab_size", "warmup_steps", "steps", "profiled_steps")}
    run = config.model_dump(mode="json", exclude=set(_OF_NO_MATTER)) if config else None
    axes = cell.model_dump(exclude={"machines"} if cell.machines == 1 else None)
    identity = {"cell": axes, "config": run, "settings": settings, "faults": faults}
    key = fingerprint({**identity, "refused": refused, "excluded": excluded, "environment": dict(environment)})[:16]
    return PlannedCell(cell, key, config, refused, excluded, faults)


def rows_for_workers(suite: Suite, scaling: str) -> int | None:
    """Return the number of workers whose weak rows all workers share in strong scaling; None in weak scaling."""
    return max(suite.machines) * max(suite.workers) if scaling == "strong" else None


def cell_config(suite: Suite, cell: Cell) -> Config:
    """Return the config that a cell's workers train with.

    Raises:
        ConfigError: the config's own checks refuse it, or a package is missing.
    """
    parallel = suite.config.get("parallel")
    degrees = [parallel.get(key) for key in ("tensor", "context", "pipeline")] if isinstance(parallel, dict) else []
    # Invalid numbers are refused below with the rest of the config.
    together = prod(degree for degree in degrees if isinstance(degree, int) and degree > 0)
    shared_by = rows_for_workers(suite, cell.scaling) or cell.workers
    values: dict[str, Any] = {
        "name": cell.name,
        "seed": suite.seed,
        "model.preset": cell.model,
        # The last one is the step whose memory is measured.
        "train.steps": suite.warmup_steps + suite.steps + suite.profiled_steps + 1,
        "train.sequence_length": cell.sequence_length,
        "train.micro_batch": cell.micro_batch,
        "train.global_batch": cell.micro_batch * suite.micro_batches * max(1, shared_by // together),
        "train.precision": cell.precision,
        "parallel.strategy": cell.strategy,
        "parallel.workers": cell.workers,
        # Only steps: no evaluation, no file.
        "evaluation.every": None,
        "checkpoint.every": "1000000000 steps",
        "telemetry.report": False,
    }
    if suite.data == "synthetic":
        values["model.vocab_size"] = suite.vocab_size
    if cell.sequence_length > 2048:
        values["model.max_sequence_length"] = cell.sequence_length
    if cell.model == OWN:
        del values["model.preset"]
    written = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    # The benchmark is about speed, so bits are promised only if the suite's own keys say so.
    own = ["determinism=off", *(f"{key}={json.dumps(value)}" for key, value in flattened(suite.config))]
    config = override(Config(), [*written, *own])
    # After the checks that do not depend on the strategy, so that all cells then have one reason.
    package = find_strategy(cell.strategy).needs
    if package is not None and find_spec(package.module) is None:
        raise ConfigError(f"{package.title} is not installed", fix=install_command(package.extra))
    if config.train.compile == "auto":
        raise ConfigError(
            "a benchmark measures one of both ways", where="train.compile", fix="train.compile=true, or false"
        )
    return config


def suite_config(suite: Suite) -> Config:
    """Return the config of the cell with most workers that has one: a strategy may lack its package here.

    Its workers are those of one machine.

    Raises:
        ConfigError: no cell has one.
    """
    problems = []
    by_workers = sorted(cells_of(suite), key=lambda cell: -cell.workers)
    for cell in by_workers:
        try:
            found = override(cell_config(suite, cell), [f"name=bench-{suite.name}"])
        except ConfigError as problem:
            problems.append(problem)
            continue
        parallel = found.parallel.model_copy(update={"workers": max(suite.workers)})
        return found.model_copy(update={"parallel": parallel})
    raise problems[0]
