"""A minute of `python -m fuzz`: files that others may have written, edited at random. `make fuzz` takes longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.driver import MOST_GROWTH, Reader, fuzz
from fuzz.edits import edited
from fuzz.targets import TARGETS

_SECONDS = 60 / len(TARGETS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", TARGETS)
def test_nothing_but_errors_with_three_parts(name: str, tmp_path: Path) -> None:
    summary = fuzz(name, _SECONDS, tmp_path / name)
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
    "traceback": "raise KeyError(1)",
    "hang": "[None for _ in iter(int, 1)]",
    "growth": "bytearray(1200 * 2**20)[:] and None",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", _DEFECTS)
def test_what_a_reader_should_not_do_is_found(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a reader of its own, which does it where a file has other bytes than at the start."""
    from fuzz import driver, targets

    (tmp_path / "cases" / "a").mkdir(parents=True)
    (tmp_path / "cases" / "a" / "a.txt").write_text("sound")
    (tmp_path / "defect.py").write_text(
        "import os\n"
        "def read(case):\n"
        "    if (case / 'a.txt').read_text() != 'sound':\n"
        f"        {_DEFECTS[kind] if kind != 'hang' else 'while True: pass'}\n"
    )
    (tmp_path / "run_reader.py").write_text(
        "import sys\n"
        "import defect\n"
        "from fuzz import reader, targets\n"
        "targets.TARGETS['defect'] = targets.Target('defect', None, defect.read)\n"
        "reader.main()\n"
    )
    monkeypatch.setattr(driver, "_CPU_SECONDS", 1.0)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(targets.__file__).parents[1]}")
    reader = Reader(targets.Target("defect", lambda _: None, lambda _: None), tmp_path / "cases")
    reader._command[1:3] = [str(tmp_path / "run_reader.py")]
    try:
        assert reader.read(tmp_path / "cases" / "a")["outcome"] == "read"
        (tmp_path / "cases" / "a" / "a.txt").write_text("edited")
        answer = reader.read(tmp_path / "cases" / "a")
    finally:
        reader.close()
    if kind == "growth":
        assert answer["growth"] > MOST_GROWTH
    else:
        assert answer["outcome"] == kind
