"""A run directory that several machines see, through clients that remember for a while what was not there."""

import io
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.checkpoint import verify_across_hosts
from headway.checkpoint.format.manifest import Manifest
from headway.checkpoint.save.messages import WriterSettings
from headway.checkpoint.save.writer_process import WriterService
from headway.checkpoint.store import CheckpointInfo, CheckpointStore
from headway.checkpoint.verify import Damage, check_file
from headway.core.errors import CheckpointError, CorruptionError
from headway.core.process.waiting import wait_until
from headway.run.directory.run_directory import Attempt, RunDirectory
from support.states import blocks, make_state, save
from support.waits import LONG


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
    settings = WriterSettings(tmp_path, workers=2, patience_seconds=60.0)
    note = tmp_path / "part-00001.json"
    soon(note.touch)
    WriterService(settings, io.StringIO())._wait_for(note, 1, "worker 1 has not written its part")
    assert note.exists()


def load_on(
    infos: list[CheckpointInfo], machines: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[list[str]], list[str]]:
    """What workers hash before they load, each on the machine of that letter, and what they are refused with."""
    workers = len(infos)
    barrier, said, checked, refused = threading.Barrier(workers), [None] * workers, [[] for _ in infos], [""] * workers
    here = threading.local()

    def gather(value: Any) -> list[Any]:
        said[here.rank] = json.loads(json.dumps(value))
        barrier.wait()
        everyone = list(said)
        barrier.wait()
        return everyone

    def check(folder: Path, name: str, manifest: Manifest) -> Damage | None:
        rank = next(rank for rank, info in enumerate(infos) if info.path == folder)
        checked[rank].append(name)
        return check_file(folder, name, manifest)

    def work(rank: int) -> None:
        here.rank = rank
        try:
            verify_across_hosts.check_same_on_all_hosts(infos[rank], blocks(make_state()), rank, gather)
        except CorruptionError as error:
            refused[rank] = error.what

    monkeypatch.setattr(verify_across_hosts, "check_file", check)
    for name in ("kernel_name", "host_name"):
        monkeypatch.setattr(verify_across_hosts, name, lambda: machines[here.rank])
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [sorted(names) for names in checked], refused


def seen(tmp_path: Path, workers: int) -> list[CheckpointInfo]:
    """One checkpoint of several files, in a place of its own for each worker."""
    found = []
    for rank in range(workers):
        store = CheckpointStore(tmp_path / str(rank), max_shard_bytes=60)
        save(store, 2)
        found.append(store.info(2))
    assert len(found[0].manifest.files) > 2
    return found


def test_another_machine_hashes_what_its_workers_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    infos = seen(tmp_path, 4)
    files = sorted(infos[0].manifest.files)
    checked, refused = load_on(infos, "aabb", monkeypatch)
    assert checked[:2] == [[], []] and checked[2] and checked[3] and sorted(checked[2] + checked[3]) == files
    assert load_on(infos[:2], "aa", monkeypatch) == ([[], []], ["", ""]), "the first one has read all of it there"
    assert refused == [""] * 4


@pytest.mark.parametrize("what", ["bytes", "state"])
def test_what_another_machine_reads_otherwise_is_refused_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    infos = seen(tmp_path, 3)
    if what == "bytes":
        path = next(iter(sorted(infos[2].path.glob("shard-*"))))
        path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    else:
        other = CheckpointStore(tmp_path / "other")
        save(other, 2, seed=9)
        infos[2] = other.info(2)
    _, refused = load_on(infos, "aab", monkeypatch)
    words = "has changed since it was written" if what == "bytes" else "it is another state"
    assert refused[0].startswith("b does not read the checkpoint of step 2") and words in refused[0]
    assert refused == [refused[0]] * 3


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
    assert wait_until(lambda: begun, LONG)
    with pytest.raises(CheckpointError, match="does not see"):
        Attempt.join(run.path, 1, token, patience_seconds=0.0)
    (attempt,) = begun
    assert Attempt.join(run.path, 1, attempt.owner.token, 5).owner == attempt.owner
    attempt.finish("finished", 0)
    again = run.begin_attempt("y")
    with pytest.raises(CheckpointError, match="attempt 1 no longer owns"):
        Attempt.join(run.path, 1, attempt.owner.token, 60)
    again.finish("finished", 0)
