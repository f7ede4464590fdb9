"""Reading a store behind a URL, copy by copy: order, bounds, changes, and what comes wrong."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.config.sections.data import DataConfig
from headway.core.errors import ConfigError, DataError
from headway.core.storage import client
from headway.data import remote_cache
from headway.data.feeding.rows import open_rows
from headway.data.remote_cache import Copies
from headway.data.remote_store import RemoteTokenStore, open_store, tokenizer_folder
from headway.data.storage import DataStorage, UnreachableError
from headway.data.store import TokenStore
from headway.text.inspect import describe_store, sample_text
from headway.text.preparing.prepare import prepare
from support.feeds import plain_feed

fsspec = pytest.importorskip("fsspec", reason="there is no fsspec: pip install '.[remote]'")

LENGTH = 16


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(remote_cache, "PATIENCE_SECONDS", 0.0)


@pytest.fixture(scope="module")
def prepared(
    tmp_path_factory: pytest.TempPathFactory, jsonl: Callable[..., Path], documents: Callable[..., list[str]]
) -> Path:
    """A folder with two sources and their store, made once: it takes longer than most tests."""
    folder = tmp_path_factory.mktemp("prepared")
    for number in range(24):
        jsonl(folder / ("one", "two")[number % 2] / f"{number}.jsonl", documents(12, seed=number))
    sources = [str(folder / "one"), str(folder / "two")]
    values = {"tokenizer": {"vocab_size": 300}, "shard_bytes": 1000, "validation": 0.2}
    prepare(DataConfig.model_validate({"sources": sources, "store": folder / "origin", **values}), workers=1)
    return folder


@pytest.fixture
def origin(tmp_path: Path, prepared: Path) -> TokenStore:
    """A local store of two sources with a dozen shards each."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    store = TokenStore.open(tmp_path / "origin")
    assert all(len(store.shards("train", source)) == 12 for source in ("one", "two"))
    return store


@pytest.fixture
def bucket(origin: TokenStore) -> Iterator[Any]:
    """The same in fsspec's memory, at memory://bucket/store."""
    files = fsspec.filesystem("memory")
    files.put(str(origin.path), "/bucket/store", recursive=True)
    yield files
    files.rm("/bucket", recursive=True)


def far(tmp_path: Path, cache: int = 10**9, name: str = "copies", **values: Any) -> DataConfig:
    return DataConfig.model_validate(
        {"remote": "memory://bucket/store", "store": tmp_path / name, "cache_bytes": cache} | values
    )


def copied(store: TokenStore) -> list[Path]:
    return sorted(file for split in ("train", "validation") for file in store.path.glob(f"{split}/*/*"))


def largest(store: TokenStore) -> int:
    return max(file.stat().st_size for file in store.path.glob("*/*/*") if file.suffix in (".bin", ".idx"))


def whole(store: TokenStore) -> dict[tuple[str, str], list[int]]:
    """All tokens, read in an order that jumps between shards."""
    found = {}
    for split in store.splits:
        for source in store.sources(split):
            tokens = store.tokens(split, source)
            out = np.zeros(tokens, dtype=np.int64)
            starts = np.arange(0, tokens, 37)
            for start in np.random.default_rng(0).permutation(starts).tolist():
                count = min(37, tokens - start)
                out[start : start + count] = store.read(split, source, start, count)
            found[split, source] = out.tolist()
    return found


def test_it_is_the_local_store(tmp_path: Path, origin: TokenStore, bucket: Any) -> None:
    store = open_store(far(tmp_path))
    assert store.fingerprint == origin.fingerprint
    assert copied(store) == []  # nothing but manifest and tokenizer comes before it is needed
    assert (store.path / "manifest.json").read_bytes() == (origin.path / "manifest.json").read_bytes()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (store.tokenizer_folder / name).read_bytes() == (origin.tokenizer_folder / name).read_bytes()
    assert whole(store) == whole(origin)
    for split in origin.splits:
        for source in origin.sources(split):
            assert store.documents(split, source).tolist() == origin.documents(split, source).tolist()
    assert store.inputs() == origin.inputs()
    # Where it lies and which encoder made it are no part of it.
    beside = {"store": "", "encoder": ""}
    assert {**describe_store(store), **beside} == {**describe_store(origin), **beside}
    assert sample_text(store) == sample_text(origin)
    # Complete, the copies are a store of their own.
    assert TokenStore.open(store.path).verify() == []


@pytest.mark.parametrize(
    ("packing", "masked"),
    [
        ("concat", False),
        ("best_fit", True),
        *(
            pytest.param(packing, masked, marks=pytest.mark.slow)
            for packing, masked in [("concat", True), ("best_fit", False), ("pad", False), ("pad", True)]
        ),
    ],
)
def test_rows_are_the_local_ones(tmp_path: Path, origin: TokenStore, bucket: Any, packing: str, masked: bool) -> None:
    store = open_store(far(tmp_path, 4 * largest(origin)))
    for source in origin.sources("train"):
        here, there = (open_rows(s, "train", source, LENGTH, packing, document_mask=masked) for s in (origin, store))
        numbers = np.random.default_rng(1).permutation(here.count)
        for few in np.array_split(numbers, 20):
            expected, found = here.read(few), there.read(few)
            assert np.array_equal(expected.tokens, found.tokens)
            assert (expected.documents is None) == (found.documents is None)
            assert expected.documents is None or np.array_equal(expected.documents, found.documents)


def test_batches_are_the_local_ones(tmp_path: Path, origin: TokenStore, bucket: Any) -> None:
    grid = {"sequence_length": LENGTH, "seed": 5, "lanes": 2, "micro_batches": 2, "micro_batch": 3}
    here, there = plain_feed(origin, **grid), plain_feed(open_store(far(tmp_path, 3 * largest(origin))), **grid)
    for step in range(40):
        for lane in range(2):
            for one, other in zip(here.batch(step, lane), there.batch(step, lane), strict=True):
                assert one["ids"].equal(other["ids"]) and one["targets"].equal(other["targets"])


def test_copies_stay_within_their_bound(tmp_path: Path, origin: TokenStore, bucket: Any) -> None:
    limit = 3 * largest(origin)
    assert limit < origin.size_bytes / 3
    store = open_store(far(tmp_path, limit))
    most, sizes = 0, []
    for source in origin.sources("train"):
        for start in range(0, origin.tokens("train", source) - 40, 40):
            found = store.read("train", source, start, 40)
            assert np.array_equal(found, origin.read("train", source, start, 40))
            sizes.append(sum(file.stat().st_size for file in copied(store)))
            most = max(most, len(copied(store)))
    assert max(sizes) <= limit
    assert most > 1  # it is a cache, not one file at a time


def test_the_copy_used_longest_ago_goes_first(tmp_path: Path, origin: TokenStore, bucket: Any) -> None:
    """Of those that this process uses, and of those that others have used."""
    source = origin.sources("train")[0]
    shards = origin.shards("train", source)
    smallest = min(range(3, len(shards)), key=lambda number: shards[number].tokens)

    def opened(folder: str) -> TokenStore:
        limit = sum(2 * shard.tokens for shard in shards[:3])  # less room than a run would need
        return RemoteTokenStore(
            Copies("memory://bucket/store", {}, tmp_path / folder, limit, processes=1), origin.manifest
        )

    def use(store: TokenStore, *numbers: int) -> set[str]:
        for number in numbers:
            store.read("train", source, shards[number].first_token, 1)
        return {file.name for file in copied(store)}

    store = opened("copies")
    assert use(store, 0, 1, 2, 0) == {shard.file for shard in shards[:3]}
    there = use(store, smallest)
    assert {shards[0].file, shards[smallest].file} <= there and shards[1].file not in there

    use(opened("others"), 0, 1, 2)
    gc.collect()  # nobody has them open now
    for number in range(3):
        file = tmp_path / "others" / "train" / source / shards[number].file
        os.utime(file, (number + 1, number + 1))
    use(opened("others"), 0)
    gc.collect()
    there = use(opened("others"), smallest)
    assert {shards[0].file, shards[smallest].file} <= there and shards[1].file not in there


def test_a_mapped_copy_is_never_removed(tmp_path: Path, origin: TokenStore, bucket: Any) -> None:
    source = origin.sources("train")[0]
    shards = origin.shards("train", source)
    limit = 3 * largest(origin)
    first, second = open_store(far(tmp_path, limit)), open_store(far(tmp_path, limit))
    held = first.read("train", source, 0, 5)  # a view of the mapping
    file = first.path / "train" / source / shards[0].file
    for shard in shards[1:]:
        second.read("train", source, shard.first_token, 1)
        assert file.exists()
    expected = held.tolist()
    assert expected == origin.read("train", source, 0, 5).tolist()
    del held, first
    gc.collect()
    for shard in shards[1:]:
        second.read("train", source, shard.first_token, 1)
    assert not file.exists()


def test_the_lock_lasts_as_long_as_the_mapping(tmp_path: Path, origin: TokenStore, bucket: Any) -> None:
    store = open_store(far(tmp_path))
    source = origin.sources("train")[0]
    view = store.read("train", source, 0, 5)
    file = store.path / "train" / source / origin.shards("train", source)[0].file
    with file.open("r+b") as opened:
        with pytest.raises(BlockingIOError):
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        store.copies._release(0)  # type: ignore[attr-defined]
        with pytest.raises(BlockingIOError):
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        del view
        gc.collect()
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_too_small_a_bound_is_refused(tmp_path: Path, origin: TokenStore, bucket: Any) -> None:
    """Rows of training are read ahead while an evaluation reads its own."""
    sizes = {
        split: max(2 * shard.tokens for name in origin.sources(split) for shard in origin.shards(split, name))
        for split in ("train", "validation")
    }
    size = sum(sizes.values())
    with pytest.raises(ConfigError, match="two of the largest shards of each split") as caught:
        open_store(far(tmp_path, 2 * size - 1))
    assert f"data.cache_bytes={2 * size}" in str(caught.value)
    open_store(far(tmp_path, 2 * size))
    with pytest.raises(ConfigError, match="for each of 3 processes"):
        open_store(far(tmp_path, 2 * size), processes=3)


def test_a_shard_is_brought_once_for_all(
    tmp_path: Path, origin: TokenStore, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    real = DataStorage.stream_to

    def counting(self: DataStorage, name: str, *arguments: Any, **options: Any) -> Any:
        asked.append(name)
        time.sleep(0.05)
        return real(self, name, *arguments, **options)

    monkeypatch.setattr(DataStorage, "stream_to", counting)
    stores = [open_store(far(tmp_path)) for _ in range(6)]
    asked.clear()
    source = origin.sources("train")[0]
    threads = [threading.Thread(target=s.read, args=("train", source, 0, 4)) for s in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 1


def test_rows_in_many_shards_are_brought_together(
    tmp_path: Path, origin: TokenStore, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(far(tmp_path))
    source = origin.sources("train")[0]
    rows = open_rows(store, "train", source, LENGTH)
    under_way, most, guard = 0, 0, threading.Lock()
    real = DataStorage.stream_to

    def slow(*arguments: Any, **options: Any) -> Any:
        nonlocal under_way, most
        with guard:
            under_way += 1
            most = max(most, under_way)
        time.sleep(0.1)
        try:
            return real(*arguments, **options)
        finally:
            with guard:
                under_way -= 1

    monkeypatch.setattr(DataStorage, "stream_to", slow)
    rows.read(np.arange(rows.count))
    assert most > 2


class TestWhatComesWrong:
    """The remote store is damaged, changes, or goes."""

    def a_shard(self, origin: TokenStore) -> tuple[str, str]:
        source = origin.sources("train")[0]
        return source, f"/bucket/store/train/{source}/{origin.shards('train', source)[0].file}"

    def test_a_corrupted_object_is_refused(self, tmp_path: Path, origin: TokenStore, bucket: Any) -> None:
        source, path = self.a_shard(origin)
        content = bytearray(bucket.cat(path))
        content[len(content) // 2] ^= 1
        bucket.pipe(path, bytes(content))
        store = open_store(far(tmp_path))
        with pytest.raises(DataError, match="SHA-256 is wrong") as caught:
            store.read("train", source, 0, 4)
        assert path in str(caught.value)
        assert copied(store) == [] or all(file.suffix == ".part" for file in copied(store))
        assert store.verify() == [f"{path.removeprefix('/bucket/store/')}: its SHA-256 is not the manifest's"]

    def test_one_bad_transfer_is_done_again(
        self, tmp_path: Path, origin: TokenStore, bucket: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source, _ = self.a_shard(origin)
        store = open_store(far(tmp_path))
        real, bad = type(bucket).cat_file, [True]

        def flipping(*arguments: Any, **options: Any) -> bytes:
            content = bytearray(real(*arguments, **options))
            if bad:
                bad.pop()
                content[3] ^= 1
            return bytes(content)

        monkeypatch.setattr(type(bucket), "cat_file", flipping)
        assert np.array_equal(store.read("train", source, 0, 9), origin.read("train", source, 0, 9))
        assert not bad

    def test_a_short_object_is_found_by_the_listing(self, tmp_path: Path, origin: TokenStore, bucket: Any) -> None:
        _, path = self.a_shard(origin)
        bucket.pipe(path, bucket.cat(path)[:-2])
        with pytest.raises(DataError, match="bytes long, not") as caught:
            open_store(far(tmp_path))
        assert path in str(caught.value)

    def test_a_missing_object_is_found_by_the_listing(self, tmp_path: Path, origin: TokenStore, bucket: Any) -> None:
        _, path = self.a_shard(origin)
        bucket.rm(path)
        with pytest.raises(DataError, match="missing"):
            open_store(far(tmp_path))
        assert copied(open_store(far(tmp_path), check=False)) == []

    def test_another_store_in_its_place(self, tmp_path: Path, origin: TokenStore, bucket: Any, config: Any) -> None:
        store = open_store(far(tmp_path))
        data = config([tmp_path / "one"], store=tmp_path / "other", validation=0.2)
        prepare(data, workers=1)
        bucket.rm("/bucket", recursive=True)
        bucket.put(str(data.store), "/bucket/store", recursive=True)
        source, _ = self.a_shard(origin)
        with pytest.raises(DataError, match="has changed during the run"):
            store.read("train", source, 0, 4)
        with pytest.raises(DataError, match="the remote store has changed: its fingerprint"):
            open_store(far(tmp_path))
        open_store(far(tmp_path, name="elsewhere"))

    def test_a_store_that_goes(self, tmp_path: Path, origin: TokenStore, bucket: Any) -> None:
        store = open_store(far(tmp_path))
        bucket.rm("/bucket", recursive=True)
        bucket.pipe("/bucket/else", b"")
        source, _ = self.a_shard(origin)
        with pytest.raises(DataError, match="the remote store is gone"):
            store.read("train", source, 0, 4)
        with pytest.raises(DataError, match="there is no token store there"):
            open_store(far(tmp_path))

    def test_names_that_lead_out_of_the_folder(self, tmp_path: Path, origin: TokenStore, bucket: Any) -> None:
        manifest = json.loads(bucket.cat("/bucket/store/manifest.json"))
        source = origin.sources("train")[0]
        manifest["splits"]["train"][source]["shards"][0]["file"] = "../../../escaped.bin"
        bucket.pipe("/bucket/store/manifest.json", json.dumps(manifest).encode())
        with pytest.raises(DataError, match=r"shards.0.file: .*found '../../../escaped.bin'"):
            open_store(far(tmp_path))

    def test_a_tokenizer_that_is_not_the_manifests(self, tmp_path: Path, origin: TokenStore, bucket: Any) -> None:
        path = "/bucket/store/tokenizer/tokenizer.json"
        bucket.pipe(path, bucket.cat(path) + b"\n")
        with pytest.raises(DataError, match="SHA-256 is not the manifest's"):
            open_store(far(tmp_path))
        assert not (tmp_path / "copies" / "manifest.json").exists()

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="there is no token store there"):
            open_store(far(tmp_path))

    def test_a_full_disk(
        self, tmp_path: Path, origin: TokenStore, bucket: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = open_store(far(tmp_path))
        source, _ = self.a_shard(origin)
        monkeypatch.setenv("HEADWAY_FAULTS", "enospc@remote.rename:1")
        with pytest.raises(DataError, match="No space left") as caught:
            store.read("train", source, 0, 4)
        assert "data.cache_bytes" in str(caught.value)
        monkeypatch.delenv("HEADWAY_FAULTS")
        assert np.array_equal(store.read("train", source, 0, 4), origin.read("train", source, 0, 4))


class TestThePlaceOfCopies:
    """What may be in `data.store`."""

    def test_a_store_of_its_own_is_left_alone(self, tmp_path: Path, origin: TokenStore, bucket: Any) -> None:
        before = sorted(origin.path.rglob("*"))
        with pytest.raises(ConfigError, match="the folder holds something else"):
            open_store(far(tmp_path, name="origin"))
        assert sorted(origin.path.rglob("*")) == before

    def test_preparing_into_it_is_refused(self, tmp_path: Path, origin: TokenStore, bucket: Any) -> None:
        data = far(tmp_path, sources=[str(tmp_path / "one")])
        open_store(data)
        with pytest.raises(ConfigError, match="this config trains from the store at memory://bucket/store"):
            prepare(data, workers=1)

    def test_half_a_download_never_counts_and_goes(self, tmp_path: Path, origin: TokenStore, bucket: Any) -> None:
        limit = 3 * largest(origin)
        store = open_store(far(tmp_path, limit))
        source = origin.sources("train")[0]
        shards = origin.shards("train", source)
        folder = store.path / "train" / source
        folder.mkdir(parents=True)
        half, other = folder / f".{shards[0].file}.part", folder / f".{shards[1].file}.part"
        for path in (half, other):
            path.write_bytes(bytes(limit))  # as much as a killed process may have taken
            os.utime(path, (1, 1))
        assert np.array_equal(store.read("train", source, 0, 9), origin.read("train", source, 0, 9))
        assert not half.exists() and not other.exists()
        assert sum(file.stat().st_size for file in copied(store)) <= limit

    def test_a_copy_of_another_length_is_replaced(self, tmp_path: Path, origin: TokenStore, bucket: Any) -> None:
        store = open_store(far(tmp_path))
        source = origin.sources("train")[0]
        file = store.path / "train" / source / origin.shards("train", source)[0].file
        file.parent.mkdir(parents=True)
        file.write_bytes(b"cut")
        assert np.array_equal(store.read("train", source, 0, 9), origin.read("train", source, 0, 9))

    def test_without_the_network_copies_serve(
        self, tmp_path: Path, origin: TokenStore, bucket: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
    ) -> None:
        source = origin.sources("train")[0]
        open_store(far(tmp_path)).read("train", source, 0, 4)

        def gone(*arguments: Any, **options: Any) -> Any:
            raise ConnectionError("no route")

        for request in ("open", "cat_file"):
            monkeypatch.setattr(type(bucket), request, gone)
        store = open_store(far(tmp_path))
        assert isinstance(store, RemoteTokenStore)
        assert "continuing with the copies" in capsys.readouterr().err
        assert np.array_equal(store.read("train", source, 0, 4), origin.read("train", source, 0, 4))
        with pytest.raises(DataError, match="no route"):
            store.read("train", source, origin.shards("train", source)[1].first_token, 4)
        with pytest.raises(DataError, match="no route"):
            open_store(far(tmp_path, name="nothing-yet"))

    def test_the_tokenizer_alone(self, tmp_path: Path, origin: TokenStore, bucket: Any) -> None:
        folder = tokenizer_folder(far(tmp_path))
        assert (folder / "tokenizer.json").read_bytes() == (origin.tokenizer_folder / "tokenizer.json").read_bytes()


def test_no_more_files_are_mapped_than_a_process_may_open(
    tmp_path: Path, origin: TokenStore, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_cache, "_MAPPED", 4)
    store = open_store(far(tmp_path))

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(f"{store.path}/")

    source = origin.sources("train")[0]
    for shard in origin.shards("train", source):
        store.read("train", source, shard.first_token, 1)
        assert mapped() <= 4
    assert mapped() == 4


def test_killed_while_the_first_copies_are_made(tmp_path: Path, origin: TokenStore, bucket: Any) -> None:
    folder = tmp_path / "copies"
    open_store(far(tmp_path))
    (folder / "manifest.json").unlink()  # it comes last
    (folder / "tokenizer" / "tokenizer.json").unlink()
    store = open_store(far(tmp_path))
    assert (store.tokenizer_folder / "tokenizer.json").exists() and (folder / "manifest.json").exists()
    assert whole(store) == whole(origin)


def test_on_the_web(tmp_path: Path, origin: TokenStore) -> None:
    """There are no listings there; this server does not know ranges either."""
    pytest.importorskip("aiohttp", reason="fsspec needs it for the web")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(origin.path))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            store = open_store(far(tmp_path, 3 * largest(origin), remote=url))
            assert whole(store) == whole(origin)
            source = origin.sources("train")[0]
            file = origin.path / "train" / source / origin.shards("train", source)[5].file
            content = file.read_bytes()
            file.write_bytes(content[:-2])
            with pytest.raises(DataError, match="bytes long, not") as caught:
                open_store(far(tmp_path, name="other", remote=url))
            assert file.name in str(caught.value)
            file.unlink()
            with pytest.raises(DataError, match="missing"):
                open_store(far(tmp_path, name="other", remote=url))
        finally:
            server.shutdown()


def test_patience_ends_when_the_store_is_back(
    tmp_path: Path, origin: TokenStore, bucket: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(remote_cache, "PATIENCE_SECONDS", 60.0)
    store = open_store(far(tmp_path))
    real, failures = type(bucket).cat_file, list(range(8))

    def failing(*arguments: Any, **options: Any) -> bytes:
        if failures:
            failures.pop()
            raise ConnectionError("refused")
        return real(*arguments, **options)

    monkeypatch.setattr(type(bucket), "cat_file", failing)
    source = origin.sources("train")[0]
    assert np.array_equal(store.read("train", source, 0, 4), origin.read("train", source, 0, 4))
    said = capsys.readouterr().err
    assert said.count("trying again for 1 m") == 1 and "answers again" in said


def test_patience_is_as_long_as_the_caller_says(
    tmp_path: Path, origin: TokenStore, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a download, all of its requests together; the first reads of a start have none."""
    clock = [0.0]
    monkeypatch.setattr(client, "FIRST_WAIT_SECONDS", 0.5)
    store = open_store(far(tmp_path), patience_seconds=100.0)

    class Waited(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            clock[0] += timeout or 0.0
            return False

    def away(*_: Any, **__: Any) -> Any:
        clock[0] += 2.0
        raise ConnectionError("refused")

    monkeypatch.setattr(client.time, "monotonic", lambda: clock[0])
    store.copies._patient.stopping = Waited()  # type: ignore[attr-defined]
    for request in ("open", "cat_file"):
        monkeypatch.setattr(type(bucket), request, away)
    with pytest.raises(UnreachableError):
        store.read("train", origin.sources("train")[0], 0, 4)
    assert 60 < clock[0] <= 102
    clock[0] = 0.0
    monkeypatch.setattr(client, "FIRST_WAIT_SECONDS", 0.0)
    with pytest.raises(UnreachableError):
        open_store(far(tmp_path, name="others"), patience_seconds=100.0)
    assert clock[0] < 15
