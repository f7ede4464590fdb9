"""A run directory that several machines see, through clients that remember for a while what was not there."""

import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.checkpoint.store import CheckpointStore
from headway.checkpoint.write_process import WriteProcess
from headway.core.errors import CheckpointError
from headway.core.waiting import wait_until
from headway.supervise.run_directory import Attempt, RunDirectory
from states import save


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Path]]:
    """A client of NFS: what was not there stays away until its folder is opened. Gives what it remembers."""
    missing: set[Path] = set()
    exists, opened = Path.exists, os.open

    def remembered(path: Path) -> bool:
        if any(place in missing for place in (path, *path.parents)):
            return False
        if not exists(path):
            missing.add(path)
        return path not in missing

    def ask(path: Any, *arguments: Any, **more: Any) -> int:
        folder = Path(os.fsdecode(path)) if isinstance(path, str | bytes | os.PathLike) else None
        missing.difference_update([name for name in missing if name.parent == folder])
        return opened(path, *arguments, **more)

    monkeypatch.setattr(Path, "exists", remembered)
    monkeypatch.setattr(os, "open", ask)
    yield missing


def soon(work: Any) -> None:
    threading.Timer(0.2, work).start()


def test_a_checkpoint_of_another_machine_is_seen(tmp_path: Path, client: set[Path]) -> None:
    source, store = CheckpointStore(tmp_path / "source"), CheckpointStore(tmp_path / "run" / "checkpoints")
    save(source, 2)
    assert not store.directory.exists() and not (store.directory / "step-00000002" / "manifest.json").exists()
    with pytest.raises(CheckpointError, match="no checkpoint of step 2"):
        store.info(2)
    store.directory.parent.mkdir()
    soon(lambda: source.directory.rename(store.directory))
    assert store.info(2, patience_seconds=60).step == 2


def test_a_part_that_another_machine_has_written_is_seen_at_once(tmp_path: Path, client: set[Path]) -> None:
    settings = {"fence": None, "after_save": None, "rank": 0, "directory": str(tmp_path), "keep": 3, "sign": False}
    more = {"encrypt": False, "max_shard_bytes": 1, "workers": 2, "patience_seconds": 60.0, "lock": None}
    note = tmp_path / "part-00001.json"
    soon(note.touch)
    WriteProcess({**settings, **more}, io.StringIO())._wait_for(note, 1, "worker 1 has not written its part")
    assert note.exists()


def test_an_attempt_that_began_on_another_machine_is_joined(tmp_path: Path, client: set[Path]) -> None:
    run = RunDirectory(tmp_path / "runs" / "tiny")
    assert not run.path.exists()
    begun: list[Attempt] = []
    token = "another"
    with pytest.raises(CheckpointError, match="does not see the run directory of the first worker: attempt 1") as told:
        Attempt.join(run.path, 1, token)
    assert told.value.fix is not None and "share" in told.value.fix
    soon(lambda: begun.append(run.begin_attempt("x")))
    with pytest.raises(CheckpointError, match="does not see"):  # an attempt of the same number, in another directory
        Attempt.join(run.path, 1, token, patience_seconds=0.6)
    assert wait_until(lambda: begun, 60)
    with pytest.raises(CheckpointError, match="does not see"):
        Attempt.join(run.path, 1, token, patience_seconds=0.0)
    (attempt,) = begun
    assert Attempt.join(run.path, 1, attempt.owner.token, 5).owner == attempt.owner
    attempt.finish("finished", 0)
    again = run.begin_attempt("y")
    with pytest.raises(CheckpointError, match="attempt 1 no longer owns"):
        Attempt.join(run.path, 1, attempt.owner.token, 60)
    again.finish("finished", 0)
