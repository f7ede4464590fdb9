"""Temporary folders, and those of processes that were killed."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from headway.core.errors import ConfigError
from headway.core.files import scratch
from headway.core.files.scratch import scratch_folder

#: Makes a folder with something in it, says so, and waits.
_MAKER = """
import sys, time
from pathlib import Path
from headway.core.files.scratch import scratch_folder
with scratch_folder("mine-", Path(sys.argv[1])) as folder:
    (folder / "large").write_bytes(bytes(1000))
    print(folder, flush=True)
    time.sleep(600)
"""


def test_a_folder_is_there_for_a_block_and_empties_itself(tmp_path: Path) -> None:
    with scratch_folder("mine-", tmp_path) as folder:
        (folder / "deep").mkdir()
        (folder / "deep/file").touch()
        assert folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(KeyError), scratch_folder("mine-", tmp_path):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_goes_and_what_is_in_use_stays(tmp_path: Path) -> None:
    (tmp_path / "mine-of-a-stranger").mkdir()
    (tmp_path / "mine-file").touch()
    with subprocess.Popen([sys.executable, "-c", _MAKER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as maker:
        try:
            assert maker.stdout is not None
            theirs = Path(maker.stdout.readline().strip())
            with scratch_folder("mine-", tmp_path), scratch_folder("mine-", tmp_path):
                assert (theirs / "large").exists()
        finally:
            maker.kill()
    assert (theirs / "large").exists()
    with scratch_folder("other-", tmp_path):
        assert (theirs / "large").exists(), "of another kind"
    with scratch_folder("mine-", tmp_path):
        assert not theirs.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine-file", "mine-of-a-stranger"]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    with scratch_folder("kept-", tmp_path) as kept:
        (tmp_path / "mine-link").symlink_to(kept)
        scratch._remove_if_left(tmp_path / "mine-link")
        assert kept.exists()


def test_without_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    (tmp_path / "mine-left").mkdir()
    (tmp_path / "mine-left/.in-use").touch()
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with scratch_folder("mine-", tmp_path) as folder:
        assert folder.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["mine-left"]


def test_a_name_that_reads_like_a_pattern(tmp_path: Path) -> None:
    with scratch_folder("m[i]ne-*", tmp_path) as folder:
        (tmp_path / "mine-left").mkdir()
        (tmp_path / "mine-left/.in-use").touch()
        with scratch_folder("m[i]ne-*", tmp_path):
            assert folder.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["mine-left"]


@pytest.mark.parametrize(
    ("number", "fix"), [(errno.EROFS, "mount it"), (errno.ENOSPC, "TMPDIR"), (errno.EACCES, "TMPDIR")]
)
def test_a_system_that_takes_no_temporary_files(number: int, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(ConfigError, match=os.strerror(number)) as refused, scratch_folder("mine-"):
        pass
    assert refused.value.where == tempfile.gettempdir() and fix in str(refused.value.fix)


def test_a_system_without_a_place_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    monkeypatch.setenv("TMPDIR", "/gone")
    with pytest.raises(ConfigError, match="No usable") as refused, scratch_folder("mine-"):
        pass
    assert refused.value.where == "/gone"
