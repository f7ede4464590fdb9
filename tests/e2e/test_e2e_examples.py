"""The examples do what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.runs import torchrun

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_image_classifier_learns(tmp_path: Path, workers: int) -> None:
    overrides = (f"runs={tmp_path}", "train.device=cpu", "train.steps=80")
    result = torchrun(workers, EXAMPLES / "image_classifier.py", *overrides)
    loss = float(result.stdout.strip().splitlines()[-1].rsplit(" ", 1)[-1])
    assert loss < 0.5, "four classes: chance is a loss of 1.39"
