"""Training on a store of which a shard has another byte than it was prepared with, in its full length."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.runs import headway, manifest, state_hash, write_config, write_corpus


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write_corpus(tmp_path)
    path = write_config(tmp_path)
    assert headway("data", "prepare", path).returncode == 0
    return path


def flip(folder: Path) -> Path:
    """Change the low byte of a token in the middle of the training shard; every id stays in the vocabulary."""
    (file,) = (folder / "store" / "train").glob("*/*.bin")
    content = bytearray(file.read_bytes())
    content[len(content) // 4 * 2] ^= 1
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_damaged_shard_ends_the_run_before_a_checkpoint_is_of_it(tmp_path: Path, config: Path, workers: int) -> None:
    file = flip(tmp_path)
    result = headway("train", config, f"parallel.workers={workers}")
    assert result.returncode == 3, result.stderr
    assert "a shard of the token store is damaged: its SHA-256 is not the manifest's" in result.stderr
    assert str(file) in result.stderr
    assert "Traceback" not in result.stderr or workers > 1  # a worker that misses the other one says so
    assert list((tmp_path / "runs" / "tiny" / "checkpoints").glob("step-*")) == []


@pytest.mark.slow
def test_the_repaired_run_goes_on_and_its_bytes_are_those_of_an_undamaged_one(tmp_path: Path, config: Path) -> None:
    assert headway("train", config, "name=whole").returncode == 0
    flip(tmp_path)
    assert headway("train", config).returncode == 3
    assert headway("data", "prepare", config, "--repair").returncode == 0
    assert headway("train", config).returncode == 0
    runs = tmp_path / "runs"
    assert manifest(runs / "tiny")["step"] == 10
    assert state_hash(runs / "tiny") == state_hash(runs / "whole")


@pytest.mark.slow
def test_never_checks_never(tmp_path: Path, config: Path) -> None:
    flip(tmp_path)
    assert headway("train", config, "data.verify=never").returncode == 0
