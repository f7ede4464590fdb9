"""Figures of a vocabulary on a corpus, and `headway tokenizer compare`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from headway.cli.application import application
from headway.config import load_config
from headway.core.errors import ConfigError, HeadwayError
from headway.data.store import TokenStore
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.text.inspect import fertility
from headway.text.preparing.prepare import prepare
from headway.text.tokenizing.statistics import measure
from headway.text.tokenizing.train import train_on


def words(known: list[str]) -> Tokenizer:
    """A vocabulary of whole words, `<unk>` for all others."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    backend = Backend(models.WordLevel({"<unk>": 0} | {w: i for i, w in enumerate(known, 1)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(str(backend.to_str()).encode(), "words")


def test_everything_is_counted() -> None:
    samples = {"first": ["red green red", "blue"], "second": ["red rot grün", ""]}
    figures = measure(words(["red", "green", "blue", "white"]), samples)
    first, second = figures.sources["first"], figures.sources["second"]
    assert (first.documents, first.text_bytes, first.words, first.tokens, first.unknown) == (2, 17, 4, 4, 0)
    assert (second.documents, second.text_bytes, second.words, second.tokens, second.unknown) == (2, 13, 3, 3, 2)
    assert (figures.total.tokens, figures.total.unknown, figures.total.text_bytes) == (7, 2, 30)
    assert first.bytes_per_token == 17 / 4 and second.fertility == 1.0
    # "white" and "</s>".
    assert (figures.vocab_size, figures.unused) == (6, 2)
    # Words come back with one space between them, whatever was there; unknown ones do not.
    assert (figures.round_trips, figures.round_trips_tried, figures.lost) == (3, 4, "red rot grün")
    assert figures.encoder == "tokenizers" and figures.tokens_per_second > 0


def test_a_byte_level_vocabulary_loses_nothing() -> None:
    texts = ["naïve café\n\n\t<|endoftext|> 漢字", "plain text\r\n", "None " * 9]
    figures = measure(train_on(texts, 300), {"all": texts})
    assert (figures.round_trips, figures.lost, figures.encoder) == (3, None, "fastokens")
    shown = json.loads(json.dumps(figures.to_json()))
    assert shown["total"]["unknown"] == 0 and shown["sources"]["all"]["documents"] == 3


def test_what_cannot_be_computed_is_absent() -> None:
    shown = measure(words(["red"]), {"none": []}).to_json()
    assert shown["total"]["tokens"] == 0 and shown["unused"] == 3
    assert not {"bytes_per_token", "tokens_per_word", "unknown_share"} & set(shown["total"])


@pytest.fixture
def corpus(tmp_path: Path, documents: Callable[..., list[str]], jsonl: Callable[..., Path]) -> Path:
    jsonl(tmp_path / "a.jsonl", documents(100))
    (tmp_path / "b.txt").write_text("grün ist die Farbe der Hügel\n" * 50, "utf-8")
    config = tmp_path / "run.yaml"
    config.write_text(
        "name: small\ndata:\n  sources: [{path: a.jsonl, name: english}, {path: b.txt, name: german}]\n"
        "  store: stores/{name}\n  tokenizer: {vocab_size: 300}\ntrain: {steps: 1}\n"
    )
    return config


def run(*arguments: Any) -> Result:
    result = CliRunner().invoke(application(["tokenizer"]), ["tokenizer", *map(str, arguments)])
    if result.exception and isinstance(result.exception, HeadwayError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def test_compare(tmp_path: Path, corpus: Path) -> None:
    run("train", corpus, "-o", "small")
    run("train", corpus, "data.tokenizer.vocab_size=600", "data.tokenizer.pattern=llama3", "-o", "large")
    small, large = json.loads(run("compare", corpus, "small", "large/tokenizer.json", "--json").stdout)
    assert (small["tokenizer"], large["tokenizer"]) == ("small", "large/tokenizer.json")
    assert list(small["sources"]) == ["english", "german"]
    for source in ("english", "german"):
        assert small["sources"][source]["text_bytes"] == large["sources"][source]["text_bytes"] > 1000
        assert small["sources"][source]["tokens_per_word"] > large["sources"][source]["tokens_per_word"]
    shown = run("compare", corpus, "small", "large").stdout
    assert "tokens/word" in shown and "german" in shown and "fastokens" in shown and "all" in shown


def test_compare_takes_overrides_and_the_configs_own_tokenizer(corpus: Path) -> None:
    run("train", corpus, "-o", "small")
    (shown,) = json.loads(run("compare", corpus, "data.tokenizer.path=small", "--sample", "1 kB", "--json").stdout)
    assert shown["tokenizer"].endswith("small")
    assert 0 < shown["total"]["text_bytes"] <= 1000
    with pytest.raises(ConfigError) as caught:
        run("compare", corpus, "small", "--sample", "much")
    assert caught.value.where == "--sample"


def test_compare_measures_with_the_encoder_that_the_config_names(corpus: Path) -> None:
    run("train", corpus, "-o", "small")
    (shown,) = json.loads(run("compare", corpus, "small", "data.tokenizer.encoder=tokenizers", "--json").stdout)
    assert shown["encoder"] == "tokenizers"


def test_inspect_takes_special_tokens_in_text_as_the_config_says(corpus: Path) -> None:
    run("train", corpus, "-o", "small")
    own, text = "data.tokenizer.path=small", "ab<|endoftext|>"
    special = "data.tokenizer.special_tokens_in_text=true"
    as_text, as_special = (
        json.loads(run("inspect", corpus, own, *more, "--text", text, "--json").stdout) for more in ([], [special])
    )
    assert as_special["tokens"][-1] == [0, "<|endoftext|>"] and [0, "<|endoftext|>"] not in as_text["tokens"]
    assert as_special["bytes_per_token"] == len(text) / len(as_special["tokens"]) > as_text["bytes_per_token"]


def test_the_report_and_the_comparison_mean_the_same_by_a_word(corpus: Path) -> None:
    """Tokens per word, by the words of Rust et al. 2021; `don't` is one of them."""
    Path("a.jsonl").write_text('{"text": "don\'t say re-enter, e.g. 3.14 - ..."}\n' * 30)
    data = load_config(corpus, ["data.sources=[a.jsonl]", "data.validation=0"]).data
    prepare(data, workers=1)
    store = TokenStore.open(data.store)
    figures = measure(Tokenizer.load(store.tokenizer_folder), {"all": ["don't say re-enter, e.g. 3.14 - ..."]})
    assert figures.total.words == 7
    assert fertility(store, "train", "a") == figures.total.fertility == figures.total.tokens / 7


def test_compare_says_what_is_lost(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(words(["red"]).content)
    assert "does not give back 'document 0" in run("compare", corpus, "tokenizer.json").stdout


def test_help_has_examples() -> None:
    for verb in ("train", "inspect", "compare"):
        assert "Examples" in run(verb, "--help").stdout
