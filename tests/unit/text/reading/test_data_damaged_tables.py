"""Tables that are not what they say: an offset that leads out of its buffer would end the process."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import DataError
from headway.text.reading import arrow_messages, sources
from headway.text.reading.readers import read_batches
from headway.text.reading.sources import pieces_of
from support.sources import find, read

arrow = pytest.importorskip("pyarrow")

ROWS = 40
TEXTS = [f"document {number} " * (1 + number % 7) for number in range(ROWS)]


def column(kind: str) -> Any:
    """The texts in one of the forms that Arrow has for them."""
    if kind == "dictionary":
        return arrow.array(TEXTS).dictionary_encode()
    if kind == "nested":
        return arrow.array([{"other": [number], "text": text} for number, text in enumerate(TEXTS)])
    types = {"large": arrow.large_string(), "view": arrow.string_view()}
    return arrow.array(TEXTS, types.get(kind, arrow.string()))


def write(path: Path, kind: str, rows_at_a_time: int = 10) -> None:
    """An Arrow file (.feather) or stream (.arrow) of four record batches."""
    table = arrow.table({"text": column(kind), "id": list(range(ROWS))})
    writer = arrow.ipc.new_file if path.suffix == ".feather" else arrow.ipc.new_stream
    with writer(path, table.schema) as out:
        out.write_table(table, max_chunksize=rows_at_a_time)


def place_of(path: Path, kind: str) -> tuple[int, str]:
    """Where in the file the tenth number stands that leads to the text of the third record batch, and its format."""
    part = arrow.chunked_array([column(kind)]).combine_chunks().slice(20, 10)
    data = path.read_bytes()
    if kind == "view":
        views = part.buffers()[1].to_pybytes()[20 * 16 : 30 * 16]
        return data.index(views) + 5 * 16, "<i"  # the length of a view
    if kind == "dictionary":
        indices = part.indices.buffers()[1].to_pybytes()[20 * 4 : 30 * 4]
        return data.index(indices) + 5 * 4, "<i"
    texts = part.field("text") if kind == "nested" else part
    form, width = ("<11q", 8) if kind == "large" else ("<11i", 4)
    offsets = [0]
    for text in texts.to_pylist():
        offsets.append(offsets[-1] + len(text))
    return data.index(struct.pack(form, *offsets)) + 5 * width, form[0] + form[-1]


@pytest.mark.parametrize("name", ["a.feather", "a.arrow"])
@pytest.mark.parametrize("kind", ["plain", "large", "view", "dictionary", "nested"])
@pytest.mark.parametrize("value", [-5, 2_000_000_000, -2_000_000_000])
def test_an_edited_offset_is_a_malformed_batch(tmp_path: Path, name: str, kind: str, value: int) -> None:
    """Read as it was, each of these ended the process with a segmentation fault, or in a traceback."""
    path = tmp_path / name
    write(path, kind)
    place, form = place_of(path, kind)
    data = bytearray(path.read_bytes())
    struct.pack_into(form, data, place, value)
    path.write_bytes(data)
    found = read(path, field="text.text" if kind == "nested" else "text")
    assert found.texts == TEXTS[:20] + TEXTS[30:]
    (bad,) = found.bad
    assert bad.where == f"{path}:row 21" and not bad.rest
    assert "(10 rows) is damaged: " in bad.reason
    if path.suffix == ".feather":
        assert bad.reason.startswith("record batch 2 ")
    else:
        assert bad.reason.startswith("record batch 2 " if kind == "dictionary" else "the record batch at byte ")


def test_a_preparation_says_which_batch_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.feather"
    write(path, "plain")
    place, form = place_of(path, "plain")
    data = bytearray(path.read_bytes())
    struct.pack_into(form, data, place, 10**9)
    path.write_bytes(data)
    error = read(path).bad[0].error()
    assert isinstance(error, DataError) and error.exit_code == 3
    assert error.what.startswith("record batch 2 (10 rows) is damaged: Offset invariant failure")
    assert error.where == f"{path}:row 21"


@pytest.mark.parametrize("name", ["a.feather", "a.arrow"])
def test_rows_behind_a_damaged_batch_keep_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also where each batch is read by itself: what counts the rows before it looks at headers alone."""
    monkeypatch.setattr(sources, "PIECE_BYTES", 1)
    path = tmp_path / name
    write(path, "plain")
    place, form = place_of(path, "plain")
    data = bytearray(path.read_bytes())
    struct.pack_into(form, data, place, -1)
    last = data.rindex(b"document 33 ")
    data[last] = 0xFF  # no UTF-8
    path.write_bytes(data)
    found = read(path)
    assert [bad.where for bad in found.bad] == [f"{path}:row 21", f"{path}:row 34"]
    assert found.texts == TEXTS[:20] + TEXTS[30:33] + TEXTS[34:]


@pytest.mark.parametrize("name", ["a.feather", "a.arrow"])
def test_what_nobody_wants_may_be_damaged(tmp_path: Path, name: str) -> None:
    other = arrow.array([[f"item {number}"] * 3 for number in range(ROWS)])
    table = arrow.table({"meta": arrow.StructArray.from_arrays([other, arrow.array(TEXTS)], ["other", "text"])})
    path = tmp_path / name
    writer = arrow.ipc.new_file if path.suffix == ".feather" else arrow.ipc.new_stream
    with writer(path, table.schema) as out:
        out.write_table(table)
    data = bytearray(path.read_bytes())
    offsets = struct.pack(f"<{ROWS + 1}i", *range(0, 3 * ROWS + 1, 3))
    struct.pack_into("<i", data, data.index(offsets) + 40, 2 * 10**9)
    path.write_bytes(data)
    assert read(path, field="meta.text").texts == TEXTS


def test_headers_tell_what_pyarrow_tells(tmp_path: Path) -> None:
    for name in ("a.feather", "a.arrow"):
        for kind in ("plain", "dictionary"):
            path = tmp_path / name
            write(path, kind, rows_at_a_time=7)
            with path.open("rb") as stream:
                size = path.stat().st_size
                if name == "a.feather":
                    dictionaries, batches = arrow_messages.file_blocks(stream, size)
                    messages = [arrow_messages.message_at(stream, place, size) for place in [*dictionaries, *batches]]
                else:
                    messages = list(arrow_messages.stream_messages(stream, 0, size, size))[1:]
            rows = [message.rows for message in messages if message is not None]
            expected = [7, 7, 7, 7, 7, 5]
            assert rows == ([ROWS, *expected] if kind == "dictionary" else expected)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_headers_tell_what_a_batch_unpacks_to(tmp_path: Path, compression: str) -> None:
    table = arrow.table({"text": TEXTS})
    path = tmp_path / "a.feather"
    with arrow.ipc.new_file(path, table.schema, options=arrow.ipc.IpcWriteOptions(compression=compression)) as out:
        out.write_table(table)
    with path.open("rb") as stream:
        size = path.stat().st_size
        _, (place,) = arrow_messages.file_blocks(stream, size)
        message = arrow_messages.message_at(stream, place, size)
        assert message is not None
        packed = arrow_messages.unpacked_bytes(stream, message)
    assert packed == sum(map(len, TEXTS)) + 4 * (ROWS + 1)


@pytest.mark.parametrize("name", ["a.feather", "a.arrow", "dictionary.feather", "dictionary.arrow", "a.parquet"])
@given(
    edits=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from([1, 4, 8]), st.integers(-(2**31), 2**31)),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=30, deadline=None)
def test_no_edit_ends_in_anything_but_texts_and_what_is_wrong(
    tmp_path_factory: pytest.TempPathFactory, name: str, edits: list[tuple[float, int, int]]
) -> None:
    path = tmp_path_factory.getbasetemp() / f"edited-{name}"
    if name == "a.parquet":
        import pyarrow.parquet as parquet

        parquet.write_table(arrow.table({"text": TEXTS, "id": list(range(ROWS))}), path, row_group_size=10)
    else:
        write(path, name.partition(".")[0] if "dictionary" in name else "plain")
    data = bytearray(path.read_bytes())
    for place, width, value in edits:
        start = int(place * len(data))
        data[start : start + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
    path.write_bytes(data)
    try:
        for piece in pieces_of(find(path)):
            for batch in read_batches(piece):
                assert all(type(text) is str for text in batch.texts)
    except DataError as error:
        assert error.where


class TestSavedDatasets:
    """Folders of `datasets` with an indices mapping, which are read row by row out of mapped files."""

    @pytest.fixture
    def saved(self, tmp_path: Path) -> Path:
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_dict({"text": TEXTS, "id": list(range(ROWS))}).save_to_disk(tmp_path / "saved")
        self.order(tmp_path / "saved", [3, 1, 39])
        return tmp_path / "saved"

    def order(self, saved: Path, rows: list[int]) -> None:
        table = arrow.table({"indices": arrow.array(rows, arrow.int64())})
        with arrow.ipc.new_stream(saved / "indices.arrow", table.schema) as out:
            out.write_table(table)
        state = json.loads((saved / "state.json").read_text())
        state["_indices_data_files"] = [{"filename": "indices.arrow"}]
        (saved / "state.json").write_text(json.dumps(state))

    def test_rows_in_the_order_of_the_mapping(self, saved: Path) -> None:
        assert read(saved).texts == [TEXTS[3], TEXTS[1], TEXTS[39]]
        assert read(saved, template="{id}: {text}").texts[0] == f"3: {TEXTS[3]}"

    @pytest.mark.parametrize("row", [-1, ROWS, 2**62])
    def test_a_row_that_is_not_there(self, saved: Path, row: int) -> None:
        self.order(saved, [0, row])
        with pytest.raises(DataError, match=f"the indices mapping names row {row} of {ROWS}") as caught:
            read(saved)
        assert caught.value.where == str(saved / "indices.arrow")

    @pytest.mark.parametrize("value", [-5, 2_000_000_000])
    def test_an_edited_offset(self, saved: Path, value: int) -> None:
        (file,) = saved.glob("data-*.arrow")
        offsets = [0]
        for text in TEXTS:
            offsets.append(offsets[-1] + len(text))
        data = bytearray(file.read_bytes())
        struct.pack_into("<i", data, data.index(struct.pack(f"<{ROWS + 1}i", *offsets)) + 40, value)
        file.write_bytes(data)
        with pytest.raises(
            DataError, match="record batch 0 of the dataset's file is damaged: Offset invariant"
        ) as caught:
            read(saved)
        assert caught.value.where == str(file)

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("state.json", '{"_data_files": [3]}'),
            ("state.json", '{"_data_files": [{"filename": null}]}'),
            ("state.json", "[" * 10_000),
            ("state.json", '{"_data_files": [], "_data_files": []}'),
            ("dataset_dict.json", '{"splits": 3}'),
            ("dataset_dict.json", '{"splits": [{}]}'),
        ],
    )
    def test_a_description_that_is_none(self, saved: Path, name: str, content: str) -> None:
        (saved / name).write_text(content)
        with pytest.raises(DataError, match="not a dataset's description"):
            read(saved)


def test_maps_of_the_cache_are_checked_before_they_are_read(tmp_path: Path) -> None:
    """What `datasets` reads row by row, a part of a split for one, it reads out of mapped files without a look."""
    datasets = pytest.importorskip("datasets")
    from headway.text.reading.huggingface_datasets import _check_maps

    table = arrow.table({"text": TEXTS})
    path = tmp_path / "cache.arrow"
    with arrow.ipc.new_stream(path, table.schema) as out:
        out.write_table(table, max_chunksize=10)
    _check_maps(datasets.Dataset.from_file(str(path)))
    data = bytearray(path.read_bytes())
    place, form = place_of(path, "plain")
    struct.pack_into(form, data, place, 10**9)
    path.write_bytes(data)
    with pytest.raises(ValueError, match="record batch 2 of it is damaged: Offset invariant failure"):
        _check_maps(datasets.Dataset.from_file(str(path)))
