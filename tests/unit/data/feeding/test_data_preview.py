"""What is shown of a step and a store: special tokens within texts, and sources that are left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.config import Config, LaneGrid, resolve
from headway.data.feeding.token_feed import TokenFeed
from headway.data.store import TokenStore
from headway.text.cli.inspect import _asked_shares
from headway.text.inspect import fertility, sample_text
from headway.text.preparing.prepare import prepare
from support.feeds import preview

GRID = LaneGrid(lanes=1, micro_batches=1, micro_batch=2)
TRAIN = {"steps": 4, "sequence_length": 16, "global_batch": 2, "lanes": 1}


@pytest.fixture
def chat(tmp_path: Path) -> Config:
    """Conversations whose turns begin with a special token, encoded as such."""
    vocab = {word: n for n, word in enumerate(("<unk>", "</s>", "<|user|>", "red", "stone"))}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": vocab[name], "content": name, "special": True, **flags} for name in ("</s>", "<|user|>")]
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    spec = {"version": "1.0", "added_tokens": added, "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"text": "<|user|> red stone <|user|>"}) + "\n" + '{"text": "red"}\n' * 40
    )
    data = {
        "sources": ["a.jsonl"],
        "store": "store",
        "validation": 0,
        "tokenizer": {"path": "tokenizer.json", "special_tokens_in_text": True},
    }
    return resolve(Config.model_validate({"data": data, "train": TRAIN}))


@pytest.mark.parametrize("packing", ["concat", "pad"])
def test_special_tokens_within_a_text_are_shown_and_its_end_is_not(chat: Config, packing: str) -> None:
    prepare(chat.data, workers=1)
    store = TokenStore.open(chat.data.store)
    assert sample_text(store) == "<|user|> red stone <|user|>"
    assert sample_text(store, 1) == "red"
    assert fertility(store, "train", "a") == 1.0
    config = chat.model_copy(update={"data": chat.data.model_copy(update={"packing": packing})})
    shown = [text for step in range(4) for row in preview(config, GRID, store, step).rows for text in row.documents]
    # A row may begin with the end of the document before.
    assert set(shown) <= {"", "red", "<|user|> red stone <|user|>"} and "<|user|> red stone <|user|>" in shown


def test_a_source_too_short_for_a_row_is_told_of(
    store: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = {name: store.tokens("train", name) for name in ("first", "second")}
    assert tokens["first"] > tokens["second"]
    sources = [{"path": f"{name}.jsonl"} for name in tokens]
    train = {**TRAIN, "sequence_length": tokens["second"]}
    values: dict[str, Any] = {"data": {"sources": sources, "store": str(store.path)}, "train": train}
    config = resolve(Config.model_validate(values))
    said = f"fewer than the {tokens['second'] + 1:,} tokens of one row: 'second' ({tokens['second']:,} tokens)"
    view = preview(config, GRID, store, 0)
    assert [(s.name, s.asked, s.step) for s in view.sources] == [("first", 1.0, 1.0), ("second", 0.0, 0.0)]
    assert said in capsys.readouterr().err
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    assert _asked_shares(tmp_path / "run.yaml", [], store) == {"first": 1.0, "second": 0.0}
    feed = TokenFeed.of(config.row_settings, GRID, store)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    feed.warn_of_short_sources()
    assert capsys.readouterr().err == ""


def test_nothing_is_said_where_every_source_has_rows(store: TokenStore, capsys: pytest.CaptureFixture[str]) -> None:
    sources = [{"path": f"{name}.jsonl"} for name in ("first", "second")]
    data = {"sources": sources, "store": str(store.path)}
    config = resolve(Config.model_validate({"data": data, "train": TRAIN}))
    capsys.readouterr()
    assert len(preview(config, GRID, store, 0).sources) == 2
    assert capsys.readouterr().err == ""
