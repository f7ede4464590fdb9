"""Headway turns text into trained language models on whatever machines you have, and never loses ground.

    import headway

    run = headway.train("my.yaml", steps=100)
    print(run, headway.generate(run, "Once upon a time"))

These names are the public interface (docs/python.md); where their code lives may change. Nothing heavy is imported
until it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headway.core.version import __version__ as __version__

if TYPE_CHECKING:
    from headway.api.results import Run
    from headway.api.training import Trainer, train
    from headway.api.verbs import compare, evaluate, export, generate, prepare
    from headway.clouds.launchers import ray
    from headway.clouds.launchers.launcher import Launcher
    from headway.config import Config, OptimizerSpec, StrategySpec, load_config, override
    from headway.core.errors import HeadwayError
    from headway.data.store import TokenStore
    from headway.models.conformance import check_model
    from headway.tracking.sink import Sink
    from headway.training.figures import Metric
    from headway.training.job import Callback
    from headway.training.own_task import Task

#: The module of each public name. `ray` is a module itself: `headway.ray.fit`.
_HOMES = {
    "load_config": "headway.config",
    "override": "headway.config",
    "Config": "headway.config",
    "prepare": "headway.api.verbs",
    "train": "headway.api.training",
    "evaluate": "headway.api.verbs",
    "compare": "headway.api.verbs",
    "generate": "headway.api.verbs",
    "export": "headway.api.verbs",
    "Run": "headway.api.results",
    "Trainer": "headway.api.training",
    "Task": "headway.training.own_task",
    "Metric": "headway.training.figures",
    "Callback": "headway.training.job",
    "HeadwayError": "headway.core.errors",
    "TokenStore": "headway.data.store",
    "OptimizerSpec": "headway.config",
    "StrategySpec": "headway.config",
    "Sink": "headway.tracking.sink",
    "Launcher": "headway.clouds.launchers.launcher",
    "check_model": "headway.models.conformance",
    "ray": "headway.clouds.launchers",
}

__all__ = [
    "load_config", "override", "Config", "prepare", "train", "evaluate", "compare", "generate", "export", "Run",
    "Trainer", "Task", "Metric", "Callback", "HeadwayError", "TokenStore", "OptimizerSpec", "StrategySpec", "Sink",
    "Launcher", "check_model", "ray",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headway' has no attribute '{name}'")
    home = import_module(_HOMES[name])
    return import_module(f"{home.__name__}.{name}") if name == "ray" else getattr(home, name)
