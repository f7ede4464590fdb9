"""A pretrained checkpoint beside the data and the lengths that a run would train it on."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.config import Config, ModelConfig, load_config
from headway.config.sections.data import DataConfig
from headway.core.errors import ConfigError
from headway.data.store import TokenStore
from headway.models.build import build_model
from headway.models.huggingface.checkpoint import export_model
from headway.session.completed import _warn_of_differences, completed, prepare_if_needed
from support import write_config

SHAPE = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 64, "max_sequence_length": 64}


@pytest.fixture
def pretrained(corpus: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "pretrained"
    export_model(build_model(ModelConfig(**SHAPE), vocab_size=320, seed=1), folder, corpus / "store/tokenizer")
    return folder


@pytest.fixture
def config(tiny: Callable[..., Path], pretrained: Path) -> Callable[..., Config]:
    def load(*overrides: str) -> Config:
        return load_config(tiny(), [f"model.from_pretrained={pretrained}", *overrides])

    return load


def _edit(pretrained: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = pretrained / "tokenizer.json"
    spec = json.loads(file.read_bytes())
    change(spec)
    file.write_text(json.dumps(spec, indent=1))


def test_the_checkpoints_own_tokenizer_passes(
    config: Callable[..., Config], pretrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def add(spec: dict[str, Any]) -> None:
        spec["added_tokens"].append({**spec["added_tokens"][0], "id": 310, "content": "<|user|>"})

    for change in (lambda spec: None, add):
        _edit(pretrained, change)
        assert completed(config())[0].model.dim == 32
    assert capsys.readouterr().err == ""
    (pretrained / "tokenizer.json").unlink()
    assert completed(config())[0].model.dim == 32
    assert f"{pretrained} has no tokenizer.json" in capsys.readouterr().err


def test_another_tokenizer_than_the_checkpoints_is_refused(
    config: Callable[..., Config], pretrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def swap(spec: dict[str, Any]) -> None:
        vocab = spec["model"]["vocab"]
        one, other = (token for token, number in vocab.items() if number in (270, 271))
        vocab[one], vocab[other] = vocab[other], vocab[one]

    _edit(pretrained, swap)
    with pytest.raises(ConfigError, match=r"id 27[01] is '.+' in the checkpoint, '.+' in the store") as caught:
        completed(config())
    assert f"data.tokenizer.path={pretrained / 'tokenizer.json'}" in str(caught.value)
    # A run that has learned them goes on.
    (Path(config().run_directory) / "checkpoints/step-00000002").mkdir(parents=True)
    completed(config())
    assert "id 27" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ([], None),
        (["data.validation=0.3", "data.clean=[unicode]"], "data.validation, data.clean"),
        (["data.sources=[corpus.jsonl, more.jsonl]"], r"data.sources \(the store has corpus\)"),
    ],
)
def test_a_store_that_was_prepared_otherwise_is_told_of(
    tiny: Callable[..., Path], overrides: list[str], named: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    completed(load_config(tiny(), overrides))
    said = capsys.readouterr().err
    if named is None:
        assert said == ""
    else:
        assert re.search(f"was prepared with other settings than the config has: {named};", said)


def test_nothing_is_said_of_a_store_that_no_config_made_nor_twice(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = load_config(tiny(), ["data.validation=0.3"]).data
    store = TokenStore.open(data.store)

    def said(data: DataConfig) -> str:
        _warn_of_differences(data, store)
        return capsys.readouterr().err

    assert "data.validation" in said(data)
    assert said(data.model_copy(update={"remote": "s3://bucket/store"})) == ""
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "1")
        patch.setenv("WORLD_SIZE", "2")
        assert said(data) == ""
    store.manifest["imported"] = {"from": "nanogpt"}
    assert said(data) == ""


def test_rows_longer_than_the_checkpoint_is_meant_for_are_refused(config: Callable[..., Config]) -> None:
    completed(config("train.sequence_length=64"))
    with pytest.raises(ConfigError, match="is 128, but the checkpoint is meant for 64") as caught:
        completed(config("train.sequence_length=128"))
    advice = caught.value.fix.rpartition(" ")[2]
    assert advice == "model.max_sequence_length=2049", "2048 is what nobody has given"
    for override in (advice, "model.max_sequence_length=128"):
        completed(config("train.sequence_length=128", override))


def test_training_prepares_a_store_that_is_missing_or_out_of_date(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copyfile(corpus / "corpus.jsonl", tmp_path / "corpus.jsonl")

    def load(*overrides: str) -> Config:
        return load_config(write_config(tmp_path), [f"data.store={tmp_path}/own", *overrides])

    prepare_if_needed(load(), restart=False, own_process=False)
    said = capsys.readouterr().err
    assert f"preparing {tmp_path}/own: there is no token store yet; from {tmp_path}/corpus.jsonl" in said
    assert "60 documents" in said and TokenStore.open(tmp_path / "own").splits

    asked: list[DataConfig] = []

    def prepare(data: DataConfig, workers: int | None) -> Any:
        asked.append(data)
        return SimpleNamespace(describe=lambda: "prepared")

    monkeypatch.setattr("headway.data.preparing.prepare.prepare", prepare)
    prepare_if_needed(load(), restart=False, own_process=False)
    assert not asked, "it is up to date"
    changed = load("data.validation=0.3")
    prepare_if_needed(changed, restart=False, own_process=False)
    assert asked.pop() == changed.data
    assert "it was prepared with other settings: data.validation" in capsys.readouterr().err
    prepare_if_needed(load("data.validation=0.3", "data.sources=[other.jsonl]"), restart=False, own_process=False)
    assert not asked, "it is of other text, which is not thrown away"
    prepare_if_needed(load("data.remote=s3://bucket/store", f"data.store={tmp_path}/none"), False, False)
    run = changed.run_directory
    (run / "checkpoints/step-00000002").mkdir(parents=True)
    prepare_if_needed(changed, restart=False, own_process=False)
    assert not asked, "a run keeps the data that it has begun with"
    prepare_if_needed(changed, restart=True, own_process=False)
    assert asked.pop() == changed.data
    shutil.rmtree(run)
    manifest = json.loads((tmp_path / "own/manifest.json").read_text())
    (tmp_path / "own/manifest.json").write_text(json.dumps({**manifest, "imported": {}}))
    prepare_if_needed(changed, restart=False, own_process=False)
    assert not asked, "an imported store has no text to prepare it from"
