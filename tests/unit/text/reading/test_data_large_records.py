"""Records that are larger than `data.max_document_bytes`: named with their size, passed over, and never held whole."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import DataError
from headway.text.reading import csv_rows, json_lines, sources
from headway.text.reading.csv_rows import _careful_rows, _quick_rows
from headway.text.reading.documents import BadDocument
from headway.text.reading.readers import read_batches
from headway.text.reading.sources import pieces_of
from support.sources import find, read

MOST = 1000
LARGE = "large " * 500  # 3,000 bytes
TEXTS = ["first", LARGE, "x" * 900, "ü" * 600, "last"]  # the fourth has 1,200 bytes in 600 characters
SMALL = [text for text in TEXTS if len(text.encode()) < 950]


def write_jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS), "utf-8")


def write_csv(path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("id", "text"), *((1, text) for text in TEXTS)])


def write_table(kind: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        types = {
            "large": arrow.large_string(),
            "dictionary": arrow.dictionary(arrow.int16(), arrow.string()),
            "view": arrow.string_view(),
        }
        column = arrow.array(TEXTS)
        column = column.dictionary_encode() if kind == "dictionary" else column.cast(types.get(kind, arrow.string()))
        table = arrow.table({"text": column})
        if path.suffix == ".parquet":
            parquet.write_table(table, path)
        else:
            writer = arrow.ipc.new_file if path.suffix == ".feather" else arrow.ipc.new_stream
            with writer(path, table.schema) as out:
                out.write_table(table)

    return write


KINDS: dict[str, Callable[[Path], None]] = {
    "a.jsonl": write_jsonl,
    "a.csv": write_csv,
    "a.parquet": write_table(""),
    "dictionary.parquet": write_table("dictionary"),
    "a.arrow": write_table(""),
    "large.arrow": write_table("large"),
    "view.arrow": write_table("view"),
    "dictionary.arrow": write_table("dictionary"),
    "dictionary.feather": write_table("dictionary"),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("most", [MOST, 2000, 10**6])
def test_a_record_that_is_too_large_is_named_and_the_others_are_read(tmp_path: Path, name: str, most: int) -> None:
    KINDS[name](tmp_path / name)
    found = read(tmp_path / name, most=most)
    wanted = [text for text in TEXTS if len(text.encode()) <= most - 100]
    assert found.texts == wanted
    assert len(found.bad) == len(TEXTS) - len(wanted)
    for document in found.bad:
        assert document.too_large and not document.rest
        assert "data.max_document_bytes is" in document.reason
    if most == MOST:
        first = found.bad[0]
        number = 2 + (name == "a.csv")
        assert first.where in (f"{tmp_path}/{name}:{number}", f"{tmp_path}/{name}:row {number}")
        assert "has 2.9 KiB, and data.max_document_bytes is 1000 B" in first.reason
        assert first.error().fix == "raise data.max_document_bytes, or set data.bad_documents: skip"


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_the_limit_is_exact(tmp_path: Path, name: str) -> None:
    KINDS[name](tmp_path / name)
    lines = (tmp_path / name).read_bytes().splitlines()
    size = len(lines[-2])
    at, below = (read(tmp_path / name, most=most) for most in (size, size - 1))
    assert (TEXTS[3] in at.texts, TEXTS[3] in below.texts) == (True, False)
    assert f"has {size:,} bytes, and" in below.bad[-1].reason


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
@pytest.mark.parametrize("ending", ["gz", "bz2", "xz", "zst"])
def test_what_unpacks_to_a_record_without_end_takes_little_memory(tmp_path: Path, name: str, ending: str) -> None:
    """24 MB in one record between two others, out of a file of some kilobytes."""
    long = "x" * (24 * 10**6)
    if name == "a.jsonl":
        content = b'{"text": "first"}\n{"text": "%s"}\n{"text": "last"}\n' % long.encode()
    else:
        content = b'text\nfirst\n"%s\n""quoted"", and more"\nlast\n' % long.encode()
    zstd = pytest.importorskip("zstandard").ZstdCompressor().compress
    methods: dict[str, Any] = {
        "gz": lambda data: gzip.compress(data, 1),
        "bz2": lambda data: bz2.compress(data, 1),
        "xz": lambda data: lzma.compress(data, preset=0),
    }
    path = tmp_path / f"{name}.{ending}"
    path.write_bytes(methods.get(ending, zstd)(content))
    size = len(content)
    del content, long
    (piece,) = pieces_of(find(path, most=2**18))
    tracemalloc.start()
    try:
        batches = list(read_batches(piece))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [text for batch in batches for text in batch.texts] == ["first", "last"]
    (bad,) = [document for batch in batches for document in batch.bad]
    # Whoever stops at the first malformed document does not read on to the end of one that may have none.
    assert re.search(r"has more than [45]\.. MiB, and data.max_document_bytes is 256.0 KiB$", bad.reason)
    assert bad.too_large and peak < 16e6 < size


@pytest.mark.parametrize("piece_bytes", [7, 100, 10**6])
@pytest.mark.parametrize("block", [50, 300, 2**20])
def test_lines_behind_a_large_one_keep_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int, block: int
) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(json_lines, "BLOCK", block)
    monkeypatch.setattr(json_lines, "_TAIL", block)
    lines = [
        '{"text": "a"}',
        "x" * 150,
        '{"text": "b"}',
        "y" * 5000,
        "{}",
        '{"text": "c"}',
        "z" * 3000,
        '{"text": "d"}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    found = read(tmp_path / "a.jsonl", most=100)
    assert found.texts == ["a", "b", "c", "d"]
    assert [document.where.rpartition(":")[2] for document in found.bad] == ["2", "4", "5", "7"]
    assert [document.too_large for document in found.bad] == [True, True, False, True]


@given(st.text(alphabet='a,"\r\nö\ufeff', max_size=40), st.integers(3, 9))
@settings(max_examples=300, deadline=None)
def test_csv_rows_are_found_as_python_finds_them(text: str, block: int) -> None:
    def python() -> Any:
        reader = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
        for values in reader:
            yield values, reader.line_num

    data = text.encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_rows, "_BLOCK", block)
        for method in (_quick_rows, _careful_rows):
            taken: list[Any] = []
            expected: list[Any] = []
            for found, into in ((method(io.BufferedReader(io.BytesIO(data)), 10**6, ","), taken), (python(), expected)):  # type: ignore[arg-type]
                try:
                    for row in found:
                        into.append(row)
                except csv.Error:
                    into.append("malformed")
            assert taken == expected


def test_csv_rows_of_many_sizes_are_read_as_without_a_limit(tmp_path: Path) -> None:
    texts = [f'{number}: "quoted, text"\n' * (number * 37 % 101) for number in range(300)]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text", "id"), *((text, 1) for text in texts)])
    rows = {}
    for number, text in enumerate(texts):
        out = io.StringIO()
        csv.writer(out).writerow((text, 1))
        rows[number] = len(out.getvalue().encode()) - 2
    found = read(tmp_path / "a.csv", most=1500)
    assert found.texts == [text for number, text in enumerate(texts) if text and rows[number] <= 1500]
    assert len(found.bad) == sum(size > 1500 for size in rows.values())
    lines = 2
    places = []
    for number, text in enumerate(texts):
        if rows[number] > 1500:
            places.append(f"{tmp_path}/a.csv:{lines}")
        lines += text.count("\n") + 1
    assert [document.where for document in found.bad] == places


def test_a_row_whose_quotes_never_end_is_the_rest_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('text\nfirst\n"' + "never ends\n" * 1000)
    found = read(tmp_path / "a.csv", most=5000)
    assert found.texts == ["first"]
    (bad,) = found.bad
    assert bad.rest and bad.too_large and "10.7 KiB" in bad.reason


def test_names_of_columns_without_end_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text," * 10_000 + "\nx\n")
    with pytest.raises(DataError, match=r"names of the columns have more than 1000 B"):
        read(tmp_path / "a.csv", most=1000)


def test_a_text_file_is_as_large_as_it_is(tmp_path: Path) -> None:
    """It is one document, and its size is there to be seen; packed ones may grow as much as text does."""
    text = "".join(f"line {number} of many\n" for number in range(20_000))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"x" * 10**7))
    found = read(tmp_path, most=1000)
    assert found.texts == [text, text]
    (bad,) = found.bad
    assert bad.where == f"{tmp_path}/c.txt.gz" and bad.too_large
    assert "over 32 times its size and over data.max_document_bytes (1000 B)" in bad.reason
    assert read(tmp_path / "c.txt.gz", most=10**7).texts == ["x" * 10**7]


def test_items_of_a_function_are_records_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large_items.py").write_text(f"def items():\n    yield from {TEXTS!r}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    found = read("python:large_items:items", most=1000)
    assert found.texts == SMALL
    assert [document.where for document in found.bad] == [f"python:large_items:items:item {n}" for n in (2, 4)]
    assert all(isinstance(document, BadDocument) and document.too_large for document in found.bad)


def test_a_value_that_many_rows_share_does_not_fill_memory(tmp_path: Path) -> None:
    """A dictionary has it once; as texts, a thousand rows at once would have it a thousand times."""
    arrow = pytest.importorskip("pyarrow")
    value = "x" * 2**20
    column = arrow.DictionaryArray.from_arrays(arrow.array([0] * 1000, arrow.int32()), arrow.array([value]))
    table = arrow.table({"text": column})
    with arrow.ipc.new_file(tmp_path / "a.feather", table.schema) as out:
        out.write_table(table)
    sizes = [len(batch.texts) for piece in pieces_of(find(tmp_path / "a.feather")) for batch in read_batches(piece)]
    assert sum(sizes) == 1000 and max(sizes) <= 2


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("name", ["a.feather", "a.arrow", "dictionary.feather", "dictionary.arrow"])
def test_a_record_batch_that_unpacks_to_far_too_much_is_passed_over(
    tmp_path: Path, name: str, compression: str
) -> None:
    arrow = pytest.importorskip("pyarrow")
    texts = ["small", "x" * 100_000, "last"]
    table = arrow.table({"text": arrow.array(texts)})
    if name.startswith("dictionary"):
        table = arrow.table({"text": arrow.array(texts).dictionary_encode()})
    writer = arrow.ipc.new_file if name.endswith(".feather") else arrow.ipc.new_stream
    with writer(tmp_path / name, table.schema, options=arrow.ipc.IpcWriteOptions(compression=compression)) as out:
        out.write_table(table, max_chunksize=1)
    assert read(tmp_path / name).texts == texts
    found = read(tmp_path / name, most=5000)
    (bad,) = found.bad
    assert bad.too_large and "unpacks to 97.7 KiB, above 16 times data.max_document_bytes, 78.1 KiB" in bad.reason
    if name.startswith("dictionary"):  # all batches need it
        assert bad.rest and found.texts == []
    else:
        assert bad.where == f"{tmp_path}/{name}:row 2" and found.texts == ["small", "last"]
