"""Reading files: every format, in any pieces, and what is wrong with them."""

from __future__ import annotations

import bz2
import csv
import errno
import gzip
import io
import json
import lzma
import pickle
import re
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.core.errors import ConfigError, DataError
from headway.text.reading import json_lines, sources
from headway.text.reading.readers import read_batches
from headway.text.reading.sources import pieces_of
from support.sources import find, read

TEXTS = ["plain", 'two\nlines, a "quote" and a\ttab', "Grüße 🎉 𝔘𝔫𝔦", " spaces \r\n"]
LINES = ["jsonl", "csv"]
COMPRESSED = ["gz", "zst", "bz2", "xz"]


def write_as(path: Path, texts: list[str]) -> None:
    """Write texts in the format that the file's ending names."""
    kind = path.suffixes[0]
    if kind in (".parquet", ".arrow", ".feather"):
        write_table(path, texts)
        return
    plain = path.with_name(f"plain{kind}")
    if kind == ".jsonl":
        plain.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n\n" for text in texts), "utf-8")
    elif kind == ".csv":
        with plain.open("w", newline="", encoding="utf-8-sig") as file:
            csv.writer(file).writerows([("text", "id"), *((text, 1) for text in texts)])
    path.write_bytes(compressed(plain.read_bytes(), path.suffix))
    plain.unlink()


def write_table(path: Path, texts: list[str]) -> None:
    """Parquet, an Arrow stream (.arrow) or an Arrow file (.feather), three rows at a time."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"id": list(range(len(texts))), "text": texts})
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=3)
        return
    writer = arrow.ipc.new_stream if path.suffix == ".arrow" else arrow.ipc.new_file
    with writer(path, table.schema) as out:
        out.write_table(table, max_chunksize=3)


def compressed(content: bytes, ending: str) -> bytes:
    """In two frames, as `cat a.zst b.zst` and parallel compressors write them."""
    halves = content[:50], content[50:]
    if ending == ".zst":
        compressor = pytest.importorskip("zstandard").ZstdCompressor()
        return b"".join(map(compressor.compress, halves))
    method = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}.get(ending, bytes)
    return b"".join(map(method, halves))


@pytest.mark.parametrize(
    "ending", [*LINES, *(f"{kind}.{end}" for kind in LINES for end in COMPRESSED), "parquet", "arrow", "feather"]
)
def test_every_format_gives_the_same_documents(tmp_path: Path, ending: str) -> None:
    write_as(tmp_path / f"corpus.{ending}", TEXTS)
    found = read(tmp_path / f"corpus.{ending}")
    assert (found.texts, found.bad, found.empty.total()) == (TEXTS, [], 0)


def test_a_text_file_is_one_document_without_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"three"))
    (tmp_path / "c.txt").write_bytes(b"")
    assert read(tmp_path).texts == ["one\r\ntwo\n", "three"]


@pytest.mark.parametrize("piece_bytes", [1, 7, 64, 1000, 10**6])
@pytest.mark.parametrize("block", [5, 2**20])
def test_pieces_cover_a_file_exactly_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    documents: Callable[..., list[str]],
    piece_bytes: int,
    block: int,
) -> None:
    texts = [*documents(40), "x" * 500, "", "last"]
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))  # no line end at the end
    for name in ("b.parquet", "c.arrow", "d.feather"):
        write_as(tmp_path / name, texts)
    monkeypatch.setattr(sources, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(json_lines, "BLOCK", block)
    for name in ("a.jsonl", "b.parquet", "c.arrow", "d.feather"):
        found = read(tmp_path / name)
        assert (found.texts, found.empty.total()) == ([text for text in texts if text], 1)
        pieces = list(pieces_of(find(tmp_path / name)))
        assert len(pieces) > 10 or piece_bytes >= 1000
        assert abs(sum(piece.bytes for piece in pieces) - (tmp_path / name).stat().st_size) < 700  # headers, footers


def test_pieces_are_small_and_go_to_other_processes(tmp_path: Path) -> None:
    write_as(tmp_path / "a.jsonl", TEXTS)
    (piece,) = pieces_of(find(tmp_path, template="{text}!"))
    copy = pickle.loads(pickle.dumps(piece))  # noqa: S301
    assert len(pickle.dumps(piece)) < 1000
    assert [text for batch in read_batches(copy) for text in batch.texts] == [f"{text}!" for text in TEXTS]


def test_bad_lines_are_named_by_their_number_in_any_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.dumps({"text": f"fine {number}"}).encode() for number in range(14)]
    lines[6] = b'{"text": "broken'
    lines[8] = b'{"body": "other name"}'
    lines[9] = b'{"text": 5}'
    lines[10] = b'{"text": "\xff"}'
    lines[11] = b'["text"]'
    lines[12] = b"\0\0\0\0"
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    for piece_bytes in (20, 10**6):
        monkeypatch.setattr(sources, "PIECE_BYTES", piece_bytes)
        found = read(tmp_path / "a.jsonl")
        assert [item.where.rsplit(":", 1)[1] for item in found.bad] == ["7", "9", "10", "11", "12", "13"]
        broken, missing, number, bytes_, array, zeros = (item.reason for item in found.bad)
        assert "not valid JSON" in broken and "not valid JSON" in zeros
        assert "no field 'text'" in missing and "body" in missing
        assert "holds int, not text" in number
        assert "not valid UTF-8: byte 0xff" in bytes_
        assert "not a JSON object" in array and "jq" in array
        assert found.texts == [f"fine {number}" for number in (0, 1, 2, 3, 4, 5, 7, 13)]


def test_line_numbers_are_counted_anew_when_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 30)
    for lines in (3, 40):
        (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * lines + "broken\n")
        assert [item.where for item in read(tmp_path / "a.jsonl").bad] == [f"{tmp_path}/a.jsonl:{lines + 1}"]


def test_a_field_that_no_record_has_is_a_mistake_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"texts": "x", "more": "y", "id": 1}\n' * 3)
    with pytest.raises(DataError, match="there are: id, more, texts; did you mean 'texts'") as caught:
        read(tmp_path / "a.jsonl")
    assert caught.value.where == f"{tmp_path}/a.jsonl:1"
    # One record that has it makes the others malformed documents.
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"text": "here"}\n')
    found = read(tmp_path / "a.jsonl")
    assert found.texts == ["here"] and len(found.bad) == 3
    assert "did you mean 'texts'?" in found.bad[0].reason


@pytest.mark.parametrize(
    "line",
    [
        '{"text": "\\ud800"}',
        '{"text": null}',
        "[" * 100_000,
        '{"text": ' + "9" * 5000 + "}",
        '{"text": "a\0b"}',
        '{"text": "x"} y',
        '{"text": "x",}',
        '"text"',
    ],
)
@pytest.mark.parametrize("template", [None, "{text}"])
def test_what_gives_no_text_is_told(tmp_path: Path, line: str, template: str | None) -> None:
    (tmp_path / "a.jsonl").write_text(line + '\n{"text": "fine"}\n')
    found = read(tmp_path / "a.jsonl", template=template)
    assert found.texts == ["fine"] and len(found.bad) == 1
    assert found.bad[0].where.endswith("a.jsonl:1")


@pytest.mark.parametrize(
    "other",
    [
        "NaN",
        "-Infinity",
        "1e999",
        "12345678901234567890123",
        '"\\ud800"',
        "[" * 500 + "]" * 500,
        '"\\u0000"',
        "1.5e-400",
    ],
)
def test_whatever_json_accepts_beside_the_text_is_accepted(tmp_path: Path, other: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"other": {other}, "other": 1, "text": "two"}}\n')
    assert read(tmp_path / "a.jsonl").texts == ["two"]


ASKED = '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'
ASKED_TWICE = '[{"role": "user", "content": "a", "content": "\\\\"}, {"role": "assistant", "content": "b"}]'


@pytest.mark.parametrize(
    ("line", "values", "key"),
    [
        ('{"text": "one", "text": "two"}', {}, "text"),
        ('{"text" :"one", "a": "\\"text\\": 1", "text"\t: "one"}', {}, "text"),
        ('{"te\\u0078t": "one", "a": 1, "te\\u0078t": "two"}', {}, "text"),
        ('{"tèxt": "one", "t\\u00e8xt": "two"}', {"field": "tèxt"}, "tèxt"),
        ('{"a": {"b": "one", "b": "two"}}', {"field": "a.b"}, "b"),
        ('{"a": {"b": "one"}, "a": {"b": "two"}}', {"field": "a.b"}, "a"),
        ('{"a": "one", "b": "1", "b": "2"}', {"template": "{a} {b}"}, "b"),
        (f'{{"messages": {ASKED}, "messages": {ASKED}}}', {"format": "chat"}, "messages"),
        (f'{{"messages": {ASKED_TWICE}}}', {"format": "chat"}, "content"),
    ],
)
def test_a_key_of_the_text_that_is_given_twice_is_malformed(
    tmp_path: Path, line: str, values: dict[str, str], key: str
) -> None:
    """Which of the two was meant is not known."""
    (tmp_path / "a.jsonl").write_text(f"{line}\n", encoding="utf-8")
    found = read(tmp_path / "a.jsonl", **values)
    assert found.texts == [] and [bad.reason for bad in found.bad] == [f"gives the key '{key}' twice"]


def test_other_keys_may_be_given_twice_and_texts_may_look_like_keys(tmp_path: Path) -> None:
    lines = [
        '{"text": "one", "a": 1, "a": 2}',
        '{"a": {"text": 1}, "text": "two"}',
        '{"text": "\\"text\\": \\\\"}',
        '{"a": "text", "text": "four", "b": "\\"text\\":"}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    found = read(tmp_path / "a.jsonl")
    assert (found.texts, found.bad) == (["one", "two", '"text": \\', "four"], [])


def test_escaped_nul_and_both_halves_of_a_pair_are_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\u0000b \\ud83c\\udf89"}\n')
    assert read(tmp_path / "a.jsonl").texts == ["a\0b 🎉"]


def test_byte_order_mark_crlf_and_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n \t\n{"text": "two\\r\\n"}\r\n')
    found = read(tmp_path / "a.jsonl")
    assert (found.texts, found.bad, found.empty.total()) == (["one", "two\r\n"], [], 0)


@pytest.mark.parametrize("beyond", range(5))
def test_a_byte_order_mark_moves_no_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beyond: int) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 400)
    monkeypatch.setattr(json_lines, "_TAIL", 100)
    texts = ["x" * (400 + beyond - len('\ufeff{"text": ""}\n'.encode())), *(f"{number:080}" for number in range(20))]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"".join(b'{"text": "%b"}\n' % t.encode() for t in texts))
    found = read(tmp_path / "a.jsonl")
    assert (found.texts, found.bad) == (texts, [])


def test_empty_documents_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": "x"}\n{"text": ""}\n')
    (tmp_path / "b.csv").write_text('id,text\n1,""\n2,y\n')
    write_as(tmp_path / "c.parquet", ["", "z"])
    found = read(tmp_path / "a.jsonl", tmp_path / "b.csv", tmp_path / "c.parquet")
    assert (found.texts, found.empty.total(), found.bad) == (["x", "y", "z"], 4, [])


def test_a_line_of_100_megabytes_and_a_million_equal_characters(tmp_path: Path) -> None:
    long = "word " * 20_000_000
    with (tmp_path / "a.jsonl").open("w") as file:
        file.write(f'{{"text": "before"}}\n{{"text": "{long}"}}\n{{"text": "{"é" * 10**6}"}}\n{{"text": "after"}}\n')
    pieces = list(pieces_of(find(tmp_path / "a.jsonl", most=2**27)))
    assert len(pieces) > 20
    texts = [text for piece in pieces for batch in read_batches(piece) for text in batch.texts]
    assert [len(text) for text in texts] == [6, len(long), 10**6, 5]
    assert texts[1] == long and set(texts[2]) == {"é"}


def test_a_large_file_is_read_as_a_stream(tmp_path: Path) -> None:
    line = json.dumps({"text": "x" * 10_000}) + "\n"
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((line * 6000).encode(), 1))  # 60 MB of text
    (piece,) = pieces_of(find(tmp_path / "a.jsonl.gz"))
    tracemalloc.start()
    try:
        count = sum(len(batch.texts) for batch in read_batches(piece))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 6000 and peak < 12e6


def test_large_row_groups_and_record_batches_are_read_a_part_at_a_time(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"{number} " * 200 for number in range(20_000)]
    table = arrow.table({"text": texts})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=20_000)
    with arrow.ipc.new_stream(tmp_path / "b.arrow", table.schema) as out:
        out.write_table(table)
    for name in ("a.parquet", "b.arrow"):
        (piece,) = pieces_of(find(tmp_path / name))
        batches = list(read_batches(piece))
        assert [text for batch in batches for text in batch.texts] == texts
        assert max(sum(map(len, batch.texts)) for batch in batches) < 4e6


def test_invalid_utf8_in_text_and_csv(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good \xe4 bad")
    (tmp_path / "b.csv").write_bytes(b"text,other\nfine,\xff\nb\xffd,x\nlast,y\n")
    found = read(tmp_path / "a.txt", tmp_path / "b.csv")
    assert found.texts == ["fine", "last"]  # bad bytes in another column do no harm
    text, row = found.bad
    assert "byte 0xe4 at offset 5" in text.reason and row.where.endswith("b.csv:3")


def test_invalid_utf8_in_tables(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"text": arrow.array([b"fine", b"b\xffd", b"last"], arrow.binary()).view(arrow.string())})
    parquet.write_table(table, tmp_path / "a.parquet")
    with arrow.ipc.new_stream(tmp_path / "b.arrow", table.schema) as out:
        out.write_table(table)
    for name in ("a.parquet", "b.arrow"):
        found = read(tmp_path / name)
        assert found.texts == ["fine", "last"]
        assert [item.where for item in found.bad] == [f"{tmp_path}/{name}:row 2"]
        assert "not valid UTF-8" in found.bad[0].reason


def test_csv_rows_that_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,text\r\n1,one\r\n2\r\n3,"a ""long""\nrow"\r\n\r\n4,"unclosed\nfile\n')
    found = read(tmp_path / "a.csv")
    assert found.texts == ["one", 'a "long"\nrow']
    short, unclosed = found.bad
    assert short.where.endswith(":3") and "1 of 2 columns" in short.reason
    assert unclosed.where.endswith(":7") and "not valid CSV" in unclosed.reason


@pytest.mark.parametrize(
    "rows",
    [
        '"abc "x" def\nsecond line",foo\nok,1\n',
        '"two "x" lines\nthat look, like rows\nthird line",foo\nok,1\n',  # the row's quotes are even in number here
        '"a lone 5" in it\nsecond, line\nthird line",foo\nok,1\n',  # and there in its first line
    ],
)
def test_a_csv_row_that_cannot_be_told_from_others_ends_the_file(tmp_path: Path, rows: str) -> None:
    """Any line behind it may be one of its own, and none is to be taken for a document."""
    (tmp_path / "a.csv").write_text(f"text,id\nfirst,1\n{rows}")
    found = read(tmp_path / "a.csv")
    assert found.texts == ["first"]
    (rest,) = found.bad
    assert rest.where.endswith(":3") and rest.rest
    assert "not valid CSV: ',' expected after" in rest.reason and "the start of the next row" in rest.reason


def test_a_csv_row_with_a_comma_that_nobody_quoted_is_not_cut(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,text\n1,short\n2,one, two, three\n3,what spreadsheets write,,\n")
    found = read(tmp_path / "a.csv")
    assert found.texts == ["short", "what spreadsheets write"]
    (longer,) = found.bad
    assert longer.where.endswith(":3") and longer.reason == "row has 4 columns, not 2"


def test_csv_columns_that_cannot_be_read_are_a_mistake_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('"text"x,id\none,1\n')
    with pytest.raises(DataError, match="the names of the columns are not valid CSV") as caught:
        read(tmp_path / "a.csv")
    assert caught.value.where == f"{tmp_path}/a.csv:1"


def test_csv_columns_of_one_name_are_told_apart_by_nobody(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,id,id,text\none,1,2,two\n")
    with pytest.raises(DataError, match="2 columns have the name 'text'") as caught:
        read(tmp_path / "a.csv")
    assert caught.value.where == f"{tmp_path}/a.csv:1"
    (tmp_path / "a.csv").write_text("text,id,id\none,1,2\n")
    assert read(tmp_path / "a.csv").texts == ["one"]


def test_malformed_csv_rows_do_not_pile_up(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,text\n" + "1\n" * 20_000)
    (piece,) = pieces_of(find(tmp_path / "a.csv"))
    sizes = [len(batch.bad) for batch in read_batches(piece)]
    assert sum(sizes) == 20_000 and max(sizes) < 10_000


def test_missing_column_is_a_mistake_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,content,body\n1,x,y\n")
    with pytest.raises(DataError, match="no field 'text'; there are: body, content, id"):
        read(tmp_path / "a.csv")
    assert read(tmp_path / "a.csv", field="content").texts == ["x"]
    for name in ("b.parquet", "c.arrow", "d.feather"):
        write_as(tmp_path / name, ["x"])
        with pytest.raises(DataError, match="did you mean 'text'"):
            read(tmp_path / name, field="texts")
        with pytest.raises(DataError, match="column 'id' holds int64, not text"):
            read(tmp_path / name, field="id")


@pytest.mark.parametrize("name", ["a.parquet", "b.arrow"])
def test_columns_of_one_name_are_refused(tmp_path: Path, name: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table([arrow.array(["x"]), arrow.array(["y"])], names=["text", "text"])
    if name == "a.parquet":
        parquet.write_table(table, tmp_path / name)
    else:
        with arrow.ipc.new_stream(tmp_path / name, table.schema) as out:
            out.write_table(table)
    with pytest.raises(DataError, match="2 columns have the name 'text'"):
        read(tmp_path / name)


def test_nulls_are_malformed_and_named_by_their_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 1)
    for name in ("a.parquet", "b.arrow", "c.feather"):
        write_as(tmp_path / name, ["a", "b", "c", "d", None, "f"])  # type: ignore[list-item]
        found = read(tmp_path / name)
        assert found.texts == ["a", "b", "c", "d", "f"]
        assert [(item.where, item.reason) for item in found.bad] == [
            (f"{tmp_path}/{name}:row 5", "field 'text' holds null, not text")
        ]


@pytest.mark.parametrize("name", ["a.parquet", "a.feather"])
@pytest.mark.parametrize("kept", [5, -20])
def test_a_cut_table_with_a_footer_is_refused(tmp_path: Path, name: str, kept: int) -> None:
    write_as(tmp_path / name, TEXTS)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:kept])
    with pytest.raises(DataError, match=r"not a readable (Parquet|Arrow) file") as caught:
        read(tmp_path / name)
    assert caught.value.where == str(tmp_path / name)


def test_a_table_damaged_in_the_middle(tmp_path: Path, documents: Callable[..., list[str]]) -> None:
    texts = documents(60)
    write_as(tmp_path / "a.parquet", texts)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    half = len(data) // 2
    data[half : half + 400] = bytes(400)
    (tmp_path / "a.parquet").write_bytes(data)
    found = read(tmp_path / "a.parquet")
    assert found.bad and "cannot be read from here on" in found.bad[0].reason
    assert found.texts == texts[: len(found.texts)] and len(found.texts) < 60


def test_a_cut_arrow_stream_gives_what_is_whole(tmp_path: Path, documents: Callable[..., list[str]]) -> None:
    texts = documents(60)
    for kept in (-30, -500, 700):
        write_as(tmp_path / "a.arrow", texts)
        (tmp_path / "a.arrow").write_bytes((tmp_path / "a.arrow").read_bytes()[:kept])
        found = read(tmp_path / "a.arrow")
        assert found.texts == texts[: len(found.texts)] and len(found.texts) < 60
        (bad,) = found.bad
        assert "cannot be read from here on" in bad.reason
        assert bad.where == f"{tmp_path}/a.arrow:row {len(found.texts) + 1}"


@pytest.mark.parametrize("ending", [f"{kind}.{end}" for kind in LINES for end in COMPRESSED])
def test_cut_compressed_files_are_noticed(tmp_path: Path, documents: Callable[..., list[str]], ending: str) -> None:
    texts = documents(4000)
    path = tmp_path / f"corpus.{ending}"
    write_as(path, texts)
    path.write_bytes(path.read_bytes()[:-200])
    found = read(path)
    (last,) = found.bad
    assert "cannot be read from here on" in last.reason
    assert found.texts == texts[: len(found.texts)]
    # Compressors work in blocks; what was whole before the last one is there.
    assert len(found.texts) > (1000 if not ending.endswith(("xz", "bz2")) else -1)
    per_document = 2 if ending.startswith("jsonl") else 1
    assert last.where == f"{path}:{per_document * len(found.texts) + (1 if per_document == 2 else 2)}"


def test_zstd_that_looks_back_two_gigabytes_is_read(tmp_path: Path) -> None:
    zstd = pytest.importorskip("zstandard")
    far = zstd.ZstdCompressionParameters.from_level(3, window_log=31)
    compressor = zstd.ZstdCompressor(compression_params=far).compressobj()  # as `zstd --long=31`, without a length
    content = compressor.compress(b'{"text": "from a large dump"}\n') + compressor.flush()
    (tmp_path / "dump.jsonl.zst").write_bytes(content)
    assert read(tmp_path / "dump.jsonl.zst").texts == ["from a large dump"]


@pytest.mark.parametrize("ending", [f"jsonl.{end}" for end in COMPRESSED])
def test_what_is_not_compressed_at_all_is_noticed(tmp_path: Path, ending: str) -> None:
    (tmp_path / f"a.{ending}").write_text('{"text": "x"}\n')
    found = read(tmp_path / f"a.{ending}")
    assert not found.texts and "cannot be read from here on" in found.bad[0].reason


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.csv", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow"])
def test_a_file_that_vanishes_between_listing_and_reading_is_an_error(tmp_path: Path, name: str) -> None:
    if name == "a.txt":
        (tmp_path / name).write_text("x")
    else:
        write_as(tmp_path / name, TEXTS)
    pieces = list(pieces_of(find(tmp_path / name)))
    (tmp_path / name).unlink()
    # Not a malformed document, which could be skipped: the store would lack it, and nobody would know.
    with pytest.raises(DataError, match="cannot be read") as caught:
        list(read_batches(pieces[0]))
    assert caught.value.where == str(tmp_path / name)


def test_a_failing_disk_is_an_error_and_not_a_malformed_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_as(tmp_path / "a.jsonl", TEXTS)
    (piece,) = pieces_of(find(tmp_path / "a.jsonl"))

    def broken(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("headway.text.reading.compression.BlockReader.read", broken)
    with pytest.raises(DataError, match="Input/output error"):
        list(read_batches(piece))


def test_a_disk_that_fails_in_the_middle_of_a_table_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documents: Callable[..., list[str]]
) -> None:
    write_as(tmp_path / "a.parquet", documents(3000))
    pieces = list(pieces_of(find(tmp_path / "a.parquet")))

    class Failing(io.FileIO):
        def read(self, size: int = -1) -> bytes:
            if self.tell() < 20_000:  # the footer lies behind
                raise OSError(errno.EIO, "Input/output error")
            return super().read(size)

    monkeypatch.setattr("headway.text.reading.tables.open_file", lambda file: Failing(file.path))
    with pytest.raises(DataError, match="Input/output error"):
        list(read_batches(pieces[0]))


@pytest.mark.parametrize(
    ("package", "name"), [("pyarrow", "a.parquet"), ("pyarrow", "a.arrow"), ("zstandard", "a.txt.zst")]
)
def test_missing_extras_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=r"pip install '(pyarrow|zstandard)>="):
        read(tmp_path / name)


@pytest.mark.parametrize("nested", ["struct", "list"])
def test_a_stream_with_a_dictionary_within_a_column_loses_nothing(nested: str, tmp_path: Path) -> None:
    """Its dictionary is a message of its own, which is no batch of rows."""
    arrow = pytest.importorskip("pyarrow")
    texts = [f"document {number}" for number in range(6)]
    tags = arrow.array(["x", "y"] * 3).dictionary_encode()
    if nested == "struct":
        column = arrow.StructArray.from_arrays([tags], ["tag"])
    else:
        column = arrow.ListArray.from_arrays(arrow.array(range(7), arrow.int32()), tags)
    table = arrow.table({"text": texts, "more": column})
    with arrow.ipc.new_stream(tmp_path / "a.arrow", table.schema) as out:
        out.write_table(table, max_chunksize=2)
    found = [batch for piece in pieces_of(find(tmp_path / "a.arrow")) for batch in read_batches(piece)]
    assert [text for batch in found for text in batch.texts] == texts and not any(batch.bad for batch in found)


def test_columns_of_a_stream_that_nobody_wants_are_left_alone(tmp_path: Path) -> None:
    """They may hold what Python cannot: years it does not know, bytes that are no text, two of one name."""
    arrow = pytest.importorskip("pyarrow")
    texts = ["one", "two"]
    years = arrow.array([10**17] * 2, arrow.timestamp("s"))
    broken = arrow.array([b"\xff", b"\xfe"], arrow.binary()).view(arrow.string())
    names = ["text", "years", "broken", "x", "x"]
    table = arrow.Table.from_arrays([arrow.array(texts), years, broken, arrow.array(texts), arrow.array(texts)], names)
    with arrow.ipc.new_stream(tmp_path / "a.arrow", table.schema) as out:
        out.write_table(table)
    for template in (None, "{text}"):
        found = [b for p in pieces_of(find(tmp_path / "a.arrow", template=template)) for b in read_batches(p)]
        assert [text for batch in found for text in batch.texts] == texts and not any(batch.bad for batch in found)


def test_text_that_a_table_declares_in_another_way(tmp_path: Path) -> None:
    """As bytes, as JSON, and below a name with a dot, alone and inside another column."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    raw = [b"one", "zw\u00f6lf".encode(), b"\xff"]
    json_column = arrow.ExtensionArray.from_storage(arrow.json_(), arrow.array(['{"a": 1}', '"b"', "3"]))
    inner = arrow.StructArray.from_arrays([arrow.array(["x", "y", "z"]), json_column], ["a.b", "a"])
    columns = {"raw": arrow.array(raw), "large": arrow.array(raw, arrow.large_binary()), "json": json_column}
    table = arrow.table({**columns, "top.dot": arrow.array(raw), "meta": inner, "n": arrow.array([1, 2, 3])})
    parquet.write_table(table, tmp_path / "a.parquet")
    with arrow.ipc.new_file(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        for field in ("raw", "large", "top.dot"):
            found = read(tmp_path / name, field=field)
            assert found.texts == ["one", "zw\u00f6lf"] and "not valid UTF-8" in found.bad[0].reason, (name, field)
        assert read(tmp_path / name, field="json").texts == ['{"a": 1}', '"b"', "3"]
        assert read(tmp_path / name, field="meta.a.b").texts == ["x", "y", "z"]
        assert read(tmp_path / name, template="{meta.a.b} {meta.a} {n}").texts == ['x {"a": 1} 1', 'y "b" 2', "z 3 3"]
        for field, what in (("meta", "holds struct"), ("n", "holds int64"), ("meta.b", "did you mean 'meta.a.b'")):
            with pytest.raises(DataError, match=re.escape(what)):
                read(tmp_path / name, field=field)


def test_a_column_of_runs_names_the_function_that_writes_them_out(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    compute = pytest.importorskip("pyarrow.compute")
    table = arrow.table({"text": compute.run_end_encode(arrow.array(["x", "x", "y"]))})
    with arrow.ipc.new_file(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table)
    with pytest.raises(DataError) as caught:
        read(tmp_path / "a.arrow")
    assert "run_end_encoded" in caught.value.what and "run_end_decode" in str(caught.value.fix)
