"""Sources behind web addresses and other URLs: with and without ranges, with failures that pass and that do not."""

from __future__ import annotations

import gzip
import http.server
import io
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from headway.core.errors import ConfigError, DataError
from headway.core.requirements import install_command
from headway.core.storage import client
from headway.core.storage.listing import version_of
from headway.data.storage import DataStorage
from headway.text.preparing.inputs import InputHashes
from headway.text.preparing.units import units_of
from headway.text.reading import places, sources
from headway.text.reading.readers import read_batches
from headway.text.reading.sources import pieces_of
from support.sources import find, read

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")

TEXTS = [f"document {number}: " + "word " * (number % 200) for number in range(3000)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


@dataclass
class Web:
    """What a web server has, how well it serves it, and what it was asked for."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    tell_length: bool = True
    failures: list[int] = field(default_factory=list)
    """Status codes of the next answers to requests for content."""
    cut: int | None = None
    """Answers end after this many bytes."""
    asked: list[str] = field(default_factory=list)
    sent: int = 0


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    state = Web()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(False)

        def do_GET(self) -> None:
            self.answer(True)

        def answer(self, with_body: bool) -> None:
            content = state.files.get(self.path)
            if with_body:
                state.asked.append(self.headers.get("Range", "all"))
            status = state.failures.pop(0) if with_body and state.failures else 404 if content is None else 200
            if status != 200:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            assert content is not None
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if state.ranges and wanted:
                start, end = int(wanted[1]), int(wanted[2] or len(content) - 1) + 1
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{min(end, len(content)) - 1}/{len(content)}")
                content = content[start:end]
            else:
                self.send_response(200)
            if state.tell_length:
                self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", '"v1"')
            if not state.tell_length or state.cut is not None:
                self.send_header("Connection", "close")
            self.end_headers()
            if with_body:
                content = content[: state.cut]
                state.sent += len(content)
                self.wfile.write(content)
            if not state.tell_length or state.cut is not None:
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    monkeypatch.setattr(server, "handle_error", lambda *_: None)  # clients that go away early are meant here
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(client, "FIRST_WAIT_SECONDS", 0.01)
    yield state
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("ranges", [True, False])
def test_a_file_on_the_web(web: Web, monkeypatch: pytest.MonkeyPatch, ranges: bool) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 100_000)
    web.files, web.ranges = {"/a.jsonl": LINES, "/b.jsonl.gz": gzip.compress(LINES)}, ranges
    assert read(f"{web.url}/a.jsonl").texts == TEXTS
    assert read(f"{web.url}/b.jsonl.gz").texts == TEXTS
    (source,) = find(f"{web.url}/a.jsonl")
    assert (source.name, source.files[0].name, source.files[0].bytes) == ("a", "a.jsonl", len(LINES))
    assert source.files[0].version == "etag:v1"
    # A server that cannot serve parts is read from beginning to end, once.
    assert len(list(pieces_of([source]))) == (len(LINES) // 100_000 + 1 if ranges else 1)


def test_a_server_without_ranges_is_not_asked_for_the_whole_to_find_out(web: Web) -> None:
    web.files, web.ranges = {"/a.jsonl": LINES * 40}, False
    find(f"{web.url}/a.jsonl")
    assert len(web.asked) == 1 and web.asked[0] != "all"


def test_tables_on_the_web(web: Web, tmp_path) -> None:  # type: ignore[no-untyped-def]
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": TEXTS}), tmp_path / "a.parquet", row_group_size=500)
    web.files = {"/a.parquet": (tmp_path / "a.parquet").read_bytes()}
    assert read(f"{web.url}/a.parquet").texts == TEXTS
    web.ranges = False
    with pytest.raises(DataError, match="does not support range requests") as caught:
        read(f"{web.url}/a.parquet")
    assert caught.value.where == f"{web.url}/a.parquet"


def test_a_query_belongs_to_the_address_and_not_to_the_name(web: Web) -> None:
    web.files = {"/data/a.jsonl?download=true&version=2": LINES}
    (source,) = find(f"{web.url}/data/a.jsonl?download=true&version=2")
    assert (source.name, source.files[0].name, source.files[0].format) == ("a", "a.jsonl", "jsonl")
    assert read(f"{web.url}/data/a.jsonl?download=true&version=2").texts == TEXTS


def test_what_the_web_does_not_have(web: Web) -> None:
    with pytest.raises(DataError, match="no such file or folder") as caught:
        find(f"{web.url}/a.jsonl")
    assert caught.value.where == f"{web.url}/a.jsonl"
    web.files, web.tell_length = {"/a.jsonl": LINES}, False
    with pytest.raises(DataError, match="does not report the file's length"):
        find(f"{web.url}/a.jsonl")
    with pytest.raises(DataError, match="does not report the file's length"):  # it did when the file was listed
        DataStorage(f"{web.url}/a.jsonl", {}).describe()


@pytest.mark.parametrize("failures", [[503], [500, 429, 502]])
def test_failures_that_pass_are_survived(web: Web, failures: list[int]) -> None:
    web.files = {"/a.jsonl": LINES}
    pieces = list(pieces_of(find(f"{web.url}/a.jsonl")))
    web.failures = failures
    assert [text for piece in pieces for batch in read_batches(piece) for text in batch.texts] == TEXTS
    assert not web.failures


def test_failures_that_do_not_pass_are_told(web: Web) -> None:
    web.files = {"/a.jsonl": LINES}
    (piece,) = pieces_of(find(f"{web.url}/a.jsonl"))
    web.failures, web.asked = [503] * 50, []
    with pytest.raises(DataError, match="the remote store cannot be read: 503") as caught:
        list(read_batches(piece))
    assert caught.value.where == f"{web.url}/a.jsonl" and len(web.asked) == 4
    web.failures, web.asked = [403] * 50, []
    with pytest.raises(DataError, match="does not let us in: 403"):
        list(read_batches(piece))
    assert len(web.asked) == 1  # asking again does not help
    web.failures, web.files = [], {}
    with pytest.raises(DataError, match="no such remote file"):
        list(read_batches(piece))


@pytest.mark.parametrize("ranges", [True, False])
def test_an_answer_that_is_cut_short_is_an_error(web: Web, ranges: bool) -> None:
    web.files, web.ranges = {"/a.jsonl": LINES}, ranges
    (piece,) = pieces_of(find(f"{web.url}/a.jsonl"))
    web.cut = 50_000
    with pytest.raises(DataError) as caught:
        list(read_batches(piece))
    assert caught.value.where == f"{web.url}/a.jsonl"


def test_nobody_there_is_told_and_not_taken_for_a_missing_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_WAIT_SECONDS", 0.01)
    with pytest.raises(DataError, match=r"the remote store cannot be read: .*127\.0\.0\.1:9"):
        find("http://127.0.0.1:9/a.jsonl")
    with pytest.raises(DataError, match=r"cannot be read: .*no-such-host\.invalid"):
        find("https://no-such-host.invalid/a.jsonl")


def test_a_stream_that_goes_on_after_its_length_is_not_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may announce one length and send more, or without an end."""

    class Endless(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            return bytes(size)

    answers = [Endless(), io.BytesIO(b"text")]
    monkeypatch.setattr("fsspec.implementations.http.HTTPFileSystem.open", lambda *_, **__: answers.pop(0))
    storage = DataStorage("https://host/a", {})
    with pytest.raises(DataError, match="continues after its announced 100,000 bytes"):
        storage.open("", 100_000, ranges=False).read()
    assert storage.open("", 4, ranges=False).read() == b"text"


def test_any_file_system_that_fsspec_knows() -> None:
    files = fsspec.filesystem("memory")
    files.pipe({"/corpus/a.jsonl": LINES, "/corpus/deep/b.txt": b"text", "/corpus/.hidden.txt": b"x"})
    try:
        (source,) = find("memory://corpus")
        assert [file.name for file in source.files] == ["a.jsonl", "deep/b.txt"]
        assert read("memory://corpus").texts == [*TEXTS, "text"]
        assert read("memory://corpus/*.jsonl").texts == TEXTS
        assert read("memory://corpus/**/*.txt").texts == ["text"]
        pieces = list(pieces_of(find("memory://corpus/a.jsonl")))
        files.pipe("/corpus/a.jsonl", LINES[:1000])
        with pytest.raises(DataError, match="ends after 1,000 of"):
            list(read_batches(pieces[0]))
    finally:
        files.rm("/corpus", recursive=True)


def test_a_remote_file_may_have_a_name_that_reads_like_a_glob(monkeypatch: pytest.MonkeyPatch) -> None:
    files = fsspec.filesystem("memory")
    files.pipe({f"/odd/{name}.txt": name.encode() for name in ("data1", "data[1]", "data2", "what?", "whats")})
    try:
        assert read("memory://odd/data[1].txt").texts == ["data[1]"]
        assert read("memory://odd/what?.txt").texts == ["what?"]
        assert read("memory://odd/data[12].txt").texts == ["data1", "data2"]
        original = type(files).info

        def lists_only(self, path, **options):  # type: ignore[no-untyped-def]
            if "*" in path:
                raise PermissionError("Forbidden")  # of a key that is not there, to who may list some keys only
            return original(self, path, **options)

        monkeypatch.setattr(type(files), "info", lists_only)
        assert read("memory://odd/wh*.txt").texts == ["what?", "whats"]
    finally:
        files.rm("/odd", recursive=True)


def test_bad_lines_of_a_remote_file_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.text.reading import json_lines

    files = fsspec.filesystem("memory")
    content = b'{"text": "fine"}\n' * 1000 + b"broken\n"
    files.pipe("/bad.jsonl", content)
    monkeypatch.setattr(sources, "PIECE_BYTES", 5000)
    try:
        assert [item.where for item in read("memory://bad.jsonl").bad] == ["memory://bad.jsonl:1001"]
        # Counting lines of what lies far from here would mean fetching it all again.
        monkeypatch.setattr(json_lines, "_COUNTED_REMOTELY", 10_000)
        assert [item.where for item in read("memory://bad.jsonl").bad] == ["memory://bad.jsonl:byte 17,000"]
    finally:
        files.rm("/bad.jsonl")


def test_a_reader_fetches_ahead_while_it_goes_straight_on(monkeypatch: pytest.MonkeyPatch) -> None:
    files = fsspec.filesystem("memory")
    content = bytes(range(256)) * 2**16  # 16 MiB
    files.pipe("/a.txt", content)
    threads = set()
    original = type(files).cat_file

    def slow(self, path, start=None, end=None, **options):  # type: ignore[no-untyped-def]
        threads.add(threading.current_thread().name)
        time.sleep(0.01)
        return original(self, path, start=start, end=end, **options)

    monkeypatch.setattr(type(files), "cat_file", slow)
    try:
        (file,) = find("memory://a.txt")[0].files
        with places.open_file(file) as stream:
            assert stream.read() == content
            stream.seek(-5, 2)
            assert stream.read() == content[-5:]
            stream.seek(10)
            assert stream.read(3) == content[10:13]
        assert any("headway-remote" in name for name in threads)
    finally:
        files.rm("/a.txt")


@pytest.mark.parametrize(
    ("package", "url", "extra"),
    [
        ("fsspec", "s3://b/a.txt", "remote"),
        ("gcsfs", "gs://b/a.txt", "gcs"),
        ("huggingface_hub", "hf://datasets/org/name/a.txt", "datasets"),
    ],
)
def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, package: str, url: str, extra: str) -> None:
    from fsspec.registry import _registry

    monkeypatch.delitem(_registry, url.partition(":")[0], raising=False)  # those that are loaded
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=re.escape(install_command(extra))):
        find(url)


def test_an_unknown_scheme_is_a_mistake_of_the_config() -> None:
    with pytest.raises(ConfigError, match="Protocol not known: s4") as caught:
        find("s4://bucket/a.txt")
    assert "s3://" in str(caught.value.fix)


def test_the_owner_of_a_file_is_no_version_of_it() -> None:
    """What `fsspec` calls `uid` on SFTP and SMB."""
    info = {"size": 10, "uid": 1000}
    assert version_of({**info, "mtime": "a"}) != version_of({**info, "mtime": "b"})
    assert version_of({**info, "ETag": "a", "mtime": "b"}) == version_of({**info, "ETag": "a", "mtime": "c"})


def test_a_file_on_the_hub_is_known_by_the_hash_that_the_hub_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the real file system; what the Hub's API tells is made up."""
    pytest.importorskip("huggingface_hub")
    from huggingface_hub import HfApi, HfFileSystem
    from huggingface_hub.hf_api import RepoFile

    told: dict[str, RepoFile] = {}
    main = SimpleNamespace(sha="1" * 40)

    def put(name: str, content: str) -> None:
        large = {"size": 4, "oid": content * 64, "pointerSize": 130}
        told[name] = RepoFile(path=name, size=4, oid=content * 40, lfs=large, xetHash=content * 64)

    def fetched(*_: Any, **__: Any) -> Any:
        raise AssertionError("a whole file would be fetched to be hashed")

    monkeypatch.setattr(HfApi, "repo_info", lambda *_, **__: main)
    monkeypatch.setattr(HfApi, "list_repo_tree", lambda *_, **__: iter(list(told.values())))
    pages = [(told.values(), True)]
    monkeypatch.setattr(HfApi, "_iter_repo_tree_pages", lambda *_, **__: pages, raising=False)
    monkeypatch.setattr(DataStorage, "open", fetched)
    HfFileSystem.clear_instance_cache()
    try:
        put("a.txt", "a")
        put("b.txt", "b")
        for path in ("hf://datasets/org/name/*.txt", "hf://datasets/org/name/a.txt"):
            (source,) = find(path)
            (unit,) = units_of(0, source, 10**9)
            facts = InputHashes().of(unit)[0]
            assert facts == {"path": "a.txt", "format": "text", "bytes": 4, "version": f"blob_id:{'a' * 40}"}
        before = source.files[0]
        assert before.location == f"hf://datasets/org/name@{main.sha}/a.txt"
        put("a.txt", "c")  # other text of the same length
        main.sha = "2" * 40
        assert InputHashes().check_unchanged(before), "it is as its commit has it"
        (after,) = find("hf://datasets/org/name/a.txt")[0].files
        assert after.version == f"blob_id:{'c' * 40}" and after.location != before.location
    finally:
        HfFileSystem.clear_instance_cache()
