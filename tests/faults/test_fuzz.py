"""A minute of `python -m fuzz`: files that others may have written, edited at random. `make fuzz` takes longer."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from fuzz import driver
from fuzz.__main__ import main
from fuzz.driver import Reader, fuzz
from fuzz.edits import edited
from fuzz.targets import TARGETS, find_target

_SECONDS = 60 / len(TARGETS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", TARGETS)
def test_nothing_but_errors_with_three_parts(name: str, tmp_path: Path) -> None:
    summary = fuzz(TARGETS[name], _SECONDS, tmp_path / name)
    assert summary.failure is None, summary.failure
    assert summary.inputs > 0


@pytest.mark.parametrize(
    ("change", "after"),
    [
        (("number", 0.5, 2, -1), b"0123\xff\xff67"),
        (("bytes", 0.25, b"ab"), b"01ab4567"),
        (("bit", 0.0, 0), b"11234567"),
        (("insert", 0.5, b"x", 2), b"0123xx4567"),
        (("delete", 0.5, 2), b"012367"),
        (("repeat", 0.5, 2, 3), b"012345454567"),
        (("cut", 0.5), b"0123"),
        (("json", 0.5, "value", 0), b"01234567"),
    ],
)
def test_edits(change: tuple[object, ...], after: bytes) -> None:
    assert edited(b"01234567", [change]) == after


def test_edits_of_json() -> None:
    assert edited(b'{"a": 1}', [("json", 0.0, "value", 2)]) == b'{"a": -1}'
    assert edited(b'{"a": 1}', [("json", 0.0, "remove", 0)]) == b"{}"
    assert edited(b'{"a": 1}', [("json", 0.0, "twice", 1)]) == b'{"a": true, "a": 1}'
    assert edited(b'{"a": 1}\n{"b": 2}', [("json", 0.6, "value", 3)]) == b'{"a": 1}\n{"b": 0}'


_DEFECTS = {
    "crash": "os.kill(os.getpid(), 11)",
    "hang": "while True: pass",
    "growth": "bytearray(200 * 2**20)[:] and None",
    "traceback": "raise KeyError(1)",
    "traceback of a thread": "t = threading.Thread(target=int, args=('x',)); t.start(); t.join()",
    "traceback over memory": "bytearray(2**40)",
}
_READER = """
import os
import threading
from fuzz.targets import Target

def make(folder):
    (folder / "a").mkdir()
    (folder / "a" / "a.txt").write_text("sound")

def read(case):
    if (case / "a.txt").read_bytes()[:1] != b"s":
        {defect}

TARGET = Target("planted:TARGET", make, read)
"""


@pytest.mark.parametrize("kind", _DEFECTS)
def test_what_a_reader_should_not_do_is_found(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reader does it where a file begins with another letter; the command tells, and keeps a case that does it."""
    (tmp_path / "planted.py").write_text(_READER.format(defect=_DEFECTS[kind]))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(driver, "_CPU_SECONDS", 0.5 if kind == "hang" else 60.0)
    monkeypatch.setattr(driver, "MOST_GROWTH", 10**8)
    monkeypatch.setattr(driver, "_SHRINK_SECONDS", 2.0)
    monkeypatch.delitem(sys.modules, "planted", raising=False)
    assert main(["planted:TARGET", "--seconds", "60", "--seed", "1", "--folder", str(tmp_path / "fuzz")]) == 1
    said = capsys.readouterr().out
    outcome = kind.partition(" ")[0]
    case = tmp_path / "fuzz" / "planted:TARGET" / "found" / "a"
    assert f"planted:TARGET: {outcome} " in said and f"kept in {case}" in said
    assert f"python -m fuzz planted:TARGET --case {case}" in said
    reader = Reader(find_target("planted:TARGET"), tmp_path / "fuzz" / "planted:TARGET" / "cases")
    try:
        answer = reader.read(case)
    finally:
        reader.close()
    assert answer["growth"] > driver.MOST_GROWTH if kind == "growth" else answer["outcome"] == outcome


def test_a_sound_reader_passes_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "planted.py").write_text(_READER.format(defect="pass"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delitem(sys.modules, "planted", raising=False)
    assert main(["planted:TARGET", "--seconds", "0.1"]) == 0
    assert "inputs" in capsys.readouterr().out and not [*tmp_path.glob("headway-fuzz-*")]
