"""A tokenizer.json made short."""

from __future__ import annotations

import json
from collections.abc import Callable

import orjson
import pytest

from headway.data.tokenizing.library import encode, open_library
from headway.data.tokenizing.preload import short_form
from headway.text.tokenizing.train import train_on


def test_merges_that_hold_spaces_stay_pairs() -> None:
    def made_short(*merges: list[str]) -> object:
        spec = {"model": {"type": "BPE", "vocab": {}, "merges": list(merges)}}
        return short_form(json.dumps(spec).encode())["model"]["merges"]

    assert made_short(["a", "b"], ["c", "dé"]) == ["a b", "c dé"]
    assert made_short(["a", "b"], ["c ", "d"]) == [["a", "b"], ["c ", "d"]]
    assert short_form(b'{"model": {"vocab": []}}') == {"model": {"vocab": []}}


def test_it_is_the_same_tokenizer(documents: Callable[..., list[str]]) -> None:
    content = train_on(documents(20), 300).content
    short = orjson.dumps(short_form(content))
    assert len(short) < len(content)
    one, other = (open_library(form, special_tokens_in_text=False) for form in (content, short))
    assert encode(one, documents(5)) == encode(other, documents(5)) and one.get_vocab() == other.get_vocab()


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b'{"model": 3}'])
def test_what_is_no_tokenizer_is_an_error(content: bytes) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        short_form(content)
