"""A text that spells out a special token is text, whatever a model's own pieces are."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from headway.data.tokenizing.encoders import ENCODERS, REFERENCE, choose_encoder, open_encoder
from headway.data.tokenizing.tokenizer import Tokenizer

END = "<|endoftext|>"


def of_model(model: dict[str, Any], end: str, pre: dict[str, Any] | None = None, **flags: bool) -> Tokenizer:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": model["vocab"][end], "content": end, "special": True, **plain, **flags}]
    pre = pre or {"type": "WhitespaceSplit"}
    spec = {"version": "1.0", "added_tokens": added, "pre_tokenizer": pre, "model": model}
    return Tokenizer(json.dumps(spec).encode(), "here", end)


def of_words(kind: str, end: str = "</s>", pre: dict[str, Any] | None = None) -> Tokenizer:
    model: dict[str, Any] = {"type": kind, "vocab": {"<unk>": 0, end: 1, "a": 2, "b": 3}, "unk_token": "<unk>"}
    if kind == "WordPiece":
        model |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    return of_model(model, end, pre)


def of_merges(end: str, merges: list[str], **model: Any) -> Tokenizer:
    """Letters, their merges, and the end of a text, which may be one of these."""
    made = (merge.replace(" ", "") for merge in merges)
    vocab = {token: n for n, token in enumerate(dict.fromkeys([*"abcdenost<>", *made, end]))}
    return of_model({"type": "BPE", "vocab": vocab, "merges": merges, **model}, end)


def of_ranks(folder: Path, end: str, pattern: str) -> Tokenizer:
    """A .tiktoken file of the 256 bytes alone."""
    lines = [base64.b64encode(bytes([byte])) + f" {byte}\n".encode() for byte in range(256)]
    (folder / "x.tiktoken").write_bytes(b"".join(lines))
    config = {"pat_str": pattern, "eos_token": end, "added_tokens_decoder": {"256": {"content": end, "special": True}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder / "x.tiktoken")


def encode(tokenizer: Tokenizer, text: str, asked: bool = False) -> list[int]:
    ids: list[int] = tokenizer.encode_arrays([text], special_tokens_in_text=asked)[0].tolist()
    return ids


@pytest.mark.parametrize("kind", ["WordLevel", "WordPiece"])
def test_a_special_token_among_a_models_words_is_unknown_in_a_text(kind: str) -> None:
    tokenizer = of_words(kind)
    assert encode(tokenizer, "a </s> b") == [2, 0, 3]
    assert encode(tokenizer, "a </s> b", asked=True) == [2, 1, 3]
    assert tokenizer.decode([2, 1, 3], skip_special_tokens=False) == "a </s> b"
    assert tokenizer.decode([2, 1, 3]) == "a b"


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize(
    ("end", "pattern", "text"),
    [(END, r"\S+|\s+", f"a {END} b"), ("EOS", "gpt2", "the EOS.EOS"), ("<|EOS", "cl100k", "(<|EOS <EOS")],
)
def test_a_special_token_that_is_a_word_of_a_rank_file_is_bytes_in_a_text(
    tmp_path: Path, encoder: str, end: str, pattern: str, text: str
) -> None:
    if encoder != REFERENCE:
        pytest.importorskip(encoder)
    tokenizer = of_ranks(tmp_path, end, pattern)
    ids, _ = open_encoder(encoder, tokenizer).encode([text])
    assert ids.tolist() == list(text.encode())
    ids, _ = open_encoder(encoder, tokenizer, special_tokens_in_text=True).encode([text])
    assert 256 in ids.tolist()
    assert tokenizer.decode([97, 256], skip_special_tokens=False) == "a" + end
    assert choose_encoder(tokenizer, encoder, [text]) == encoder


def test_a_special_token_that_merges_make_is_its_parts_in_a_text() -> None:
    merges = ["< e", "n d", "<e nd", "<end >", "s t"]
    tokenizer = of_merges("<end>", merges)
    vocab = json.loads(tokenizer.content)["model"]["vocab"]
    assert encode(tokenizer, "a<end>st") == [vocab[token] for token in ("a", "<end", ">", "st")]
    assert encode(tokenizer, "a<end>st", asked=True) == [vocab[token] for token in ("a", "<end>", "st")]


@pytest.mark.parametrize(("end", "ignore_merges"), [("st", False), ("st", True), ("a", True)])
def test_a_special_token_that_words_are_made_of_is_found_in_them(end: str, ignore_merges: bool) -> None:
    """Hidden, it would take every word apart that has it within."""
    tokenizer = of_merges(end, ["s t", "st a"], ignore_merges=ignore_merges)
    assert not tokenizer.special_in_text.hidden
    assert tokenizer.decode(encode(tokenizer, "sta"), skip_special_tokens=False) == "sta"
    assert len(encode(tokenizer, "sta")) == 1


@pytest.mark.parametrize(
    "pre", [{"type": "Whitespace"}, {"type": "BertPreTokenizer"}, {"type": "ByteLevel", "use_regex": True}]
)
def test_where_no_word_is_a_special_token_the_file_is_used_as_it_is(pre: dict[str, Any]) -> None:
    """Stores that were made with it need not be made anew."""
    tokenizer = of_words("WordLevel", pre={"add_prefix_space": False, "trim_offsets": True} | pre)
    assert tokenizer.content_for(special_tokens_in_text=False) is tokenizer.content
    assert 1 not in encode(tokenizer, "a </s> b</s>")


def test_published_patterns_part_the_usual_names(tmp_path: Path) -> None:
    for pattern in ("gpt2", "cl100k", "qwen2", "o200k", "tekken"):
        tokenizer = of_ranks(tmp_path, END, pattern)
        assert not tokenizer.special_in_text.hidden
        assert 256 not in encode(tokenizer, f"{END} a{END}b {END[1:]} 's{END}\n{END}")


def test_the_unknown_token_keeps_its_name() -> None:
    tokenizer = of_words("WordLevel", end="<unk>")
    assert encode(tokenizer, "a zebra") == [2, 1]


def test_a_hidden_end_of_a_text_that_is_not_marked_special() -> None:
    model = {"type": "WordLevel", "vocab": {"<unk>": 0, "</s>": 1, "a": 2}, "unk_token": "<unk>"}
    tokenizer = of_model(model, "</s>", special=False)
    assert encode(tokenizer, "a </s> a") == [2, 0, 2]
