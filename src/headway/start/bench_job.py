"""A suite as a job of a cluster: the suite that travels, and the config that says where it is launched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headway.clouds.launchers.job import Job
from headway.config import Config
from headway.config.loading.load import override
from headway.core.errors import ConfigError
from headway.lab.bench.matrix import cell_config, cells_of
from headway.lab.bench.suite import Cell, Suite, load_suite

#: Keys of the config that say where a suite is measured, not how: they are no part of its results.
_OF_THE_LAUNCH = ("launch", "runs")


def bench_job(name: str, overrides: Sequence[str], parts: int = 1, out: Path | None = None) -> Job:
    """Return the job that measures a suite on a cluster, on as many machines as its largest cell has.

    Args:
        name: A YAML file, or the name of a built-in suite.
        overrides: As `load_suite` takes them; `launch.` and `config.runs` say where.
        parts: Jobs that share the cells.
        out: Folder that gets the files.

    Raises:
        ConfigError: the suite is wrong, or has fewer cells than parts.
    """
    suite = load_suite(name, overrides)
    if suite.config.get("train", {}).get("device") == "cpu":
        suite = load_suite(name, overrides, accelerator=False)
    cells = list(cells_of(suite))
    if parts > len(cells):
        raise ConfigError(f"{len(cells)} cells make no {parts} parts", where="--parts", fix=f"--parts {len(cells)}")
    config = _config(suite, cells)
    kept = {key: value for key, value in suite.config.items() if key not in _OF_THE_LAUNCH}
    text = _yaml(suite.model_copy(update={"config": kept}))
    return Job(config, max(suite.machines), out=out, suite=text, parts=parts)


def _config(suite: Suite, cells: Sequence[Cell]) -> Config:
    """Return the config of the cell with most workers that has one: a strategy may lack its package here."""
    problems = []
    by_workers = sorted(cells, key=lambda cell: -cell.workers)
    for cell in by_workers:
        try:
            found = override(cell_config(suite, cell), [f"name=bench-{suite.name}"])
        except ConfigError as problem:
            problems.append(problem)
            continue
        parallel = found.parallel.model_copy(update={"workers": max(suite.workers)})
        return found.model_copy(update={"parallel": parallel})
    raise problems[0]


def _yaml(suite: Suite) -> str:
    import yaml

    values = suite.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    return str(yaml.safe_dump({"name": suite.name, **values}, sort_keys=False, width=120))
