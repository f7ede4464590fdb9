"""Fixtures of tests that start several workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.runs import write_config
from support.trials import STEPS, Trials


@pytest.fixture
def trials(corpus: Path, tmp_path: Path) -> Callable[..., Trials]:
    def make(**sections: Any) -> Trials:
        data = {"store": str(corpus / "store"), "sources": [str(corpus / "corpus.jsonl")]}
        values: dict[str, Any] = {
            "train": {"steps": STEPS, "micro_batch": 1, "lanes": 4},
            "model": {"dropout": 0.0},
            "checkpoint": {"every": f"{STEPS // 2} steps"},
            "evaluation": {"rows": 5},
        }
        data |= sections.pop("data", {})
        for name, section in sections.items():
            values[name] = {**values[name], **section} if isinstance(values.get(name), dict) else section
        return Trials(tmp_path, write_config(tmp_path, data=data, **values))

    return make
