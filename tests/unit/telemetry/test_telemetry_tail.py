"""Reading what is appended: each complete line once, whatever happens to the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.core.files.foreign import LINE_BYTES
from headway.telemetry.tail import JsonLinesTail


def write(path: Path, *numbers: int, mode: str = "a") -> None:
    with path.open(mode) as file:
        file.writelines(json.dumps({"n": number}) + "\n" for number in numbers)


def read(tail: JsonLinesTail) -> tuple[bool, list[int]]:
    """Whether the file began anew, and the numbers."""
    blocks = list(tail.read())
    return any(anew for anew, _ in blocks), [record["n"] for _, records in blocks for record in records]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_each_line_is_read_once(path: Path) -> None:
    tail = JsonLinesTail(path)
    assert read(tail) == (False, [])
    write(path, 1, 2)
    assert read(tail) == (False, [1, 2])
    assert read(tail) == (False, [])
    write(path, 3)
    assert read(tail) == (False, [3])


def test_a_torn_line_is_read_when_it_is_complete(path: Path) -> None:
    tail = JsonLinesTail(path)
    write(path, 1)
    with path.open("a") as file:
        file.write('{"n":')
    assert read(tail) == (False, [1])
    with path.open("a") as file:
        file.write(" 2}\n")
    assert read(tail) == (False, [2])


def test_a_line_that_a_kill_has_torn_is_left_out(path: Path) -> None:
    tail = JsonLinesTail(path)
    path.write_text('{"n": 1}\n{"n": 2, "x')
    assert read(tail) == (False, [1])
    with path.open("a") as file:
        file.write("\n")  # as the next attempt does
    write(path, 3)
    assert read(tail) == (False, [3])


@pytest.mark.parametrize("numbers", [(7,), (7, 8, 9), ()])
def test_a_shorter_file_is_read_anew(path: Path, numbers: tuple[int, ...]) -> None:
    tail = JsonLinesTail(path)
    write(path, 1, 2, 3, 4)
    read(tail)
    write(path, *numbers, mode="w")
    assert read(tail) == (True, list(numbers))
    assert read(tail) == (False, [])
    write(path, 5)
    assert read(tail) == (False, [5])


def test_a_file_that_was_cut_and_has_grown_past_the_cursor_is_read_anew(path: Path) -> None:
    tail = JsonLinesTail(path)
    write(path, 1, 2, 3)
    read(tail)
    path.write_text('{"n": 4, "x": "longer than a line"}\n{"n": 5}\n')
    assert read(tail) == (True, [4, 5])


def test_another_file_in_its_place_is_read_anew(path: Path, tmp_path: Path) -> None:
    tail = JsonLinesTail(path)
    write(path, 1)
    read(tail)
    write(tmp_path / "other", 1, 2)
    (tmp_path / "other").replace(path)
    assert read(tail) == (True, [1, 2])


def test_only_the_newest_lines_at_first(path: Path) -> None:
    write(path, *range(1000))
    tail = JsonLinesTail(path, newest_bytes=100)
    first = read(tail)[1]
    assert first[-1] == 999 and first == list(range(first[0], 1000)) and 5 < len(first) < 15
    write(path, 1000)
    assert read(tail) == (False, [1000])


def test_blocks_are_joined(path: Path) -> None:
    """A file of many blocks, whose borders cut lines."""
    write(path, *range(100_000))
    tail = JsonLinesTail(path)
    assert len(list(JsonLinesTail(path).read())) > 3
    assert read(tail) == (False, list(range(100_000)))


def test_a_line_longer_than_a_block_is_read_and_an_endless_one_is_not(path: Path) -> None:
    tail = JsonLinesTail(path)
    path.write_text(json.dumps({"n": 1, "x": "a" * 600_000}) + "\n")
    assert read(tail) == (False, [1])
    with path.open("a") as file:
        file.write("a" * (LINE_BYTES + 1))
    assert read(tail) == (False, [])
