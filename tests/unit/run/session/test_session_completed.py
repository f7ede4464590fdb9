"""A pretrained checkpoint beside the data and the lengths that a run would train it on."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.api.start.preparing import prepare_if_needed
from headway.config import Config, ModelConfig, TokenizerConfig, dump_config, load_config
from headway.core.errors import ConfigError, DataError
from headway.data.made_of import MADE_OF
from headway.data.pinned import pinned
from headway.data.store import TokenStore
from headway.data.used_by import keep_manifest, mark_use, runs_using
from headway.models.build import build_model
from headway.models.huggingface.export import export_model
from headway.run.session.attempt import RunOptions
from headway.run.session.completed import completed
from headway.run.session.preparation import why_prepare
from headway.text.preparing.prepare import prepare
from support.runs import write_config

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
    with pytest.raises(ConfigError, match=r"id 27[01] is '.+' in the checkpoint, '.+' in that") as caught:
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
        (["data.validation=0.3", "data.clean=[unicode]"], r"data.clean.0 \(unicode\) is new; data.validation was 0.1"),
        (["data.sources=[elsewhere/corpus.jsonl, more.jsonl]"], r"and is now elsewhere/corpus.jsonl; data.sources.1"),
    ],
)
def test_a_store_that_was_prepared_otherwise_is_told_of(
    tiny: Callable[..., Path], overrides: list[str], named: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(tiny(), overrides)
    completed(config)
    said = capsys.readouterr().err
    if named is None:
        assert said == ""
        completed(config, RunOptions())
        return
    assert re.search(f"the token store is not what the config says: .*{named}.*; it is used as it is", said)
    with pytest.raises(ConfigError, match=named):
        completed(config, RunOptions())
    (config.run_directory / "checkpoints/step-00000002").mkdir(parents=True)
    completed(config, RunOptions())
    for options in (RunOptions(restart=True), RunOptions(accept_changes=True)):
        with pytest.raises(ConfigError, match=named):
            completed(config, options)


def test_nothing_is_said_of_a_store_that_no_config_made_nor_twice(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(tiny(), ["data.validation=0.3"])

    def said() -> str:
        completed(config)
        return capsys.readouterr().err

    assert "data.validation" in said()
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "1")
        patch.setenv("WORLD_SIZE", "2")
        assert said() == ""
    own = shutil.copytree(config.data.store, tmp_path / "imported")
    manifest = json.loads((own / "manifest.json").read_text())
    (own / "manifest.json").write_text(json.dumps({**manifest, "imported": {"from": "nanogpt"}}))
    config = load_config(tiny(), ["data.validation=0.3", f"data.store={own}"])
    assert said() == ""


def test_rows_longer_than_the_checkpoint_is_meant_for_are_refused(config: Callable[..., Config]) -> None:
    completed(config("train.sequence_length=64"))
    with pytest.raises(ConfigError, match="is 128, but the checkpoint is meant for 64") as caught:
        completed(config("train.sequence_length=128"))
    advice = caught.value.fix.rpartition(" ")[2]
    assert advice == "model.max_sequence_length=2049", "2048 is what nobody has given"
    for override in (advice, "model.max_sequence_length=128"):
        completed(config("train.sequence_length=128", override))


@pytest.fixture
def own(corpus: Path, tmp_path: Path) -> Callable[..., Config]:
    """The config of a store of this test's own."""
    shutil.copyfile(corpus / "corpus.jsonl", tmp_path / "corpus.jsonl")
    shutil.copyfile(corpus / "corpus.jsonl", tmp_path / "other.jsonl")
    with (tmp_path / "other.jsonl").open("a") as file:
        file.write(json.dumps({"text": "one more " * 40}) + "\n")
    return lambda *overrides: load_config(write_config(tmp_path), [f"data.store={tmp_path}/own", *overrides])


def using(config: Config, name: str) -> Path:
    """A run that uses the store."""
    run, store = config.runs / name, config.data.store
    (run / "attempts").mkdir(parents=True)
    (run / "config.yaml").write_text(dump_config(config))
    fingerprint = TokenStore.open(store).fingerprint
    keep_manifest(run, store, fingerprint)
    mark_use(store, run, fingerprint, os.getpid())
    return run


def test_training_prepares_a_store_that_is_missing_or_not_what_the_config_says(
    own: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare_if_needed(own(), RunOptions(), own_process=False)
    said = capsys.readouterr().err
    assert f"preparing {tmp_path}/own from {tmp_path}/corpus.jsonl: there is no token store yet" in said
    assert "60 documents" in said and TokenStore.open(tmp_path / "own").splits
    assert why_prepare(own(), RunOptions()) is None
    assert why_prepare(own("data.remote=s3://bucket/store", f"data.store={tmp_path}/none"), RunOptions()) is None

    changed = own(f"data.sources=[{tmp_path}/other.jsonl]")
    prepare_if_needed(changed, RunOptions(), own_process=False)
    said = capsys.readouterr().err
    assert f"data.sources.0.path was {tmp_path}/corpus.jsonl and is now {tmp_path}/other.jsonl" in said
    assert TokenStore.open(tmp_path / "own").sources("train") == ["other"]

    missing = own(f"data.sources=[{tmp_path}/missing]")
    with pytest.raises(DataError, match="no such file or folder"):
        prepare_if_needed(missing, RunOptions(), own_process=False)
    (tmp_path / "other.jsonl").unlink()
    assert why_prepare(changed, RunOptions()) is None, "what is prepared needs no sources"

    manifest = json.loads((tmp_path / "own/manifest.json").read_text())
    (tmp_path / "own/manifest.json").write_text(json.dumps({**manifest, "imported": {}}))
    assert why_prepare(own(), RunOptions()) is None, "an imported store has no text to prepare it from"


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Write the module of the user's cleaning functions, as an editor does between two commands."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])

    def write(text: str) -> None:
        (tmp_path / "own_cleaning.py").write_text(text)
        sys.modules.pop("own_cleaning", None)
        importlib.invalidate_caches()

    yield write
    sys.modules.pop("own_cleaning", None)


STEPS = 'data.clean=["unicode", {"step": "python", "function": "own_cleaning:clean"}]'
OWN_STEPS = (
    'data.sources=[{"path": "FOLDER/corpus.jsonl",'
    ' "clean": [{"step": "score", "function": "own_cleaning:clean", "at_least": 0}]}]'
)


@pytest.mark.parametrize(
    ("override", "key", "before", "after"),
    [
        (STEPS, "data.clean.1", "text + 'one'", "text + 'another one'"),
        (OWN_STEPS, "data.sources.0.clean.0", "1", "len(text) % 2 - 1"),
    ],
)
def test_an_edited_cleaning_function_is_another_setting(
    own: Callable[..., Config],
    tmp_path: Path,
    written: Callable[[str], None],
    override: str,
    key: str,
    before: str,
    after: str,
) -> None:
    config = own(override.replace("FOLDER", str(tmp_path)))
    code = "def clean(text): return {}\n"
    written(code.format(before))
    prepare_if_needed(config, RunOptions(), own_process=False)
    first = TokenStore.open(config.data.store)
    assert why_prepare(config, RunOptions()) is None
    written(code.format(after))
    said = f"it is not what the config says: {key}: the code of own_cleaning:clean has changed"
    assert why_prepare(config, RunOptions()) == said
    (config.data.store / MADE_OF).rename(tmp_path / "record")
    assert why_prepare(config, RunOptions()) == said, "a store that was copied without its record"
    run = using(config, "another")
    with pytest.raises(ConfigError, match="the code of own_cleaning:clean has changed") as caught:
        prepare_if_needed(config, RunOptions(), own_process=False)
    assert str(run) in str(caught.value)
    (tmp_path / "runs/another").rename(tmp_path / f"runs/{config.name}")
    (config.run_directory / "checkpoints/step-00000002").mkdir(parents=True)
    assert why_prepare(config, RunOptions()) is None, "a run that is resumed keeps its data"
    shutil.rmtree(config.run_directory)
    prepare_if_needed(config, RunOptions(), own_process=False)
    renewed = TokenStore.open(config.data.store)
    assert renewed.fingerprint != first.fingerprint
    assert why_prepare(config, RunOptions()) is None
    fresh = own(override.replace("FOLDER", str(tmp_path)), f"data.store={tmp_path}/fresh")
    prepare(fresh.data.model_copy(update={"tokenizer": TokenizerConfig(path=tmp_path / "own/tokenizer")}), workers=1)
    assert TokenStore.open(tmp_path / "fresh").manifest["splits"] == renewed.manifest["splits"]


def test_a_cleaning_function_that_cannot_be_compared_is_named_in_a_line(
    own: Callable[..., Config], tmp_path: Path, written: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    config = own(STEPS)
    written("def clean(text): return len(text) > 3\n")
    prepare_if_needed(config, RunOptions(), own_process=False)
    capsys.readouterr()
    written("import a_package_of_another_machine\ndef clean(text): return len(text) > 3\n")
    prepare_if_needed(config, RunOptions(), own_process=False)
    (line,) = capsys.readouterr().err.splitlines()
    assert f"nothing shows whether {tmp_path}/own was cleaned with the code that own_cleaning:clean has now" in line
    (tmp_path / "own_cleaning.py").unlink()
    assert why_prepare(config, RunOptions()) is None, "the store was copied to another machine"


def test_code_is_compared_without_being_imported_where_its_source_is_the_same(
    own: Callable[..., Config], tmp_path: Path, written: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    config = own(STEPS)
    written("from own_helper import clean\n")
    (tmp_path / "own_helper.py").write_text("def clean(text): return len(text) > 3\n")
    prepare_if_needed(config, RunOptions(), own_process=False)
    manifest = json.loads((tmp_path / "own/manifest.json").read_text())
    stored = manifest["settings"]["clean"]["steps"][1]
    assert stored["source"] == hashlib.sha256((tmp_path / "own_helper.py").read_bytes()).hexdigest()
    # A store of an earlier version has the file that the config names, whichever defines the function.
    stored["source"] = hashlib.sha256((tmp_path / "own_cleaning.py").read_bytes()).hexdigest()
    (tmp_path / "own/manifest.json").write_text(json.dumps(manifest))
    sys.modules.pop("own_cleaning")
    capsys.readouterr()
    assert why_prepare(config, RunOptions()) is None and capsys.readouterr().err == ""
    assert "own_cleaning" not in sys.modules


def test_a_run_keeps_its_data_unless_it_accepts_changes(own: Callable[..., Config], tmp_path: Path) -> None:
    config, changed = own(), own("data.validation=0.3")
    prepare_if_needed(config, RunOptions(), own_process=False)
    run = using(config, config.name)
    (run / "checkpoints/step-00000002").mkdir(parents=True)
    assert why_prepare(changed, RunOptions()) is None, "its own store; the changed config is refused later"
    for options in (RunOptions(restart=True), RunOptions(accept_changes=True)):
        assert "data.validation was 0.1 and is now 0.3" in (why_prepare(changed, options) or "")
        assert why_prepare(config, options) is None
    shutil.rmtree(config.data.store)
    assert "no token store" in (why_prepare(config, RunOptions()) or "")
    with pytest.raises(ConfigError, match="the run's token store is gone") as caught:
        why_prepare(changed, RunOptions())
    assert "--accept-changes" in str(caught.value)


def test_a_store_that_other_runs_use_is_not_replaced(own: Callable[..., Config], tmp_path: Path) -> None:
    prepare_if_needed(own(), RunOptions(), own_process=False)
    run = using(own(), "another")
    before = TokenStore.open(tmp_path / "own").fingerprint
    for override in (f"data.sources=[{tmp_path}/other.jsonl]", "data.validation=0.3", "data.tokenizer.vocab_size=290"):
        changed = own(override)
        for options in (RunOptions(), RunOptions(restart=True), RunOptions(accept_changes=True)):
            with pytest.raises(ConfigError, match=f"is not what the config says, and {run} uses it") as caught:
                prepare_if_needed(changed, options, own_process=False)
            assert (
                "data.store" in str(caught.value) and "go back to what this one was prepared from" in caught.value.fix
            )
        with pytest.raises(ConfigError, match=f"{run} uses it"):
            prepare(changed.data, workers=1)
    assert TokenStore.open(tmp_path / "own").fingerprint == before
    grown = own(f"data.sources=[{tmp_path}/corpus.jsonl, {tmp_path}/other.jsonl]")
    with pytest.raises(ConfigError, match=f"{run} uses it") as caught:
        why_prepare(grown, RunOptions())
    assert "or let it grow: headway data prepare" in caught.value.fix
    prepare(grown.data, workers=1)
    pinned(TokenStore.open(tmp_path / "own"), run, before)
    shutil.rmtree(run)
    assert why_prepare(own("data.validation=0.3"), RunOptions()), "no run uses it now"


def test_a_preparation_takes_no_vocabulary_from_a_run(own: Callable[..., Config], tmp_path: Path) -> None:
    """The run itself accepts other data, but could not continue with other ids; started over it can."""
    prepare_if_needed(own(), RunOptions(), own_process=False)
    run = using(own(), own().name)
    (run / "checkpoints/step-00000002").mkdir(parents=True)
    before = TokenStore.open(tmp_path / "own").fingerprint
    changed = own("data.tokenizer.vocab_size=290")
    with pytest.raises(ConfigError, match=f"another vocabulary, and {run} could not continue with it") as caught:
        prepare_if_needed(changed, RunOptions(accept_changes=True), own_process=False)
    assert f"data.tokenizer.path={tmp_path}/own/tokenizer" in caught.value.fix
    assert TokenStore.open(tmp_path / "own").fingerprint == before
    with pytest.raises(DataError):
        missing = own(f"data.sources=[{tmp_path}/missing]")
        prepare_if_needed(missing, RunOptions(restart=True), own_process=False)
    assert runs_using(tmp_path / "own") == [run.resolve()], "the restart has failed"
    prepare_if_needed(changed, RunOptions(restart=True), own_process=False)
    assert TokenStore.open(tmp_path / "own").vocab_size == 290


def test_a_model_without_a_tokenizer_gets_no_other_one(
    own: Callable[..., Config], pretrained: Path, tmp_path: Path
) -> None:
    model = f"model.from_pretrained={pretrained}"
    for file in pretrained.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match="the model to continue has no tokenizer") as caught:
        prepare_if_needed(own(model), RunOptions(), own_process=False)
    assert str(pretrained) in (caught.value.where or "") and "data.tokenizer.path" in caught.value.fix
    assert not (tmp_path / "own").exists()
    given = own(model, f"data.tokenizer.path={tmp_path}/tokenizer")
    with pytest.raises(DataError, match="no tokenizer can be read"):
        prepare_if_needed(given, RunOptions(), own_process=False)
    prepare_if_needed(own(), RunOptions(), own_process=False)
    assert completed(own(model), RunOptions())[0].model.dim == 32, "the store that is there may be the model's own"
    before = TokenStore.open(tmp_path / "own").fingerprint
    with pytest.raises(ConfigError, match="has no tokenizer"):
        prepare_if_needed(own(model, "data.validation=0.3"), RunOptions(), own_process=False)
    assert TokenStore.open(tmp_path / "own").fingerprint == before
