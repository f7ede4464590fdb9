"""Records that travel with a checkpoint: what is packed, and what an archive may hold."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from headway.checkpoint.records import RECORDS_FILE, pack_records, unpack_records
from headway.core.errors import CheckpointError
from headway.core.files import sha256_file

FILES = {
    "ledger.jsonl": '{"kind": "commit"}\n',
    "metrics.jsonl": '{"step": 1}\n{"step": 2}\n',
    "attempts/001/attempt.json": '{"number": 1}',
    "attempts/012/attempt.json": '{"number": 12}',
    "tracking/mlflow-0a1b2c3d.json": '{"run": "x", "place": 12}',
}
#: What stays where it is: locks, logs, what is made anew, and what may hold more than others should see.
OTHERS = ("run.json", "config.yaml", ".owner", "attempts/001/worker-0.log", "tracking/mlflow-0a1b2c3d.lock")


def write(run: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)
    return run


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_the_records_of_a_run_come_back_as_they_were(tmp_path: Path) -> None:
    run = write(tmp_path / "run", {**FILES, **dict.fromkeys(OTHERS, "no")})
    entry = pack_records(run, tmp_path)
    assert sorted(unpack_records(tmp_path / RECORDS_FILE, entry, tmp_path / "new")) == sorted(FILES)
    assert contents(tmp_path / "new") == FILES


def test_a_line_that_was_being_written_is_left_out(tmp_path: Path) -> None:
    run = write(tmp_path / "run", {"metrics.jsonl": '{"step": 1}\n{"st', "ledger.jsonl": '{"ki'})
    unpack_records(tmp_path / RECORDS_FILE, pack_records(run, tmp_path), tmp_path / "new")
    assert contents(tmp_path / "new") == {"metrics.jsonl": '{"step": 1}\n', "ledger.jsonl": ""}


def test_changed_bytes_are_not_taken(tmp_path: Path) -> None:
    entry = pack_records(write(tmp_path / "run", FILES), tmp_path)
    content = bytearray((tmp_path / RECORDS_FILE).read_bytes())
    content[40] ^= 1
    (tmp_path / RECORDS_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match="differ from what was saved"):
        unpack_records(tmp_path / RECORDS_FILE, entry, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["../outside.jsonl", "/etc/cron.d/x", "attempts/001/../../.owner", "config.yaml"])
def test_an_archive_writes_nothing_but_records(tmp_path: Path, name: str) -> None:
    path = tmp_path / RECORDS_FILE
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ledger.jsonl", "{}\n")
        archive.writestr(name, "x")
    entry = {"sha256": sha256_file(path), "bytes": path.stat().st_size}
    with pytest.raises(CheckpointError, match="hold "):
        unpack_records(path, entry, tmp_path / "new")
    assert not (tmp_path / "new").exists()
