"""Which keys of a config say something else than a store was prepared with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.config.sections.data import DataConfig
from headway.data.made_of import MADE_OF, differences, made_of, only_adds
from headway.data.store import TokenStore
from headway.text.preparing.prepare import prepare
from support.chat import chat_tokenizer


@pytest.fixture
def asked(tmp_path: Path, config: Callable[..., DataConfig], jsonl: Callable[..., Path]) -> Callable[..., DataConfig]:
    """The config of a store with every kind of setting; with some of them replaced."""
    text = "This is text number {}, and of some length. There is a second sentence. The third one ends it."
    jsonl(tmp_path / "a.jsonl", [text.format(number) for number in range(20)])
    jsonl(tmp_path / "set.jsonl", ["one two three four five six seven eight nine"])
    (tmp_path / "words.txt").write_text("blocked\n")
    clean = [
        "unicode",
        {"step": "c4", "blocked_words": str(tmp_path / "words.txt")},
        {"step": "decontaminate", "sets": [str(tmp_path / "set.jsonl")], "action": "report"},
    ]
    full: dict[str, Any] = {"sources": "a.jsonl", "validation": 0.2, "clean": clean, "dedup": {"documents": True}}
    return lambda **values: config(**{**full, **values})


def test_a_store_without_its_record_is_compared_by_its_manifest(
    tmp_path: Path, asked: Callable[..., DataConfig]
) -> None:
    """As one of an earlier version, or one that was copied without its hidden files."""
    data = asked()
    prepare(data, workers=1)
    (data.store / MADE_OF).unlink()
    manifest = TokenStore.open(data.store).manifest
    steps = [step.model_dump() for step in data.clean]

    def named(**values: Any) -> list[str]:
        return differences(asked(**values), manifest)

    assert named() == []
    assert named(sources=[{"path": "elsewhere/a.jsonl"}]) == [], "the place is not in the manifest"
    assert named(sources=[{"path": "a.jsonl", "limit": "5 documents"}]) == ["data.sources.0.limit"]
    assert named(sources=[{"path": "a.jsonl", "field": "body"}]) == ["data.sources.0.field"]
    moved = [steps[0], {**steps[1], "blocked_words": "other.txt"}, {**steps[2], "sets": ["other.jsonl"]}]
    assert named(clean=moved) == []
    assert named(clean=[*steps[:2], {**steps[2], "ngram": 14}]) == ["data.clean"]
    assert named(clean=steps[:2]) == named(clean=[]) == named(clean=[*steps, "pii"]) == ["data.clean"]
    assert named(validation=0.1) == ["data.validation"]
    assert named(begin_of_text="never") == []
    beginning = {**manifest, "tokenizer": {**manifest["tokenizer"], "begin_of_text": ["<s>"]}}
    given = asked(tokenizer={"path": "t.json"}, begin_of_text="always")
    assert "data.begin_of_text" in differences(given, manifest)
    assert "data.begin_of_text" in differences(asked(begin_of_text="never"), beginning)
    assert differences(asked(), beginning) == [], "the tokenizer decides"
    assert named(bad_documents="skip") == ["data.bad_documents"]
    assert named(dedup={}) == ["data.dedup"] == named(dedup={"documents": True, "near": True})
    assert named(tokenizer={"vocab_size": 400}) == ["data.tokenizer"]
    assert named(tokenizer={"path": str(data.store)}) == [], (
        "a model that was trained on the store brings its vocabulary"
    )
    other = chat_tokenizer(tmp_path / "other")
    assert named(tokenizer={"path": str(other)}) == ["data.tokenizer"] == named(tokenizer={"path": "none"})
    special = {"vocab_size": 300, "special_tokens_in_text": True}
    assert named(tokenizer=special) == ["data.tokenizer.special_tokens_in_text"]
    assert named(sources=["a.jsonl", "b.jsonl"]) == ["data.sources (the store has a)"]
    assert named(sources=[{"path": "a.jsonl", "name": "c"}], validation=0.0) == [
        "data.validation",
        "data.sources (the store has a)",
    ]


# Every key of `data` and of a source, with another value; None where the key does not shape a store.
OTHER: dict[str, Any] = {
    "sources": ["b.jsonl"],
    "store": None,
    "remote": None,
    "remote_options": None,
    "cache_bytes": None,
    "tokenizer": {"vocab_size": 400},
    "clean": [],
    "dedup": {"documents": True, "near": True},
    "begin_of_text": "always",
    "validation": 0.1,
    "verify": None,
    "shard_bytes": None,
    "bad_documents": "skip",
    "max_document_bytes": 1000,
    "workers": None,
    "mixture": None,
    "packing": None,
    "document_mask": None,
    "processes": None,
}
OTHER_OF_A_SOURCE: dict[str, Any] = {
    "path": "b.jsonl",
    "name": "b",
    "format": "jsonl",
    "field": "body",
    "template": "{text}!",
    "limit": "5 documents",
    "weight": None,
    "clean": ["unicode"],
    "role": None,
    "max_epochs": None,
    "subset": "en",
    "split": "test",
    "streaming": True,
    "storage_options": {"endpoint_url": "https://there"},
    "exclude": ["*.bak"],
    "also": ["*.py"],
    "delimiter": ";",
}


def test_every_key_that_shapes_a_store_counts(asked: Callable[..., DataConfig]) -> None:
    """A new key must be in one of these tables, or this test fails."""
    data = asked()
    prepare(data, workers=1)
    manifest = TokenStore.open(data.store).manifest
    assert differences(data, manifest) == []
    assert OTHER.keys() >= DataConfig.model_fields.keys()
    for key, value in OTHER.items():
        if value is not None:
            found = differences(asked(**{key: value}), manifest)
            assert found and all(difference.startswith(f"data.{key}") for difference in found), key
        else:
            assert not any(name.startswith(f"data.{key}") for name in made_of(data)), key
    assert OTHER_OF_A_SOURCE.keys() >= type(data.sources[0]).model_fields.keys()
    for key, value in OTHER_OF_A_SOURCE.items():
        if value is not None:
            (found_one,) = differences(asked(sources=[{"path": "a.jsonl", key: value}]), manifest)
            assert found_one.startswith(f"data.sources.0.{key} was"), key
        else:
            assert key not in made_of(data)["data.sources"][0], key


def test_what_means_the_same_is_no_difference(tmp_path: Path, asked: Callable[..., DataConfig]) -> None:
    data = asked()
    prepare(data, workers=1)
    manifest = TokenStore.open(data.store).manifest
    steps = [step.model_dump() for step in data.clean]

    def named(**values: Any) -> list[str]:
        return differences(asked(**values), manifest)

    assert named(sources=[str(tmp_path / "a.jsonl")]) == named(sources=["./a.jsonl"]) == []
    assert named(begin_of_text="never") == []
    assert named(tokenizer={"path": str(data.store)}) == [], "a model trained on the store brings its vocabulary"
    other = chat_tokenizer(tmp_path / "other")
    assert named(tokenizer={"vocab_size": 400}) == ["data.tokenizer.vocab_size was 300 and is now 400"]
    for path in (str(other), "none"):
        assert f"data.tokenizer.path was not set and is now {path}" in named(tokenizer={"path": path})
    moved = [steps[0], {**steps[1], "blocked_words": "other.txt"}, steps[2]]
    assert len(named(clean=moved)) == 1, "another list of words"
    shutil.move(tmp_path / "a.jsonl", tmp_path / "gone.jsonl")
    assert named() == [], "training needs no sources"
    assert named(sources=["b.jsonl"]) == ["data.sources.0.path was a.jsonl and is now b.jsonl"]
    assert named(sources=["a.jsonl", "b.jsonl"]) == ["data.sources.1 (b) is new"]
    assert only_adds(asked(sources=["b.jsonl", "a.jsonl"]), manifest)
    assert not only_adds(asked(sources=["b.jsonl"]), manifest)
    assert not only_adds(asked(sources=["a.jsonl", "b.jsonl"], validation=0.1), manifest)


def test_a_record_of_another_manifest_is_not_believed(asked: Callable[..., DataConfig]) -> None:
    data = asked()
    prepare(data, workers=1)
    manifest = TokenStore.open(data.store).manifest
    elsewhere = asked(sources=["elsewhere/a.jsonl"])
    assert differences(elsewhere, manifest) != []
    record = json.loads((data.store / MADE_OF).read_text())
    for broken in ({**record, "manifest": "0" * 64}, {**record, "data": {"sources": 3}}, {}, []):
        (data.store / MADE_OF).write_text(json.dumps(broken))
        assert differences(elsewhere, manifest) == []
    older = {key: value for key, value in record["data"][0].items() if key != "max_document_bytes"}
    (data.store / MADE_OF).write_text(json.dumps({**record, "data": [older]}))
    assert differences(data, manifest) == [], "a key that a later version has is at its default"
    before = {file: file.read_bytes() for file in data.store.rglob("*") if file.is_file() and ".work" not in file.parts}
    prepare(data, workers=1)
    assert json.loads((data.store / MADE_OF).read_text()) == record
    assert before == {file: file.read_bytes() for file in before}


def test_configs_that_gave_the_same_bytes_are_all_what_the_store_was_made_of(asked: Callable[..., DataConfig]) -> None:
    one, other = asked(), asked(max_document_bytes=10_000)
    for data in (one, other, one):
        prepare(data, workers=1)
        manifest = TokenStore.open(data.store).manifest
        assert differences(data, manifest) == []
    assert differences(one, manifest) == differences(other, manifest) == []
    assert differences(asked(max_document_bytes=20_000), manifest) == [
        "data.max_document_bytes was 67108864 and is now 20000"
    ]
    assert len(json.loads((one.store / MADE_OF).read_text())["data"]) == 2
