"""Sources in a real object store: the same documents as from the disk, and clear errors when it fails."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from headway.checkpoint.remote.objects import Objects
from headway.core.errors import DataError
from headway.data.storage import DataStorage
from headway.text.reading import sources
from headway.text.reading.places import open_file, stamp_of
from headway.text.reading.readers import read_batches
from headway.text.reading.sources import pieces_of
from support.object_storage import GLOBS, TEXTS, S3Server, find_by_glob, prepare_from_both, put_folder
from support.runs import headway, skip_without, write_config
from support.sources import find, read

skip_without("s3fs")


@pytest.fixture
def bucket(s3: S3Server, every_format: Path) -> str:
    """The corpus in the bucket; returns its URL."""
    url = f"{s3.url}/corpus"
    if not s3.files().exists(f"{s3.bucket}/corpus/g.txt"):
        put_folder(Objects(url), every_format)
    return url


def test_a_folder_in_a_bucket_reads_like_one_on_disk(
    bucket: str, every_format: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 50_000)
    (here,), (there,) = find(every_format), find(bucket)
    assert [(f.name, f.format, f.compression, f.bytes) for f in here.files] == [
        (f.name, f.format, f.compression, f.bytes) for f in there.files
    ]
    assert (here.name, here.ignored) == (there.name, there.ignored)
    assert [piece.span for piece in pieces_of([here])] == [piece.span for piece in pieces_of([there])]
    local, distant = read(every_format), read(bucket)
    assert local.texts == distant.texts and len(local.texts) == 6 * len(TEXTS) + 1
    assert not distant.bad


@pytest.mark.parametrize(("pattern", "names"), GLOBS.items())
def test_globs(bucket: str, every_format: Path, pattern: str, names: list[str]) -> None:
    find_by_glob(bucket, every_format, pattern, names)


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
    original = DataStorage._with_retries

    def counted(self, *arguments):  # type: ignore[no-untyped-def]
        result = original(self, *arguments)
        fetched.append(len(result) if isinstance(result, bytes) else 0)
        return result

    monkeypatch.setattr(DataStorage, "_with_retries", counted)
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
    original = DataStorage._with_retries

    def counted(self, *arguments):  # type: ignore[no-untyped-def]
        result = original(self, *arguments)
        fetched.append(len(result) if isinstance(result, bytes) else 0)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DataStorage, "_with_retries", counted)
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


def test_a_server_that_dies_half_way_is_one_clear_error(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs

    server = type(s3_server)(tmp_path / "s3")
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


def test_a_bucket_prepares_to_the_same_tokens_as_a_folder(bucket: str, every_format: Path, tmp_path: Path) -> None:
    prepare_from_both(bucket, every_format, tmp_path)
