"""A suite as a job of a cluster: the suite that travels, and the config that says where it is launched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headway.clouds.launchers.job import Job
from headway.core.errors import ConfigError
from headway.lab.bench.launchers import MACHINES
from headway.lab.bench.matrix import cells_of, suite_config
from headway.lab.bench.suite import Suite, load_suite

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
    config = suite_config(suite)
    kept = {key: value for key, value in suite.config.items() if key not in _OF_THE_LAUNCH}
    text = _yaml(suite.model_copy(update={"config": kept}))
    return Job(config, max(suite.machines), out=out, suite=text, suite_launcher=MACHINES, parts=parts)


def _yaml(suite: Suite) -> str:
    import yaml

    values = suite.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    return str(yaml.safe_dump({"name": suite.name, **values}, sort_keys=False, width=120))
