"""Ways of summing gradients over workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.telemetry.metrics import read_metrics
from support.runs import headway, run_workers


def test_every_way_gives_the_sum_within_what_it_promises() -> None:
    run_workers(4, Path(__file__).with_name("exchange_worker.py"))


@pytest.mark.slow
def test_runs_learn_with_every_way(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Rounded gradients give other losses, which shows that they were rounded, but hardly worse ones."""
    config = tiny(model={"dropout": 0.0}, train={"lanes": 4})
    ways: dict[str, tuple[Any, ...]] = {
        "plain": ("-w", "2"),
        "bf16": ("-w", "2", "parallel.reduce_precision=bf16"),
        "powersgd": ("-w", "2", "parallel.compression=powersgd", "determinism=off"),
        "levels": ("-w", "4", "parallel.replicate=2"),
    }
    losses = {}
    for name, arguments in ways.items():
        result = headway("train", config, f"name={name}", *arguments)
        assert result.returncode == 0, result.stderr
        losses[name] = read_metrics(tmp_path / "runs" / name).last("train/loss") or 0.0
    assert abs(losses["levels"] - losses["plain"]) < 1e-5
    assert 1e-6 < abs(losses["bf16"] - losses["plain"]) < 0.02
    assert 1e-6 < abs(losses["powersgd"] - losses["plain"]) < 0.5


@pytest.mark.slow
def test_what_does_not_go_together_is_refused(tiny: Callable[..., Path]) -> None:
    config = tiny()
    for overrides, fix in (
        (["parallel.compression=powersgd"], "determinism=off"),
        (["parallel.reduce_precision=bf16", "determinism=elastic"], "determinism=run"),
        (["parallel.reduce_precision=bf16", "parallel.strategy=zero3"], "parallel.strategy=ddp"),
        (["parallel.reduce_precision=bf16", "parallel.compression=powersgd", "determinism=off"], "keep one"),
        (["parallel.strategy=hsdp"], "parallel.strategy=fsdp"),
        (["parallel.tensor=4"], "parallel.workers=4"),
        (["parallel.tensor=2", "determinism=elastic"], "determinism=run"),
        (["parallel.replicate=3", "parallel.strategy=ddp"], "parallel.replicate=2"),
    ):
        result = headway("train", config, "-w", "2", *overrides)
        assert result.returncode == 2 and fix in result.stderr, (overrides, result.stderr)
