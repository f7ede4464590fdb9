"""datatrove's tokenized files, written from their layout and, where it is installed, by datatrove itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.core.errors import ConfigError, DataError
from headway.text.importing.store import plan_import


def write_ds(
    path: Path,
    documents: Sequence[Sequence[int]],
    dtype: str = "<u2",
    index: bool = True,
    tokenizer: str | None = "gpt2",
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    flat = np.array([token for document in documents for token in document], dtype=dtype)
    path.write_bytes(flat.tobytes())
    if index:
        path.with_name(path.name + ".index").write_bytes(np.cumsum([*map(len, documents)]).astype("<u8").tobytes())
    if tokenizer is not None:
        about = f"{tokenizer}|{flat.dtype.itemsize}\n{len(flat)}\n{len(flat)} T"
        path.with_name(path.name + ".metadata").write_text(about)
    return path


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("metadata", [False, True])
def test_documents_come_token_by_token(
    tmp_path: Path, ids: Any, ended: Any, imported: Any, documents_of: Any, dtype: str, eos: bool, metadata: bool
) -> None:
    documents = ended if eos else ids
    write_ds(tmp_path / "x.ds", documents, dtype, tokenizer="gpt2" if metadata else None)
    store, report = imported("datatrove", tmp_path / "x.ds", share=0)
    assert documents_of(store, "train") == ended
    assert store.manifest["dtype"] == "uint16"
    assert report.ended_documents == (0 if eos else len(ids))


def test_without_an_index_the_token_tells(
    tmp_path: Path, ids: Any, ended: Any, imported: Any, documents_of: Any
) -> None:
    write_ds(tmp_path / "x.ds", ended, index=False, tokenizer=None)
    store, _ = imported("datatrove", tmp_path / "x.ds", share=0)
    assert documents_of(store, "train") == ended


def test_ids_of_four_bytes_are_not_taken_for_two_where_no_file_tells_their_width(
    tmp_path: Path, ids: Any, imported: Any
) -> None:
    write_ds(tmp_path / "x.ds", ids[:1], "<u4", index=False, tokenizer=None)
    with pytest.raises(DataError, match="the ids seem to be uint32") as caught:
        imported("datatrove", tmp_path / "x.ds")
    assert ".ds.metadata" in str(caught.value.fix)


def test_a_folder_is_one_source(tmp_path: Path, ids: Any, ended: Any, imported: Any, documents_of: Any) -> None:
    for number in range(4):
        write_ds(tmp_path / "fineweb" / str(number // 2) / f"{number:05d}.ds", ids[number * 10 : number * 10 + 10])
    store, report = imported("datatrove", tmp_path / "fineweb", share=0)
    assert store.sources("train") == ["fineweb"]
    assert documents_of(store, "train") == ended
    assert report.files == 4


def test_the_tokenizer_that_the_files_name(
    tmp_path: Path, ids: Any, vocabulary: Path, imported: Any, documents_of: Any
) -> None:
    write_ds(tmp_path / "x.ds", ids, tokenizer=str(vocabulary))
    store, _ = imported("datatrove", tmp_path / "x.ds", tokenizer=None)
    assert (store.tokenizer_folder / "tokenizer.json").read_bytes() == vocabulary.read_bytes()


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["gpt2"], "name 'gpt2', which is not on this machine"),
        (["gpt2", "llama"], "name 'gpt2' and 'llama'"),
        (["Unknown Tokenizer|2"], "do not name one"),
        ([None], "do not name one"),
    ],
)
def test_without_a_tokenizer_it_is_refused(tmp_path: Path, ids: Any, names: list[str | None], said: str) -> None:
    for number, name in enumerate(names):
        write_ds(tmp_path / "d" / f"{number}.ds", [ids[number]], tokenizer=name)
    with pytest.raises(ConfigError, match=said):
        plan_import("datatrove", [str(tmp_path / "d")])


@pytest.mark.parametrize(
    ("ending", "change", "said"),
    [
        ("", lambda data: data[:-2], "x.ds.index says"),
        ("", lambda data: data[:-1], "tokens of 2 bytes"),
        ("", lambda data: data + b"\0\0", "x.ds.index says"),
        (".index", lambda data: data[:-8], "x.ds.index says"),
        (".index", lambda data: data[:-3], "not a multiple of 8"),
        (".index", lambda data: data[8:16] + data[:8] + data[16:], "not in order"),
        (".metadata", lambda data: b"", "its lines are not"),
        (".metadata", lambda data: b"gpt2|2\n5\n", "x.ds.metadata says 5"),
        (".metadata", lambda data: b"gpt2|3\n5\n", "neither 2 nor 4"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, ids: Any, imported: Any, ending: str, change: Any, said: str) -> None:
    write_ds(tmp_path / "x.ds", ids)
    path = tmp_path / f"x.ds{ending}"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=said):
        imported("datatrove", tmp_path / "x.ds")
    assert not (tmp_path / "store").exists()


def test_marks_for_the_loss_are_missed_aloud(tmp_path: Path, ids: Any, imported: Any, capsys: Any) -> None:
    write_ds(tmp_path / "x.ds", ids)
    (tmp_path / "x.ds.loss").write_bytes(bytes(10))
    imported("datatrove", tmp_path / "x.ds")
    assert "x.ds.loss) is not imported" in capsys.readouterr().err


@pytest.mark.parametrize("eos", [None, "<|endoftext|>"])
def test_as_datatrove_reads_them(
    tmp_path: Path, texts: list[str], ended: Any, vocabulary: Path, imported: Any, documents_of: Any, eos: str | None
) -> None:
    """Written and read back by datatrove itself, shuffled and cut into files as it does."""
    tokens = pytest.importorskip("datatrove.pipeline.tokens", reason="datatrove is not installed")
    from datatrove.data import Document
    from datatrove.utils.dataset import DatatroveFolderDataset

    writer = tokens.DocumentTokenizer(
        str(tmp_path / "ds"), str(vocabulary), eos_token=eos, seed=1, max_tokens_per_file=100_000
    )
    writer.run([Document(text=text, id=str(number)) for number, text in enumerate(texts)], 0, 1)
    store, report = imported("datatrove", tmp_path / "ds", tokenizer=None, share=0)
    assert report.files > 1
    assert Counter(documents_of(store, "train")) == Counter(ended)
    if eos:
        # Rows of one token and the next, end to end: all of a file's tokens but perhaps the last.
        theirs = DatatroveFolderDataset(str(tmp_path / "ds"), 1, filename_pattern="*.ds", token_size=2)
        flat = store.read("train", "ds", 0, store.tokens("train", "ds"))
        sizes = [path.stat().st_size // 2 for path in sorted((tmp_path / "ds").glob("*.ds"))]
        starts = np.cumsum([0, *sizes])
        expected = np.concatenate(
            [flat[start : start + size // 2 * 2] for start, size in zip(starts, sizes, strict=False)]
        )
        found = np.concatenate([theirs[number]["input_ids"].numpy() for number in range(len(theirs))])
        assert np.array_equal(found, expected)
