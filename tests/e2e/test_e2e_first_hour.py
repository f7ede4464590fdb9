"""From a folder of text to a model that answers, and the length of a run in epochs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from headway.config import load_config
from headway.telemetry.record import open_run
from support.runs import headway

TEXT = "the old house stood by the river and the river ran to the sea while the wind sang in the trees"


def sentence(number: int) -> str:
    words = TEXT.split()
    return " ".join(words[(number * 7 + place * (1 + number % 5)) % len(words)] for place in range(40)) + ".\n"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number}.txt").write_text("".join(sentence(number + line) for line in range(20)))
    (folder / "more.jsonl").write_text("".join(json.dumps({"text": sentence(n) * 4}) + "\n" for n in range(100)))
    (folder / "tool.py").write_text("def main():\n    return 1\n" * 20)
    (folder / "scan.pdf").write_bytes(b"%PDF" + bytes(range(256)))
    return folder


def test_a_folder_becomes_a_model_that_answers(texts: Path, tmp_path: Path) -> None:
    done = headway("train", "texts", "--minutes", "0.5", "telemetry.report=false", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 .pdf: convert them first" in done.stderr
    plan = re.findall(r"^(text|machine|model|training|update|time) {2,}", done.stderr, re.MULTILINE)
    assert plan == ["text", "machine", "model", "training", "update", "time"]
    assert re.findall(r"^  headway (\w+)", done.stdout, re.MULTILINE) == ["chat", "ui", "train"]
    run = tmp_path / "runs" / "texts"
    metrics = open_run(run).metrics
    first = metrics.series("train/loss")[1][0]
    assert (metrics.last("evaluation/loss") or first) < first - 2  # it has learnt
    assert (run / "export" / "model.safetensors").is_file() and "---" in (run / "samples.txt").read_text()
    assert load_config(run / "config.yaml").data.sources[0].also == ["*.py"]

    answer = headway("chat", str(run), "-n", "8", cwd=tmp_path, input="the old\n")
    assert answer.returncode == 0 and answer.stdout.strip()

    again = headway("train", "texts", cwd=tmp_path)
    assert again.returncode == 0 and "continues as it was planned" in again.stderr
    assert open_run(run).metrics.last_step == metrics.last_step

    other = tmp_path / "elsewhere" / "texts"
    other.mkdir(parents=True)
    (other / "a.txt").write_text(sentence(1))
    refused = headway("train", str(other), cwd=tmp_path)
    assert refused.returncode == 2 and "is of other text" in refused.stderr


def test_a_dial_is_for_a_folder(tmp_path: Path) -> None:
    refused = headway("train", "quickstart", "--minutes", "3", cwd=tmp_path)
    assert refused.returncode == 2 and "this is a config" in refused.stderr
    for options in ([], ["--minutes", "3"]):
        misspelt = headway("train", "txts", *options, cwd=tmp_path)
        assert misspelt.returncode == 2 and "no such folder of text" in misspelt.stderr


def test_epochs_become_the_steps_of_the_prepared_data(texts: Path, tmp_path: Path) -> None:
    config = "base: laptop\ndata: {sources: [texts], tokenizer: {vocab_size: 300}, validation: 0}\n"
    config += "model: {dim: 32, layers: 1, heads: 2, kv_heads: 2, ffn_dim: 64}\n"
    config += "train: {epochs: 0.5, sequence_length: 128}\nevaluation: {every: null}\ntelemetry: {report: false}\n"
    (tmp_path / "run.yaml").write_text(config)
    unprepared = headway("verify", "run.yaml", cwd=tmp_path)
    assert unprepared.returncode == 2 and "headway data prepare run.yaml" in unprepared.stderr
    assert "0.5 epochs" in headway("config", "check", "run.yaml", cwd=tmp_path).stdout

    done = headway("train", "run.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "runs" / "laptop")
    steps = run.metrics.last_step
    assert run.metrics.last("data/epochs/texts") == pytest.approx(0.5, abs=8 / 100)
    again = headway("train", "run.yaml", cwd=tmp_path)
    assert again.returncode == 0 and f"all {steps} steps are done" in again.stderr
