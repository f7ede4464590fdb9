"""Shards are checked once when they are first opened, and what is wrong with one is raised before a state is saved."""

from __future__ import annotations

import fcntl
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.core.errors import DataError
from headway.data import first_use
from headway.data.first_use import VERIFIED, ShardChecker, WrongShardError
from headway.data.store import TokenStore


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read through."""
    names: list[str] = []
    problem = ShardChecker._problem

    def noted(self: ShardChecker, item: Any, descriptor: int) -> str | None:
        names.append(item.path.name)
        return problem(self, item, descriptor)

    monkeypatch.setattr(ShardChecker, "_problem", noted)
    return names


def all_of(store: TokenStore) -> None:
    store.read("train", "first", 0, store.tokens("train", "first"))


def files(store: TokenStore) -> list[str]:
    return [shard.file for shard in store.shards("train", "first")]


def damage(store: TokenStore, number: int) -> Path:
    """Change one token of a shard; returns its file."""
    file = store.path / "train" / "first" / files(store)[number]
    content = bytearray(file.read_bytes())
    content[4] ^= 1
    file.write_bytes(content)
    return file


def test_every_shard_is_read_once_by_whoever_comes_first(store: TokenStore, read: list[str]) -> None:
    checker = store.check_on_first_use()
    store.read("train", "first", 0, 1)
    assert checker.wait_verified(1, math.inf) and read == files(store)[:1]
    for _ in range(2):
        all_of(store)
    assert checker.wait_verified(2, math.inf) and read == files(store)
    again = TokenStore.open(store.path)  # another worker, or a later attempt
    checker = again.check_on_first_use()
    all_of(again)
    assert checker.wait_verified(1, math.inf) and read == files(store)


def test_a_file_that_is_another_now_is_read_again(store: TokenStore, read: list[str]) -> None:
    all_of(store)
    store.check_on_first_use().wait_verified(1, math.inf)
    for _ in range(2):
        again = TokenStore.open(store.path)
        checker = again.check_on_first_use()
        all_of(again)
        checker.wait_verified(1, math.inf)
    assert read == files(store)
    os.utime(store.path / "train" / "first" / files(store)[1])
    again = TokenStore.open(store.path)
    checker = again.check_on_first_use()
    all_of(again)
    checker.wait_verified(1, math.inf)
    assert read == [*files(store), files(store)[1]]


def test_a_damaged_shard_is_named_by_a_save_and_by_the_next_rows(store: TokenStore) -> None:
    file = damage(store, 1)
    checker = store.check_on_first_use()
    all_of(store)
    with pytest.raises(WrongShardError, match="a shard of the token store is damaged: its SHA-256 is not") as caught:
        checker.wait_verified(5, math.inf)
    assert isinstance(caught.value, DataError) and caught.value.exit_code == 3
    assert caught.value.where == str(file) and "headway data prepare --repair with the config of the run" in str(
        caught.value.fix
    )
    assert "step" not in str(caught.value.fix)
    with pytest.raises(WrongShardError):
        store.read("train", "first", 0, 1)
    with pytest.raises(WrongShardError):  # also by a store that is made of it
        store.with_shards("train", {"first": files(store)[:1]}).read("train", "first", 0, 1)


def test_checkpoints_that_may_be_of_it_are_named(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    damage(store, 0)
    checker = ShardChecker(store.path, store.dtype, store.vocab_size)
    held = checker._changed
    with held:  # the thread cannot say what it has found
        store.checker = checker
        store.read("train", "first", 0, 1)
        assert not checker.wait_verified(7, 0.0) and not checker.wait_verified(8, 0.0)
    with pytest.raises(WrongShardError) as caught:
        checker.wait_verified(9, math.inf)
    assert "first roll back to a checkpoint before step 7 (headway checkpoints restore)" in str(caught.value.fix)


def test_ids_that_no_vocabulary_has_are_found(store: TokenStore) -> None:
    file = store.path / "train" / "first" / files(store)[0]
    entry = store.shard_entries("train", "first")[0]
    ids = np.fromfile(file, store.dtype)
    ids[3] = store.vocab_size
    ids.tofile(file)
    from headway.core.files.hashes import sha256_file

    entry["sha256"] = sha256_file(file)
    checker = store.check_on_first_use()
    store.read("train", "first", 0, 1)
    with pytest.raises(WrongShardError, match="it has the id 300, but the vocabulary ends at 299"):
        checker.wait_verified(1, math.inf)


def test_a_shard_that_another_process_reads_is_waited_for(store: TokenStore, read: list[str]) -> None:
    """A lock of this process would be no lock, so another one holds it."""
    file = store.path / "train" / "first" / files(store)[0]
    checker = store.check_on_first_use()
    item = first_use._Opened(file, file.stat().st_size, store.shard_entries("train", "first")[0]["sha256"])
    mark = first_use._mark(item, file.stat())
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        descriptor = os.open(store.path / VERIFIED, os.O_RDWR)
        fcntl.lockf(descriptor, fcntl.LOCK_EX, 16, first_use._place(mark))
        os.write(ready[1], b".")
        os.read(done[0], 1)
        os.pwrite(descriptor, mark, first_use._place(mark))  # it has found it right
        os._exit(0)
    os.read(ready[0], 1)
    store.read("train", "first", 0, 1)
    assert not checker.wait_verified(1, 0.3) and read == []
    os.write(done[1], b".")
    os.waitpid(child, 0)
    assert checker.wait_verified(2, math.inf) and read == []


def test_a_store_that_cannot_be_written_is_checked_all_the_same(
    store: TokenStore, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refused(path: Any, *arguments: Any, **options: Any) -> int:
        if Path(path).name == VERIFIED:
            raise PermissionError(13, "Permission denied")
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refused)
    for times in (1, 2):
        again = TokenStore.open(store.path)
        checker = again.check_on_first_use()
        all_of(again)
        assert checker.wait_verified(1, math.inf) and read == files(store) * times


def test_what_goes_wrong_in_the_thread_is_told(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever saves waits for it."""

    def fails(*_: Any) -> None:
        raise RuntimeError("oh")

    monkeypatch.setattr(ShardChecker, "_problem", fails)
    checker = store.check_on_first_use()
    store.read("train", "first", 0, 1)
    with pytest.raises(WrongShardError, match=r"it cannot be checked: RuntimeError\('oh'\)"):
        checker.wait_verified(1, math.inf)
