"""What a user sees when the token store is not what the config says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import yaml

from headway.data.store import TokenStore
from support.runs import WORDS, headway, write_config


def texts(path: Path, word: str, documents: int = 40) -> None:
    with path.open("w", encoding="utf-8") as file:
        for number in range(documents):
            text = " ".join(f"{word} {WORDS[(number + place) % len(WORDS)]} {number}" for place in range(30))
            file.write(json.dumps({"text": text}) + "\n")


def changed(config: Path, **values: object) -> Path:
    content = yaml.safe_load(config.read_text())
    content["data"].update(values)
    config.write_text(yaml.safe_dump(content))
    return config


def test_changed_sources_are_prepared_or_refused(tmp_path: Path) -> None:
    texts(tmp_path / "corpus.jsonl", "old")
    texts(tmp_path / "new.jsonl", "new")
    config, store = write_config(tmp_path, train={"steps": 2}), tmp_path / "store"
    assert headway("train", config).returncode == 0
    first = TokenStore.open(store).fingerprint

    # The run's own config: refused as a changed run; started over it is prepared anew, and what is trained is recorded.
    changed(config, sources=[str(tmp_path / "new.jsonl")])
    refused = headway("train", config)
    assert refused.returncode == 2 and "--accept-changes" in refused.stderr, refused.stderr
    assert TokenStore.open(store).fingerprint == first
    preview = headway("train", config, "--restart", "--dry-run")
    assert preview.returncode == 0 and "is now" in preview.stdout and "new.jsonl" in preview.stdout, preview.stderr
    assert TokenStore.open(store).fingerprint == first
    again = headway("train", config, "--restart")
    assert again.returncode == 0 and f"is now {tmp_path}/new.jsonl" in again.stderr, again.stderr
    second = TokenStore.open(store)
    assert second.sources("train") == ["new"] and second.fingerprint != first
    record = json.loads((tmp_path / "runs/tiny/run.json").read_text())
    assert second.fingerprint in json.dumps(record)

    # Another run on the store: refused by every door, with both ways.
    changed(config, sources=[str(tmp_path / "corpus.jsonl")])
    for command in (
        ("train", config, "name=b"),
        ("train", config, "name=b", "--dry-run"),
        ("train", config, "name=b", "--restart"),
        ("data", "prepare", config, "name=b"),
        ("launch", config, "name=b", "--on", "slurm", "--dry-run"),
    ):
        refused = headway(*command)
        assert refused.returncode == 2, refused.stderr
        for words in (f"{tmp_path}/runs/tiny uses it", "data.store", "go back to what this one was prepared from"):
            assert words in refused.stderr, refused.stderr
    # Machines of a cloud share no disk with this one, and prepare a store of their own.
    remote = "checkpoint.remote.url=s3://bucket/runs"
    assert headway("launch", config, "name=b", remote, "--on", "sky", "--dry-run").returncode == 0
    assert TokenStore.open(store).fingerprint == second.fingerprint and not (tmp_path / "runs/b").exists()
    assert headway("train", config, "name=b", f"data.store={tmp_path}/second").returncode == 0

    # A folder that does not exist trains nothing, unless its text is prepared.
    changed(config, sources=[str(tmp_path / "nowhere")])
    missing = headway("train", config, "name=c", f"data.store={tmp_path}/third")
    assert missing.returncode == 3 and "no such file or folder" in missing.stderr
    assert not (tmp_path / "third").exists() and not (tmp_path / "runs/c").exists()
    changed(config, sources=[str(tmp_path / "new.jsonl")])
    (tmp_path / "new.jsonl").unlink()
    copy = shutil.copytree(store, tmp_path / "elsewhere")
    assert headway("train", config, "name=c", f"data.store={copy}").returncode == 0
    assert headway("train", config, "train.steps=4", "--accept-changes").returncode == 0


def test_a_run_that_accepts_changes_gets_the_sources_of_its_config(tmp_path: Path) -> None:
    texts(tmp_path / "corpus.jsonl", "old")
    texts(tmp_path / "more.jsonl", "new")
    config, store = write_config(tmp_path, train={"steps": 2}), tmp_path / "store"
    assert headway("train", config).returncode == 0
    vocabulary = TokenStore.open(store).tokenizer_fingerprint
    changed(config, sources=[str(tmp_path / "corpus.jsonl"), str(tmp_path / "more.jsonl")])
    done = headway("train", config, "train.steps=4", "--accept-changes")
    assert done.returncode == 0 and "(more) is new" in done.stderr, done.stderr
    assert "'more' is new" in done.stderr, "the run's plan has it"
    assert TokenStore.open(store).tokenizer_fingerprint == vocabulary
    assert headway("ledger", tmp_path / "runs/tiny").returncode == 0
    again = headway("train", config, "train.steps=4")
    assert again.returncode == 0 and "is finished" in again.stderr, again.stderr


def test_a_refused_start_leaves_neither_a_store_nor_a_run(tmp_path: Path) -> None:
    texts(tmp_path / "corpus.jsonl", "old")
    config = write_config(tmp_path, train={"steps": 2})
    mistakes = ["callbacks=[nowhere:Callback]", "loss=nowhere:loss"]
    refused = headway("train", config, *mistakes)
    assert refused.returncode == 2 and refused.stderr.count("nowhere cannot be imported") == 1, refused.stderr
    assert not (tmp_path / "store").exists() and not (tmp_path / "runs").exists()
    assert headway("data", "prepare", config).returncode == 0
    for workers in (1, 2):
        refused = headway("train", config, *mistakes, f"parallel.workers={workers}")
        assert refused.returncode == 2 and "nowhere cannot be imported" in refused.stderr, refused.stderr
        assert not (tmp_path / "runs/tiny/attempts").exists()
    listed = headway("runs", "list", tmp_path / "runs")
    assert "failed" not in listed.stdout, listed.stdout
