"""`determinism: elastic`: the same bits on any number of workers, also when it changes in mid-run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.runs import headway, state_hash, torchrun

ELASTIC = {"determinism": "elastic"}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_one_two_and_four_workers_and_a_change_between_them(
    tiny: Callable[..., Path], tmp_path: Path, precision: str
) -> None:
    config = tiny(**ELASTIC, train={"lanes": 4, "precision": precision, "micro_batch": 1})
    hashes = {}
    for workers in (1, 2, 4):
        result = headway("train", config, f"name=w{workers}", "-w", str(workers))
        assert result.returncode == 0, result.stderr
        hashes[workers] = state_hash(tmp_path / "runs" / f"w{workers}")
    # 4 workers until the kill, then 2, then 1.
    assert headway("train", config, "name=mixed", "-w", "4", faults="kill@step=3").returncode != 0
    assert headway("train", config, "name=mixed", "-w", "2", faults="kill@step=7").returncode != 0
    assert headway("train", config, "name=mixed", "-w", "1").returncode == 0
    hashes["mixed"] = state_hash(tmp_path / "runs" / "mixed")  # type: ignore[index]
    assert len(set(hashes.values())) == 1, hashes


@pytest.mark.slow
def test_run_determinism_differs_between_workers_and_says_so(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Otherwise the test above would prove nothing about the tree."""
    config = tiny()
    for workers in (1, 2):
        assert headway("train", config, f"name=w{workers}", "-w", str(workers)).returncode == 0
    assert state_hash(tmp_path / "runs" / "w1") != state_hash(tmp_path / "runs" / "w2")
    headway("train", config, "name=changed", "-w", "2", faults="kill@step=5")
    changed = headway("train", config, "name=changed", "-w", "1")
    assert changed.returncode == 0 and "not bit for bit" in changed.stderr


def test_a_change_of_threads_is_refused(tiny: Callable[..., Path]) -> None:
    config = tiny(**ELASTIC, train={"lanes": 2})
    headway("train", config, faults="kill@step=5")
    result = headway("train", config, "parallel.threads=2")
    assert result.returncode == 2 and "parallel.threads=1" in result.stderr


@pytest.mark.parametrize("workers", ["3", "8"])
def test_what_cannot_keep_the_promise_is_refused(tiny: Callable[..., Path], tmp_path: Path, workers: str) -> None:
    result = headway("train", tiny(**ELASTIC, train={"lanes": 4}), "-w", workers)
    assert result.returncode == 2 and "fix:" in result.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_plain_torchrun_gives_the_same_bits(tiny: Callable[..., Path], tmp_path: Path) -> None:
    config = tiny()
    assert headway("train", config, "name=own", "-w", "2").returncode == 0
    torchrun(2, "-m", "headway", "train", config, "name=torchrun")
    assert state_hash(tmp_path / "runs" / "torchrun") == state_hash(tmp_path / "runs" / "own")


def test_a_worker_that_dies_is_named(tiny: Callable[..., Path]) -> None:
    result = headway("train", tiny(), "-w", "2", faults="kill@step=3")
    assert result.returncode == 1
    assert "died (signal 9)" in result.stderr and "continues from the newest checkpoint" in result.stderr
