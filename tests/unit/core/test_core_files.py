"""Files that are whole or absent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headway.core.files import atomic as files
from headway.core.files import hashes
from headway.core.files.foreign import read_json_lines
from support.waits import LONG


def test_atomic_write_makes_folders_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.bin"
    for content in (b"one", b"two, longer", b"3"):
        with files.atomic_write(path) as file:
            file.write(content)
        assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


def test_folders_change_places_or_nothing_happens(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    (one / "mine").mkdir(parents=True)
    (other / "yours").mkdir(parents=True)
    done = files.exchange(one, other)
    assert [path.name for folder in (one, other) for path in folder.iterdir()] == (
        ["yours", "mine"] if done else ["mine", "yours"]
    )
    assert not files.exchange(one, tmp_path / "absent") and one.is_dir() and not (tmp_path / "absent").exists()


def test_a_device_stays_one(tmp_path: Path) -> None:
    """`-o /dev/null` as root, in a container for example."""
    path = tmp_path / "null"
    path.symlink_to("/dev/null")
    with files.atomic_write(path) as file:
        file.write(b"x")
    assert path.is_char_device() and list(tmp_path.iterdir()) == [path]


@pytest.mark.timeout(60)
def test_a_fifo_that_nobody_reads_is_replaced_and_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    os.mkfifo(path)
    files.write_json(path, {"a": 1})
    assert path.is_file() and json.loads(path.read_bytes()) == {"a": 1}


@pytest.mark.timeout(60)
def test_a_fifo_that_is_read_is_written_to(tmp_path: Path) -> None:
    """`headway report -o fifo`, beside `cat fifo`."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with files.atomic_write(path) as file:
            file.write(b"x" * 5000)
        assert os.read(reader, 9999) == b"x" * 5000 and path.is_fifo()
    finally:
        os.close(reader)


@pytest.mark.timeout(60)
def test_nothing_is_appended_to_or_hashed_that_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for path in (tmp_path / "fifo", tmp_path / "zero"):
        with pytest.raises(OSError, match="not a regular file"):
            files.append_json_line(path, {"a": 1})
        with pytest.raises(OSError, match="not a regular file"):
            hashes.sha256_file(path)
    (tmp_path / "long").touch()
    os.truncate(tmp_path / "long", 2**40)
    with pytest.raises(OSError, match="are read"):
        hashes.sha256_file(tmp_path / "long", most=1000)


def test_a_link_stays_one(tmp_path: Path) -> None:
    """`-o /dev/stdout`, which is one to a file when the shell says so."""
    path, target = tmp_path / "link", tmp_path / "target"
    target.write_text("old")
    path.symlink_to(target)
    with files.atomic_write(path) as file:
        file.write(b"new")
    assert path.is_symlink() and target.read_text() == "new"


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="needs /dev/stdout")
def test_standard_output_is_written_to(tmp_path: Path) -> None:
    code = (
        "import pathlib; from headway.core.files.atomic import atomic_write\n"
        "with atomic_write(pathlib.Path('/dev/stdout'), 'w') as file: file.write('x')"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout == b"x"
    with (tmp_path / "out").open("w") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
    assert (tmp_path / "out").read_text() == "x" and Path("/dev/stdout").is_symlink()


def test_a_failed_write_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError), files.atomic_write(path, "w") as file:
        file.write("new, but only ha")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_write_that_fails_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "file.json"
    files.write_json(path, "old")
    monkeypatch.setattr(*((os, "fsync") if failing == "fsync" else (Path, "replace")), fail)
    with pytest.raises(OSError, match="No space left"):
        files.write_json(path, "new")
    assert json.loads(path.read_text()) == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_content_is_on_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut the name must never stand for an empty file, and a reported write must not be gone."""
    calls: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def recorded_fsync(descriptor: int) -> None:
        calls.append("sync folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "sync file")  # noqa: PTH112
        fsync(descriptor)

    def recorded_replace(self: Path, target: Path) -> Path:
        calls.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "replace", recorded_replace)
    files.write_json(tmp_path / "file.json", 1)
    if sys.platform == "linux":
        assert calls == ["sync file", "rename", "sync folder"]


def test_what_is_on_its_way_to_the_disk_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.write(b"x" * 10_000)
        file.flush()
        files.begin_flush(file.fileno(), 0, 10_000)
        files.begin_flush(file.fileno(), 8192, 10**6)
        monkeypatch.setattr(files.ctypes, "CDLL", lambda _: object())  # another system
        files.begin_flush(file.fileno(), 0, 10_000)
    assert (tmp_path / "file").read_bytes() == b"x" * 10_000


def test_a_killed_write_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    code = (
        "import os, signal, sys, pathlib; from headway.core.files.atomic import atomic_write\n"
        "with atomic_write(pathlib.Path(sys.argv[1]), 'w') as file:\n"
        "    file.write('new'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], timeout=LONG).returncode == -signal.SIGKILL
    assert path.read_text() == "old"


def test_json_keeps_text_as_it_is(tmp_path: Path) -> None:
    files.write_json(tmp_path / "x.json", {"b": "é", "a": [1]})
    assert (tmp_path / "x.json").read_text(encoding="utf-8") == '{\n  "b": "é",\n  "a": [\n    1\n  ]\n}\n'


def test_names_that_are_no_utf8_are_spelled_out(tmp_path: Path) -> None:
    record = {"folder": os.fsdecode(b"caf\xe9"), "text": "é"}
    files.write_json(tmp_path / "a.json", record)
    files.append_json_line(tmp_path / "a.jsonl", record)
    for name in ("a.json", "a.jsonl"):
        assert json.loads((tmp_path / name).read_bytes()) == record


def test_json_lines_read_back(tmp_path: Path) -> None:
    path, records = tmp_path / "x.jsonl", [{"step": 1}, {"text": "é\n"}, {"big": "x" * 100_000}]
    for record in records:
        files.append_json_line(path, record)
    assert list(read_json_lines(path)) == records
    assert len(path.read_bytes().splitlines()) == len(records)
    assert list(read_json_lines(tmp_path / "none.jsonl")) == []


def test_a_flushed_record_has_reached_the_disk_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[os.stat_result] = []
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(os.fstat(file)))
    path = tmp_path / "x.jsonl"
    files.append_json_line(path, {"step": 1})
    assert not flushed
    paths = path, tmp_path / "new.jsonl"
    for place in paths:
        files.append_json_line(place, {"step": 2}, flush=True)
    found = [(there.st_ino, there.st_size) for there in flushed]
    assert found[:2] == [(place.stat().st_ino, place.stat().st_size) for place in paths]
    assert [number for number, _ in found[2:]] == [tmp_path.stat().st_ino], "the name of the new file"


@pytest.mark.parametrize("cut", [1, 5, 11])
def test_a_record_after_a_cut_line_is_whole(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.jsonl"
    for step in (1, 2):
        files.append_json_line(path, {"step": step})
    size = path.stat().st_size
    os.truncate(path, size - cut)
    files.append_json_line(path, {"step": 3})
    # Cut by one byte the record has lost its line's end only; cut by all, as many as there were, nothing is left of it.
    assert list(read_json_lines(path)) == [{"step": step} for step in ((1, 2, 3) if cut == 1 else (1, 3))]


def test_lines_that_are_no_records_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a":1}\n\xff\xfe\n[1]\n\n5\n{"a":2\n{"a":3}\n')
    assert list(read_json_lines(path)) == [{"a": 1}, {"a": 3}]


def test_hashes(tmp_path: Path) -> None:
    # FIPS 180-2, appendix B.1.
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    (tmp_path / "abc").write_bytes(b"abc")
    assert hashes.sha256_bytes(b"abc") == hashes.sha256_bytes(memoryview(b"abc")) == abc
    assert hashes.sha256_file(tmp_path / "abc") == abc


def test_a_fingerprint_depends_on_values_not_on_their_order() -> None:
    assert hashes.canonical_json({"b": "é", "a": [1, 2.5]}) == '{"a":[1,2.5],"b":"é"}'.encode()
    assert hashes.fingerprint({"a": 1, "b": 2}) == hashes.fingerprint({"b": 2, "a": 1})
    assert hashes.fingerprint({"a": [1, 2]}) != hashes.fingerprint({"a": [2, 1]})
    assert hashes.fingerprint(1) != hashes.fingerprint("1")
