"""What belongs to a trained model, when the world around its run has changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.api import train
from headway.config import load_config
from headway.core.console import Progress
from headway.core.errors import CheckpointError, DataError
from headway.core.files.hashes import sha256_file
from headway.data.tokenizing.tokenizer import Tokenizer, keep_copy
from headway.text.preparing.prepare import prepare
from headway.training.evaluation.inference import evaluate_trained, load_trained


@pytest.fixture
def run(corpus: Path, tiny: Callable[..., Path], tmp_path: Path) -> Path:
    """A run of two steps on a store of its own, in `store`."""
    shutil.copytree(corpus / "store", tmp_path / "store")
    config = load_config(tiny(train={"steps": 2}, data={"store": str(tmp_path / "store")}))
    train(config)
    return config.run_directory


def _prepare_again(tmp_path: Path) -> None:
    """The store with another vocabulary."""
    data = load_config(tmp_path / "config.yaml", ["data.tokenizer.vocab_size=280"]).data
    prepare(data, workers=1, force=True)


def test_a_run_has_the_tokenizer_that_it_was_trained_with(run: Path, tmp_path: Path) -> None:
    before = sha256_file(tmp_path / "store/tokenizer/tokenizer.json")
    _prepare_again(tmp_path)
    assert sha256_file(tmp_path / "store/tokenizer/tokenizer.json") != before
    trained = load_trained(run)
    assert trained.tokenizer.fingerprint == before and trained.tokenizer_folder == run / "tokenizer"
    with pytest.raises(DataError, match="another tokenizer") as caught:
        evaluate_trained(run)
    assert str(tmp_path / "store") in str(caught.value)
    shutil.rmtree(tmp_path / "store")
    assert load_trained(run).tokenizer.fingerprint == before


def test_another_tokenizer_than_the_checkpoints_is_refused(run: Path, tmp_path: Path) -> None:
    shutil.rmtree(run / "tokenizer")
    assert load_trained(run).tokenizer_folder == tmp_path / "store/tokenizer"
    _prepare_again(tmp_path)
    with pytest.raises(CheckpointError, match="made with another tokenizer") as caught:
        load_trained(run)
    assert str(tmp_path / "store/tokenizer") in str(caught.value) and str(run / "tokenizer") in str(caught.value)
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(CheckpointError, match="is not there"):
        load_trained(run)


def test_an_evaluation_shows_its_progress(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(Progress, "advance", lambda bar: shown.append(f"{bar.label} {bar.total:g} {bar.unit}"))
    evaluate_trained(run, rows=20)
    assert shown == ["evaluating 3 batches"] * 3


def test_a_copy_is_made_of_the_right_tokenizer_only(corpus: Path, tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "run/tokenizer"
    shutil.copytree(corpus / "store/tokenizer", source)
    fingerprint = Tokenizer.load(source).fingerprint
    keep_copy(source, copy, "another")
    assert not copy.exists()
    (copy.with_name(".tokenizer.tmp")).mkdir(parents=True)  # a process was killed over it
    (copy.with_name(".tokenizer.tmp") / "half").touch()
    keep_copy(source, copy, fingerprint)
    assert sorted(file.name for file in copy.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert [file.name for file in copy.parent.iterdir()] == ["tokenizer"]
    (copy / "tokenizer.json").write_text("of a run that was begun before")
    keep_copy(source, copy, fingerprint)
    assert Tokenizer.load(copy).fingerprint == fingerprint
