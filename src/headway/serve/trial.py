"""Serves two versions of a model, of which an experiment finds the better one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from headway.core.errors import ConfigError
from headway.serve.experiment.experiment import PATH, Experiment
from headway.serve.experiment.journal import Plan
from headway.serve.front import Front
from headway.serve.metrics import Metrics
from headway.serve.options import EngineOptions, ServerOptions, Source
from headway.serve.run import KEY_VARIABLE, access_key, find_version, run_front
from headway.serve.served import Arm, follow_all


def serve_experiment(plan: Plan, folder: Path, source: Source, engine: EngineOptions, *, server: ServerOptions) -> None:
    """Serve two aliases of a model until SIGTERM, and take outcomes.

    Raises:
        ConfigError: as `serve_model`; there is no key for outcomes, or the folder has another experiment.
        CheckpointError: as `serve_model`; the journal was changed.
    """
    key = access_key(server.place)
    if key is None:
        raise ConfigError(
            "outcomes decide, so whoever posts them needs a key",
            where="--split",
            fix=f"openssl rand -hex 32 > key.txt; chmod 600 key.txt; {KEY_VARIABLE}_FILE=key.txt headway serve ...",
        )
    if "@" in source.model or Path(source.model).exists():
        raise ConfigError(
            "a split is between aliases of a model in a registry",
            where=source.model,
            fix="headway serve NAME --split prod=90,candidate=10; headway registry list shows the names",
        )
    experiment = Experiment(plan, folder)
    metrics = Metrics()
    try:
        arms = {}
        for alias in experiment.arms():
            named = replace(source, model=f"{source.model}@{alias}", name=source.served_name)
            arms[alias] = Arm(alias, partial(find_version, named, engine, metrics))
        routes = {PATH: experiment.post}
        front = Front(source.served_name, arms, experiment.choose, key, server.limits, metrics, routes)

        async def note(arm: Arm) -> None:
            await experiment.note_version(arm.name, arm.backend.label)

        async def tasks() -> None:
            for arm in arms.values():
                await note(arm)
            await follow_all(list(arms.values()), server.follow_seconds, metrics.switched, note)

        run_front(front, server, tasks)
    finally:
        experiment.close()
