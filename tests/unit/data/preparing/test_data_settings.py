"""Which keys of a config say something else than a store was prepared with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.config.sections.data import DataConfig
from headway.data.preparing.prepare import prepare
from headway.data.preparing.settings import differing_keys
from headway.data.store import TokenStore
from support_chat import chat_tokenizer


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


def test_only_what_differs_is_named(tmp_path: Path, asked: Callable[..., DataConfig]) -> None:
    data = asked()
    prepare(data, workers=1)
    manifest = TokenStore.open(data.store).manifest
    steps = [step.model_dump() for step in data.clean]

    def named(**values: Any) -> list[str]:
        return differing_keys(asked(**values), manifest)

    assert named() == []
    assert named(sources=[{"path": "elsewhere/a.jsonl", "limit": "5 documents"}]) == [], "neither is in the manifest"
    moved = [steps[0], {**steps[1], "blocked_words": "other.txt"}, {**steps[2], "sets": ["other.jsonl"]}]
    assert named(clean=moved) == []
    assert named(clean=[*steps[:2], {**steps[2], "ngram": 14}]) == ["data.clean"]
    assert named(clean=steps[:2]) == named(clean=[]) == named(clean=[*steps, "pii"]) == ["data.clean"]
    assert named(validation=0.1) == ["data.validation"]
    assert named(begin_of_text="never") == []
    beginning = {**manifest, "tokenizer": {**manifest["tokenizer"], "begin_of_text": ["<s>"]}}
    given = asked(tokenizer={"path": "t.json"}, begin_of_text="always")
    assert "data.begin_of_text" in differing_keys(given, manifest)
    assert "data.begin_of_text" in differing_keys(asked(begin_of_text="never"), beginning)
    assert differing_keys(asked(), beginning) == [], "the tokenizer decides"
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
