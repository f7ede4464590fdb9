"""Megatron's indexed datasets, written from their layout and, where it is installed, by Megatron itself."""

from __future__ import annotations

import resource
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from headway.core.errors import ConfigError, DataError
from headway.text.cli.importing import _print_next
from headway.text.importing.store import plan_import

CODES = {"u1": 1, "<i2": 3, "<i4": 4, "<i8": 5, "<u2": 8}


def write_indexed(
    prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "<i4", **changed: Any
) -> Path:
    """Documents of sequences in the documented layout; `changed` replaces parts of the index."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], dtype="<i4")
    width = np.dtype(dtype).itemsize
    pointers = np.concatenate([[0], np.cumsum(lengths.astype("<i8"))[:-1]]) * width if len(lengths) else np.empty(0)
    bounds = np.cumsum([0, *map(len, documents)])
    parts = {
        "magic": b"MMIDIDX\x00\x00",
        "version": struct.pack("<Q", 1),
        "code": struct.pack("<B", CODES[dtype]),
        "counts": struct.pack("<QQ", len(lengths), len(bounds)),
        "lengths": lengths.tobytes(),
        "pointers": pointers.astype("<i8").tobytes(),
        "bounds": bounds.astype("<i8").tobytes(),
        "modes": b"",
    }
    prefix.with_name(prefix.name + ".idx").write_bytes(b"".join({**parts, **changed}.values()))
    flat = np.array([token for sequence in sequences for token in sequence], dtype=dtype)
    prefix.with_name(prefix.name + ".bin").write_bytes(flat.tobytes())
    return prefix


def in_thirds(document: Sequence[int]) -> list[Sequence[int]]:
    """A document as three sequences, like sentences."""
    third = len(document) // 3
    return [document[:third], document[third : 2 * third], document[2 * third :]]


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dtype", ["<i2", "<i4", "<i8", "<u2"])
@pytest.mark.parametrize("sentences", [False, True])
@pytest.mark.parametrize("append_eod", [False, True])
def test_documents_come_token_by_token(
    tmp_path: Path,
    ids: Any,
    ended: Any,
    imported: Any,
    documents_of: Any,
    dtype: str,
    sentences: bool,
    append_eod: bool,
) -> None:
    whole = [[*document, 0] if append_eod else document for document in ids]
    write_indexed(tmp_path / "web_text_document", [in_thirds(d) if sentences else [d] for d in whole], dtype)
    store, report = imported("megatron", tmp_path / "web_text_document", share=0)
    assert documents_of(store, "train") == ended
    assert store.splits == ["train"] and store.sources("train") == ["web"]
    assert store.manifest["dtype"] == "uint16"  # narrowed where it was wider
    assert (report.documents, report.tokens) == (len(ended), sum(map(len, ended)))
    assert report.ended_documents == (0 if append_eod else len(ended))


def test_what_holds_out_documents_is_their_ids(
    tmp_path: Path, ids: Any, ended: Any, imported: Any, documents_of: Any
) -> None:
    """Not the type of the ids, nor who ended the documents, nor their order."""
    write_indexed(tmp_path / "a", [[document] for document in ids], "<u2")
    write_indexed(tmp_path / "b", [[[*document, 0]] for document in reversed(ids)], "<i8")
    stores = [imported("megatron", tmp_path / name, name=f"store-{name}", share=0.3)[0] for name in "ab"]
    splits = [[Counter(documents_of(store, split)) for split in ("train", "validation")] for store in stores]
    assert splits[0] == splits[1]
    assert splits[0][0] + splits[0][1] == Counter(ended)
    assert 3 <= splits[0][1].total() <= 24  # of 40
    assert "uint32" in stores[0].manifest["split"]["rule"]


def test_a_small_corpus_gets_a_validation_document(tmp_path: Path, ids: Any, imported: Any, documents_of: Any) -> None:
    write_indexed(tmp_path / "two", [[ids[0]], [ids[1]]])
    store, report = imported("megatron", tmp_path / "two")
    assert report.validation_documents == 1 and len(documents_of(store, "train")) == 1


def test_a_blend_becomes_sources_with_weights(tmp_path: Path, ids: Any, imported: Any, documents_of: Any) -> None:
    write_indexed(tmp_path / "web_text_document", [[document] for document in ids[:20]])
    write_indexed(tmp_path / "code_text_sentence", [in_thirds(document) for document in ids[20:]], "<u2")
    arguments = ["0.3", tmp_path / "web_text_document", "0.7", tmp_path / "code_text_sentence.idx"]
    store, report = imported("megatron", *arguments, share=0)
    assert store.sources("train") == ["web", "code"]
    assert report.weights == {"web": 0.3, "code": 0.7}
    assert documents_of(store, "train", "web") == [(*d, 0) for d in ids[:20]]
    assert documents_of(store, "train", "code") == [(*d, 0) for d in ids[20:]]


def test_the_printed_config_has_names_and_weights_as_they_are(
    tmp_path: Path, ids: Any, imported: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {"2024": 0.123456789, "web": 0.7}
    for name in weights:
        write_indexed(tmp_path / f"{name}_text_document", [[ids[3]]])
    blend = [part for name, weight in weights.items() for part in (str(weight), tmp_path / f"{name}_text_document")]
    _print_next(imported("megatron", *blend)[1])
    said = yaml.safe_load(capsys.readouterr().out.partition("\n\n")[2])
    assert {source["name"]: source["weight"] for source in said["data"]["sources"]} == weights


@pytest.mark.parametrize("weight", ["0", "nan", "-0.5", "inf"])
def test_a_weight_that_no_config_takes_is_refused(tmp_path: Path, ids: Any, imported: Any, weight: str) -> None:
    write_indexed(tmp_path / "web_text_document", [[ids[3]]])
    with pytest.raises(ConfigError, match="is not above 0"):
        imported("megatron", weight, tmp_path / "web_text_document")


def test_a_part_without_sequences_is_part_of_a_folder(tmp_path: Path, ids: Any, imported: Any) -> None:
    (tmp_path / "data").mkdir()
    write_indexed(tmp_path / "data" / "a_document", [[ids[3]]])
    write_indexed(tmp_path / "data" / "b_document", [])
    assert imported("megatron", tmp_path / "data")[0].sources("train") == ["a"]


def test_many_files_are_not_all_open_at_a_time(tmp_path: Path, ids: Any, imported: Any) -> None:
    (tmp_path / "data").mkdir()
    for number in range(60):
        write_indexed(tmp_path / "data" / f"{number}_document", [[ids[3]]])
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 40, before[1]))
    try:
        assert len(imported("megatron", tmp_path / "data")[0].sources("train")) == 60
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("kind", ["megatron", "nanogpt", "datatrove"])
def test_the_folder_of_nobody_is_refused(imported: Any, kind: str) -> None:
    with pytest.raises(ConfigError, match="has no meaning here"):
        imported(kind, "~nobodyofthatname/data")


def test_a_folder_and_names(tmp_path: Path, ids: Any, imported: Any) -> None:
    (tmp_path / "data").mkdir()
    for name in ("b_document", "a_document"):
        write_indexed(tmp_path / "data" / name, [[ids[3]]])
    assert imported("megatron", tmp_path / "data", name="s1")[0].sources("train") == ["a", "b"]
    assert imported("megatron", tmp_path / "data", name="s2", names=["all"])[0].sources("train") == ["all"]
    assert imported("megatron", tmp_path / "data", name="s3", names=["x", "y"])[0].sources("train") == ["x", "y"]
    with pytest.raises(ConfigError, match="3 names for 2 sources"):
        imported("megatron", tmp_path / "data", names=["x", "y", "z"])


def test_validation_files(tmp_path: Path, ids: Any, imported: Any, documents_of: Any) -> None:
    write_indexed(tmp_path / "train_document", [[document] for document in ids[:30]])
    write_indexed(tmp_path / "held_document", [[document] for document in ids[30:]])
    store, _ = imported("megatron", tmp_path / "train_document", validation=[str(tmp_path / "held_document")])
    assert documents_of(store, "train") == [(*d, 0) for d in ids[:30]]
    assert documents_of(store, "validation") == [(*d, 0) for d in ids[30:]]
    with pytest.raises(ConfigError, match="there are validation files"):
        imported(
            "megatron", tmp_path / "train_document", validation=[str(tmp_path / "held_document")], share=0.1, name="no"
        )


def test_empty_documents_are_counted(tmp_path: Path, ids: Any, imported: Any, documents_of: Any) -> None:
    write_indexed(tmp_path / "some", [[ids[0]], [], [[0]], [[]], [ids[1]], []])
    store, report = imported("megatron", tmp_path / "some", share=0)
    assert documents_of(store, "train") == [(*ids[0], 0), (*ids[1], 0)]
    assert report.empty_documents == 4


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(("bad", "dtype"), [(1000, "<u2"), (-1, "<i4"), (2**31 + 5, "<i8")])
def test_an_id_out_of_range_names_its_place(
    tmp_path: Path, ids: Any, vocabulary: Path, imported: Any, bad: int, dtype: str
) -> None:
    documents = [list(document) for document in ids]
    place = sum(map(len, documents[:7])) + 11
    documents[7][11] = bad
    write_indexed(tmp_path / "data", [[document] for document in documents], dtype)
    with pytest.raises(DataError) as caught:
        imported("megatron", tmp_path / "data")
    assert f"token {place:,} of the file is {bad:,}, but the vocabulary ends at 999" in str(caught.value)
    assert f"data.bin, byte {place * np.dtype(dtype).itemsize:,}" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda index, data: index.write_bytes(index.read_bytes()[:-1]), "data.idx"),
        (lambda index, data: index.write_bytes(index.read_bytes()[:20]), "too few for a header"),
        (lambda index, data: index.write_bytes(b""), "not a Megatron index"),
        (lambda index, data: index.write_bytes(b"PK\3\4" + index.read_bytes()), "not a Megatron index"),
        (lambda index, data: data.write_bytes(data.read_bytes()[:-4]), "data.bin"),
        (lambda index, data: data.write_bytes(data.read_bytes() + b"\0"), "its index says"),
        (lambda index, data: data.unlink(), "cannot be read: No such file"),
        (lambda index, data: index.unlink(), "cannot be read: No such file"),
    ],
)
def test_cut_and_damaged_files_are_named(
    tmp_path: Path, ids: Any, imported: Any, change: Callable[[Path, Path], Any], said: str
) -> None:
    write_indexed(tmp_path / "data", [[document] for document in ids])
    change(tmp_path / "data.idx", tmp_path / "data.bin")
    with pytest.raises(DataError, match=said):
        imported("megatron", tmp_path / "data")


@pytest.mark.parametrize(
    ("part", "content", "said"),
    [
        ("version", struct.pack("<Q", 2), "has version 2"),
        ("code", struct.pack("<B", 7), "numbers of type 7, not token ids"),
        ("bounds", np.array([0, 2, 1, 3], dtype="<i8").tobytes(), "documents are not in order"),
        ("bounds", np.array([1, 1, 2, 3], dtype="<i8").tobytes(), "documents are not in order"),
        ("bounds", np.array([0, 1, 2, 2], dtype="<i8").tobytes(), "end at sequence 2 of 3"),
        ("pointers", np.array([0, 4, 12], dtype="<i8").tobytes(), "sequence 2 does not begin where"),
        ("lengths", np.array([3, -3, 3], dtype="<i4").tobytes(), "sequence 1 does not begin where"),
        ("modes", b"\0\1\0", "multimodal"),
    ],
)
def test_an_index_that_contradicts_itself(tmp_path: Path, imported: Any, part: str, content: bytes, said: str) -> None:
    if part == "pointers":
        prefix = write_indexed(tmp_path / "data", [[[5]], [[6]], [[7]]], **{part: content})
        (tmp_path / "data.bin").write_bytes(bytes(16))
    else:
        prefix = write_indexed(tmp_path / "data", [[[5, 6, 7]], [[5, 6, 7]], [[5, 6, 7]]], **{part: content})
    with pytest.raises(DataError, match=said):
        imported("megatron", prefix)


def test_a_vocabulary_too_large_for_the_files(tmp_path: Path, ids: Any, vocabulary: Path) -> None:
    write_indexed(tmp_path / "data", [[[1, 2, 3]]], "u1")
    with pytest.raises(DataError, match="written with a smaller vocabulary: uint8"):
        plan_import("megatron", [str(tmp_path / "data")], tokenizer=vocabulary)


def test_without_a_tokenizer_it_is_refused(tmp_path: Path, ids: Any) -> None:
    write_indexed(tmp_path / "data", [[ids[0]]])
    with pytest.raises(ConfigError, match="do not name the tokenizer"):
        plan_import("megatron", [str(tmp_path / "data")])


@pytest.mark.parametrize("multiple", [False, True])
def test_as_megatron_reads_them(tmp_path: Path, ids: Any, imported: Any, documents_of: Any, multiple: bool) -> None:
    """Written and read back by Megatron's own classes."""
    indexed = pytest.importorskip(
        "megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed (pip install --no-deps)"
    )
    import torch

    prefix = str(tmp_path / "theirs_document")
    builder = indexed.IndexedDatasetBuilder(prefix + ".bin", dtype=indexed.DType.optimal_dtype(1000))
    for document in ids:
        if multiple:
            builder.add_document(torch.tensor(document), [len(part) for part in in_thirds(document)])
        else:
            builder.add_item(torch.tensor([*document, 0]))
            builder.end_document()
    builder.finalize(prefix + ".idx")
    store, _ = imported("megatron", prefix, share=0)
    theirs = indexed.IndexedDataset(prefix)
    bounds = theirs.document_indices.tolist()
    expected = [
        tuple(np.concatenate([theirs[number] for number in range(start, end)]).tolist())
        for start, end in pairwise(bounds)
    ]
    assert documents_of(store, "train") == [d if d[-1] == 0 else (*d, 0) for d in expected]
