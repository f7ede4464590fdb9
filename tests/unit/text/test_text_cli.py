"""`headway data` and `headway tokenizer`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headway.cli.application import application
from headway.core.errors import ConfigError, DataError
from headway.data.store import TokenStore
from headway.text.cli import data

app = application(["data", "tokenizer"])


def run(*arguments: str | Path) -> Any:
    """Result of a command that is meant to succeed."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None:
        raise result.exception
    return result


@pytest.fixture
def config_file(tmp_path: Path, documents: Callable[..., list[str]], jsonl: Callable[..., Path]) -> Path:
    jsonl(tmp_path / "corpus" / "a.jsonl", documents(50))
    (tmp_path / "corpus" / "notes.doc").write_text("not read")
    file = tmp_path / "run.yaml"
    file.write_text(
        "name: small\n"
        f"data:\n  sources: {tmp_path / 'corpus'}\n  store: {tmp_path}/stores/{{name}}\n"
        "  tokenizer: {vocab_size: 300}\n"
        "train: {steps: 1}\n"
    )
    return file


def test_prepare_inspect_verify(tmp_path: Path, config_file: Path) -> None:
    report = json.loads(run("data", "prepare", config_file, "--json").stdout)
    assert (report["documents"], report["ignored_files"], report["up_to_date"]) == (50, 1, False)
    assert report["store"] == str(tmp_path / "stores/small")
    again = run("data", "prepare", config_file)
    assert "50 documents" in again.stdout and "up to date" in again.stderr
    forced = run("data", "prepare", config_file, "--force", "--workers", "1", "data.validation=0.3")
    assert "MB/s" in forced.stdout
    facts = json.loads(run("data", "inspect", config_file, "--json").stdout)
    assert sum(source["documents"] for source in facts["sources"]) == 50
    assert facts["sample"].startswith("document 0/")
    shown = run("data", "inspect", tmp_path / "stores/small").stdout
    assert "validation  corpus" in shown and "P50" in shown and "BYTES/TOKEN" in shown
    assert f"encoded by {report['encoder']}, fingerprint" in shown and facts["encoder"] == report["encoder"]
    assert "sound" in run("data", "verify", config_file).stdout
    assert json.loads(run("data", "verify", tmp_path / "stores/small", "--json").stdout)["problems"] == []


def test_duplicates_are_shown_in_words_and_figures(config_file: Path, documents: Callable[..., list[str]]) -> None:
    texts = [*documents(90, seed=1), *["the same text in ten documents of this corpus"] * 10]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (config_file.parent / "corpus" / "b.jsonl").write_text(lines)
    run("data", "prepare", config_file, "--workers", "1", "data.dedup.documents=true")
    shown = run("data", "inspect", config_file).stdout
    removed = shown[shown.index("removed documents:") :].splitlines()[1:3]
    assert removed[1].split() == ["corpus", "150", "0", "(0.0%)", "9", "(6.0%)"]
    header, row, clusters = shown[shown.index("duplicates:") :].splitlines()[1:4]
    assert header.split()[:6] == ["SOURCE", "DOCUMENTS", "EQUAL", "SIMILAR", "EMPTIED", "REMOVED"]
    assert row.split()[:7] == ["corpus", "150", "9", "0", "0", "9", "(6.0%)"]
    assert clusters == "clusters of equal or similar documents: 1; the largest have 10 (6.7%)"
    page = Path(run("data", "report", config_file).stdout.strip()).read_text("utf-8")
    words = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert "10 documents (6.7 %)" in words and "[{" not in words
    assert "Removed as duplicates</dt><dd>6.0 %<small>9 documents" in page
    assert "Removed by cleaning</dt><dd>0.0 %<small>0 documents" in page
    assert "Encoded by</dt><dd>n/a" not in page


def test_every_evaluation_set_that_was_found_is_named(config_file: Path, documents: Callable[..., list[str]]) -> None:
    folder, sets = config_file.parent, []
    texts = [documents(1, seed=100 + number)[0] + " of some length for the set" for number in range(8)]
    for number, text in enumerate(texts):
        (folder / f"set{number}.jsonl").write_text(json.dumps({"text": text}) + "\n")
        sets.append(f"{{path: {folder}/set{number}.jsonl}}")
    lines = "".join(json.dumps({"text": f"here it is: {text}"}) + "\n" for text in texts)
    (folder / "corpus" / "b.jsonl").write_text(lines)
    run("data", "prepare", config_file, f"data.clean=[{{step: decontaminate, sets: [{', '.join(sets)}]}}]")
    reasons = ", ".join(f"set{number} 1" for number in range(8))
    assert reasons in run("data", "inspect", config_file).stdout
    page = Path(run("data", "report", config_file).stdout.strip()).read_text("utf-8")
    assert f">{reasons}<" in page and "Removed by cleaning</dt><dd>13.8 %<small>8 documents" in page


def test_verify_ends_with_the_data_exit_code(tmp_path: Path, config_file: Path) -> None:
    run("data", "prepare", config_file)
    (shard,) = (tmp_path / "stores/small/train/corpus").glob("*.bin")
    content = bytearray(shard.read_bytes())
    content[10] ^= 255
    shard.write_bytes(content)
    with pytest.raises(DataError, match=rf"train/corpus/{shard.name}: its SHA-256") as caught:
        run("data", "verify", config_file)
    assert caught.value.exit_code == 3
    assert caught.value.fix == f"headway data prepare {config_file} --repair"
    result = CliRunner().invoke(app, ["data", "verify", str(config_file), "--json"])
    assert result.exception and json.loads(result.stdout)["problems"]
    shard.unlink()
    with pytest.raises(DataError, match=rf"train/corpus/{shard.name}: missing"):
        run("data", "verify", tmp_path / "stores/small")
    run("data", "prepare", config_file)
    assert "sound" in run("data", "verify", config_file).stdout
    flipped = bytearray(shard.read_bytes())
    flipped[10] ^= 255
    shard.write_bytes(flipped)
    assert "MB/s" in run("data", "prepare", config_file, "--repair").stdout
    assert "sound" in run("data", "verify", config_file).stdout


def test_dry_run_lists_and_writes_nothing(tmp_path: Path, config_file: Path) -> None:
    shown = run("data", "prepare", config_file, "--dry-run").stdout
    assert "a.jsonl" in shown and "jsonl" in shown and "left out: 1 " in shown
    (source,) = json.loads(run("data", "prepare", config_file, "--dry-run", "--json").stdout)
    assert source["files"][0]["format"] == "jsonl" and source["files"][0]["bytes"] > 1000
    assert not (tmp_path / "stores").exists()


def test_tokenizer_train_and_inspect(tmp_path: Path, config_file: Path) -> None:
    folder = tmp_path / "vocabulary"
    facts = json.loads(run("tokenizer", "train", config_file, "-o", folder, "--json").stdout)
    assert facts["vocab_size"] == 300 and (folder / "tokenizer.json").exists()
    run("data", "prepare", config_file)
    shown = json.loads(run("tokenizer", "inspect", config_file, "--json").stdout)
    # `prepare` trains the same vocabulary by itself.
    assert shown["fingerprint"] == facts["fingerprint"]
    assert shown["bytes_per_token"] > 1 and shown["sample_bytes"] > 1000
    for path in (folder, folder / "tokenizer.json", tmp_path / "stores/small"):
        shown = json.loads(run("tokenizer", "inspect", path, "--text", "the fox", "--json").stdout)
        assert "".join(text for _, text in shown["tokens"]) == "the fox"
    assert "<|endoftext|> (0)" in run("tokenizer", "inspect", folder, "--text", "x").stdout


@pytest.mark.parametrize(
    "command", [["data", "prepare"], ["data", "inspect"], ["data", "verify"], ["tokenizer", "train"]]
)
def test_help_has_examples(command: list[str]) -> None:
    assert "Example" in run(*command, "--help").stdout


def test_a_sample_that_is_no_amount_is_said_in_plain_words(config_file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run("tokenizer", "compare", config_file, "--sample", "much")
    assert caught.value.what.startswith("'much' is not a")


def test_a_tokenizer_is_not_trained_on_nothing(config_file: Path) -> None:
    (config_file.parent / "corpus" / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="no text to train a tokenizer on"):
        run("tokenizer", "train", config_file, "-o", "nothing")
    assert not Path("nothing").exists()
    (config_file.parent / "corpus" / "a.jsonl").write_text('{"text": "twice twice"}\n')
    assert "tokens instead of 300" in run("tokenizer", "train", config_file, "-o", "little").stderr


def test_what_makes_a_damaged_store_whole(config_file: Path) -> None:
    """Where no preparation can, that is not what is advised."""
    run("data", "prepare", config_file)
    store = TokenStore.open(config_file.parent / "stores/small")
    assert data._repair(store) == f"headway data prepare {config_file} --repair"
    store.manifest["imported"] = {}
    assert "headway data import" in data._repair(store)
    store.at_hand = False  # as one behind a URL
    assert "upload" in data._repair(store)
