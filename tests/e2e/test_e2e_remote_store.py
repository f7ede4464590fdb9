"""Training from a store in object storage: a real S3 server, real processes, kills on both sides."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.config.sections.data import DataConfig
from headway.core.errors import DataError
from headway.data.remote_cache import KEEPING, locked
from headway.data.remote_store import open_store
from headway.data.store import TokenStore
from support.feeds import plain_feed
from support.object_storage import S3Server, store_files
from support.runs import headway, state_hash, write_config, write_corpus
from support.waits import LONG

FILES = 12
RUN = {"train": {"steps": 12, "sequence_length": 32, "global_batch": 8, "micro_batch": 2, "device": "cpu"}}


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store of twelve shards."""
    folder = tmp_path_factory.mktemp("origin")
    lines = write_corpus(folder, 240).read_text().splitlines(keepends=True)
    (folder / "texts").mkdir()
    for number in range(FILES):
        (folder / "texts" / f"{number:02d}.jsonl").write_text("".join(lines[number::FILES]))
    config = write_config(folder, data=_data(folder, folder / "store"))
    result = headway("data", "prepare", config)
    assert result.returncode == 0, result.stderr
    assert len(TokenStore.open(folder / "store").shards("train", "texts")) == FILES
    return folder


def _data(folder: Path, store: Path, **values: Any) -> dict[str, Any]:
    return {"sources": [str(folder / "texts")], "store": str(store), "shard_bytes": 1000, "validation": 0.1, **values}


@pytest.fixture
def url(s3: S3Server, origin: Path, tmp_path: Path) -> str:
    """The same store in a bucket."""
    return _upload(s3, origin, tmp_path.name)


def _upload(server: S3Server, origin: Path, name: str) -> str:
    files = server.files()
    for relative, path in store_files(origin / "store"):
        files.pipe_file(f"{server.bucket}/{name}/{relative}", path.read_bytes())
    return f"{server.url}/{name}"


def _limit(origin: Path, processes: int = 1) -> int:
    """Room for a quarter of the shards."""
    found = [path for path in (origin / "store").glob("*/*/*") if path.suffix in (".bin", ".idx")]
    sizes = {split: [p.stat().st_size for p in found if p.parts[-3] == split] for split in ("train", "validation")}
    total = sum(map(sum, sizes.values()))
    limit = max(2 * sum(map(max, sizes.values())) * processes, total // 4)
    assert limit < total / 1.5
    return limit


def _configs(origin: Path, tmp_path: Path, url: str, limit: int, **sections: Any) -> tuple[Path, Path]:
    """The same run from the local store and from the remote one."""
    paths = []
    for name, data in (
        ("local", _data(origin, origin / "store")),
        ("remote", _data(origin, tmp_path / "copies", remote=url, cache_bytes=limit)),
    ):
        (tmp_path / name).mkdir()
        paths.append(write_config(tmp_path / name, data=data, **{**RUN, **sections}))
    return paths[0], paths[1]


def _copies(folder: Path) -> int:
    """Bytes of copies; counted under the lock under which room is made, so that none is both there and replaced."""
    (folder / KEEPING).mkdir(parents=True, exist_ok=True)
    with locked(folder / KEEPING / "lock"):
        return sum(path.stat().st_size for path in folder.glob("*/*/*") if path.is_file())


@pytest.mark.slow
def test_a_run_from_object_storage_is_the_local_one_through_a_kill(origin: Path, tmp_path: Path, url: str) -> None:
    limit = _limit(origin)
    local, remote = _configs(origin, tmp_path, url, limit)
    assert headway("train", local).returncode == 0
    assert "died (signal 9)" in headway("train", remote, faults="kill@step=7").stderr
    assert _copies(tmp_path / "copies") <= limit
    resumed = headway("train", remote)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming from" in resumed.stderr
    assert _copies(tmp_path / "copies") <= limit
    runs = [path.parent / "runs" / "tiny" for path in (local, remote)]
    assert state_hash(runs[0]) == state_hash(runs[1])

    assert headway("ledger", runs[1]).returncode == 0
    losses = [json.loads(headway("eval", run, "--json").stdout)["loss"] for run in runs]
    assert losses[0] == losses[1]
    shown = [headway("data", "preview", path, "--step", "5", "--json") for path in (local, remote)]
    assert shown[0].stdout == shown[1].stdout != ""
    assert headway("data", "verify", remote).returncode == 0


@pytest.mark.slow
def test_killed_while_a_shard_comes(origin: Path, tmp_path: Path, url: str) -> None:
    local, remote = _configs(origin, tmp_path, url, _limit(origin))
    assert headway("train", local).returncode == 0
    for point in ("remote.keep", "remote.block:2", "remote.rename:9"):
        killed = headway("train", remote, faults=f"kill@{point}")
        assert killed.returncode == -9 or "died (signal 9)" in killed.stderr, (point, killed.stderr)
    assert headway("train", remote).returncode == 0
    assert state_hash(tmp_path / "local/runs/tiny") == state_hash(tmp_path / "remote/runs/tiny")


@pytest.mark.slow
def test_two_workers_share_the_copies(origin: Path, tmp_path: Path, url: str) -> None:
    limit = _limit(origin, processes=2)
    sections = {"parallel": {"threads": 1, "workers": 2}}
    local, remote = _configs(origin, tmp_path, url, limit, **sections)
    assert headway("train", local).returncode == 0
    result = headway("train", remote)
    assert result.returncode == 0, result.stderr
    assert "more than data.cache_bytes" not in result.stderr
    assert _copies(tmp_path / "copies") <= limit
    assert state_hash(tmp_path / "local/runs/tiny") == state_hash(tmp_path / "remote/runs/tiny")


@pytest.mark.slow
def test_two_processes_at_once_bring_a_shard_once(origin: Path, tmp_path: Path, url: str) -> None:
    """Both read all rows in orders of their own from one folder of copies, too small for all of them."""
    limit = _limit(origin, processes=2)
    program = """
import sys, hashlib, numpy as np
from headway.config.sections.data import DataConfig
from headway.data.remote_store import open_store
url, folder, limit, seed = sys.argv[1:]
data = DataConfig.model_validate({"remote": url, "store": folder, "cache_bytes": int(limit)})
store = open_store(data, processes=2)
tokens = store.tokens("train", "texts")
out = np.zeros(tokens, dtype=np.int64)
for start in np.random.default_rng(int(seed)).permutation(np.arange(0, tokens, 50)).tolist():
    count = min(50, tokens - start)
    out[start:start + count] = store.read("train", "texts", start, count)
print(hashlib.sha256(out.tobytes()).hexdigest())
"""
    command = [sys.executable, "-c", program, url, str(tmp_path / "copies"), str(limit)]
    both = [subprocess.Popen([*command, str(seed)], stdout=-1, stderr=-1, text=True) for seed in (1, 2)]
    most = 0
    while any(process.poll() is None for process in both):
        most = max(most, _copies(tmp_path / "copies"))
        time.sleep(0.02)
    outputs = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    store = TokenStore.open(origin / "store")
    whole = store.read("train", "texts", 0, store.tokens("train", "texts")).astype(np.int64)
    assert {out.strip() for out, _ in outputs} == {hashlib.sha256(whole.tobytes()).hexdigest()}
    assert not any("more than data.cache_bytes" in err for _, err in outputs)
    assert 0 < most <= limit


@pytest.mark.slow
def test_a_corrupted_object_ends_the_run(origin: Path, tmp_path: Path, url: str, s3: S3Server) -> None:
    store = TokenStore.open(origin / "store")
    name = f"train/texts/{store.shards('train', 'texts')[4].file}"
    content = bytearray((origin / "store" / name).read_bytes())
    content[100] ^= 64
    s3.put(f"{tmp_path.name}/{name}", bytes(content))
    _, remote = _configs(origin, tmp_path, url, _limit(origin))
    result = headway("train", remote)
    assert result.returncode == DataError.exit_code
    assert "SHA-256" in result.stderr and name in result.stderr
    assert not (tmp_path / "copies" / name).exists()
    # Put right, the same command goes on.
    s3.put(f"{tmp_path.name}/{name}", (origin / "store" / name).read_bytes())
    assert headway("train", remote).returncode == 0


class TestAServerThatDies:
    """It is killed, and comes back with what it had."""

    @pytest.fixture
    def server(self, tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
        """One of our own."""
        server = type(s3)(tmp_path / "server")
        server.start()
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server
        server.stop()

    def test_reading_waits_for_it(self, origin: Path, tmp_path: Path, server: S3Server) -> None:
        data = DataConfig.model_validate(
            {"remote": _upload(server, origin, "s"), "store": tmp_path / "copies", "cache_bytes": _limit(origin)}
        )
        grid: dict[str, Any] = {"sequence_length": 32, "seed": 1, "lanes": 1, "micro_batches": 1, "micro_batch": 4}
        here, there = plain_feed(TokenStore.open(origin / "store"), **grid), plain_feed(open_store(data), **grid)
        assert there.batch(0, 0)[0]["ids"].equal(here.batch(0, 0)[0]["ids"])
        server.stop()
        back = threading.Timer(3.0, server.start)
        back.start()
        started = time.monotonic()
        for step in range(1, 12):
            assert there.batch(step, 0)[0]["ids"].equal(here.batch(step, 0)[0]["ids"])
        assert time.monotonic() - started > 2.5, "rows of shards that were not here came from somewhere"
        back.join()

    @pytest.mark.slow
    def test_a_run_goes_on(self, origin: Path, tmp_path: Path, server: S3Server) -> None:
        url = _upload(server, origin, "s")
        local, remote = _configs(origin, tmp_path, url, _limit(origin), train={**RUN["train"], "steps": 60})
        assert headway("train", local).returncode == 0
        metrics = tmp_path / "remote" / "runs" / "tiny" / "metrics.jsonl"
        with subprocess.Popen(
            [sys.executable, "-m", "headway", "train", str(remote)], stderr=subprocess.PIPE, text=True, env=os.environ
        ) as run:
            until = time.monotonic() + 120
            while not (metrics.exists() and metrics.read_text().count("\n") > 3):
                assert time.monotonic() < until and run.poll() is None
                time.sleep(0.02)
            server.stop()
            time.sleep(4)
            assert run.poll() is None, "it should wait for the server"
            server.start()
            _, said = run.communicate(timeout=LONG)
        assert run.returncode == 0, said
        assert "trying again" in said
        assert state_hash(tmp_path / "local/runs/tiny") == state_hash(tmp_path / "remote/runs/tiny")
