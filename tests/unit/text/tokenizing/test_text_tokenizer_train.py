"""Training vocabularies, and the sample of the sources that they see."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.config.sections.data import DataConfig, SourceConfig
from headway.core.errors import ConfigError
from headway.data.tokenizing import spec as module
from headway.text.reading.sources import Source, find_sources
from headway.text.tokenizing.train import sample_text, train_on, train_tokenizer


def test_training_on_a_long_text_sees_the_same_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "long.txt"
    path.write_text("red green blue, stone river cloud. " * 200, encoding="utf-8")
    sources = find_sources([SourceConfig(path=str(path))])
    whole, seen = train_tokenizer(sources, 300, 10**6)
    assert seen == path.stat().st_size
    monkeypatch.setattr(module, "PART_CHARACTERS", 16)
    assert train_tokenizer(sources, 300, 10**6)[0].fingerprint == whole.fingerprint


def test_training_does_not_depend_on_threads(tmp_path: Path, documents: Callable[..., list[str]]) -> None:
    (tmp_path / "a.txt").write_text("\n".join(documents(3000)))
    (tmp_path / "b.txt").write_text("\n".join(documents(2000, seed=1)).upper())
    script = (
        "from headway.config.sections.data import SourceConfig as S;"
        "from headway.text.reading.sources import find_sources;"
        "from headway.text.tokenizing.train import train_tokenizer;"
        "print(train_tokenizer(find_sources([S(path='a.txt'), S(path='b.txt')]), 600, 10**6)[0].fingerprint)"
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
    from headway.text.reading import sources

    monkeypatch.setattr(sources, "PIECE_BYTES", 2**20)
    jsonl(tmp_path / "a.jsonl", [f"{number:05d}" + "x" * 1000 for number in range(8000)])
    texts = list(sample_text(find_sources([SourceConfig(path="a.jsonl")]), 2**19))
    numbers = [int(text[:5]) for text in texts if len(text) > 5]
    assert min(numbers) < 1000 and max(numbers) > 7000
    assert sum(map(len, texts)) <= 2**19


def test_sample_of_a_stream_is_its_beginning_and_no_more() -> None:
    asked = 0

    def endless() -> Iterator[str]:
        nonlocal asked
        while True:
            asked += 1
            yield "y" * 100_000

    source = Source("endless", "text", [], stream=endless, location="endless")
    assert sum(map(len, sample_text([source], 10**6))) == 10**6 and asked < 100


@pytest.mark.parametrize(("limit", "most"), [("300 documents", 300 * 1005), ("1 MB", 2**20)])
def test_sample_is_within_the_limit(
    monkeypatch: pytest.MonkeyPatch, jsonl: Callable[..., Path], limit: str, most: int
) -> None:
    from headway.text.reading import sources

    monkeypatch.setattr(sources, "PIECE_BYTES", 2**18)
    jsonl(Path("a.jsonl"), [f"{number:05d}" + "x" * 1000 for number in range(4000)])
    (source,) = find_sources([SourceConfig(path="a.jsonl", limit=limit)])
    texts = list(sample_text([source], 10**9))
    assert 0.9 * most < sum(map(len, texts)) <= most
    assert max(int(text[:5]) for text in texts if len(text) > 5) == len(texts) - 1


@pytest.mark.parametrize(
    ("name", "template"), [("a.jsonl", None), ("a.csv", None), ("a.csv", "{text}" + 9 * "0"), ("a.jsonl.gz", None)]
)
def test_sample_has_no_more_text_than_the_limit(jsonl: Callable[..., Path], name: str, template: str | None) -> None:
    for part in range(3):
        texts = [f"{300 * part + number:05d}" + "x" * 50 for number in range(300)]
        lines = jsonl(Path("lines"), texts).read_bytes()
        lines = "\n".join(["text", *texts]).encode() if name == "a.csv" else lines
        Path(f"{part}{name}").write_bytes(gzip.compress(lines) if name.endswith("gz") else lines)
    values: dict[str, Any] = {"path": f"*{name}", "limit": "20000 bytes", "template": template}
    found = list(sample_text(find_sources([SourceConfig(**values)]), 10**9))
    assert 0.7 * 20_000 < sum(map(len, found)) <= 20_000
    assert max(int(text[:5]) for text in found if len(text) > 5) < 20_000 / 50


def test_sample_comes_from_all_over_what_is_within_a_limit(
    monkeypatch: pytest.MonkeyPatch, jsonl: Callable[..., Path]
) -> None:
    from headway.text.reading import sources

    monkeypatch.setattr(sources, "PIECE_BYTES", 2**18)
    jsonl(Path("a.jsonl"), [f"{number:05d}" + "x" * 1000 for number in range(4000)])
    found = list(sample_text(find_sources([SourceConfig(path="a.jsonl", limit="2 MB")]), 2**19))
    numbers = [int(text[:5]) for text in found if len(text) > 5]
    assert min(numbers) < 300 and 1500 < max(numbers) <= 2**21 / 1000


def test_what_a_limit_leaves_of_a_share_goes_to_other_sources() -> None:
    Path("limited.txt").write_text("l" * 200_000)
    Path("other.txt").write_text("o" * 150_000)
    sources = find_sources([SourceConfig(path="limited.txt", limit="1000 bytes"), SourceConfig(path="other.txt")])
    assert list(map(len, sample_text(sources, 100_000))) == [1000, 99_000]


def test_numbers_are_spelled_digit_by_digit(tmp_path: Path) -> None:
    file = tmp_path / "numbers.txt"
    file.write_text(" ".join(["2026", "1024", "65536"] * 200))
    tokenizer, _ = train_tokenizer(find_sources([SourceConfig(path=str(file))]), 300, 10_000)
    ids = tokenizer.encode_batch(["65536"])[0]
    assert [tokenizer.decode([i]) for i in ids] == list("65536")


def test_special_tokens_in_the_text_are_not_learnt() -> None:
    texts = ["one <|endoftext|> two", "two <|endoftext|>three"] * 50
    trained = train_on(texts, 400, r"\S+|\s+")
    assert trained.end_of_text_id not in trained.encode_batch(["a <|endoftext|> b"])[0]


def test_a_line_break_stands_alone(tmp_path: Path) -> None:
    file = tmp_path / "code.txt"
    file.write_text("if x:\n    pass\n\n    return\n" * 50)
    tokenizer, _ = train_tokenizer(find_sources([SourceConfig(path=str(file))]), 300, 10_000)
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode_batch(["if x:\n\n    pass\n"])[0]]
    assert [piece for piece in pieces if "\n" in piece] == ["\n"] * 3


def library_texts() -> list[str]:
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:25]
    return [path.read_text("utf-8", errors="ignore") for path in paths]


def test_no_token_but_the_digit_has_a_digit_and_no_token_but_the_line_break_has_one() -> None:
    trained = train_on(library_texts(), 3000)
    texts = [trained.decode([number]) for number in range(1, trained.vocab_size)]
    assert sorted(text for text in texts if any(digit in text for digit in "0123456789")) == list("0123456789")
    assert [text for text in texts if "\n" in text] == ["\n"]


@pytest.mark.slow
def test_merges_keep_digits_and_line_breaks_alone_as_splitting_would() -> None:
    """The finished tokenizer splits by GPT-2's pattern; with more splits, at digits and line breaks, ids are the same.

    But for white space before a digit: of several spaces the last stands alone.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import pre_tokenizers

    trained = train_on(library_texts(), 3000)
    splitting = Backend.from_str(trained.content.decode())
    splitting.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    for text in library_texts():
        text = re.sub(r"\s+(?=\d)", " ", "".join(c for c in text if c.isascii() or not c.isnumeric()))
        assert trained.encode_batch([text])[0] == splitting.encode(text, add_special_tokens=False).ids
    assert [trained.decode([number]) for number in trained.encode_batch(["x   7"])[0]] == ["x", "  ", " ", "7"]


@pytest.mark.parametrize("pattern", ["gpt2", "llama3", "qwen2", "o200k", r"[a-z]+|[^a-z]"])
def test_a_pattern_decides_how_text_is_split(pattern: str) -> None:
    text = "abcd 1234\n\nabcd 1234\n\n" * 100
    trained = train_on([text], 400, pattern)
    pieces = {trained.decode([number]) for number in trained.encode_batch([text])[0]}
    assert ("234" in pieces or " 1234" in pieces or "123" in pieces) == (pattern in ("gpt2", "llama3", "o200k"))
    assert ("\n\n" in pieces) == (pattern in ("llama3", "qwen2", "o200k"))
    assert trained.decode(trained.encode_batch([text])[0]) == text


def test_a_pattern_that_is_none() -> None:
    with pytest.raises(ConfigError, match="neither a known name nor a regular expression") as caught:
        train_on(["text"], 300, "(unclosed")
    assert "headway" in str(caught.value.fix)


def test_the_config_says_the_pattern(tmp_path: Path) -> None:
    from headway.data.tokenizing.tokenizer import Tokenizer
    from headway.text.preparing.prepare import prepare

    (tmp_path / "a.txt").write_text("abcd 1234\n\n" * 100)
    settings = {"sources": "a.txt", "store": "store", "tokenizer": {"vocab_size": 280, "pattern": "llama3"}}
    prepare(DataConfig.model_validate(settings), workers=1)
    assert r"\p{N}{1,3}" in json.dumps(json.loads(Tokenizer.load(tmp_path / "store").content)).replace("\\\\", "\\")


@pytest.mark.parametrize(
    ("name", "near"), [("cl100k_base", "cl100k"), ("GPT2", "gpt2"), ("llama-3", "llama3"), ("headwey", "headway")]
)
def test_a_name_of_no_pattern_is_not_taken_for_a_regular_expression(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"no pattern '{name}'; did you mean '{near}'"):
        train_on(["some text"], 300, name)
