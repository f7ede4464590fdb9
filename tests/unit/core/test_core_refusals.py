"""What the system says where a disk takes no more is one kind of error, whatever its number."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from headway.checkpoint.save.fence import fenced
from headway.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    HeadwayError,
    explain_refusal,
    explaining_refusals,
    fix_for,
    refusal,
)
from headway.core.files.atomic import append_json_line, atomic_write
from headway.core.process import faults
from support.runs import in_child

#: Each with a word of what is done about it.
KIND = {errno.ENOSPC: "free space", errno.EDQUOT: "quota", errno.EFBIG: "ulimit -f", errno.EROFS: "mount it"}
numbers = pytest.mark.parametrize("number", KIND, ids=errno.errorcode.__getitem__)


@numbers
def test_each_is_told_with_its_place_and_what_to_do(number: int) -> None:
    error = OSError(number, os.strerror(number), "/disk/run.json")
    told = explain_refusal(error, CheckpointError, "elsewhere")
    assert isinstance(told, CheckpointError) and told.where == "/disk/run.json"
    assert os.strerror(number) in told.what and KIND[number] in (told.fix or "")
    nameless = explain_refusal(OSError(number, os.strerror(number)), where="elsewhere")
    assert nameless is not None and (nameless.where, nameless.exit_code) == ("elsewhere", 1)


@numbers
def test_each_is_seen_behind_other_errors_and_in_the_words_of_libraries(number: int) -> None:
    behind = RuntimeError("the writer failed")
    behind.__cause__ = OSError(number, "")
    assert refusal(behind) == number
    assert refusal(RuntimeError(f"Error while serializing: I/O error: no (os error {number})")) == number  # safetensors
    assert refusal(OSError(f"[Errno {number}] Failed to write")) == number  # pyarrow


def test_a_disk_that_fails_is_told_but_may_be_tried_again() -> None:
    """A line instead of a traceback; by its exit code a supervisor makes another attempt."""
    told = explain_refusal(OSError(errno.EIO, os.strerror(errno.EIO), "/disk/run.json"), CheckpointError)
    assert type(told) is HeadwayError and (told.where, told.exit_code) == ("/disk/run.json", 1)
    assert told.what == "the disk has failed (Input/output error)" and "dmesg" in str(told.fix)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.ENOMEM, errno.EPIPE])
def test_others_are_not_taken_for_one(number: int) -> None:
    error = OSError(number, os.strerror(number))
    assert refusal(error) is None and explain_refusal(error) is None
    assert fix_for(error, "look at it") == "look at it"
    with pytest.raises(OSError) as same, explaining_refusals(DataError):
        raise error
    assert same.value is error


def test_a_system_that_takes_no_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As libraries find out while they are loaded: torch's own imports ask where such files go."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/gone"])
    monkeypatch.setenv("TMPDIR", "/gone")
    no_folder = pytest.raises(CheckpointError, match="no folder takes temporary files")
    with no_folder as told, explaining_refusals(CheckpointError):
        tempfile.gettempdir()
    assert told.value.where == "/gone" and "set TMPDIR" in str(told.value.fix)


def test_what_is_deliberate_stays_as_it_was_said() -> None:
    said = ConfigError("no room")
    said.__cause__ = OSError(errno.ENOSPC, "")
    assert explain_refusal(said) is None
    with pytest.raises(ConfigError) as same, explaining_refusals(DataError):
        raise said
    assert same.value is said


@numbers
def test_each_can_be_ordered(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_passed", Counter())
    monkeypatch.setenv("HEADWAY_FAULTS", f"{errno.errorcode[number].lower()}@data.shard")
    with pytest.raises(OSError, match=r"data\.shard") as caught:
        faults.fault_point("data.shard")
    assert caught.value.errno == number


def test_a_full_disk_keeps_the_advice_of_who_writes_there() -> None:
    assert fix_for(OSError(errno.ENOSPC, ""), "free space, or lower the limit") == "free space, or lower the limit"
    assert "ulimit" in fix_for(OSError(errno.EFBIG, ""), "free space, or lower the limit")


def test_a_write_that_is_refused_names_the_file_that_was_meant(tmp_path: Path) -> None:
    """The kernel refuses it (EFBIG), at the write and so without a name."""
    (tmp_path / "run.json").write_text("before")

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
        for write in (_whole, lambda path: append_json_line(path, {"number": 123456789})):
            with pytest.raises(OSError) as refused:
                write(tmp_path / "run.json")
            assert (refused.value.errno, refused.value.filename) == (errno.EFBIG, str(tmp_path / "run.json"))

    assert in_child(limited) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json"]


def _whole(path: Path) -> None:
    with atomic_write(path) as file:
        file.write(bytes(100))


def test_no_verb_ends_in_a_traceback_over_one() -> None:
    script = (
        "import errno, sys\n"
        "from headway.cli import application, main\n"
        "def run(): raise OSError(errno.EDQUOT, 'Disk quota exceeded', '/disk/file')\n"
        "application.application = lambda *_: run\n"
        "sys.argv = ['headway', 'models']\n"
        "main.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and lines[:2] == [
        "error: the quota is used up (Disk quota exceeded)",
        "  where: /disk/file",
    ]
    assert len(lines) == 3 and "have the quota raised" in lines[2]


def test_it_is_kept_that_an_error_is_one_of_headway() -> None:
    with pytest.raises(HeadwayError, match="the file system is read-only"), explaining_refusals(HeadwayError):
        raise OSError(errno.EROFS, "Read-only file system")


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which was removed."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PWD", str(folder))
    folder.rmdir()
    return folder


@pytest.mark.parametrize("words", [("train", "quickstart"), ("runs", "list"), ("doctor",)])
def test_a_command_in_a_folder_that_was_removed_says_so(nowhere: Path, words: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-m", "headway", *words], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: the working directory does not exist any more",
        f"  where: {nowhere}",
        "  fix:   change to a folder that exists, and run the same command again",
    ]


def test_a_path_that_is_not_found_since_its_folder_was_removed_is_explained(nowhere: Path) -> None:
    for lost in (lambda: Path("run.json").read_text(), lambda: Path("run.json").absolute()):
        with pytest.raises(FileNotFoundError) as error:
            lost()
        told = explain_refusal(error.value, CheckpointError, "elsewhere")
        assert isinstance(told, ConfigError) and told.where == str(nowhere)


def test_a_run_whose_folder_was_removed_with_the_working_directory_has_no_other_owner(nowhere: Path) -> None:
    told = fenced(Path("runs/tiny"), 1)
    assert told.what == "the working directory does not exist any more" and told.where == str(nowhere)
    assert "owner is now unknown" in fenced(nowhere / "runs/tiny", 1).what


def test_a_path_that_is_not_found_anywhere_else_is_not_explained() -> None:
    assert explain_refusal(FileNotFoundError(errno.ENOENT, "No such file or directory", "x")) is None
