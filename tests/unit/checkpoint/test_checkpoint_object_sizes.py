"""What a remote tier gives is read into memory up to a limit for its kind, whatever a server sends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from headway.checkpoint.format.sealing import SEALED
from headway.checkpoint.remote import sealed_objects
from headway.checkpoint.remote.objects import Objects
from headway.checkpoint.remote.ownership import NEWEST, RUN_FILE, claim_name
from headway.checkpoint.remote.sealed_objects import SealedObjects
from headway.checkpoint.remote.tier import RemoteTier
from headway.core.errors import CheckpointError
from headway.core.files.foreign import LISTING_BYTES
from headway.core.storage import RECORD_BYTES, client
from support.local_server import LocalServer
from support.object_storage import S3Server

_BLOCK = bytes(2**20)
#: What an endless answer would come to if it were read to its end.
_MOST_BLOCKS = 2000


class _Endless(BaseHTTPRequestHandler):
    """Answers with an object that does not end, its length announced as `length`, or not at all."""

    protocol_version = "HTTP/1.1"
    length: int | None
    sent: list[int]
    ended: threading.Event

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("ETag", '"1"')
        if self.length is None:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(self.length))
        self.end_headers()
        with suppress(OSError):
            for _ in range(_MOST_BLOCKS):
                chunk = b"%x\r\n%b\r\n" % (len(_BLOCK), _BLOCK) if self.length is None else _BLOCK
                self.wfile.write(chunk)
                self.sent.append(len(_BLOCK))
        self.ended.set()


@pytest.fixture(params=[None, _MOST_BLOCKS * len(_BLOCK)], ids=["without a length", "with a length"])
def endless(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[int]]]:
    """The URL of a store of which every object is endless, and what it has sent."""
    s3fs = pytest.importorskip("s3fs", reason="there is no S3 client: pip install '.[s3]'")
    sent: list[int] = []
    ended = threading.Event()
    server = LocalServer(_Endless, length=request.param, sent=sent, ended=ended)
    environment = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_ENDPOINT_URL": server.endpoint}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    yield "s3://bucket/run", sent
    assert ended.wait(60), "the connection was closed"
    s3fs.S3FileSystem.clear_instance_cache()
    server.close()


def test_an_endless_object_is_read_up_to_its_limit(endless: tuple[str, list[int]]) -> None:
    url, sent = endless
    with pytest.raises(CheckpointError, match=r"at most 64\.0 KiB, .* more bytes than that") as refused:
        Objects(url, patience_seconds=0).read("owners/1.json")
    assert refused.value.where == "s3://bucket/run/owners/1.json"
    assert sum(sent) < 100 * len(_BLOCK), "what lies in buffers between the two"


@pytest.mark.parametrize("name", [claim_name(3), RUN_FILE, NEWEST])
@pytest.mark.parametrize("place", ["file", "memory"])
def test_a_record_that_is_too_large_is_named_with_its_size(place: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    objects = Objects(f"file://{tmp_path}/tier" if place == "file" else f"memory://{tmp_path.name}/tier")
    objects.write(name, bytes(RECORD_BYTES))
    assert objects.read(name) == bytes(RECORD_BYTES)
    objects.write(name, bytes(RECORD_BYTES + 1024))
    with pytest.raises(CheckpointError, match=r"at most 64\.0 KiB, .* has 65\.0 KiB") as refused:
        objects.read(name)
    assert refused.value.where == objects.url_of(name) and refused.value.fix


def test_on_a_server(s3: S3Server) -> None:
    objects = Objects(f"{s3.url}/sizes")
    for size in (0, 1, RECORD_BYTES):
        objects.write("owners/1.json", bytes(size))
        assert objects.read("owners/1.json") == bytes(size)
    assert objects.read("owners/2.json") is None
    objects.write("owners/1.json", bytes(RECORD_BYTES + 1024))
    for ask in (lambda: objects.read("owners/1.json"), lambda: objects.create("owners/1.json", b"mine")):
        with pytest.raises(CheckpointError, match=r"has 65\.0 KiB"):
            ask()


def test_a_manifest_may_be_as_large_as_one_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is lowered: what a step's manifest may have is more than a test should write."""
    asked: list[int] = []
    original = client.read_whole

    def read_whole(files: object, path: str, most: int) -> bytes:
        asked.append(most)
        return original(files, path, min(most, 2 * RECORD_BYTES))

    monkeypatch.setattr(client, "read_whole", read_whole)
    tier = RemoteTier(Objects(f"memory://{tmp_path.name}"))
    tier.objects.write("step-00000003/manifest.json", b" " * (RECORD_BYTES + 1))
    with pytest.raises(CheckpointError, match="is not JSON"):
        tier.manifest(3)
    assert asked == [LISTING_BYTES]
    tier.objects.write("step-00000003/manifest.json", bytes(3 * RECORD_BYTES))
    with pytest.raises(CheckpointError, match="an object of this kind has at most"):
        tier.manifest(3)


def test_what_is_sealed_may_have_as_much_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_objects, "LISTING_BYTES", RECORD_BYTES)
    objects = SealedObjects(f"memory://{tmp_path.name}/tier")
    objects.key = bytes(32)
    objects.write("step-1/manifest.json", bytes(RECORD_BYTES))
    assert objects.read("step-1/manifest.json", RECORD_BYTES) == bytes(RECORD_BYTES)
    assert objects.open_one_of(["step-1/manifest.json"])
    objects.write("step-1/manifest.json", bytes(RECORD_BYTES + 1))
    for read in (lambda: objects.read("step-1/manifest.json"), lambda: objects.open_one_of(["step-1/manifest.json"])):
        with pytest.raises(CheckpointError, match="of this kind") as refused:
            read()
        assert str(refused.value.where).endswith(f"manifest.json{SEALED}")
