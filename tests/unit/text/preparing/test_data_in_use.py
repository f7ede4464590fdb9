"""A store that a training reads is not taken away from under it."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from headway.config.sections.data import DataConfig
from headway.core.errors import ConfigError, DataError
from headway.core.process.waiting import wait_until
from headway.data import in_use as in_use_module
from headway.data.in_use import check_not_in_use, in_use, replacing
from headway.data.pinned import pinned
from headway.data.replacing import check_replaceable
from headway.data.store import TokenStore
from headway.data.store_manifest import MANIFEST
from headway.data.used_by import keep_manifest, mark_use, runs_using, uses_of
from headway.text.preparing import build, building
from headway.text.preparing.prepare import prepare
from support.runs import store_contents
from support.waits import LONG

Configs = Callable[..., DataConfig]
READS = "a training reads this token store"


@pytest.fixture
def more(tmp_path: Path, config: Configs, twenty_files: Path) -> DataConfig:
    """The config of a store that is there, to which a file has come since."""
    prepare(config(twenty_files), workers=1)
    (twenty_files / "more.txt").write_text("more text")
    return config(twenty_files)


def test_a_preparation_that_would_replace_it_is_refused_before_it_works(
    tmp_path: Path, more: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = TokenStore.open(more.store).fingerprint
    with in_use(more.store), monkeypatch.context() as patch:
        patch.setattr(build._UnitJob, "accept", lambda *_: pytest.fail("it has worked"))
        with pytest.raises(DataError, match=READS) as caught:
            prepare(more, workers=1)
        assert caught.value.where == str(more.store) and "data.store" in (caught.value.fix or "")
        patch.setattr(build.Builder, "__init__", lambda *_: pytest.fail("it has trained a vocabulary"))
        with pytest.raises(DataError, match=READS):
            prepare(more, workers=1, force=True)
    assert TokenStore.open(more.store).fingerprint == before
    prepare(more, workers=1)
    assert TokenStore.open(more.store).fingerprint != before


def test_nothing_to_do_is_no_reason_to_refuse(config: Configs, twenty_files: Path) -> None:
    """Several runs may train on one store, each after a preparation of its own."""
    prepare(config(twenty_files), workers=1)
    with in_use(config(twenty_files).store):
        assert prepare(config(twenty_files), workers=1).up_to_date


def test_a_training_that_began_meanwhile_keeps_its_store_and_the_work_is_kept(
    tmp_path: Path, more: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = TokenStore.open(more.store)
    with monkeypatch.context() as patch:
        patch.setattr(build, "check_not_in_use", lambda store, keeps_for: None)
        with in_use(more.store), pytest.raises(DataError, match=READS):
            prepare(more, workers=1)
    assert TokenStore.open(more.store).fingerprint == before.fingerprint and before.verify() == []
    again = prepare(more, workers=1)
    assert again.processed_bytes == 0 and not again.up_to_date
    assert not list(tmp_path.glob(".store.*"))


def test_a_reader_that_is_killed_leaves_nothing_behind(more: DataConfig) -> None:
    hold = (
        "import sys, time; from pathlib import Path; from headway.data.in_use import in_use\n"
        "with in_use(Path(sys.argv[1])): print(flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", hold, str(more.store)], stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None and reader.stdout.readline() == b"\n"
        with pytest.raises(DataError, match=READS):
            check_not_in_use(more.store)
        reader.kill()
        reader.wait()
        check_not_in_use(more.store)


def test_a_copy_of_the_reader_goes_on_reading(more: DataConfig) -> None:
    """A supervisor's attempts are copies of it."""
    copy = (
        "import os, sys, time; from pathlib import Path; from headway.data.in_use import in_use\n"
        "with in_use(Path(sys.argv[1])):\n"
        "    copy = os.fork()\n"
        "    if copy == 0: time.sleep(600)\n"
        "print(copy)"
    )
    with subprocess.Popen([sys.executable, "-c", copy, str(more.store)], stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        process = int(reader.stdout.readline())
        reader.wait()
        with pytest.raises(DataError, match=READS):
            check_not_in_use(more.store)
        os.kill(process, signal.SIGKILL)
        reader.stdout.read()  # until nobody has it open

    def released() -> bool:
        with suppress(DataError):
            check_not_in_use(more.store)
            return True
        return False

    assert wait_until(released, LONG)


def test_who_comes_while_it_is_replaced_has_the_new_one(more: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it would hold a store that nobody can read any more, and the new one could be replaced under it."""
    change, readers, fingerprints = building._changed_places, list[threading.Thread](), list[str]()
    waits, ends = threading.Event(), threading.Event()
    lock = fcntl.flock

    def flock(descriptor: int, how: int) -> None:
        if how == fcntl.LOCK_SH:
            waits.set()
        lock(descriptor, how)

    def read() -> None:
        with in_use(more.store):
            fingerprints.append(TokenStore.open(more.store).fingerprint)
            ends.wait()

    def changed_places(folder: Path, store: Path) -> Path:
        readers.append(threading.Thread(target=read))
        readers[0].start()
        waits.wait()
        assert not fingerprints
        return change(folder, store)

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(building, "_changed_places", changed_places)
    made = prepare(more, workers=1)
    try:
        while not fingerprints:
            readers[0].join(0.01)
        assert fingerprints == [made.fingerprint]
        with pytest.raises(DataError, match=READS):
            check_not_in_use(more.store)
    finally:
        ends.set()
        readers[0].join()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_where_there_are_no_locks_nobody_is_kept_out(
    more: DataConfig, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def none_here(descriptor: int, how: int) -> None:
        raise OSError(number, "no locks here")

    before = TokenStore.open(more.store).fingerprint
    monkeypatch.setattr(in_use_module.fcntl, "flock", none_here)
    with in_use(more.store), replacing(more.store):
        pass
    monkeypatch.undo()
    prepare(more, workers=1)
    assert TokenStore.open(more.store).fingerprint != before


def test_where_nothing_tells_files_apart_nobody_waits_for_ever(
    more: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "samestat", lambda one, other: False)
        with in_use(more.store):
            check_not_in_use(more.store)
    assert not prepare(more, workers=1).up_to_date


def test_a_store_of_which_one_may_only_read_is_held_too(more: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened to write nothing can be where a disk is mounted to be read only."""
    opened = os.open

    def open_to_read(path: Path, flags: int) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, "read only")
        return opened(path, flags)

    monkeypatch.setattr(in_use_module.os, "open", open_to_read)
    with in_use(more.store), pytest.raises(DataError, match=READS):
        check_not_in_use(more.store)
    check_not_in_use(more.store)


def test_where_there_is_no_store_nothing_is_in_use(tmp_path: Path) -> None:
    with in_use(tmp_path / "none"):
        check_not_in_use(tmp_path / "none")


def test_what_is_held_is_the_manifest_without_a_look_at_numpy() -> None:
    """A process that is to be copied must not have loaded it."""
    assert in_use_module._MANIFEST == MANIFEST
    look = "import sys, headway.data.in_use; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], check=False).returncode == 0


def marked(run: Path, store: Path, pid: int) -> str:
    """A run directory that has left its mark in a store; returns the fingerprint of its data."""
    run.mkdir()
    (run / "config.yaml").write_text("name: run\n")
    data = TokenStore.open(store).fingerprint
    keep_manifest(run, store, data)
    mark_use(store, run, data, pid)
    return data


def test_what_a_run_reads_is_kept_for_it_while_it_goes_on(tmp_path: Path, more: DataConfig) -> None:
    """A run that has left its mark is not in the way, and reads on what it began with."""
    run = tmp_path / "run"
    data = marked(run, more.store, os.getpid())
    with in_use(more.store):
        prepare(more, workers=1)
    now = TokenStore.open(more.store)
    assert now.fingerprint != data and now.verify() == []
    kept = pinned(now, run, data)
    assert [problem for problem in kept.verify() if not problem.startswith("inputs.json")] == []
    assert kept.fingerprint == data
    assert [use.run for use in uses_of(more.store)] == [run.resolve()]
    (run / "config.yaml").unlink()
    assert uses_of(more.store) == [], "for a run that is gone nothing is kept"


def test_another_reader_is_still_in_the_way(tmp_path: Path, more: DataConfig) -> None:
    marked(tmp_path / "run", more.store, os.getpid() + 1)
    with in_use(more.store), pytest.raises(DataError, match=READS):
        prepare(more, workers=1)


def test_a_copy_of_a_store_is_not_used_by_the_runs_of_the_original(tmp_path: Path, more: DataConfig) -> None:
    run = tmp_path / "run"
    marked(run, more.store, os.getpid())
    copy = shutil.copytree(more.store, tmp_path / "copy")
    assert runs_using(more.store) == [run.resolve()] and runs_using(copy) == []
    moved = more.store.rename(tmp_path / "moved")
    assert runs_using(moved) == runs_using(copy) == [run.resolve()], "the run may be given either"


def test_text_that_lies_elsewhere_now_leaves_the_store_of_a_run_as_it_is(tmp_path: Path, more: DataConfig) -> None:
    """Whether it is the same text is known when it has been read."""
    prepare(more, workers=1)
    marked(tmp_path / "run", more.store, os.getpid() + 1)
    (source,) = more.sources
    (tmp_path / "elsewhere").mkdir()
    text = Path(source.path).rename(tmp_path / "elsewhere" / Path(source.path).name)
    there = more.model_copy(update={"sources": [source.model_copy(update={"path": str(text)})]})
    with pytest.raises(ConfigError, match=r"uses it: data\.sources\.0\.path was") as caught:
        check_replaceable(there, None)
    assert "if the same text lies elsewhere now: headway data prepare" in str(caught.value.fix)
    before = store_contents(more.store)
    assert prepare(there, workers=1).up_to_date
    assert check_replaceable(there, None) == check_replaceable(more, None) == []

    third = tmp_path / "third" / text.name
    shutil.copytree(text, third)
    (third / "more.txt").write_text("other text")
    changed = more.model_copy(update={"sources": [source.model_copy(update={"path": str(third)})]})
    with pytest.raises(ConfigError, match="the token store is not what the config says"):
        prepare(changed, workers=1)
    assert store_contents(more.store) == before
