"""Headway turns text into trained language models on whatever machines you have, and never loses ground.

    import headway

    run = headway.train(headway.load_config("configs/quickstart.yaml", ["train.steps=100"]))

Nothing heavy is imported until it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headway.core.version import __version__ as __version__

if TYPE_CHECKING:
    from headway.api import Run, Trainer, train
    from headway.config import Config, load_config, override
    from headway.core.errors import HeadwayError
    from headway.training.job import Callback

__all__ = ["Callback", "Config", "HeadwayError", "Run", "Trainer", "load_config", "override", "train"]

_HOMES = {
    "Callback": "headway.training.job",
    "Config": "headway.config",
    "HeadwayError": "headway.core.errors",
    "Run": "headway.api",
    "Trainer": "headway.api",
    "load_config": "headway.config",
    "override": "headway.config",
    "train": "headway.api",
}


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headway' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
