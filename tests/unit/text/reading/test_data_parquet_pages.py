"""What the pages of a Parquet file say they unpack to, and what is done where that would fill memory."""

from __future__ import annotations

import io
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from headway.text.reading.documents import TooLargeError
from headway.text.reading.parquet_pages import PageGuard, page_header
from headway.text.reading.readers import read_batches
from headway.text.reading.sources import pieces_of
from support.sources import find, read

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

TEXTS = [f"document {number} " * (1 + number % 50) for number in range(3000)]
CODECS = ["none", "snappy", "gzip", "zstd"]


def pages(path: Path) -> list[tuple[int, int, int]]:
    """Kind, unpacked and packed bytes of every page of a file of one column, and that they lie one behind the other."""
    facts, data, found = parquet.ParquetFile(path).metadata, path.read_bytes(), []
    for number in range(facts.num_row_groups):
        chunk = facts.row_group(number).column(0)
        place = chunk.dictionary_page_offset or chunk.data_page_offset
        end = place + chunk.total_compressed_size
        total = 0
        while place < end:
            header, size = page_header(data, place)
            found.append((header[1], header[2], header[3]))
            total += size + header[2]
            place += size + header[3]
        assert place == end and total == chunk.total_uncompressed_size
    return found


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [True, False])
def test_headers_tell_what_the_footer_tells(tmp_path: Path, codec: str, version: str, dictionary: bool) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(
        arrow.table({"text": TEXTS * 2}),
        path,
        compression=codec,
        data_page_version=version,
        use_dictionary=dictionary,
        row_group_size=4000,
        data_page_size=20_000,
        write_page_checksum=True,
    )
    kinds = [kind for kind, _, _ in pages(path)]
    assert kinds.count(2) == 2 * dictionary and kinds.count(0 if version == "1.0" else 3) > 2
    assert read(path).texts == TEXTS * 2


@pytest.mark.parametrize("size", [1, 7, 100, 5000, 2**20])
def test_the_guard_sees_every_page_however_the_file_is_read(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"text": TEXTS}), path, row_group_size=1000, data_page_size=5000)
    largest = max(unpacked for _, unpacked, _ in pages(path))
    facts = parquet.ParquetFile(path).metadata
    chunks = []
    for number in range(facts.num_row_groups):
        chunk = facts.row_group(number).column(0)
        start = chunk.dictionary_page_offset or chunk.data_page_offset
        chunks.append((start, start + chunk.total_compressed_size))

    def go_through(most: int) -> None:
        guard = PageGuard(io.BytesIO(path.read_bytes()))
        guard.watch(chunks, most, rows=1)
        while guard.read(size):
            pass

    go_through(largest)
    with pytest.raises(TooLargeError):
        go_through(largest - 1)


def test_a_page_that_unpacks_to_far_too_much_ends_its_file(tmp_path: Path) -> None:
    """It could only be passed over with all its rows, of which nobody knows how many are too large."""
    path = tmp_path / "a.parquet"
    with parquet.ParquetWriter(path, arrow.schema([("text", arrow.string())]), use_dictionary=False) as out:
        out.write_table(arrow.table({"text": ["small"]}))
        out.write_table(arrow.table({"text": ["x" * 100_000]}))
    assert [len(text) for text in read(path).texts] == [5, 100_000]
    found = read(path, most=10_000)
    assert found.texts == ["small"] and not found.bad[0].rest  # one row that is too large is passed over
    found = read(path, most=5000)
    (bad,) = found.bad
    # The rows of both row groups were to be decoded at once.
    assert found.texts == [] and bad.rest and bad.too_large and bad.where == f"{path}:row 1"
    assert "unpacks to 97.7 KiB, above 16 times data.max_document_bytes, 78.1 KiB" in bad.reason


def shared(path: Path, how: str, rows: int, size: int) -> None:
    """A file in which all rows have one value, which stands there once."""
    values = {"text": ["x" * size] * rows}
    if how == "dictionary":
        parquet.write_table(arrow.table(values), path)
    else:
        parquet.write_table(
            arrow.table(values), path, use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"}
        )
    assert path.stat().st_size < 100_000


@pytest.mark.parametrize("how", ["dictionary", "delta"])
def test_rows_that_share_a_value_are_decoded_a_few_at_a_time(tmp_path: Path, how: str) -> None:
    path = tmp_path / "a.parquet"
    shared(path, how, rows=1000, size=2**16)
    before = arrow.total_allocated_bytes()
    (piece,) = pieces_of(find(path, most=2**17))
    count, most = 0, 0
    for batch in read_batches(piece):
        count += len(batch.texts)
        most = max(most, arrow.total_allocated_bytes() - before)
    # As texts they are 65 MB, and 16 limits are one.
    assert count == 1000 and most < 4e6


@pytest.mark.parametrize("how", ["dictionary", "delta"])
def test_where_even_few_would_fill_memory_the_file_ends(tmp_path: Path, how: str) -> None:
    path = tmp_path / "a.parquet"
    shared(path, how, rows=100, size=2**16)
    found = read(path, most=3000)
    (bad,) = found.bad
    assert found.texts == [] and bad.rest and bad.too_large
    assert "of the page at byte 4 can have" in bad.reason or "unpacks to" in bad.reason


def test_rows_that_the_footer_promises_and_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"text": TEXTS[:10]}), path)
    real = parquet.ParquetFile.iter_batches

    def fewer(self: Any, **options: Any) -> Any:
        for batch in real(self, **options):
            yield batch.slice(0, 4)

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", fewer)
    found = read(path)
    (bad,) = found.bad
    assert found.texts == TEXTS[:4] and bad.rest and bad.where == f"{path}:row 5"
    assert "there are 4 rows, but the footer says 10" in bad.reason


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"\x15\x00\x15\x01\x15\x02\x00", "has no size"),  # unpacks to -1 byte
        (b"\x15\x00\x15\x02\x15\x01\x00", "has no size"),
        (b"\x15\x00\x15\x02\x00", "has no size"),
        (b"\x1c" * 20, "nested too deeply"),
        (b"\x15" + b"\xff" * 12, "a number without an end"),
        (b"\x19\x15\x00", "an unknown type"),
    ],
)
def test_headers_that_are_none(header: bytes, said: str) -> None:
    guard = PageGuard(io.BytesIO(header + bytes(100)))
    guard.watch([(0, len(header))], 10**6, 1)
    with pytest.raises(ValueError, match=said):
        guard.read()


def test_a_header_without_an_end_does_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.text.reading.parquet_pages._LARGEST_HEADER", 10_000)
    guard = PageGuard(io.BytesIO(b"\x18" + b"\xff" * 7 + b"\x7f" + bytes(10**6)))  # some bytes, and how many they are
    guard.watch([(0, 10**6)], 10**6, 1)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="has no end"):
            while guard.read(1000):
                pass
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
