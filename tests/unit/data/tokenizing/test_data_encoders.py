"""Encoders give the reference's ids or are not used."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import ConfigError, DataError
from headway.data.tokenizing import encoders
from headway.data.tokenizing import spec as tokenizer_spec
from headway.data.tokenizing.edge_case_texts import edge_case_texts, shortened
from headway.data.tokenizing.encoders import REFERENCE, choose_encoder, open_encoder
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.text.tokenizing.train import train_on

FAST = [
    pytest.param(name, marks=pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} not installed"))
    for name in ("fastokens", "gigatoken")
]


@pytest.fixture(scope="module")
def text() -> str:
    return Path(json.__file__).read_text("utf-8") + Path(pytest.__file__).read_text("utf-8")


@pytest.fixture(scope="module", params=["headway", "gpt2", "llama3", "qwen2", "o200k", "tekken"])
def trained(request: pytest.FixtureRequest, text: str) -> Tokenizer:
    return train_on([text, *edge_case_texts()], 700, request.param)


@pytest.fixture
def tokenizer(text: str) -> Tokenizer:
    return train_on([text], 500)


def ids_of(name: str, tokenizer: Tokenizer, texts: list[str], **options: Any) -> list[list[int]]:
    ids, lengths = open_encoder(name, tokenizer, **options).encode(texts)
    assert ids.dtype == tokenizer.dtype and lengths.dtype == np.int64
    assert lengths.sum() == len(ids)
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]


@pytest.mark.parametrize("name", ["fastokens", REFERENCE])
def test_odd_texts_have_the_ids_of_the_reference(trained: Tokenizer, text: str, name: str) -> None:
    texts = [*edge_case_texts(trained.special_tokens), text]
    assert ids_of(name, trained, texts) == trained.encode_batch(texts)


@given(st.text(max_size=200))
@settings(max_examples=50, deadline=None)
def test_any_text_has_the_ids_of_the_reference(trained: Tokenizer, text: str) -> None:
    assert ids_of("fastokens", trained, [text]) == trained.encode_batch([text])


@pytest.mark.slow
def test_every_character_has_the_ids_of_the_reference(trained: Tokenizer) -> None:
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    texts = [
        "".join(f"a{c}b 1{c}2 .{c}! {c}'{c}\n{c}" for c in characters[i : i + 97])
        for i in range(0, len(characters), 97)
    ]
    for start in range(0, len(texts), 1000):
        part = texts[start : start + 1000]
        assert ids_of("fastokens", trained, part) == trained.encode_batch(part)


def test_special_tokens_in_text_are_text_unless_asked_for(tokenizer: Tokenizer) -> None:
    texts = ["a<|endoftext|>b", "<|endoftext|>"]
    end = tokenizer.end_of_text_id
    for name in ("fastokens", REFERENCE):
        assert not any(end in ids for ids in ids_of(name, tokenizer, texts))
        assert [ids.count(end) for ids in ids_of(name, tokenizer, texts, special_tokens_in_text=True)] == [1, 1]
    asked, plain = (tokenizer.encode_arrays(texts, special_tokens_in_text=asked) for asked in (True, False))
    assert [ids.tolist() for ids in asked] != [ids.tolist() for ids in plain]


@pytest.mark.parametrize("name", FAST)
def test_added_tokens_that_are_not_special_are_found_in_any_text(tokenizer: Tokenizer, name: str) -> None:
    spec = json.loads(tokenizer.content)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    spec["added_tokens"].append({"id": tokenizer.vocab_size, "content": "[tool]", **flags})
    extended = Tokenizer(json.dumps(spec).encode(), "extended")
    (ids,) = ids_of(name, extended, ["a[tool]b<|endoftext|>"])
    assert ids == extended.encode_batch(["a[tool]b<|endoftext|>"])[0]
    assert extended.vocab_size - 1 in ids and extended.end_of_text_id not in ids


@pytest.mark.parametrize("text", ["word and more, " * 300, "x" * 2000, "漢" * 1500, "", "short"])
def test_long_texts_are_cut_as_the_reference_cuts_them(
    tokenizer: Tokenizer, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_spec, "PART_CHARACTERS", 100)
    monkeypatch.setattr(tokenizer_spec, "WORD_CHARACTERS", 100)
    monkeypatch.setattr(encoders, "_GROUP_CHARACTERS", 350)
    texts = ["before", text, "after", text]
    assert ids_of("fastokens", tokenizer, texts) == tokenizer.encode_batch(texts)


def test_an_endless_word_takes_bounded_memory(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(tmp_path)
    script = (
        "import re; from pathlib import Path; from headway.data.tokenizing.tokenizer import Tokenizer;"
        "from headway.data.tokenizing.encoders import open_encoder;"
        "e = open_encoder('fastokens', Tokenizer.load('.'), threads=1);"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+) kB', Path('/proc/self/status').read_text())[1]);"
        "text = 'xy' * 10**7; before = peak(); e.encode([text]); print(peak() - before)"
    )
    result = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, check=True, cwd=tmp_path)
    # Uncut it is 1 GB for these 20 MB.
    assert int(result.stdout) / 1024 < 300


@pytest.mark.parametrize("name", [*FAST, REFERENCE])
def test_what_is_not_unicode_is_a_data_error(tokenizer: Tokenizer, name: str) -> None:
    with pytest.raises(DataError, match="not valid Unicode") as caught:
        open_encoder(name, tokenizer).encode(["fine", "half of a pair: \ud83d!"])
    assert "character 16" in str(caught.value.where)


def test_no_texts(tokenizer: Tokenizer) -> None:
    for name in ("fastokens", REFERENCE):
        ids, lengths = open_encoder(name, tokenizer).encode([])
        assert len(ids) == len(lengths) == 0


def test_threads_may_share_an_encoder(tokenizer: Tokenizer, text: str) -> None:
    encoder = open_encoder("fastokens", tokenizer)
    texts = text.splitlines(keepends=True)
    expected = encoder.encode(texts)[0]
    wrong: list[int] = []

    def run() -> None:
        wrong.extend(1 for _ in range(20) if not np.array_equal(encoder.encode(texts)[0], expected))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_threads_are_as_many_as_asked_for(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(tmp_path)
    script = (
        "import os, sys; from headway.data.tokenizing.tokenizer import Tokenizer\n"
        "from headway.data.tokenizing.encoders import open_encoder\n"
        "count = lambda: len(os.listdir('/proc/self/task'))\n"
        "t = Tokenizer.load('.'); before = count()\n"
        "e = open_encoder('fastokens', t, threads=int(sys.argv[1]) or None)\n"
        "e.encode(['some words of text'] * 100_000)\n"
        "print(count() - before, os.environ.get('RAYON_NUM_THREADS'))"
    )

    def run(threads: int) -> str:
        command = [sys.executable, "-c", script, str(threads)]
        return subprocess.run(command, text=True, capture_output=True, check=True, cwd=tmp_path).stdout.strip()

    assert run(1) == "0 None"  # and the variable is not left for other libraries
    if len(os.sched_getaffinity(0)) > 1:
        assert run(0) != "0 None"


def test_auto_takes_the_fast_one(trained: Tokenizer, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert choose_encoder(trained, "auto", [text]) == "fastokens"
    assert choose_encoder(trained, REFERENCE, [text]) == REFERENCE
    assert capsys.readouterr().err == ""


class _Wrong:
    """An encoder that differs for one text of the sample alone."""

    def __init__(self, tokenizer: Tokenizer, special: bool) -> None:
        self._right = encoders._Fastokens(tokenizer, special)

    def encode(self, texts: list[str]) -> Any:
        ids, lengths = self._right.encode(texts)
        for number, text in enumerate(texts):
            if "trap" in text:
                ids[lengths[:number].sum()] += 1
        return ids, lengths


def test_the_environment_stays_as_it_is_while_libraries_read_it(
    trained: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    begin, seen = encoders.begin_loading, list[str | None]()

    def look(*arguments: Any) -> None:
        seen.append(os.environ.get("RAYON_NUM_THREADS"))
        begin(*arguments)

    monkeypatch.setattr(encoders, "begin_loading", look)
    monkeypatch.setattr(encoders, "_last", None)
    choose_encoder(trained, "auto", ["red green"], threads=1)
    assert seen == ["1"] and "RAYON_NUM_THREADS" not in os.environ


def test_auto_falls_back_with_the_reason(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(encoders, "_FAST", {"fastokens": _Wrong})
    monkeypatch.setattr(encoders, "_last", None)
    assert choose_encoder(tokenizer, "auto", ["no problem"]) == "fastokens"
    assert choose_encoder(tokenizer, "auto", ["no problem", "a trap"]) == REFERENCE
    said = capsys.readouterr().err
    assert "fastokens differs: 'a trap' at token 0" in said and "a twentieth of the speed" in said


def test_a_wanted_one_that_differs_is_an_error(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "_FAST", {"fastokens": _Wrong})
    monkeypatch.setattr(encoders, "_last", None)
    with pytest.raises(DataError, match="'a trap' at token 0"):
        choose_encoder(tokenizer, "fastokens", ["no problem", "a trap"])


def test_a_vocabulary_that_no_fast_one_takes(capsys: pytest.CaptureFixture[str]) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    backend = Backend(models.WordPiece({"[UNK]": 0, "hello": 1, "##s": 2, "[SEP]": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    content = json.dumps(json.loads(backend.to_str())).encode()
    tokenizer = Tokenizer(content, "word pieces", "[SEP]")
    assert choose_encoder(tokenizer, "auto", ["hellos"]) == REFERENCE
    assert "fastokens cannot use the tokenizer" in capsys.readouterr().err
    assert ids_of(REFERENCE, tokenizer, ["hellos hello what"]) == [[1, 2, 1, 0]]
    with pytest.raises(DataError, match="fastokens cannot use"):
        choose_encoder(tokenizer, "fastokens", ["hellos"])


def test_unknown_and_missing_encoders(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no encoder 'faster'"):
        open_encoder("faster", tokenizer)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(encoders, "_last", None)
    with pytest.raises(ConfigError, match="not installed") as caught:
        choose_encoder(tokenizer, "gigatoken", [])
    assert caught.value.fix == "pip install gigatoken"


def test_without_any_fast_library(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(encoders, "_last", None)
    assert choose_encoder(tokenizer, "auto", ["text"]) == REFERENCE
    assert "no other is installed" in capsys.readouterr().err


def test_comparing_takes_bounded_time() -> None:
    texts = list(shortened("x" * 10**6 for _ in range(10**9)))
    assert sum(map(len, texts)) == 2**18 and max(map(len, texts)) < 2**15


@pytest.mark.parametrize("code", [0x10570, 0x11F04, 0x2EBF0, 0xA7DA, 0x10940])
def test_odd_texts_hold_letters_that_tables_may_lack(code: int) -> None:
    assert any(chr(code) in text for text in edge_case_texts())
