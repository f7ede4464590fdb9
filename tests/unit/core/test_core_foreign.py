"""What others may have written: files by kind and size, JSON by depth, duplicates and number of values, long lines."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.files import foreign
from headway.core.files.foreign import ForeignFileError, parse_json, parse_json_lines, read_bytes, read_json_lines

pytestmark = pytest.mark.timeout(60)

#: Whole numbers of more than 64 bits, which nothing in a run is, are rounded in lines.
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(path))


@pytest.mark.parametrize(
    "make", [_fifo, _socket, lambda p: p.symlink_to("/dev/zero"), lambda p: p.symlink_to("/dev/tty")]
)
@pytest.mark.parametrize("read", [read_bytes, foreign.read_json, lambda path: list(read_json_lines(path))])
def test_what_is_no_regular_file_is_not_opened(
    tmp_path: Path, make: Callable[[Path], None], read: Callable[[Path], object]
) -> None:
    make(tmp_path / "it")
    with pytest.raises(ForeignFileError, match="is not a regular file"):
        read(tmp_path / "it")


def test_a_fifo_that_takes_a_files_place_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at it and its opening."""
    path = tmp_path / "it"
    path.write_bytes(b"{}")
    look = Path.stat

    def look_and_replace(self: Path, **how: bool) -> os.stat_result:
        found = look(self, **how)
        self.unlink()
        os.mkfifo(self)
        return found

    monkeypatch.setattr(Path, "stat", look_and_replace)
    with pytest.raises(ForeignFileError):
        foreign.open_regular(path)


def test_a_folder_and_nothing_are_what_they_were(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none")
    assert list(read_json_lines(tmp_path / "none")) == []


def test_files_are_read_up_to_their_size(tmp_path: Path) -> None:
    path = tmp_path / "it"
    for size in (0, 1, 1000, 300_000):
        path.write_bytes(b"x" * size)
        assert read_bytes(path, most=300_000) == b"x" * size
    path.write_bytes(b"x" * 300_001)
    with pytest.raises(ForeignFileError, match=r"has 293\.0 KiB, and at most 293\.0 KiB are read"):
        read_bytes(path, most=300_000)
    assert read_bytes(Path("/proc/self/stat")).startswith(str(os.getpid()).encode()), "a file that has no size"


def test_a_file_that_grows_is_read_up_to_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "it"
    path.write_bytes(b"x")
    opened = foreign.open_regular(path)
    path.write_bytes(b"x" * 1_000_000)
    monkeypatch.setattr(foreign, "open_regular", lambda *_, **__: opened)
    with pytest.raises(ForeignFileError, match="more than"):
        read_bytes(path, most=500_000)


def test_a_terabyte_of_nothing_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "it"
    path.touch()
    os.truncate(path, 2**40)
    with pytest.raises(ForeignFileError, match=r"has 1\.0 TiB"):
        read_bytes(path)


def test_what_the_shell_has_opened_is_read_to_its_end_or_limit() -> None:
    code = "from pathlib import Path; from headway.core.files.foreign import *; print(read_given_bytes(Path(%r), 1000))"
    for given_text, said in (("hello", b"b'hello'"), ("x" * 100_000, b"more than 1000 B")):
        done = subprocess.run(
            [sys.executable, "-c", code % "/dev/stdin"], input=given_text.encode(), capture_output=True, check=False
        )
        assert said in done.stdout + done.stderr
    with Path("/dev/zero").open("rb") as endless:
        done = subprocess.run(
            [sys.executable, "-c", code % "/dev/fd/0"], stdin=endless, capture_output=True, check=False
        )
    assert b"more than 1000 B" in done.stderr


@settings(max_examples=50)
@given(JSON)
def test_json_is_read_as_the_standard_library_reads_it(value: object) -> None:
    for text in (json.dumps(value), json.dumps(value, indent=2, ensure_ascii=False)):
        assert parse_json(text) == json.loads(text)
        assert parse_json(text.encode("utf-8", "surrogatepass")) == json.loads(text)


@pytest.mark.parametrize("opening, closing", [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_depth_is_limited_for_lists_and_objects(opening: str, closing: str) -> None:
    per_level = len(closing)
    deep = foreign.DEPTH // per_level
    assert parse_json(opening * deep + "1" + closing * deep) is not None
    for levels in (deep + 1, 5 * deep, 100_000):
        with pytest.raises(ValueError, match="nested more than 100 deep"):
            parse_json(opening * levels + "1" + closing * levels)
        line = b'{"x":' + (opening * levels + "1" + closing * levels).encode() + b"}"
        assert list(parse_json_lines([line, b'{"y":1}'])) == [{"y": 1}]


def test_brackets_in_text_are_no_depth() -> None:
    text = json.dumps({"a": "[" * 1000, "b": ["{"] * 1000, "c": [[1]] * 1000})
    assert parse_json(text) == json.loads(text)


@pytest.mark.parametrize(
    "text", ['{"a": 1, "a": 1}', '[{"b": {"a": 1, "c": 2, "a": 3}}]', '{"a":1,"\\u0061":2}', '{"a" :1,"a":2,"b" : 3}']
)
def test_a_key_that_is_given_twice_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="gives the key 'a' twice"):
        parse_json(text)
    assert list(parse_json_lines([f'{{"x": {text}}}'.encode(), text.encode()])) == []


def test_the_name_of_a_key_is_fit_for_a_terminal() -> None:
    with pytest.raises(ValueError, match=r"'\\x1b\[31mx{72}' twice"):
        parse_json(json.dumps({"\x1b[31m" + "x" * 100: 1})[:-1] + ", " + json.dumps({"\x1b[31m" + "x" * 100: 2})[1:])


@pytest.mark.parametrize("unit", ["[],", "{},", '"ab",', "1.5,", "[[[]]],"])
def test_values_that_would_fill_memory_are_not_made(unit: str) -> None:
    text = "[" + unit * (foreign.LISTING_BYTES // 4 // len(unit)) + "0]"
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="more than 8,000,000 values"):
            parse_json(text)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@given(st.lists(st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"")), max_size=30), st.booleans())
def test_lines_are_those_of_a_plain_split(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], ends: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "lines"
    path.write_bytes(b"\n".join(lines) + b"\n" * ends)
    expected = path.read_bytes().split(b"\n")
    with pytest.MonkeyPatch.context() as patch, path.open("rb", buffering=0) as file:
        patch.setattr(foreign, "_BLOCK_BYTES", 7)
        assert list(foreign.read_lines(file, most=20)) == [
            line for number, line in enumerate(expected) if len(line) <= 20 and (line or number < len(expected) - 1)
        ]


def test_a_line_without_end_fills_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a":1}\n' + b'{"b":"' + b"x" * (8 * foreign.LINE_BYTES) + b'"}\n{"c":3}\n{"d":4}')
    tracemalloc.start()
    try:
        assert list(read_json_lines(path)) == [{"a": 1}, {"c": 3}, {"d": 4}]
        assert tracemalloc.get_traced_memory()[1] < 4 * foreign.LINE_BYTES
    finally:
        tracemalloc.stop()


def test_holes_in_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a":1}\n')
    os.truncate(path, 2**40)
    with path.open("ab") as file:
        file.write(b'\n{"b":2}\n')
    blocks = 0

    class Counted:
        def __init__(self, path: Path, most: int | None = None) -> None:
            self._file = path.open("rb")

        def read(self, size: int) -> bytes:
            nonlocal blocks
            blocks += 1
            return self._file.read(size)

        def __getattr__(self, name: str) -> object:
            return getattr(self._file, name)

        def __enter__(self) -> Counted:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

    monkeypatch.setattr(foreign, "open_regular", Counted)
    assert list(read_json_lines(path)) == [{"a": 1}, {"b": 2}]
    assert blocks < 100


@settings(max_examples=30)
@given(st.lists(st.dictionaries(st.text(max_size=5), JSON, max_size=2), max_size=3))
def test_json_lines_are_what_the_standard_library_reads(records: list[dict[str, object]]) -> None:
    for escaped in (True, False):
        lines = [json.dumps(r, ensure_ascii=escaped).encode("utf-8", "surrogatepass") for r in records]
        assert list(parse_json_lines(lines)) == records


@pytest.mark.parametrize("mode", ["r+b", "ab"])
def test_files_are_written_where_they_are_regular(tmp_path: Path, mode: Literal["r+b", "ab"]) -> None:
    path = tmp_path / "it"
    path.write_bytes(b"abc")
    with foreign.open_regular(path, mode) as file:
        file.write(b"X")
        assert path.read_bytes() == (b"Xbc" if mode == "r+b" else b"abcX"), "without a buffer"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ForeignFileError):
        foreign.open_regular(path, mode)


def test_a_file_is_made_to_be_appended_to(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        foreign.open_regular(tmp_path / "it", "ab").close()
    finally:
        os.umask(before)
    assert (tmp_path / "it").stat().st_mode & 0o777 == 0o644
    with pytest.raises(FileNotFoundError):
        foreign.open_regular(tmp_path / "none", "r+b")


@pytest.mark.parametrize(
    ("value", "number"),
    [(1, 1.0), (2.5, 2.5), (True, None), ("1", None), (None, None), (10**400, None), ([1], None), (10**30, 1e30)],
)
def test_a_number_is_one_that_a_float_can_be(value: object, number: float | None) -> None:
    assert foreign.as_number(value) == number
