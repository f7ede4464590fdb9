"""S3 servers for tests, one in this process and a real one (SeaweedFS, with a folder and ports of its own), and what is
tested with every object store."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from headway.checkpoint.remote.objects import Objects
from headway.data.store import TokenStore
from support.parts_table import program
from support.ports import free_ports
from support.runs import headway, state_hash, write_config, write_corpus
from support.s3_server import Buckets, EmulatedS3
from support.sources import find, read

BUCKET = "headway"
#: The documents of every file that `write_every_format` makes, but one.
TEXTS = ["first", "Grüße 🎉\n", *(f"document {number}: " + "some text " * (number % 40) for number in range(3000))]
#: Globs below its folder, and what they mean.
GLOBS = {
    "*.parquet": ["d.parquet"],
    "part/*": ["a.jsonl", "b.jsonl.gz"],
    "**/*.jsonl*": ["c.jsonl.zst", "part/a.jsonl", "part/b.jsonl.gz"],
    "[c-d].*": ["c.jsonl.zst", "d.parquet"],
}


class S3Server:
    """A server with one bucket; `files` puts things there.

    Args:
        folder: For what it keeps, and its log.
    """

    access_key, secret_key, bucket = "headway-test", "not-a-secret", BUCKET

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def endpoint(self) -> str:
        """Its URL."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        """The bucket."""
        return f"s3://{self.bucket}"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to get at it, as users have it."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def files(self) -> Any:
        """An `s3fs.S3FileSystem`."""
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
        return s3fs.S3FileSystem(key=self.access_key, secret=self.secret_key, endpoint_url=self.endpoint)

    def put(self, name: str, content: bytes) -> str:
        """Write an object; returns its URL."""
        self.files().pipe_file(f"{self.bucket}/{name}", content)
        return f"{self.url}/{name}"

    def start(self) -> None:
        """Start it, with what it had when it was stopped, and wait until it answers."""
        raise NotImplementedError

    def stop(self) -> None:
        """Kill it."""
        raise NotImplementedError


class InProcess(S3Server):
    """One in this process, which is there at once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._buckets, self._server, self._port = Buckets(objects={self.bucket: {}}), None, 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        self._port = self._port or free_ports(1)[0]
        self._server = EmulatedS3(self._buckets, self.access_key, self.secret_key, self._port)

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


class SeaweedFs(S3Server):
    """A real one, in processes of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.more_identities: list[dict[str, Any]] = []
        self._ports: dict[str, int] = {}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports['s3.port']}"

    def start(self) -> None:
        """Start it, and wait until it answers (about four seconds).

        Raises:
            RuntimeError: it ends, or does not answer for a minute.
        """
        for last in (False, False, True):
            chosen = bool(self._ports)
            try:
                self._start()
                return
            except RuntimeError:
                if last or chosen:
                    raise
                self._ports = {}  # somebody else has taken one of them in the meantime

    def _start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "data").mkdir(exist_ok=True)
        keys = [{"accessKey": self.access_key, "secretKey": self.secret_key}]
        identity = {"name": "test", "credentials": keys, "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
        (self._folder / "s3.json").write_text(json.dumps({"identities": [identity, *self.more_identities]}))
        if not self._ports:
            names = [f"{part}.port{kind}" for part in ("master", "volume", "filer", "s3") for kind in ("", ".grpc")]
            self._ports = dict(zip(names, free_ports(8), strict=True))
        ports = [f"-{name}={port}" for name, port in self._ports.items()]
        command = [
            str(program("weed")),
            "-logtostderr=true",
            "server",
            f"-dir={self._folder / 'data'}",
            "-ip=127.0.0.1",
        ]
        # Every port is its own, so that test runs can go on side by side.
        options = [
            "-s3.port.lance=0",
            "-ip.bind=127.0.0.1",
            "-master.volumeSizeLimitMB=64",
            "-volume.max=100",
            "-s3",
            "-s3.port.iceberg=0",
        ]
        with (self._folder / "log.txt").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *options, f"-s3.config={self._folder / 's3.json'}", *ports], stdout=log, stderr=log
            )
        self._wait()

    def _wait(self) -> None:
        assert self._process is not None
        until = time.monotonic() + 60
        while time.monotonic() < until and self._process.poll() is None:
            try:
                files, first = self.files(), f"{self.bucket}/is-it-there"
                with suppress(FileExistsError):
                    files.mkdir(self.bucket)
                # It makes buckets some time before it has room for an object.
                files.pipe_file(first, b"yes")
                assert files.cat_file(first) == b"yes"
                files.rm_file(first)
                return
            except Exception:
                time.sleep(0.2)
        log = (self._folder / "log.txt").read_text(errors="replace")[-2000:]
        self.stop()
        raise RuntimeError(f"the S3 server did not come up:\n{log}")

    def stop(self) -> None:
        """Kill it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def store_files(store: Path) -> Iterator[tuple[str, Path]]:
    """Of what makes up a token store: names relative to it, and where they are."""
    for path in sorted(store.rglob("*")):
        if path.is_file() and ".work" not in path.parts:
            yield path.relative_to(store).as_posix(), path


def write_every_format(folder: Path) -> Path:
    """The same texts in every format, and what is not read."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (folder / "part").mkdir(parents=True)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    (folder / "part" / "a.jsonl").write_bytes(lines)
    (folder / "part" / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "c.jsonl.zst").write_bytes(pytest.importorskip("zstandard").compress(lines))
    table = arrow.table({"text": TEXTS, "noise": [random.Random(n).randbytes(400) for n in range(len(TEXTS))]})
    parquet.write_table(table, folder / "d.parquet", row_group_size=500)
    with arrow.ipc.new_stream(folder / "e.arrow", table.schema) as out:
        out.write_table(table, max_chunksize=400)
    with arrow.ipc.new_file(folder / "f.feather", table.schema) as out:
        out.write_table(table, max_chunksize=400)
    (folder / "g.txt").write_text(TEXTS[1])
    (folder / ".hidden.txt").write_text("not read")
    (folder / "readme.pdf").write_text("ignored")
    return folder


def put_folder(place: Objects, folder: Path) -> None:
    """Put all that is below a folder there."""
    for file in (file for file in folder.rglob("*") if file.is_file()):
        place.upload(file.relative_to(folder).as_posix(), file)


def find_by_glob(url: str, corpus: Path, pattern: str, names: list[str], **options: Any) -> None:
    """A glob means the same in an object store as in the folder that was put there, and it reads the same."""
    (here,), (there,) = find(f"{corpus}/{pattern}"), find(f"{url}/{pattern}", **options)
    assert [file.name for file in here.files] == [file.name for file in there.files] == names
    assert read(f"{corpus}/{pattern}").texts == read(f"{url}/{pattern}", **options).texts


def prepare_from_both(url: str, corpus: Path, folder: Path, **options: Any) -> None:
    """An object store prepares to the same tokens as the folder that was put there, and once."""
    for name, source in (("local", {"path": str(corpus)}), ("remote", {"path": url, **options})):
        data = {"sources": [{**source, "name": "corpus"}], "store": str(folder / name), "workers": 2}
        config = write_config(folder, data=data)
        result = headway("data", "prepare", config)
        assert result.returncode == 0, result.stderr
    # Shards are named by what is known of their input: a hash here, the server's checksum there.
    here, there = (TokenStore.open(folder / name) for name in ("local", "remote"))
    assert here.splits == there.splits == ["train", "validation"]
    for split in here.splits:
        count = here.tokens(split, "corpus")
        assert count == there.tokens(split, "corpus")
        assert (here.read(split, "corpus", 0, count) == there.read(split, "corpus", 0, count)).all()
    assert all("version" in file for file in there.inputs()["sources"][0]["files"])
    again = headway("data", "prepare", config)
    assert again.returncode == 0 and "up to date" in again.stderr


def contend_for_an_object(place: Objects) -> None:
    """Several make the same object, and one of them has made it; a later write gives it another version."""
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda n: place.create("claim", b"%d" % n), range(8)))
    assert sum(made) == 1 and place.read("claim") == b"%d" % made.index(True)
    before = place.stat("claim")
    place.write("claim", b"x")
    after = place.stat("claim")
    assert before and after and before.version != after.version
    place.remove(["claim", "nothing"])
    assert place.read("claim") is None and place.stat("claim") is None and place.names() == []


def lose_a_machine(place: Objects, folder: Path) -> None:
    """Text, token store and checkpoints are in an object store; a run loses its machine and goes on from there."""
    url = place.url
    place.upload("corpus.jsonl", write_corpus(folder))
    config = write_config(
        folder,
        data={"sources": [f"{url}/corpus.jsonl"]},
        checkpoint={"every": "2 steps", "remote": {"url": f"{url}/checkpoints", "every": "2 steps"}},
    )
    prepared = headway("data", "prepare", config)
    assert prepared.returncode == 0, prepared.stderr
    whole = headway("train", config, "name=whole", "checkpoint.remote=null")
    assert whole.returncode == 0, whole.stderr
    for relative, path in store_files(folder / "store"):
        place.upload(f"store/{relative}", path)
    shutil.rmtree(folder / "store")
    remote = [f"data.remote={url}/store", "name=killed"]
    # Slow enough for a checkpoint to be there when the machine goes, though a client library takes a second to load.
    killed = headway("train", config, *remote, faults="slow@step=1,slow@compute=1,kill@step=9")
    assert "died (signal 9)" in killed.stderr, killed.stderr
    shutil.rmtree(folder / "runs" / "killed")
    again = headway("train", config, *remote)
    assert again.returncode == 0 and "resuming from" in again.stderr, again.stderr
    assert state_hash(folder / "runs" / "killed") == state_hash(folder / "runs" / "whole")
    verified = headway("checkpoints", "verify", f"{url}/checkpoints/killed")
    assert verified.returncode == 0, verified.stderr
