"""Vocabularies: trained ones, given ones, exact round trips."""

from __future__ import annotations

import json
import os
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config.sections.data import SourceConfig
from headway.core.errors import DataError
from headway.data.tokenizing import spec as module
from headway.data.tokenizing.encoders import ENCODERS, REFERENCE, open_encoder
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.text.reading.sources import find_sources
from headway.text.tokenizing.train import train_on, train_tokenizer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.txt").write_text("def main():\n    return [number for number in range(10)]\n" * 50)
    return train_tokenizer(find_sources([SourceConfig(path=str(folder))]), 280, 10**6)[0]


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


@given(st.text(alphabet="ab .,'1\n \té中\x1c_\"(=|-", min_size=50, max_size=400))
@settings(max_examples=100, deadline=None)
def test_long_texts_are_cut_where_it_changes_nothing(trained: Tokenizer, text: str) -> None:
    whole = trained._backend.encode(text, add_special_tokens=False).ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PART_CHARACTERS", 8)
        assert list(module.parts(text, module.AT_WORDS)) != [] and "".join(module.parts(text, module.AT_WORDS)) == text
        assert trained.encode_batch([text, "short", text])[::2] == [whole, whole]


@pytest.fixture(scope="module")
def normalising() -> Tokenizer:
    """One that composes characters first, as Qwen's does, with merges of marks with marks behind them."""
    texts = [unicodedata.normalize("NFC", f"a\u0958{mark}{mark} \u093c{mark} ") * 30 for mark in ",.;!="]
    spec = json.loads(train_on(texts, 290, "qwen2").content)
    return Tokenizer(json.dumps({**spec, "normalizer": {"type": "NFC"}}).encode(), "here")


COMPOSING = "ae .,;!=\n\u0301\u0338\u0958\u093c\u1100\u1161\u11a8\u212b\u2000é가"


@given(st.text(alphabet=COMPOSING, min_size=50, max_size=400))
@settings(max_examples=100, deadline=None)
def test_long_texts_are_cut_where_composing_characters_changes_nothing(normalising: Tokenizer, text: str) -> None:
    text += "\u0958,," * 30  # a letter that falls apart, the mark at its end belongs to the marks behind it
    whole = normalising._backend.encode(text, add_special_tokens=False).ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PART_CHARACTERS", 8)
        assert normalising.encode_batch([text]) == [whole]


def test_a_vocabulary_that_composes_characters_is_cut(normalising: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_CHARACTERS", 10)
    assert len(list(normalising.parts("some words and more words " * 10))) > 10


def test_quotes_end_words_where_nothing_else_does(trained: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '"one",    "two",        "three",    ' * 20
    whole = trained._backend.encode(text, add_special_tokens=False).ids
    monkeypatch.setattr(module, "PART_CHARACTERS", 16)
    # A cut in the white space, where an endless word would get one, changes the ids.
    for length in range(16, 48):
        monkeypatch.setattr(module, "WORD_CHARACTERS", length)
        assert len(list(module.parts(text, module.AT_WORDS))) > 5
        assert trained.encode_batch([text]) == [whole]


def test_cuts_happen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_CHARACTERS", 10)
    assert len(list(module.parts("some words and more words " * 10, module.AT_WORDS))) > 10
    assert len(list(module.parts("一些文字，还有文字。" * 10, module.AT_WORDS))) > 5


@pytest.mark.parametrize("text", ["x" * 1000, "一" * 1000, ". " * 500, "x" * 105])
def test_a_word_without_end_is_cut(trained: Tokenizer, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_CHARACTERS", 10)
    monkeypatch.setattr(module, "WORD_CHARACTERS", 100)
    parts = list(module.parts(text, module.AT_WORDS))
    assert max(map(len, parts)) <= 110
    assert "".join(parts) == text
    assert trained.decode(trained.encode_batch([text])[0]) == text


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
    assert module._is_byte_level({"normalizer": {"type": "NFC"}, "pre_tokenizer": spec}) is expected
    assert not module._is_byte_level({"normalizer": {"type": "NFKC"}, "pre_tokenizer": spec})


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


@pytest.mark.parametrize(
    "change",
    [
        {"added_tokens": [{"content": "<x>"}]},
        {"added_tokens": {"<x>": 1}},
        {"pre_tokenizer": "ByteLevel"},
        {"model": {"vocab": {"a": 0, "b": "x"}}},
        {"model": {"vocab": [1, 2]}},
        {"model": {"vocab": [[]]}},
    ],
)
def test_json_that_is_laid_out_otherwise_is_no_tokenizer(trained: Tokenizer, change: dict[str, Any]) -> None:
    content = json.dumps({**json.loads(trained.content), **change}).encode()
    with pytest.raises(DataError, match=r"not a tokenizer: its JSON is not laid out|not a non-negative integer"):
        Tokenizer(content, "here")


def _nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("depth", [120, 300, 600])
@pytest.mark.parametrize("place", ["merges", "vocab", "added_tokens", "post_processor", "normalizer", "other"])
def test_what_is_nested_too_deeply_is_no_tokenizer(trained: Tokenizer, place: str, depth: int) -> None:
    """Libraries, and what writes it again, follow it to different depths; some end the process."""
    spec = json.loads(trained.content)
    if place == "merges":
        spec["model"]["merges"].append(_nested(depth))
    elif place == "vocab":
        spec["model"]["vocab"]["new"] = _nested(depth)
    elif place == "added_tokens":
        spec["added_tokens"].append({"id": 300, "content": "new", "more": _nested(depth)})
    elif place == "other":
        spec["other"] = _nested(depth)
    else:
        steps = {"post_processor": "processors", "normalizer": "normalizers"}[place]
        for _ in range(depth // 2):
            spec[place] = {"type": "Sequence", steps: [spec[place]]}
    with pytest.raises(DataError):
        Tokenizer(json.dumps(spec).encode(), "here").encode_batch(["a"])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "tokenizer.model", "x.tiktoken"])
@pytest.mark.parametrize("kind", ["fifo", "device", "terabyte"])
def test_what_never_ends_is_no_tokenizer(tmp_path: Path, trained: Tokenizer, name: str, kind: str) -> None:
    if name == "tokenizer_config.json":
        (tmp_path / "tokenizer.json").write_bytes(trained.content)
    path = tmp_path / name
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 2**40)
    with pytest.raises(DataError, match=r"are read|not a regular file"):
        Tokenizer.load(tmp_path)


def test_dropout_of_merges_is_for_training_a_model_and_not_for_a_store(trained: Tokenizer) -> None:
    spec = json.loads(trained.content)
    spec["model"]["dropout"] = 0.5
    shaken = Tokenizer(json.dumps(spec).encode(), "here")
    text = "def main():\n    return [number for number in range(10)]\n" * 5
    assert shaken.encode_batch([text] * 5) == trained.encode_batch([text] * 5)


def test_saved_tokenizer_loads_in_transformers(tmp_path: Path, trained: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    trained.save(tmp_path / "saved")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    text = "def main(): é"
    assert loaded(text)["input_ids"] == trained.encode_batch([text])[0]
    assert loaded.eos_token_id == trained.end_of_text_id
    assert loaded.decode(trained.encode_batch([text])[0]) == text
    assert Tokenizer.load(tmp_path / "saved").fingerprint == trained.fingerprint


def test_ids_that_the_library_would_change_are_refused(tmp_path: Path) -> None:
    spec = json.loads(backend(["</s>"]))
    spec["added_tokens"][0]["id"] = 9
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(DataError, match="ids have a gap: </s> is 9"):
        Tokenizer.load(tmp_path).encode_batch(["hello"])


def unigram(special: bool) -> bytes:
    """As T5's: `</s>` is a piece like any other, and likely."""
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    end = {"id": 1, "content": "</s>", "special": special}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    pieces = [["<unk>", 0.0], ["</s>", 0.0], *([piece, -3.0] for piece in ("▁", "a", "<", "/", "s", ">"))]
    spec = {
        "version": "1.0",
        "added_tokens": [{**end, **flags}],
        "pre_tokenizer": metaspace,
        "decoder": metaspace,
        "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False},
    }
    return json.dumps(spec).encode()


@pytest.mark.parametrize("special", [True, False])
def test_the_end_of_a_text_that_is_a_piece_of_a_unigram_model_is_text_in_a_text(special: bool) -> None:
    tokenizer = Tokenizer(unigram(special), "here")
    assert (tokenizer.end_of_text, tokenizer.end_of_text_id) == ("</s>", 1)
    assert tokenizer.encode_batch(["a</s>a"]) == [[2, 3, 4, 5, 6, 7, 3]]
    (wanted,) = tokenizer.encode_arrays(["a</s>a"], special_tokens_in_text=True)
    assert 1 in wanted.tolist()


@pytest.mark.parametrize("encoder", ENCODERS)
def test_an_end_of_text_that_is_not_marked_special_is_text_in_a_text(trained: Tokenizer, encoder: str) -> None:
    spec = json.loads(trained.content)
    assert [token["content"] for token in spec["added_tokens"]] == ["<|endoftext|>"]
    spec["added_tokens"][0]["special"] = False
    tokenizer = Tokenizer(json.dumps(spec).encode(), "here")
    if encoder != REFERENCE:
        pytest.importorskip(encoder)
    text = "def <|endoftext|> return"
    ids, _ = open_encoder(encoder, tokenizer).encode([text])
    assert [ids.tolist()] == trained.encode_batch([text])
    assert tokenizer.fingerprint != trained.fingerprint and tokenizer.special_in_text.unmarked
    assert not trained.special_in_text.unmarked
