"""Vocabularies: trained ones, given ones, exact round trips."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config.schema import SourceConfig
from headway.core.errors import DataError
from headway.data import tokenizer as module
from headway.data.sources import find_sources
from headway.data.tokenizer import Tokenizer, sample_text, train_tokenizer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.txt").write_text("def main():\n    return [number for number in range(10)]\n" * 50)
    return train_tokenizer(find_sources([SourceConfig(path=str(folder))]), 280, 10**6)


ODD_TEXTS = [
    "",
    " ",
    "\n\n \t\r\n",
    "\x00\x01\x7f",
    "naïve café — “quotes” … ﬁ",
    "e\u0301 vs é",  # not normalised into each other
    "👩‍👩‍👧‍👦🏳️‍🌈",
    "العربية עברית हिन्दी 日本語 한국어",
    "\ufeff\u200b\u2028\u202e\uffff\U0010ffff",
    "<|endoftext|> in <|endoftext|>text",
]


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_any_text_survives(trained: Tokenizer, text: str) -> None:
    (ids,) = trained.encode_batch([text])
    assert trained.decode(ids) == text
    assert trained.end_of_text_id not in ids


@given(st.text())
@settings(max_examples=100, deadline=None)
def test_any_text_at_all_survives(trained: Tokenizer, text: str) -> None:
    assert trained.decode(trained.encode_batch([text])[0]) == text


def test_vocabulary_has_what_was_asked_for(trained: Tokenizer) -> None:
    assert trained.vocab_size == 280
    assert trained.special_tokens == {"<|endoftext|>": trained.end_of_text_id}
    assert trained.decode([trained.end_of_text_id]) == ""
    assert trained.decode([trained.end_of_text_id], skip_special_tokens=False) == "<|endoftext|>"
    assert trained.dtype == np.dtype("<u2")


@given(st.text(alphabet="ab .,'1\n \té中\x1c_", min_size=50, max_size=400))
@settings(max_examples=100, deadline=None)
def test_long_texts_are_cut_where_it_changes_nothing(trained: Tokenizer, text: str) -> None:
    whole = trained._backend.encode(text, add_special_tokens=False).ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PART_CHARACTERS", 8)
        assert list(module._parts(text)) != [] and "".join(module._parts(text)) == text
        assert trained.encode_batch([text, "short", text])[::2] == [whole, whole]


def test_cuts_happen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PART_CHARACTERS", 10)
    assert len(list(module._parts("some words and more words " * 10))) > 10
    assert len(list(module._parts("一些文字，还有文字。" * 10))) > 5


@pytest.mark.parametrize("text", ["x" * 1000, "一" * 1000, ". " * 500, "x" * 105])
def test_a_word_without_end_is_cut(trained: Tokenizer, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PART_CHARACTERS", 10)
    monkeypatch.setattr(module, "_WORD_CHARACTERS", 100)
    parts = list(module._parts(text))
    assert max(map(len, parts)) <= 110
    assert "".join(parts) == text
    assert trained.decode(trained.encode_batch([text])[0]) == text


def test_training_on_a_long_text_sees_the_same_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "long.txt"
    path.write_text("red green blue, stone river cloud. " * 200, encoding="utf-8")
    sources = find_sources([SourceConfig(path=str(path))])
    whole = train_tokenizer(sources, 300, 10**6)
    monkeypatch.setattr(module, "_PART_CHARACTERS", 16)
    assert train_tokenizer(sources, 300, 10**6).fingerprint == whole.fingerprint


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}, True),
        ({"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}, False),
        ({"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}, False),
        ({"type": "Metaspace", "replacement": "▁"}, False),
        (
            {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": "\\p{L}+|\\s+"}, "behavior": "Isolated"},
                    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
                ],
            },
            True,
        ),
        (None, False),
    ],
)
def test_only_known_kinds_are_cut(spec: Any, expected: bool) -> None:
    assert module._is_byte_level({"normalizer": None, "pre_tokenizer": spec}) is expected
    assert not module._is_byte_level({"normalizer": {"type": "NFC"}, "pre_tokenizer": spec})


def test_training_does_not_depend_on_threads(tmp_path: Path, documents: Callable[..., list[str]]) -> None:
    (tmp_path / "a.txt").write_text("\n".join(documents(3000)))
    (tmp_path / "b.txt").write_text("\n".join(documents(2000, seed=1)).upper())
    script = (
        "from headway.config.schema import SourceConfig as S; from headway.data.sources import find_sources;"
        "from headway.data.tokenizer import train_tokenizer;"
        "print(train_tokenizer(find_sources([S(path='a.txt'), S(path='b.txt')]), 600, 10**6).fingerprint)"
    )
    environments: list[dict[str, str]] = [
        {"RAYON_NUM_THREADS": "1"},
        {"RAYON_NUM_THREADS": "4", "PYTHONHASHSEED": "7"},
        {"TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "8"},
    ]
    prints = {
        subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, **env}, text=True, capture_output=True, check=True
        ).stdout
        for env in environments
    }
    assert len(prints) == 1


def test_sample_is_spread_evenly_and_bounded(tmp_path: Path, documents: Callable[..., list[str]]) -> None:
    (tmp_path / "small.txt").write_text("s" * 1000)
    for number in range(20):
        (tmp_path / "large").mkdir(exist_ok=True)
        (tmp_path / "large" / f"{number}.txt").write_text("l" * 10_000)
    (tmp_path / "other.txt").write_text("é" * 100_000)
    sources = find_sources([SourceConfig(path=path) for path in ("large", "small.txt", "other.txt")])
    texts = list(sample_text(sources, 21_000))
    used = {letter: sum(len(text.encode()) for text in texts if text[0] == letter) for letter in "slé"}
    # What the small source leaves goes to the others in equal parts.
    assert used == {"s": 1000, "l": 10_000, "é": 10_000}
    assert texts == list(sample_text(sources, 21_000))
    assert sum(len(text.encode()) for text in sample_text(sources, 10**9)) == 1000 + 200_000 + 200_000


def test_sample_of_a_large_file_comes_from_all_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jsonl: Callable[..., Path]
) -> None:
    from headway.data import sources

    monkeypatch.setattr(sources, "PIECE_BYTES", 2**20)
    jsonl(tmp_path / "a.jsonl", [f"{number:05d}" + "x" * 1000 for number in range(8000)])
    texts = list(sample_text(find_sources([SourceConfig(path="a.jsonl")]), 2**19))
    numbers = [int(text[:5]) for text in texts if len(text) > 5]
    assert min(numbers) < 1000 and max(numbers) > 7000
    assert sum(map(len, texts)) <= 2**19


def backend(special: list[str], **values: Any) -> bytes:
    """A word-level tokenizer.json with given special tokens."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    made = Backend(models.WordLevel({"<unk>": 0, "hello": 1, "world": 2}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(special)
    if values.get("padding"):
        made.enable_padding(length=64)
        made.enable_truncation(max_length=2)
    return str(made.to_str()).encode()


@pytest.mark.parametrize("name", ["</s>", "<|end_of_text|>", "<eos>", "<|endoftext|>"])
def test_given_tokenizers_end_is_found_by_common_names(tmp_path: Path, name: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(backend(["<pad>", name]))
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.end_of_text, loaded.end_of_text_id, loaded.vocab_size) == (name, 4, 5)


def test_given_tokenizers_end_is_what_its_config_says(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(backend(["</s>", "<stop>"]))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<stop>"}}))
    assert Tokenizer.load(tmp_path / "tokenizer.json").end_of_text == "<stop>"


def test_padding_and_truncation_in_the_file_do_not_reach_the_store(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(backend(["</s>"], padding=True))
    assert Tokenizer.load(tmp_path).encode_batch(["hello world hello", "hello"]) == [[1, 2, 1], [1]]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (backend(["<pad>"]), "no end-of-text token"),
        (b"{}", "not a tokenizer"),
        (b"\xff", "not a tokenizer"),
        (None, "no"),
    ],
)
def test_unusable_tokenizers(tmp_path: Path, content: bytes | None, what: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=what) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value.where)


def test_saved_tokenizer_loads_in_transformers(tmp_path: Path, trained: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    trained.save(tmp_path / "saved")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    text = "def main(): é"
    assert loaded(text)["input_ids"] == trained.encode_batch([text])[0]
    assert loaded.eos_token_id == trained.end_of_text_id
    assert loaded.decode(trained.encode_batch([text])[0]) == text
    assert Tokenizer.load(tmp_path / "saved").fingerprint == trained.fingerprint


def test_numbers_are_spelled_digit_by_digit(tmp_path: Path) -> None:
    file = tmp_path / "numbers.txt"
    file.write_text(" ".join(["2026", "1024", "65536"] * 200))
    tokenizer = train_tokenizer(find_sources([SourceConfig(path=str(file))]), 300, 10_000)
    ids = tokenizer.encode_batch(["65536"])[0]
    assert [tokenizer.decode([i]) for i in ids] == list("65536")


def test_a_line_break_stands_alone(tmp_path: Path) -> None:
    file = tmp_path / "code.txt"
    file.write_text("if x:\n    pass\n\n    return\n" * 50)
    tokenizer = train_tokenizer(find_sources([SourceConfig(path=str(file))]), 300, 10_000)
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode_batch(["if x:\n\n    pass\n"])[0]]
    assert [piece for piece in pieces if "\n" in piece] == ["\n"] * 3
