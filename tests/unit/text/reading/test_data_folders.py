"""Folders as people have them: what is read, what is left out and said, and what is refused before it becomes text."""

from __future__ import annotations

import gzip
import io
import json
import os
import socket
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.config.sections.data import SourceConfig
from headway.core.errors import ConfigError, DataError
from headway.text.reading import compression, json_arrays
from headway.text.reading.conversations import chat_fields, conversation_text
from headway.text.reading.documents import BadRecordError
from headway.text.reading.endings import describe_left_out
from headway.text.reading.places import Place, open_file
from headway.text.reading.readers import read_batches
from headway.text.reading.sources import PIECE_BYTES, Source, find_sources, open_tables, pieces_of
from support.sources import find, read

Fill = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Fill:
    """Makes a folder of files, by name."""

    def make(contents: dict[str, str | bytes]) -> Path:
        for name, content in contents.items():
            file = tmp_path / "corpus" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return tmp_path / "corpus"

    return make


def names(source: Source) -> list[str]:
    return [file.name for file in source.files]


def zipped() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a.txt", "hello")
    return out.getvalue()


def tarred(form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        info = tarfile.TarInfo("a.txt")
        info.size = 5
        archive.addfile(info, io.BytesIO(b"hello"))
    return out.getvalue()


# What is left out


def test_what_is_left_out_is_named_by_kind_with_advice(folder: Fill) -> None:
    files = dict.fromkeys(["a.pdf", "b/c.PDF", "d.docx", "e.zip", "f.tar.gz", "g.rst", "h.py", "h.png", "LICENSE"], "x")
    (source,) = find(folder({"text.txt": "here", **files}))
    assert names(source) == ["text.txt"] and source.ignored == 9
    assert describe_left_out(source.left_out) == (
        "left out: 2 .pdf, 1 .docx: convert them first; 1 .png, 1 without an ending; 1 .py, 1 .rst: also: ['*.py',"
        " '*.rst'] reads them; 1 .tar.gz, 1 .zip: unpack them first"
    )


def test_a_line_names_no_more_kinds_than_fit() -> None:
    kinds = {f".k{number:02}": 1 for number in range(20)}
    assert describe_left_out(kinds).endswith("; 8 of 8 other kinds")


def test_a_folder_of_nothing_else_says_how_to_unpack(folder: Fill) -> None:
    with pytest.raises(DataError, match="none of the 2 files has a known ending") as caught:
        find(folder({"a b.zip": zipped(), "c.png": "x"}))
    assert "1 .zip: unpack them first" in caught.value.what
    assert f"unzip -d 'a b' '{caught.value.where}/a b.zip'" in str(caught.value.fix)


# Archives


@pytest.mark.parametrize(
    ("name", "content", "what", "command"),
    [
        ("a.txt", zipped(), "a ZIP archive", "unzip -d a "),
        ("a.jsonl", tarred(), "a tar archive", "mkdir a && tar -C a -xf "),
        ("a.csv", tarred(tarfile.USTAR_FORMAT), "a tar archive", "tar -C a -xf "),
        ("a.txt", tarred(tarfile.GNU_FORMAT), "a tar archive", "tar -C a -xf "),
        ("a.txt.gz", gzip.compress(tarred()), "a tar archive", "tar -C a -xf "),
        ("a.md", b"WARC/1.0\r\nWARC-Type: warcinfo\r\n", "a web archive", "from a function"),
        ("a.txt", gzip.compress(b"text"), "compressed by gzip", ".gz"),
        ("a.txt", b"%PDF-1.4\nplain ASCII", "a PDF", "pdftotext "),
    ],
    ids=["zip", "tar", "ustar", "gnu tar", "tar.gz", "warc", "gzip", "pdf"],
)
def test_archives_are_known_by_their_bytes(folder: Fill, name: str, content: bytes, what: str, command: str) -> None:
    found = read(folder({name: content}))
    (bad,) = found.bad
    assert found.texts == [] and what in bad.reason
    assert command in str(bad.error().fix) and "skip" in str(bad.error().fix)


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz", "a.tgz", "a.warc.gz", "a.pdf"])
def test_an_archive_that_is_named_is_refused(folder: Fill, name: str) -> None:
    with pytest.raises(DataError, match="not text") as caught:
        find(folder({name: "x"}) / name)
    assert caught.value.fix


def test_text_that_mentions_archives_is_text(folder: Fill) -> None:
    texts = ["WARCRAFT", "PK is short", "BZh91AY", "Rar!", "\0" * 600, "ustar"]
    path = folder({f"{number}.txt": text for number, text in enumerate(texts)})
    assert read(path).texts == texts


# The field of the text


@pytest.mark.parametrize(
    ("records", "texts"),
    [
        ([{"id": "a", "content": "x", "title": "t"}], ["x"]),
        ([{"body": "x", "more": "y"}], ["x"]),
        ([{"message": "x", "n": 1}, {"message": "y", "n": 2}], ["x", "y"]),
        ([{"url": "u", "story": "x", "date": "d"}], ["x"]),
        ([{"story": None}, {"story": "x"}], ["x"]),
        ([{"content": "no"}, {"text": "x"}], ["x"]),  # one record has the field, so others lack it
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json"])
def test_a_plain_field_is_found(
    folder: Fill, name: str, records: list[dict[str, object]], texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    content = "\n".join(map(json.dumps, records)).encode()
    found = read(folder({name: gzip.compress(content) if name.endswith(".gz") else content}) / name)
    assert found.texts == texts
    said = capsys.readouterr().err
    assert ("has no field 'text'" in said) == ("text" not in records[-1]) and said.count("\n") <= 1


@pytest.mark.parametrize(
    "record",
    [{"content": "x", "body": "y"}, {"one": "x", "two": "y"}, {"id": "a", "url": "u"}, {"n": 1}, {"content": ["x"]}],
)
def test_a_field_that_is_not_plain_is_not_found(folder: Fill, record: dict[str, object]) -> None:
    with pytest.raises(DataError, match="no field 'text'"):
        read(folder({"a.jsonl": json.dumps(record)}))


def test_each_file_has_a_field_of_its_own(folder: Fill) -> None:
    path = folder(
        {
            "a.jsonl": '{"content": "a", "body": "no", "text": "A"}\n',
            "b.jsonl": '{"body": "b"}\n',
            "c.csv": "id,review\n1,c\n2,d\n",
            "d.jsonl": "",
            "e.jsonl": '{"text": "e"}\n',
        }
    )
    assert read(path).texts == ["A", "b", "c", "d", "e"]
    (source,) = find(path)
    assert [(piece.file.name, piece.field) for piece in pieces_of([source])] == [
        ("a.jsonl", "text"),
        ("b.jsonl", "body"),
        ("c.csv", "review"),
        ("d.jsonl", "text"),
        ("e.jsonl", "text"),
    ]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "feather"])
def test_a_plain_column_is_found(tmp_path: Path, kind: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"id": [1, 2], "url": ["u", "v"], "story": ["x", "y"]})
    file = tmp_path / f"a.{kind}"
    if kind == "parquet":
        parquet.write_table(table, file)
    else:
        with (arrow.ipc.new_stream if kind == "arrow" else arrow.ipc.new_file)(file, table.schema) as out:
            out.write_table(table)
    assert read(file).texts == ["x", "y"]


def test_first_lines_without_names_are_no_names(folder: Fill) -> None:
    """A first row of data is not taken for names, which would drop it."""
    for content in ("1,hello world\n2,more text\n", "hello there\nand more\n"):
        with pytest.raises(DataError, match="no field 'text'"):
            read(folder({"a.csv": content}))


@pytest.mark.parametrize(
    ("record", "fix"),
    [
        ({"messages": [{"role": "user", "content": "x"}], "prompt": "x"}, "format: chat"),
        ({"conversations": [], "id": "x"}, "format: chat"),
        ({"instruction": "x", "output": "y"}, "format: chat"),
        ({"prompt": "x", "completion": "y"}, "format: completion"),
    ],
)
def test_conversations_without_their_format_say_so(folder: Fill, record: dict[str, object], fix: str) -> None:
    with pytest.raises(DataError, match="reads records with these fields") as caught:
        read(folder({"a.jsonl": json.dumps(record)}))
    assert fix in caught.value.what and fix in str(caught.value.fix)


def test_a_conversation_in_two_parts_is_one() -> None:
    user, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
    record = {"prompt": [user], "completion": [answer]}
    assert json.loads(conversation_text(record)) == {"messages": [user, answer]}
    for parts, reason in (
        ({"prompt": [user, answer, user]}, "would be trained like the completion"),
        ({"prompt": "x", "completion": "y"}, "format: completion reads them"),
        ({"completion": [user]}, "no turn of the assistant"),
    ):
        with pytest.raises(BadRecordError, match=reason):
            conversation_text({**record, **parts})
    assert chat_fields(["prompt", "completion", "id"]) == ["prompt", "completion"]
    assert chat_fields(["messages", "prompt", "completion"]) == ["messages"]


# Which files


def test_exclude_leaves_out_files_and_folders(folder: Fill, capsys: pytest.CaptureFixture[str]) -> None:
    all_of_them = ["a.txt", "drafts/b.txt", "drafts/deep/c.txt", "sub/d.txt", "sub/drafts/e.txt", "x.log.txt"]
    path = folder(dict.fromkeys(all_of_them, "x"))
    for patterns, left in (
        (["drafts"], ["a.txt", "sub/d.txt", "x.log.txt"]),
        (["drafts/*", "*.log.*"], ["a.txt", "sub/d.txt", "sub/drafts/e.txt"]),
        ("sub/", ["a.txt", "drafts/b.txt", "drafts/deep/c.txt", "x.log.txt"]),
        (["**/[bc].txt"], ["a.txt", "sub/d.txt", "sub/drafts/e.txt", "x.log.txt"]),
    ):
        for place in (path, path / "**/*.txt"):
            (source,) = find(place, exclude=patterns)
            assert (names(source), source.ignored) == (left, 0), patterns
    assert not capsys.readouterr().err
    find(path, exclude=["typo"])
    assert "matches no file: typo" in capsys.readouterr().err


def test_an_excluded_folder_is_not_entered(folder: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder({"a.txt": "x", "closed/b.txt": "y"})
    listed = os.scandir

    def denied(place: Path) -> object:
        if place.name == "closed":
            raise PermissionError(13, "Permission denied")
        return listed(place)

    monkeypatch.setattr(os, "scandir", denied)
    assert names(find(path, exclude=["closed"])[0]) == ["a.txt"]


FURTHER = {"a.markdown": "m", "b.rst": "r", "c/d.py": "p", "e.json": '[{"text": "j"}]', "f.tsv": "text\tn\nt\t1\n"}


def test_further_files_are_read_where_they_are_asked_for(folder: Fill) -> None:
    path = folder({**FURTHER, "g.txt": "x", "h.weird": "w"})
    (source,) = find(path)
    assert names(source) == ["g.txt"] and source.ignored == 6  # as ever, so that no store takes in more
    found = read(path, also=["*.markdown", "*.rst", "*.py", "*.json", "*.tsv", "*.weird"])
    assert found.texts == ["m", "r", "p", "j", "t", "x", "w"] and not found.bad
    for name, text in zip(FURTHER, "mrpjt", strict=True):
        assert read(path / name).texts == [text]
        assert read(path / "**" / f"*{Path(name).suffix}").texts == [text]


def test_a_folder_with_a_name_like_a_file_asks_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "three.js").mkdir()
    (tmp_path / "three.js/a.js").write_text("code")
    (tmp_path / "three.js/b.txt").write_text("text")
    assert read(tmp_path / "three.js").texts == ["text"]


# Delimiters


def test_columns_are_divided_by_what_the_ending_or_the_config_says(folder: Fill) -> None:
    path = folder({"a.tsv": 'id\ttext\n1\thello, "world"\n', "b.csv": "id;text\n1;x,y\n", "c.tsv.gz": b""})
    assert read(path / "a.tsv").texts == ['hello, "world"']
    assert read(path / "b.csv", delimiter=";").texts == ["x,y"]
    assert read(path / "a.tsv", delimiter="tab", format="csv", field="text").texts == ['hello, "world"']
    long = folder({"d.tsv": "text\tn\n" + "x" * 3000 + "\t1\nshort\t2\n"}) / "d.tsv"
    found = read(long, most=1000)
    assert found.texts == ["short"] and len(found.bad) == 1  # rows above the limit are divided in the same way


@pytest.mark.parametrize(("content", "wanted"), [("id\ttext\n1\thello world\n", "tab"), ("id;text\n1;x\n", ";")])
@pytest.mark.parametrize("own_name", [False, True])
def test_a_header_line_that_is_one_name_is_refused(folder: Fill, content: str, wanted: str, own_name: bool) -> None:
    path = folder({"a.csv": content}) / "a.csv"
    values = {"field": content.split("\n")[0]} if own_name else {}
    with pytest.raises(DataError, match="with another delimiter in it") as caught:
        read(path, **values)
    assert f"delimiter: '{wanted}'" in str(caught.value.fix)
    if own_name:
        assert read(path, delimiter=",", **values).texts == [content.split("\n")[1]]


@pytest.mark.parametrize("delimiter", ["", "ab", '"', "\n", "é"])
def test_what_is_no_delimiter_is_refused(delimiter: str) -> None:
    with pytest.raises(ValueError, match="one ASCII character"):
        SourceConfig(path="a.csv", delimiter=delimiter)


def test_settings_of_files_are_refused_where_there_are_none(tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ValueError), match="exclude is for files"):
        SourceConfig(path="python:a:b", exclude=["x"])
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["x"]}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ConfigError, match="also is for files, and this is a dataset"):
        find(tmp_path / "saved", also=["*.rst"])


# Encodings


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.jsonl.gz", "a.json"])
def test_utf_16_is_known_by_its_mark(folder: Fill, encoding: str, name: str) -> None:
    texts = ["Grüße 🎉", "two"] if name != "a.txt" else ["Grüße 🎉\r\n"]
    plain = {
        "a.txt": "".join(texts),
        "a.csv": "text,n\n" + "".join(f"{text},1\n" for text in texts),
        "a.json": json.dumps([{"text": text} for text in texts], ensure_ascii=False),
    }.get(name, "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts))
    content = f"\ufeff{plain}".encode(encoding)
    found = read(folder({name: gzip.compress(content) if name.endswith(".gz") else content}) / name)
    assert (found.texts, found.bad) == (texts, [])


def test_a_long_file_of_utf_16_is_not_cut(folder: Fill) -> None:
    lines = [json.dumps({"text": f"{number} {'x' * 1000}"}) for number in range(3000)]
    path = folder({"a.jsonl": "\ufeff".encode("utf-16-le") + "\n".join(lines).encode("utf-16-le")})
    assert (path / "a.jsonl").stat().st_size > PIECE_BYTES
    found = read(path)
    assert len(found.texts) == 3000 and not found.bad


def test_text_before_a_fault_of_utf_16_is_read(folder: Fill) -> None:
    good = '\ufeff{"text": "x"}\n{"text": "y"}\n'.encode("utf-16-le")
    found = read(folder({"a.jsonl": good + b"\x00\xd8\x00\xd8" + b"a\0"}))
    assert found.texts == ["x", "y"] and "utf-16-le" in found.bad[0].reason and found.bad[0].rest


# Arrays


def test_an_array_gives_what_its_lines_would(
    folder: Fill, documents: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [{"id": number, "text": text} for number, text in enumerate([*documents(60), "", 'x"]}, {" ', "\\"])]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    wanted = read(folder({"a.jsonl": lines}) / "a.jsonl")
    for block in (1, 7, 2**20):
        monkeypatch.setattr(json_arrays, "_BLOCK", block)
        for indent in (None, 2):
            found = read(folder({"a.json": json.dumps(records, indent=indent)}) / "a.json")
            assert (found.texts, found.bad, found.empty.total()) == (wanted.texts, [], 1)
    monkeypatch.undo()
    assert read(folder({"b.json": lines}) / "b.json").texts == wanted.texts


@pytest.mark.parametrize(
    ("content", "texts", "reason"),
    [
        ('[{"text": "x"}, 3, {"text": "y"}]', ["x", "y"], "holds int"),
        ('[{"text": "x"}, {"text": "y"', ["x"], "cannot be read from here on"),
        ('[{"text": "x"} {"text": "y"}]', ["x"], "is expected"),
        ('[{"text": "x"}] more', ["x"], "more after the array"),
        ('[{"text": "x"}, ' + "[" * 100_000, ["x"], "the item has more than"),
        ('[{"text": "x"}, {"text": "' + "y" * 3000 + '"}]', ["x"], "the item has more than"),
    ],
)
def test_what_is_wrong_in_an_array_is_told(folder: Fill, content: str, texts: list[str], reason: str) -> None:
    found = read(folder({"a.json": content}) / "a.json", most=2000)
    assert found.texts == texts and len(found.bad) == 1
    assert reason in found.bad[0].reason and ":item " in found.bad[0].where


def test_a_long_array_is_not_cut(folder: Fill) -> None:
    records = [{"text": f"{number} {'x' * 1000}"} for number in range(5000)]
    found = read(folder({"a.json": json.dumps(records, indent=1)}) / "a.json")
    assert len(found.texts) == 5000 and not found.bad
    (source,) = find_sources([SourceConfig(path=str(folder({}) / "a.json"))])
    assert [piece.span for piece in pieces_of([source])] == [None]


def test_an_empty_array_has_no_text(folder: Fill) -> None:
    assert read(folder({"a.json": " [\n] "}) / "a.json").texts == []


# Files that are none, and files with nothing in them


def test_a_pipe_says_that_it_is_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(tmp_path)
        server.bind("socket")
        for name, what in (("pipe", "a FIFO"), ("socket", "a socket"), ("/dev/null", "a device")):
            with pytest.raises(DataError, match=f"it is {what}") as caught:
                find(name)
            assert "python:MODULE:FUNCTION" in str(caught.value.fix)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.feather", "a.csv", "a.jsonl", "a.tsv"])
def test_an_empty_file_of_any_format_is_empty(folder: Fill, name: str) -> None:
    path = folder({name: "", "b.txt": "x"})
    found = [text for piece in pieces_of(find(path)) for batch in read_batches(piece) for text in batch.texts]
    assert found == ["x"] and read(path / name).texts == []


# Elsewhere


def test_remote_files_are_asked_for_their_field_only_if_the_first_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    files = pytest.importorskip("fsspec").filesystem("memory")
    opened: list[str] = []

    def noted(place: Place, *arguments: Any) -> Any:
        opened.append(place.name)
        return open_file(place, *arguments)

    monkeypatch.setattr(compression, "open_file", noted)
    for place, first in (("usual", "text"), ("other", "body")):
        for number in range(4):
            field = first if number == 0 else "body"
            files.pipe(f"/{place}/{number}.jsonl", f'{{"{field}": "{number}"}}\n'.encode())
        files.pipe(f"/{place}/drafts/x.jsonl", b'{"text": "draft"}\n')
    try:
        (usual,) = find("memory://usual", exclude="drafts")
        assert [piece.field for piece in pieces_of([usual])] == ["text"] * 4 and opened == ["0.jsonl"]
        opened.clear()
        (other,) = find("memory://other", exclude=["drafts"])
        open_tables([other])
        assert sorted(opened) == [f"{number}.jsonl" for number in range(4)]
        assert [piece.field for piece in pieces_of([other])] == ["body"] * 4 and len(opened) == 4
        assert read("memory://other", exclude=["drafts"]).texts == ["0", "1", "2", "3"]
        assert read("memory://other", exclude=["drafts"], limit="2 documents").texts[:2] == ["0", "1"]
    finally:
        files.rm("/usual", recursive=True)
        files.rm("/other", recursive=True)


def test_an_evaluation_set_is_read_from_the_named_field_alone(folder: Fill) -> None:
    (source,) = find(folder({"a.jsonl": '{"body": "x"}\n'}))
    with pytest.raises(DataError, match="no field 'text'"):
        list(pieces_of([replace(source, strict=True)]))
