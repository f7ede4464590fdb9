"""What `train.weights: bf16` does not go with, and what to set instead."""

from __future__ import annotations

from typing import Any

import pytest

from headway.config import Config
from headway.config.checks.contradictions import find_problems

BF16 = {"steps": 1, "weights": "bf16", "precision": "bf16"}


def problems(**sections: Any) -> list[tuple[str | None, str | None]]:
    values = {"data": {"sources": ["text"]}, **sections}
    values["train"] = {**BF16, **sections.get("train", {})}
    found = find_problems(Config.model_validate(values))
    return [(problem.where, problem.fix) for problem in found]


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"train": {"precision": "auto"}},
        {"optimizer": {"moments": "bf16"}},
        {"parallel": {"workers": 2, "strategy": "zero2"}},
        {"parallel": {"workers": 2, "strategy": "zero3"}},
    ],
    ids=str,
)
def test_what_is_possible_is_accepted(sections: dict[str, Any]) -> None:
    assert problems(**sections) == []


@pytest.mark.parametrize(
    ("sections", "where", "fix"),
    [
        ({"train": {"precision": "fp32"}}, "train.precision", "train.precision=bf16"),
        ({"train": {"ema": 0.9}}, "train.ema", "train.ema=null"),
        ({"train": {"weights": "fp32"}, "optimizer": {"moments": "bf16"}}, "optimizer.moments", "train.weights=bf16"),
        ({"optimizer": {"name": "muon"}}, "optimizer.name", "optimizer.name=adamw"),
        ({"optimizer": {"offload": True}}, "optimizer.offload", "optimizer.offload=false"),
        ({"optimizer": {"moments": "bf16", "betas": [0.9, 0.999]}}, "optimizer.betas", "optimizer.moments=fp32"),
        ({"determinism": "elastic"}, "determinism", "determinism=run"),
        ({"parallel": {"workers": 2}}, "parallel", "parallel.strategy=zero2 or zero3"),
        ({"parallel": {"workers": 2, "context": 2, "strategy": "zero3"}}, "parallel", "without other kinds"),
        ({"parallel": {"workers": 4, "strategy": "hsdp", "replicate": 2}}, "parallel", "parallel.strategy=zero2"),
        ({"checkpoint": {"memory_every": "1 steps"}}, "checkpoint.memory_every", "checkpoint.memory_every=null"),
        ({"health": {"replay_every": 2}}, "health.replay_every", "health.replay_every=0"),
    ],
    ids=str,
)
def test_what_is_not_is_refused_with_what_to_set(sections: dict[str, Any], where: str, fix: str) -> None:
    ((place, advice),) = problems(**sections)
    assert place is not None and place.startswith(where)
    assert advice is not None and fix in advice
