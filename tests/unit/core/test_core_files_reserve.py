"""Space that is kept for records, and given up when the disk is full."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from headway.core.files.atomic import append_json_line
from headway.core.files.reserve import (
    RESERVE_BYTES,
    RESERVE_FILE,
    free_reserve,
    take_reserve,
    write_with_reserve,
)


def allocated(run: Path) -> int:
    return (run / RESERVE_FILE).stat().st_blocks * 512


def test_it_takes_its_size_on_the_disk(tmp_path: Path) -> None:
    take_reserve(tmp_path)
    assert allocated(tmp_path) >= RESERVE_BYTES == 8 * 2**20
    before = (tmp_path / RESERVE_FILE).stat().st_ino
    take_reserve(tmp_path)
    assert (tmp_path / RESERVE_FILE).stat().st_ino == before, "one that is whole is kept"
    assert free_reserve(tmp_path) and not free_reserve(tmp_path) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("has_call", [True, False])
def test_bytes_are_written_where_nothing_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_call: bool
) -> None:
    """As on a file system that compresses zeros away, and on one that has no such call; a sparse file is replaced."""
    with (tmp_path / RESERVE_FILE).open("wb") as file:
        file.truncate(RESERVE_BYTES)
    if has_call:
        monkeypatch.setattr(os, "posix_fallocate", lambda descriptor, start, size: os.truncate(descriptor, size))
    else:
        monkeypatch.delattr(os, "posix_fallocate")
    take_reserve(tmp_path)
    assert allocated(tmp_path) >= RESERVE_BYTES


def test_nothing_is_left_of_one_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="No space left"):
        take_reserve(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_record_that_does_not_fit_is_written_in_its_place(tmp_path: Path, number: int) -> None:
    take_reserve(tmp_path)

    def write() -> str:
        if (tmp_path / RESERVE_FILE).exists():
            raise OSError(number, os.strerror(number))
        return "written"

    assert write_with_reserve(tmp_path, write) == "written"


def test_it_is_kept_for_a_full_disk_only(tmp_path: Path) -> None:
    take_reserve(tmp_path)

    def refuse() -> None:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        write_with_reserve(tmp_path, refuse)
    assert (tmp_path / RESERVE_FILE).exists()


def test_a_line_that_cannot_be_flushed_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Network file systems report a full disk or a quota only when a file is flushed."""
    file, flush, refusals = tmp_path / "ledger.jsonl", os.fsync, [errno.EDQUOT]
    append_json_line(file, {"step": 1}, flush=True)
    take_reserve(tmp_path)

    def refuse(descriptor: int) -> None:
        if refusals:
            raise OSError(refusals.pop(), "Disk quota exceeded")
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    write_with_reserve(tmp_path, lambda: append_json_line(file, {"step": 2}, flush=True))
    assert file.read_text() == '{"step":1}\n{"step":2}\n' and not (tmp_path / RESERVE_FILE).exists()
    refusals.append(errno.EDQUOT)
    with pytest.raises(OSError, match="quota"):
        write_with_reserve(tmp_path, lambda: append_json_line(file, {"step": 3}, flush=True))
    assert file.read_text() == '{"step":1}\n{"step":2}\n'
