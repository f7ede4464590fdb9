"""Finding files, cutting them into pieces, reading them."""

from __future__ import annotations

import csv
import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.config.schema import SourceConfig
from headway.core.errors import ConfigError, DataError
from headway.data import sources as module
from headway.data.readers import BadDocument, Document, read_documents
from headway.data.sources import find_sources, pieces_of


def find(*paths: str | Path, **values: Any) -> list[module.Source]:
    return find_sources([SourceConfig(path=str(path), **values) for path in paths])


def read(*paths: str | Path, **values: Any) -> list[str | BadDocument]:
    found = [item for piece in pieces_of(find(*paths, **values)) for item in read_documents(piece)]
    return [item.text if isinstance(item, Document) else item for item in found]


def names(source: module.Source) -> list[str]:
    return [file.name for file in source.files]


def test_folder_is_sorted_without_hidden_and_unknown_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/.hidden.txt", ".git/x.txt", "picture.png", "c.jsonl.gz", "d.csv.zst", "e.md"):
        file = tmp_path / "corpus" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    (source,) = find(tmp_path / "corpus")
    assert names(source) == ["a/z.txt", "b.txt", "c.jsonl.gz", "d.csv.zst", "e.md"]
    assert source.ignored == 1
    assert [file.compression for file in source.files] == [None, None, "gzip", "zstd", None]
    # An explicit format takes every file that is not hidden.
    (source,) = find(tmp_path / "corpus", format="text")
    assert "picture.png" in names(source) and source.ignored == 0


def test_globs_and_files_that_two_sources_mean(tmp_path: Path) -> None:
    for name in ("one/a.txt", "one/b.txt", "two/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    first, second = find(tmp_path / "*/[ab].txt", tmp_path / "**" / "*.txt")
    assert names(first) == ["one/a.txt", "one/b.txt"]
    assert names(second) == ["two/c.txt"]
    (tmp_path / "odd[1].txt").write_text("a name that looks like a glob")
    assert read(tmp_path / "odd[1].txt") == ["a name that looks like a glob"]


def test_source_names_are_folders_and_unique(tmp_path: Path) -> None:
    for name in ("x/part.txt", "y/part.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    assert [s.name for s in find(tmp_path / "x/part.txt", tmp_path / "y/part.txt")] == ["part", "part-2"]
    assert find(tmp_path / "x", name="../my corpus")[0].name == "my-corpus"
    assert find(str(tmp_path / "x" / "*.txt"))[0].name == "x"


def test_standard_library_is_there_without_third_party_code() -> None:
    (source,) = find("stdlib:")
    assert source.name == "stdlib" and len(source.files) > 400
    assert "argparse.py" in names(source) and "json/decoder.py" in names(source)
    assert not any(part in name.split("/") for name in names(source) for part in ("site-packages", "dist-packages"))
    assert sum(file.bytes for file in source.files) > 5_000_000


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("nowhere.txt", "no such file"),
        ("corpus/*.jsonl", "glob matches no files"),
        ("empty", "holds no files"),
        ("corpus", "none of the 1 files has a known ending"),
        ("corpus/a.xml", "no known format"),
    ],
)
def test_nothing_to_read_is_an_error(tmp_path: Path, path: str, what: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.xml").write_text("x")
    with pytest.raises(DataError, match=what) as caught:
        find(tmp_path / path)
    assert caught.value.where == str(tmp_path / path)


TEXTS = ["plain", 'two\nlines, a "quote" and a\ttab', "Grüße 🎉 𝔘𝔫𝔦", " spaces \r\n"]


def write_as(path: Path, texts: list[str]) -> None:
    """Write texts in the format that the file's ending names."""
    kind = path.suffixes[0]
    if kind == ".parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.table({"id": list(range(len(texts))), "text": texts}), path, row_group_size=3)
        return
    plain = path.with_name(f"plain{kind}")
    if kind == ".jsonl":
        plain.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n\n" for text in texts), "utf-8")
    elif kind == ".csv":
        with plain.open("w", newline="", encoding="utf-8-sig") as file:
            csv.writer(file).writerows([("text", "id"), *((text, 1) for text in texts)])
    content = plain.read_bytes()
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        compressor = pytest.importorskip("zstandard").ZstdCompressor()
        # Two frames, as `cat a.zst b.zst` and parallel compressors write them.
        content = compressor.compress(content[:50]) + compressor.compress(content[50:])
    path.write_bytes(content)


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst", "csv", "csv.gz", "csv.zst", "parquet"])
def test_every_format_gives_the_same_documents(tmp_path: Path, ending: str) -> None:
    write_as(tmp_path / f"corpus.{ending}", TEXTS)
    assert read(tmp_path / f"corpus.{ending}") == TEXTS


def test_a_text_file_is_one_document_without_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"three"))
    (tmp_path / "c.txt").write_bytes(b"")
    assert read(tmp_path) == ["one\r\ntwo\n", "three"]


@pytest.mark.parametrize("piece_bytes", [1, 7, 64, 1000, 10**6])
def test_pieces_cover_a_file_exactly_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documents: Callable[..., list[str]], piece_bytes: int
) -> None:
    texts = [*documents(40), "x" * 500, "", "last"]
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))  # no line end at the end
    monkeypatch.setattr(module, "PIECE_BYTES", piece_bytes)
    assert read(tmp_path / "a.jsonl") == texts
    write_as(tmp_path / "b.parquet", texts)
    assert read(tmp_path / "b.parquet") == texts
    pieces = list(pieces_of(find(tmp_path)))
    if piece_bytes < 1000:
        assert len(pieces) > 10


def test_bad_lines_are_named_by_their_number_in_any_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.dumps({"text": f"fine {number}"}).encode() for number in range(12)]
    lines[6] = b'{"text": "broken'
    lines[8] = b'{"body": "other name"}'
    lines[9] = b'{"text": 5}'
    lines[10] = b'{"text": "\xff"}'
    lines[11] = b'["text"]'
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    for piece_bytes in (20, 10**6):
        monkeypatch.setattr(module, "PIECE_BYTES", piece_bytes)
        bad = [item for item in read(tmp_path / "a.jsonl") if isinstance(item, BadDocument)]
        assert [item.where.rsplit(":", 1)[1] for item in bad] == ["7", "9", "10", "11", "12"]
        assert "not valid JSON" in bad[0].reason
        assert "no field 'text'" in bad[1].reason and "body" in bad[1].reason
        assert "holds int, not text" in bad[2].reason
        assert "not valid UTF-8: byte 0xff" in bad[3].reason
        assert "not a JSON object" in bad[4].reason


def test_nearest_field_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"texts": "x", "id": 1}\n')
    (bad,) = read(tmp_path / "a.jsonl")
    assert isinstance(bad, BadDocument)
    assert "there are: id, texts; did you mean 'texts'?" in bad.reason


@pytest.mark.parametrize(
    "line", ['{"text": "\\ud800"}', '{"text": null}', "[" * 100_000, '{"text": ' + "9" * 5000 + "}"]
)
def test_what_json_lets_through_but_is_no_text(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text(line + '\n{"text": "fine"}\n')
    bad, fine = read(tmp_path / "a.jsonl")
    assert isinstance(bad, BadDocument) and fine == "fine"


def test_invalid_utf8_in_text_and_csv(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good \xe4 bad")
    (tmp_path / "b.csv").write_bytes(b"text,other\nfine,\xff\nb\xffd,x\nlast,y\n")
    text, first, second, third = read(tmp_path / "a.txt", tmp_path / "b.csv")
    assert isinstance(text, BadDocument) and "byte 0xe4 at offset 5" in text.reason
    assert (first, third) == ("fine", "last")  # bad bytes in another column do no harm
    assert isinstance(second, BadDocument) and second.where.endswith("b.csv:3")


def test_csv_rows_that_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,text\n1,one\n2\n3,"a ""long""\nrow"\n\n4,"unclosed\nfile\n')
    one, short, long, unclosed = read(tmp_path / "a.csv")
    assert (one, long) == ("one", 'a "long"\nrow')
    assert isinstance(short, BadDocument) and short.where.endswith(":3") and "1 of 2 columns" in short.reason
    assert isinstance(unclosed, BadDocument) and unclosed.where.endswith(":7")


def test_missing_column_is_a_mistake_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,content\n1,x\n")
    with pytest.raises(DataError, match="no field 'text'; there are: content, id"):
        read(tmp_path / "a.csv")
    assert read(tmp_path / "a.csv", field="content") == ["x"]
    write_as(tmp_path / "b.parquet", ["x"])
    with pytest.raises(DataError, match="did you mean 'text'"):
        read(tmp_path / "b.parquet", field="texts")
    with pytest.raises(DataError, match="column 'id' holds int64, not text"):
        read(tmp_path / "b.parquet", field="id")


def test_parquet_nulls_and_damage(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": ["a", None, "b"]}), tmp_path / "a.parquet")
    first, null, second = read(tmp_path / "a.parquet")
    assert (first, second) == ("a", "b")
    assert isinstance(null, BadDocument) and null.where.endswith("a.parquet:row 2") and "null" in null.reason
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(DataError, match="not a readable Parquet file"):
        read(tmp_path / "b.parquet")


@pytest.mark.parametrize("ending", ["jsonl.gz", "jsonl.zst", "csv.gz"])
def test_cut_compressed_files_are_noticed(tmp_path: Path, documents: Callable[..., list[str]], ending: str) -> None:
    texts = documents(400)
    path = tmp_path / f"corpus.{ending}"
    write_as(path, texts)
    path.write_bytes(path.read_bytes()[:-200])
    *good, last = read(path)
    assert isinstance(last, BadDocument) and "cannot be read from here on" in last.reason
    assert good == texts[: len(good)]


@pytest.mark.parametrize("ending", ["jsonl.gz", "jsonl.zst"])
def test_what_is_not_compressed_at_all_is_noticed(tmp_path: Path, ending: str) -> None:
    (tmp_path / f"a.{ending}").write_text('{"text": "x"}\n')
    (bad,) = read(tmp_path / f"a.{ending}")
    assert isinstance(bad, BadDocument)


@pytest.mark.parametrize(("package", "name"), [("pyarrow", "a.parquet"), ("zstandard", "a.txt.zst")])
def test_missing_extras_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=r"pip install 'headway\[(parquet|zstd)\]'"):
        read(tmp_path / name)
