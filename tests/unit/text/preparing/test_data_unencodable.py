"""Documents that a tokenizer cannot encode, or gives no token for, are counted and named; nothing else is lost."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.config.sections.data import DataConfig
from headway.core.errors import DataError
from headway.data.store import SKIPPED, TokenStore
from headway.data.tokenizing import encoders
from headway.data.tokenizing.library import UnencodableTextError
from headway.data.tokenizing.sentencepiece_models import _parse
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.text.inspect import describe_store
from headway.text.preparing.prepare import prepare
from headway.text.reading import sources as source_module
from headway.text.tokenizing.train import train_on

Configs, Jsonl = Callable[..., DataConfig], Callable[..., Path]
MODEL = {"type": "WordLevel", "vocab": {"<unk>": 0, "a": 1, "b": 2, "</s>": 3}, "unk_token": "<unk>"}


def given(normalizer: Any = None, end: str = "</s>", **model: Any) -> Path:
    """A tokenizer of two words, in `given`."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    model = {**MODEL, **model}
    added = [{"id": model["vocab"][end], "content": end, "special": True, **flags}]
    spec = {"version": "1.0", "normalizer": normalizer, "pre_tokenizer": {"type": "WhitespaceSplit"}}
    folder = Path("given")
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps({**spec, "added_tokens": added, "model": model}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    return folder


@pytest.fixture(scope="module")
def charsmap(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """SentencePiece's normal forms, cut off, so that `tokenizers` panics over every character that has another one."""
    library = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("model")
    (folder / "corpus.txt").write_text("some words and more words\n" * 20)
    options = {"vocab_size": 30, "hard_vocab_limit": False, "minloglevel": 2}
    library.SentencePieceTrainer.train(input=str(folder / "corpus.txt"), model_prefix=str(folder / "m"), **options)
    whole = _parse((folder / "m.model").read_bytes()).charsmap
    return whole[: 4 + struct.unpack("<I", whole[:4])[0] + 100]


def precompiled(charsmap: bytes) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()}


def documents_of(store: Path, split: str = "train", source: str = "a") -> list[list[int]]:
    opened = TokenStore.open(store)
    bounds = opened.documents(split, source).astype(int).tolist()
    ids = opened.read(split, source, 0, bounds[-1]).tolist()
    return [ids[start:end] for start, end in zip(bounds[:-1], bounds[1:], strict=True)]  # noqa: RUF007


TEXTS = ["a", "b a", "", "a ½ b", "b", "㍿", "a a"]


def test_a_panic_of_the_library_is_a_malformed_document(config: Configs, jsonl: Jsonl, charsmap: bytes) -> None:
    data = config(jsonl(Path("a.jsonl"), TEXTS), tokenizer={"path": given(precompiled(charsmap))}, validation=0)
    with pytest.raises(DataError, match="cannot encode a text: the library panicked: start byte index") as caught:
        prepare(data, workers=1)
    assert caught.value.where == "a.jsonl:4" and "bad_documents: skip" in str(caught.value.fix)

    data = data.model_copy(update={"bad_documents": "skip"})
    report = prepare(data, workers=1)
    assert (report.documents, report.unencodable, report.skipped, report.removed) == (4, 2, 0, 0)
    assert "2 documents that the tokenizer cannot encode skipped" in report.describe()
    assert documents_of(data.store) == [[1, 3], [2, 1, 3], [2, 3], [1, 1, 3]]
    listed = [json.loads(line) for line in (data.store / SKIPPED).read_text().splitlines()]
    assert [entry["where"] for entry in listed] == ["a.jsonl:4", "a.jsonl:6"]
    assert all("panicked" in entry["reason"] for entry in listed)
    again = prepare(data, workers=1)
    assert again.up_to_date and again.unencodable == 2


@pytest.mark.parametrize("settings", [{}, {"clean": ["unicode"]}, {"dedup": {"documents": True}}])
def test_its_place_is_told_behind_cleaning_and_in_pieces(
    config: Configs, jsonl: Jsonl, charsmap: bytes, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "PIECE_BYTES", 200)
    texts = [f"{'a ' * (n % 7)}b{n}" for n in range(60)]
    texts[10], texts[20], texts[33], texts[50] = texts[9], "㍿", "", "a ﷺ"
    tokenizer = {"path": given(precompiled(charsmap))}
    data = config(jsonl(Path("a.jsonl"), texts), tokenizer=tokenizer, bad_documents="skip", validation=0.2, **settings)
    report = prepare(data, workers=1)
    listed = [json.loads(line)["where"] for line in (data.store / SKIPPED).read_text().splitlines()]
    assert listed == ["a.jsonl:21", "a.jsonl:51"] and report.unencodable == 2
    assert report.documents == 60 - 3 - ("dedup" in settings)
    assert len(documents_of(data.store)) + len(documents_of(data.store, "validation")) == report.documents


def test_the_place_of_a_row(config: Configs, charsmap: bytes) -> None:
    Path("a.csv").write_text("text\na\nb\n㍿\n")
    data = config(Path("a.csv"), tokenizer={"path": given(precompiled(charsmap))}, validation=0)
    with pytest.raises(DataError, match="panicked") as caught:
        prepare(data, workers=1)
    assert caught.value.where == "a.csv: document 3"


def test_what_the_library_cannot_load_is_no_tokenizer(config: Configs, jsonl: Jsonl) -> None:
    given(precompiled(struct.pack("<I", 4) + b"\xff" * 6))
    with pytest.raises(DataError, match="not a tokenizer: the library panicked: Precompiled"):
        prepare(config(jsonl(Path("a.jsonl"), TEXTS), tokenizer={"path": "given"}), workers=1)


def test_a_vocabulary_without_the_unknown_encodes_what_it_knows(
    config: Configs, jsonl: Jsonl, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = given(vocab={"a": 0, "b": 1, "</s>": 2}, unk_token="<unk>")
    data = config(jsonl(Path("a.jsonl"), ["a b", "a c", "b"]), tokenizer={"path": folder}, validation=0)
    with pytest.raises(DataError, match=r"cannot encode a text: .*UNK") as caught:
        prepare(data, workers=1)
    assert caught.value.where == "a.jsonl:2"
    assert "some texts cannot be encoded" in capsys.readouterr().err
    prepare(data.model_copy(update={"bad_documents": "skip"}), workers=1)
    assert documents_of(data.store) == [[0, 1, 2], [1, 2]]
    only_bad = config(jsonl(Path("b.jsonl"), ["c"]), tokenizer={"path": folder}, bad_documents="skip", store="other")
    with pytest.raises(DataError, match="can encode none of 1 documents"):
        prepare(only_bad, workers=1)


def test_a_document_that_can_only_be_written_with_the_end_of_a_text(config: Configs, jsonl: Jsonl) -> None:
    """The vocabulary's unknown token is what ends texts."""
    folder = given(end="<unk>")
    data = config(jsonl(Path("a.jsonl"), ["a b", "a c", "b"]), tokenizer={"path": folder}, validation=0)
    with pytest.raises(DataError, match="it has the special token '<unk>'") as caught:
        prepare(data, workers=1)
    assert caught.value.where == "a.jsonl:2"
    data = data.model_copy(update={"bad_documents": "skip"})
    assert prepare(data, workers=1).unencodable == 1
    assert documents_of(data.store) == [[1, 2, 0], [2, 0]]
    asked = data.tokenizer.model_copy(update={"special_tokens_in_text": True})
    assert prepare(data.model_copy(update={"tokenizer": asked}), workers=1).unencodable == 0


def test_text_that_encodes_to_nothing_is_counted_and_told(
    config: Configs, jsonl: Jsonl, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = given({"type": "Replace", "pattern": {"String": "z"}, "content": ""})
    data = config(jsonl(Path("a.jsonl"), ["a", "zz", "b", "  ", "z"]), tokenizer={"path": folder}, validation=0)
    report = prepare(data, workers=1)
    assert report.without_tokens == 3 and "3 documents without a token" in report.describe()
    said = capsys.readouterr().err
    assert "no token for the text of 3 documents, the first of them a.jsonl:2" in said
    assert documents_of(data.store) == [[1, 3], [3], [2, 3], [3], [3]]
    assert describe_store(TokenStore.open(data.store))["splits"][0]["without_tokens"] == 3
    assert prepare(data, workers=1).without_tokens == 3


def test_texts_that_cannot_be_encoded_together_end_the_preparation(
    config: Configs, jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by itself can be, so that none of them is to blame."""
    data = config(jsonl(Path("a.jsonl"), ["a", "b"]), tokenizer={"path": given()}, bad_documents="skip")
    plain = encoders._Reference.encode

    def encode(self: Any, texts: list[str]) -> Any:
        if len(texts) == 2:
            raise UnencodableTextError("two at once")
        return plain(self, texts)

    monkeypatch.setattr(encoders._Reference, "encode", encode)
    with pytest.raises(DataError, match="two at once"):
        prepare(data, workers=1)


class PanicException(BaseException):
    """As `pyo3` makes them."""


def test_where_a_fast_library_panics_the_reference_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_on(["some words"] * 5, 270)
    encoder = encoders.open_encoder("fastokens", tokenizer)
    plain = encoders._Fastokens._encode

    def encode(self: Any, texts: list[str]) -> Any:
        if any("trap" in text for text in texts):
            raise PanicException("index out of bounds")
        return plain(self, texts)

    monkeypatch.setattr(encoders._Fastokens, "_encode", encode)
    texts = ["some words", "a trap", "more words"]
    ids, lengths = encoder.encode(texts)
    assert ids.tolist() == [token for ids in tokenizer.encode_batch(texts) for token in ids] and len(lengths) == 3
    with pytest.raises(KeyboardInterrupt):
        monkeypatch.setattr(encoders._Fastokens, "_encode", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        encoder.encode(texts)


def test_a_panic_while_decoding_is_a_data_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_: Any, **__: Any) -> str:
        raise PanicException

    tokenizer = Tokenizer(train_on([], 257).content, "here")
    monkeypatch.setattr(tokenizer, "_backend", type("Library", (), {"decode": decode})())
    with pytest.raises(DataError, match="cannot decode: the library panicked: it does not say why"):
        tokenizer.decode([1])
