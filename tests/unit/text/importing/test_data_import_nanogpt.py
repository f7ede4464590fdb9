"""nanoGPT's flat files, and those of llm.c with their header."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.core.errors import ConfigError, DataError
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.text.importing.store import plan_import


def write_flat(path: Path, tokens: Sequence[int], dtype: str = "<u2") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.array(tokens, dtype=dtype).tofile(path)
    return path


def write_headed(
    path: Path,
    tokens: Sequence[int],
    dtype: str = "<u2",
    magic: int = 20240520,
    version: int = 1,
    count: int | None = None,
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = np.zeros(256, dtype="<i4")
    header[:3] = [magic, version, len(tokens) if count is None else count]
    path.write_bytes(header.tobytes() + np.array(tokens, dtype=dtype).tobytes())
    return path


def after_each(documents: Sequence[Sequence[int]], end: int = 0) -> list[int]:
    return [token for document in documents for token in (*document, end)]


def before_each(documents: Sequence[Sequence[int]], end: int = 0) -> list[int]:
    return [token for document in documents for token in (end, *document)]


def test_a_name_that_is_no_utf8_is_spelled_out(tmp_path: Path, ids: Any, imported: Any) -> None:
    write_flat(tmp_path / "owt" / os.fsdecode(b"tr\xe4in.bin"), after_each(ids))
    store, _ = imported("nanogpt", tmp_path / "owt")
    assert [file["name"] for file in store.manifest["imported"]["files"]] == ["tr\\xe4in.bin"]


@pytest.mark.usefixtures("blocks")
def test_train_and_validation_files_of_a_folder(
    tmp_path: Path, ids: Any, ended: Any, imported: Any, documents_of: Any
) -> None:
    write_flat(tmp_path / "owt" / "train.bin", after_each(ids[:30]))
    write_flat(tmp_path / "owt" / "val.bin", after_each(ids[30:]))
    store, report = imported("nanogpt", tmp_path / "owt")
    assert store.sources("train") == store.sources("validation") == ["owt"]
    assert documents_of(store, "train") == ended[:30]
    assert documents_of(store, "validation") == ended[30:]
    assert (report.documents, report.validation_documents, report.ended_documents) == (40, 10, 0)
    flat = np.fromfile(tmp_path / "owt" / "train.bin", dtype="<u2")
    assert np.array_equal(store.read("train", "owt", 0, len(flat)), flat)


@pytest.mark.usefixtures("blocks")
def test_documents_that_go_on_in_the_next_file(
    tmp_path: Path, ids: Any, ended: Any, imported: Any, documents_of: Any
) -> None:
    """llm.c begins documents with the token, and cuts files at a number of tokens."""
    train, held_out = before_each(ids[:30]), before_each(ids[30:])
    third = len(train) // 3
    for number, part in enumerate((train[:third], train[third : 2 * third], train[2 * third :]), 1):
        write_headed(tmp_path / "fw" / f"fineweb_train_{number:06d}.bin", part)
    write_headed(tmp_path / "fw" / "fineweb_val_000000.bin", held_out)
    store, report = imported("nanogpt", tmp_path / "fw")
    assert documents_of(store, "train") == ended[:30]
    assert documents_of(store, "validation") == ended[30:]
    # The last document of each split has no token behind it; the first token of each has no document before it.
    assert (report.ended_documents, report.empty_documents) == (2, 2)
    again, _ = imported("nanogpt", *sorted((tmp_path / "fw").glob("*.bin"), reverse=True), name="again")
    assert again.sources("train") == ["fineweb"]
    assert documents_of(again, "train") == ended[:30]


def test_flat_files_end_their_documents(tmp_path: Path, ids: Any, ended: Any, imported: Any, documents_of: Any) -> None:
    """As characters of a play without any end-of-text token: a document per file."""
    write_flat(tmp_path / "a.bin", ids[0])
    write_flat(tmp_path / "b.bin", ids[1])
    store, report = imported("nanogpt", tmp_path / "b.bin", tmp_path / "a.bin", share=0, names=["play"])
    assert documents_of(store, "train") == ended[:2]
    assert report.ended_documents == 2


def test_llama_files_and_another_end(
    tmp_path: Path, ids: Any, vocabulary: Path, imported: Any, documents_of: Any
) -> None:
    begin = Tokenizer.load(vocabulary).special_tokens["<|begin|>"]
    path = write_headed(tmp_path / "x_train_0.bin", before_each(ids, begin), "<u4", magic=20240801, version=7)
    store, _ = imported("nanogpt", path, end_of_text="<|begin|>", share=0)
    assert store.end_of_text_id == begin
    assert documents_of(store, "train") == [(*document, begin) for document in ids]
    with pytest.raises(ConfigError, match=r"no token '<\|nope\|>'"):
        imported("nanogpt", path, end_of_text="<|nope|>", name="other")


def test_ids_of_four_bytes_where_the_vocabulary_wants_them(tmp_path: Path, imported: Any, documents_of: Any) -> None:
    """Flat files do not say how wide their ids are; the vocabulary does."""
    vocabulary = _large_vocabulary(tmp_path / "large.json")
    write_flat(tmp_path / "train.bin", [70_000, 5, 0, 69_999, 0], "<u4")
    store, _ = imported("nanogpt", tmp_path / "train.bin", tokenizer=vocabulary, share=0)
    assert store.manifest["dtype"] == "uint32"
    assert documents_of(store, "train") == [(70_000, 5, 0), (69_999, 0)]


@pytest.mark.usefixtures("blocks")
def test_ids_of_four_bytes_are_not_taken_for_two(
    tmp_path: Path, ids: Any, ended: Any, imported: Any, documents_of: Any
) -> None:
    """Ids of the vocabulary fit two bytes, and as such these would be a 0, the end of a document, behind each."""
    path = write_flat(tmp_path / "train.bin", after_each(ids), "<u4")
    for named in (path, tmp_path):
        with pytest.raises(DataError, match="the ids seem to be uint32") as caught:
            imported("nanogpt", named)
        assert caught.value.where == str(path) and "--dtype uint32" in str(caught.value.fix)
    store, _ = imported("nanogpt", path, share=0, dtype="uint32")
    assert store.manifest["dtype"] == "uint16" and documents_of(store, "train") == ended


def test_every_second_token_may_be_the_end(tmp_path: Path, imported: Any) -> None:
    """When somebody says so, however few they are; and no file of an odd number of them has four bytes each."""
    documents = [[number + 1] for number in range(40)]
    odd, empty = [*after_each(documents), 7], [0] * 601 + after_each([[5, 6]])
    for number, tokens in enumerate((odd, empty)):
        store, _ = imported("nanogpt", write_flat(tmp_path / f"{number}.bin", tokens), share=0, name=f"store{number}")
        assert store.tokens("train") == [82, 3][number]
    for count in (1, 20, 40):
        pairs = write_flat(tmp_path / f"pairs{count}.bin", after_each(documents[:count]))
        with pytest.raises(DataError, match="seem to be uint32"):
            imported("nanogpt", pairs, name=f"other{count}")
        store, _ = imported("nanogpt", pairs, share=0, dtype="uint16", name=f"other{count}")
        assert store.tokens("train") == 2 * count


@pytest.mark.parametrize(("kind", "dtype"), [("megatron", "uint16"), ("datatrove", "uint32"), ("nanogpt", "int8")])
def test_a_type_that_has_no_meaning_is_refused(tmp_path: Path, vocabulary: Path, kind: str, dtype: str) -> None:
    with pytest.raises(ConfigError, match="ids") as caught:
        plan_import(kind, [str(tmp_path)], tokenizer=vocabulary, dtype=dtype)
    assert caught.value.where == "--dtype"


def _large_vocabulary(path: Path) -> Path:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    backend = Backend(models.WordLevel({"<|endoftext|>": 0, **{f"w{n}": n for n in range(1, 70_001)}}, "w1"))
    backend.save(str(path))
    return path


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.write_bytes(b"\1\0\2"), "not a whole number of uint16 ids"),
        (lambda path: write_headed(path, [1, 2, 3], count=5), "its header says 1,034 \\(5 tokens\\)"),
        (lambda path: write_headed(path, [1, 2, 3], version=2), "the header has version 2"),
        (lambda path: write_headed(path, [1, 2, 3], magic=20240522), "evaluation data"),
        (lambda path: write_flat(path, [1, 2, 3, 1000, 0]), "token 3 of the file is 1,000"),
        (lambda path: path.write_bytes(b""), "hold no tokens"),
        (lambda path: path.mkdir(), "no \\*.bin file"),
        (lambda path: None, "No such file"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, imported: Any, make: Any, said: str) -> None:
    make(tmp_path / "train.bin")
    with pytest.raises(DataError, match=said) as caught:
        imported("nanogpt", tmp_path / "train.bin")
    assert "train.bin" in str(caught.value)
    assert not (tmp_path / "store").exists()


def test_an_id_is_found_behind_the_header(tmp_path: Path, imported: Any) -> None:
    write_headed(tmp_path / "train.bin", [1, 2, 1000])
    with pytest.raises(DataError, match=r"train\.bin, byte 1,028"):
        imported("nanogpt", tmp_path / "train.bin")


def test_only_validation_files(tmp_path: Path, ids: Any, vocabulary: Path) -> None:
    write_flat(tmp_path / "val.bin", ids[0])
    with pytest.raises(ConfigError, match="by its name this file is for validation"):
        plan_import("nanogpt", [str(tmp_path / "val.bin")], tokenizer=vocabulary)


@pytest.mark.parametrize("name", ["interval.bin", "values_0.bin", "medieval-train.bin", "trainval2.bin"])
def test_names_that_only_look_like_validation(tmp_path: Path, ids: Any, imported: Any, name: str) -> None:
    store, _ = imported("nanogpt", write_flat(tmp_path / name, after_each(ids[:2])), share=0)
    assert store.splits == ["train"]


def test_named_twice(tmp_path: Path, ids: Any, vocabulary: Path) -> None:
    path = write_flat(tmp_path / "train.bin", ids[0])
    with pytest.raises(ConfigError, match="named twice"):
        plan_import("nanogpt", [str(path), str(tmp_path / "." / "train.bin")], tokenizer=vocabulary)
