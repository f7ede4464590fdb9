"""What is kept with a store beside it: the encoder that was used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headway.config.sections.data import DataConfig
from headway.data.store import TokenStore
from headway.text.inspect import describe_store
from headway.text.preparing.prepare import prepare
from headway.text.preparing.report import PrepareReport
from support.runs import store_contents


def test_the_encoder_is_remembered_and_is_no_part_of_the_store(
    tmp_path: Path,
    config: Callable[..., DataConfig],
    documents: Callable[..., list[str]],
    jsonl: Callable[..., Path],
) -> None:
    jsonl(tmp_path / "a.jsonl", documents(30))

    def made_with(encoder: str, store: str = "store") -> PrepareReport:
        tokenizer = {"vocab_size": 300, "encoder": encoder}
        return prepare(config("a.jsonl", tokenizer=tokenizer, store=tmp_path / store), workers=1)

    made = made_with("tokenizers")
    assert made.encoder == "tokenizers" and "· encoded by tokenizers ·" in made.describe()
    again = made_with("fastokens")
    assert again.up_to_date and again.encoder == "tokenizers", "nothing was encoded anew"
    assert describe_store(TokenStore.open(tmp_path / "store"))["encoder"] == "tokenizers"
    other = made_with("fastokens", "other")
    assert other.encoder == "fastokens" and other.fingerprint == made.fingerprint
    assert store_contents(tmp_path / "other") == store_contents(tmp_path / "store")
    jsonl(tmp_path / "a.jsonl", documents(31))
    changed = made_with("fastokens")
    assert not changed.up_to_date and changed.encoder == "fastokens"


def test_a_store_without_the_record_is_up_to_date_and_says_so(
    tmp_path: Path,
    config: Callable[..., DataConfig],
    documents: Callable[..., list[str]],
    jsonl: Callable[..., Path],
) -> None:
    jsonl(tmp_path / "a.jsonl", documents(10))
    prepare(config("a.jsonl"), workers=1)
    (tmp_path / "store" / ".work" / "encoder").unlink()
    old = prepare(config("a.jsonl"), workers=1)
    assert old.up_to_date and old.encoder is None and "encoded by n/a" in old.describe()
    assert describe_store(TokenStore.open(tmp_path / "store"))["encoder"] is None
