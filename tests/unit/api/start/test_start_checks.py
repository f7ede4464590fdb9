"""Mistakes that are found before data are prepared, by every way to start or to check a run."""

from __future__ import annotations

import json
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import headway
from headway.api.start.preparing import prepare_if_needed
from headway.api.start.preview import preview
from headway.cli.application import application
from headway.config import ModelConfig, load_config
from headway.core.coordination.launch_variables import CODE_FILE
from headway.core.errors import HeadwayError
from headway.models.build import build_model
from headway.models.huggingface.export import export_model
from headway.run.session.attempt import RunOptions
from headway.telemetry.record import open_run
from support.chat import chat_tokenizer, conversation, write_records
from support.families import write_family
from support.runs import write_config, write_corpus

SHAPE = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 64, "max_sequence_length": 64}
CODE = """
import headway
class NoCallback: pass
class WithArguments(headway.Callback):
    def __init__(self, needed): pass
def loss(logits, batch): return logits.sum()
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Folders of models: native and complete, without a tokenizer, of transformers, and in other formats."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = corpus / "store/tokenizer"
    export_model(build_model(ModelConfig(**SHAPE), vocab_size=320, seed=1), folder / "good", tokenizer)
    shutil.copytree(folder / "good", folder / "mute", ignore=shutil.ignore_patterns("tokenizer*"))
    for name in ("gpt-2", "lfm-2"):
        write_family(name, folder / name)
        for file in tokenizer.glob("*.json"):
            shutil.copy(file, folder / name)
    for name, ending in (("nemo", "nemo"), ("pickled", "bin")):
        shutil.copytree(folder / "good", folder / name, ignore=shutil.ignore_patterns("*.safetensors"))
        (folder / name / f"weights.{ending}").touch()
    (folder / "good/broken.json").write_text("[]")
    chat_tokenizer(folder / "chat")
    return folder


@dataclass(frozen=True)
class Mistake:
    """A config that cannot be trained, and what is said of it."""

    said: str
    overrides: tuple[str, ...]
    missing: str | None = None
    """A package that is not installed."""
    device: bool = False
    """It depends on the machine, so `headway config check` does not know."""


def mistake(said: str, *overrides: str, missing: str | None = None, device: bool = False) -> Mistake:
    return Mistake(said, overrides, missing, device)


CHAT = 'data.sources=[{"path": "FOLDER/chats.jsonl", "format": "chat"}]'
MISTAKES = {
    "fp8 without torchao": mistake("torchao", "train.precision=fp8", missing="torchao"),
    "an 8-bit optimizer without torchao": mistake("torchao", "optimizer.name=adamw8bit", missing="torchao"),
    "deepspeed without its package": mistake("deepspeed", "parallel.strategy=deepspeed_zero1", missing="deepspeed"),
    "checkpoints at s3 without s3fs": mistake("s3fs", "checkpoint.remote.url=s3://bucket/runs", missing="s3fs"),
    "sources at s3 without s3fs": mistake("s3fs", "data.sources=[s3://bucket/corpus.jsonl]", missing="s3fs"),
    "sources at gs without gcsfs": mistake("gcsfs", "data.sources=[gs://bucket/corpus.jsonl]", missing="gcsfs"),
    "a dataset without datasets": mistake("datasets", "data.sources=[hf://some/dataset]", missing="datasets"),
    "benchmarks without lm-eval": mistake("lm-eval", "evaluation.benchmarks.tasks=[piqa]", missing="lm_eval"),
    "wandb without its package": mistake("wandb", "track=[wandb]", missing="wandb"),
    "mlflow without its package": mistake("mlflow", "track=[mlflow]", missing="mlflow"),
    "a tracker's class that is not there": mistake("nowhere", 'track=[{"sink": "nowhere:Sink"}]'),
    "a callback's module that is not there": mistake("nowhere cannot be imported", "callbacks=[nowhere:Callback]"),
    "a callback's class that is not there": mistake("has no class Missing", "callbacks=[start_code:Missing]"),
    "a callback that is none": mistake("which is no callback", "callbacks=[start_code:NoCallback]"),
    "a callback that needs arguments": mistake("cannot be made", "callbacks=[start_code:WithArguments]"),
    "a loss whose module is not there": mistake("nowhere cannot be imported", "loss=nowhere:loss"),
    "a loss that is not there": mistake("has no function missing", "loss=start_code:missing"),
    "a teacher that is not there": mistake("nowhere", "distill.teacher=MODELS/nowhere"),
    "a teacher in another format": mistake("NeMo's format", "distill.teacher=MODELS/nemo"),
    "a model that is not there": mistake("nowhere", "model={from_pretrained: MODELS/nowhere}"),
    "a model in NeMo's format": mistake("NeMo's format", "model={from_pretrained: MODELS/nemo}"),
    "a pickled model": mistake("pickled", "model={from_pretrained: MODELS/pickled}"),
    "a model without a tokenizer": mistake("has no tokenizer", "model={from_pretrained: MODELS/mute}"),
    "rows longer than the model": mistake(
        "is meant for 64", "model={from_pretrained: MODELS/good}", "train.sequence_length=128"
    ),
    "a tokenizer that is not the model's": mistake(
        "have another tokenizer than the checkpoint",
        "model={from_pretrained: MODELS/gpt-2}",
        "data.tokenizer.path=MODELS/chat",
    ),
    "a class without a tensor plan": mistake(
        "GPT2LMHeadModel does not declare",
        "model={from_pretrained: MODELS/gpt-2}",
        "parallel.tensor=2",
        "parallel.workers=2",
    ),
    "a class that lets packed documents leak": mistake(
        "does not tell packed documents apart", "model={from_pretrained: MODELS/lfm-2}", "data.document_mask=true"
    ),
    "a width that workers cannot share": mistake(
        "cannot be shared evenly", "model.ffn_dim=66", "parallel.tensor=4", "parallel.workers=4"
    ),
    "a tokenizer that is not there": mistake("no tokenizer can be read", "data.tokenizer.path=MODELS/nowhere"),
    "a tokenizer that is none": mistake("not a tokenizer", "data.tokenizer.path=MODELS/good/broken.json"),
    "conversations without a template": mistake("chat template", CHAT, "data.tokenizer.path=MODELS/good"),
    "a begin-of-text that the tokenizer has not": mistake(
        "begin", "data.begin_of_text=always", "data.tokenizer.path=MODELS/good"
    ),
    "a source that is not there": mistake("no such file or folder", "data.sources=[FOLDER/nowhere]"),
    "a source without text": mistake("the input holds no text", "data.sources=[FOLDER/empty.txt]"),
    "a glob that matches nothing": mistake("matches no files", "data.sources=['FOLDER/*.parquet']"),
    "a field that the second source has not": mistake(
        "body", 'data.sources=[FOLDER/corpus.jsonl, {"path": "FOLDER/more.jsonl", "field": "body"}]'
    ),
    "a function of documents that is not there": mistake("has no function", "data.sources=['python:start_code:none']"),
    "a cleaning function that is not there": mistake(
        "has no function", 'data.clean=[{"step": "python", "function": "start_code:none"}]'
    ),
    "an evaluation set that is not there": mistake(
        "nowhere", 'data.clean=[{"step": "decontaminate", "sets": ["FOLDER/nowhere.jsonl"]}]'
    ),
    "a vocabulary smaller than the tokenizer's": mistake(
        "smaller than the tokenizer's", "model.vocab_size=200", "data.tokenizer.path=MODELS/good"
    ),
    "a key for checkpoints that is not set": mistake("HEADWAY_SIGNING_KEY", "checkpoint.sign=true"),
    "a device that is not there": mistake("no mps device", "train.device=mps", device=True),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    write_corpus(tmp_path)
    shutil.copy(tmp_path / "corpus.jsonl", tmp_path / "more.jsonl")
    write_records(tmp_path / "chats.jsonl", [{"messages": conversation(number)} for number in range(3)])
    (tmp_path / "empty.txt").touch()
    (tmp_path / "start_code.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("start_code", None)


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts)


WAYS: dict[str, Callable[[Any], object]] = {
    "train": lambda config: headway.train(config),
    "dry run": lambda config: preview(config, RunOptions()),
}


def test_the_table_is_long_enough() -> None:
    assert len(MISTAKES) >= 30


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_before_a_byte_is_written(
    name: str, folder: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = MISTAKES[name]
    overrides = [text.replace("MODELS", str(models)).replace("FOLDER", str(folder)) for text in wrong.overrides]
    config = write_config(folder)
    before = _files(folder)
    if wrong.missing is not None:
        monkeypatch.setitem(sys.modules, wrong.missing, None)
        # Another test of this process may have used it, and fsspec keeps what it has loaded.
        monkeypatch.delitem(import_module("fsspec.registry")._registry, "s3", raising=False)
    for way, start in WAYS.items():
        with pytest.raises(HeadwayError) as caught:
            start(load_config(config, overrides))
        assert wrong.said in str(caught.value), way
        assert caught.value.fix, "it says what to do"
        assert _files(folder) == before, way
    checked = CliRunner().invoke(application(), ["config", "check", str(config), *overrides])
    assert (checked.exit_code == 0) == wrong.device, checked.output
    if not wrong.device:
        assert wrong.said in str(checked.exception)
    assert _files(folder) == before


def test_a_loss_without_an_identity_is_found_before_a_byte_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = "import threading\nlock = threading.Lock()\ndef loss(logits, batch):\n    with lock: return logits.sum()\n"
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(cell, "<ipython-input-1>", "exec"), vars(main))
    config = write_config(folder)
    before = _files(folder)
    with pytest.raises(HeadwayError, match="reads 'lock', lock, which has no identity"):
        headway.train(load_config(config, ["loss=__main__:loss"]))
    assert _files(folder) == before


def test_all_mistakes_are_listed_together(folder: Path) -> None:
    overrides = ["callbacks=[nowhere:Callback]", "loss=start_code:missing", "data.sources=[nowhere.jsonl]"]
    with pytest.raises(HeadwayError, match="3 problems") as caught:
        preview(load_config(write_config(folder), overrides), RunOptions())
    for said in ("nowhere cannot be imported", "has no function missing", "no such file or folder"):
        assert said in str(caught.value)
    twice = "track=[{tensorboard: {folder: same}}, {tensorboard: {folder: same}}]"
    with pytest.raises(HeadwayError, match="4 problems") as caught:
        headway.train(load_config(write_config(folder), [*overrides, twice]))
    assert "two trackers send to the same place" in str(caught.value)


def test_a_dry_run_without_a_store_says_what_it_would_prepare(folder: Path) -> None:
    config = load_config(write_config(folder))
    said = preview(config, RunOptions())
    assert f"would be prepared from 1 file, {(folder / 'corpus.jsonl').stat().st_size / 2**10:.1f} KiB" in said
    assert "there is no token store yet" in said and "(new)" in said
    preview(load_config(write_config(folder), ["model.vocab_size=200"]), RunOptions())  # it may be trained so small
    assert "grid       " in said and "workers    1 on cpu" in said and "parameters" in said
    assert not config.data.store.exists() and not config.run_directory.exists()
    prepare_if_needed(config, RunOptions(), own_process=False)
    assert "rows of 32 tokens" in preview(config, RunOptions())


def test_a_dry_run_leaves_no_exit_code_for_a_launcher(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lead makes one before it prepares the data, and other machines would take its code for that of the run."""
    monkeypatch.setenv(CODE_FILE, str(folder / "code"))
    monkeypatch.setenv("SLURM_PROCID", "0")
    done = CliRunner().invoke(application(), ["train", str(write_config(folder)), "--dry-run"])
    assert done.exit_code == 0 and not (folder / "code").exists(), done.output


def test_a_check_of_a_config_finds_what_a_prepared_store_leaves(folder: Path) -> None:
    config = write_config(folder)
    prepare_if_needed(load_config(config), RunOptions(), own_process=False)
    shutil.move(folder / "corpus.jsonl", folder / "gone.jsonl")
    assert CliRunner().invoke(application(), ["config", "check", str(config)]).exit_code == 0
    wrong = CliRunner().invoke(application(), ["config", "check", str(config), "callbacks=[nowhere:Callback]"])
    assert wrong.exit_code != 0 and "nowhere cannot be imported" in str(wrong.exception)


def test_a_class_that_leaks_is_found_by_a_dry_run_with_a_store_but_not_for_a_run_that_continues(
    folder: Path, models: Path
) -> None:
    path = write_config(folder)
    overrides = [f"model={{from_pretrained: {models}/lfm-2}}", "data.document_mask=true"]
    apart = [f"model={{from_pretrained: {models}/gpt-2}}", "data.document_mask=true"]
    prepare_if_needed(load_config(path, overrides[:1]), RunOptions(), own_process=False)
    preview(load_config(path, apart), RunOptions())
    config = load_config(path, overrides)
    with pytest.raises(HeadwayError, match="Lfm2ForCausalLM, tried with random weights, does not tell packed"):
        preview(config, RunOptions())
    config.run_directory.mkdir(parents=True)
    (config.run_directory / "metrics.jsonl").write_text('{"step": 1}\n')
    assert CliRunner().invoke(application(), ["config", "check", str(path), *overrides]).exit_code == 0
    with pytest.raises(HeadwayError, match="does not tell packed"):
        preview(config, RunOptions(restart=True))


def test_a_refused_start_is_not_shown_as_failed(folder: Path) -> None:
    """Some mistakes show only with the weights in place, when the attempt has begun."""
    run = folder / "runs/refused"
    (run / "attempts/001").mkdir(parents=True)
    write_config(folder).rename(run / "config.yaml")
    record = {"outcome": "the model leaks", "exit_code": 2, "started": 1.0, "ended": 2.0}
    (run / "attempts/001/attempt.json").write_text(json.dumps(record))
    assert (open_run(run).state, open_run(run).outcome) == ("not started", "the model leaks")
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    assert open_run(run).state == "failed", "a run that has done steps has failed"
    (run / "metrics.jsonl").unlink()
    (run / "attempts/001/attempt.json").write_text(json.dumps({**record, "exit_code": 3}))
    assert open_run(run).state == "failed"
