"""Records that travel with a checkpoint: what is packed, and what an archive may hold."""

from __future__ import annotations

import errno
import resource
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest

from headway.checkpoint import records
from headway.checkpoint.post_save import CheckpointMaintainer, MaintainerSettings
from headway.checkpoint.records import RECORDS, RECORDS_FILE, RecordsPacker, segments_of, unpack_records
from headway.config import Config, TrainConfig
from headway.core.errors import CheckpointError
from headway.core.files.hashes import sha256_file

FILES = {
    "ledger.jsonl": '{"kind": "commit"}\n',
    "metrics.jsonl": '{"step": 1}\n{"step": 2}\n',
    "attempts/001/attempt.json": '{"number": 1}',
    "attempts/012/attempt.json": '{"number": 12}',
    "tracking/mlflow-0a1b2c3d.json": '{"run": "x", "place": 12}',
}
#: What stays where it is: locks, logs, what is made anew, and what may hold more than others should see.
OTHERS = ("run.json", "config.yaml", ".owner", "attempts/001/worker-0.log", "tracking/mlflow-0a1b2c3d.lock")


def write(run: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)
    return run


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_the_records_of_a_run_come_back_as_they_were(tmp_path: Path) -> None:
    run = write(tmp_path / "run", {**FILES, **dict.fromkeys(OTHERS, "no")})
    entry = RecordsPacker(run).pack(tmp_path)
    assert sorted(unpack_records(tmp_path / RECORDS_FILE, entry, tmp_path / "new")) == sorted(FILES)
    assert contents(tmp_path / "new") == FILES


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_SEGMENT_BYTES", 1000)
    monkeypatch.setattr(records, "_BLOCK_BYTES", 300)


def lines(first: int, last: int) -> str:
    return "".join(f'{{"step": {step}, "loss": {step / 7}}}\n' for step in range(first, last))


@pytest.mark.usefixtures("short_segments")
def test_what_is_packed_does_not_grow_with_the_run(tmp_path: Path) -> None:
    run, packer = write(tmp_path / "run", {"metrics.jsonl": lines(0, 20), "ledger.jsonl": "{}\n"}), None
    sizes, segments = list[int](), list[dict[str, Any]]()
    for first in range(20, 400, 5):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(lines(first, first + 5)[:-9])  # the last line is still being written
            file.flush()
            packer = packer if packer and first % 50 else RecordsPacker(run)  # another attempt cuts alike
            entry = packer.pack(tmp_path)
            file.write(lines(first, first + 5)[-9:])
        with zipfile.ZipFile(tmp_path / RECORDS_FILE) as archive:
            sizes.append(archive.getinfo("metrics.jsonl").file_size)
        assert entry.get("segments", [])[: len(segments)] == segments, "earlier ones stay as they are"
        segments = entry.get("segments", [])
    whole = (run / "metrics.jsonl").read_text()
    assert max(sizes) < 1000 + 5 * 40 and len(segments) >= len(whole) // 1050 > 9
    for segment in segments_of(entry):
        (tmp_path / "records").mkdir(exist_ok=True)
        segment.write(run, tmp_path / segment.name)
    unpack_records(tmp_path / RECORDS_FILE, entry, tmp_path / "new")
    assert (tmp_path / "new" / "metrics.jsonl").read_text() == whole[: whole.rindex("\n", 0, -1) + 1]
    assert (tmp_path / "new" / "ledger.jsonl").read_text() == "{}\n"


@pytest.mark.usefixtures("short_segments")
def test_a_segment_that_differs_replaces_nothing(tmp_path: Path) -> None:
    run = write(tmp_path / "run", {"metrics.jsonl": lines(0, 100)})
    entry = RecordsPacker(run).pack(tmp_path)
    first, *more = segments_of(entry)
    (tmp_path / "records").mkdir()
    for segment in more:
        segment.write(run, tmp_path / segment.name)
    with pytest.raises(FileNotFoundError):
        unpack_records(tmp_path / RECORDS_FILE, entry, tmp_path / "new")
    (run / "metrics.jsonl").write_text(lines(0, 100).replace("1", "2", 1))
    with pytest.raises(ValueError, match=r"metrics\.jsonl has changed"):
        first.write(run, tmp_path / first.name)
    with pytest.raises(CheckpointError, match="differs from what was saved"):
        unpack_records(tmp_path / RECORDS_FILE, entry, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("change", [{"start": 1}, {"end": 0}, {"end": "9"}, {"file": "../x.jsonl"}, {"sha256": "../a"}])
def test_an_entry_with_a_damaged_segment_is_refused(change: dict[str, Any]) -> None:
    good = {"file": "metrics.jsonl", "start": 0, "end": 9, "sha256": "a" * 64}
    assert len(segments_of({"segments": [good]})) == 1
    for segments in ([{**good, **change}], [good, good], ["x"], [{**good, "more": 1}]):
        with pytest.raises(ValueError, match="a segment is damaged"):
            segments_of({"segments": segments})


@pytest.mark.parametrize("segments", [1, None, True, "x", {"file": "metrics.jsonl"}])
def test_segments_that_are_no_list_are_refused(tmp_path: Path, segments: Any) -> None:
    entry = RecordsPacker(write(tmp_path / "run", FILES)).pack(tmp_path)
    with pytest.raises(CheckpointError, match="is damaged"):
        unpack_records(tmp_path / RECORDS_FILE, {**entry, "segments": segments}, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_segment_that_is_compressed_in_another_way_is_refused(tmp_path: Path, method: int) -> None:
    """Their decompressors have no limit on the memory for a block, and errors of their own."""
    run = write(tmp_path / "run", {"metrics.jsonl": lines(0, 40)})
    entry = RecordsPacker(run).pack(tmp_path)
    (segment,) = segments_of(entry)
    (tmp_path / "records").mkdir()
    with zipfile.ZipFile(tmp_path / segment.name, "w", method) as archive:
        archive.writestr(segment.file, (run / segment.file).read_bytes()[: segment.end])
    with pytest.raises(CheckpointError, match="compressed in another way"):
        unpack_records(tmp_path / RECORDS_FILE, entry, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("short_segments")
def test_more_segments_than_files_may_be_open(tmp_path: Path) -> None:
    run = write(tmp_path / "run", {"metrics.jsonl": lines(0, 4000)})
    entry = RecordsPacker(run).pack(tmp_path)
    (tmp_path / "records").mkdir()
    for segment in segments_of(entry):
        segment.write(run, tmp_path / segment.name)
    limits, used = resource.getrlimit(resource.RLIMIT_NOFILE), max(int(file.name) for file in Path("/dev/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 50, limits[1]))
    try:
        unpack_records(tmp_path / RECORDS_FILE, entry, tmp_path / "new")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(segments_of(entry)) > 100 and contents(tmp_path / "new") == contents(run)


def test_a_line_that_was_being_written_is_left_out(tmp_path: Path) -> None:
    run = write(tmp_path / "run", {"metrics.jsonl": '{"step": 1}\n{"st', "ledger.jsonl": '{"ki'})
    unpack_records(tmp_path / RECORDS_FILE, RecordsPacker(run).pack(tmp_path), tmp_path / "new")
    assert contents(tmp_path / "new") == {"metrics.jsonl": '{"step": 1}\n', "ledger.jsonl": ""}


def test_changed_bytes_are_not_taken(tmp_path: Path) -> None:
    entry = RecordsPacker(write(tmp_path / "run", FILES)).pack(tmp_path)
    content = bytearray((tmp_path / RECORDS_FILE).read_bytes())
    content[40] ^= 1
    (tmp_path / RECORDS_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match="differ from what was saved"):
        unpack_records(tmp_path / RECORDS_FILE, entry, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["../outside.jsonl", "/etc/cron.d/x", "attempts/001/../../.owner", "config.yaml"])
def test_an_archive_writes_nothing_but_records(tmp_path: Path, name: str) -> None:
    path = tmp_path / RECORDS_FILE
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ledger.jsonl", "{}\n")
        archive.writestr(name, "x")
    entry = {"sha256": sha256_file(path), "bytes": path.stat().st_size}
    with pytest.raises(CheckpointError, match="hold "):
        unpack_records(path, entry, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def entry_of(path: Path) -> dict[str, Any]:
    return {"sha256": sha256_file(path), "bytes": path.stat().st_size}


def damage_last(path: Path) -> None:
    """Write an archive whose last file does not have the checksum that is named."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ledger.jsonl", "other\n")
        archive.writestr("metrics.jsonl", "a line to damage\n")
    path.write_bytes(path.read_bytes().replace(b"a line to damage", b"a line, damaged!", 1))


def deflate_badly(path: Path) -> None:
    """Write an archive whose last file is no compressed data."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ledger.jsonl", "other\n")
        archive.writestr("metrics.jsonl", "\n".join(map(str, range(999))))
        start = archive.getinfo("metrics.jsonl").header_offset + 30 + len("metrics.jsonl")
    content = bytearray(path.read_bytes())
    content[start : start + 20] = b"\xff" * 20
    path.write_bytes(content)


def compress_strangely(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("ledger.jsonl", "other\n")


@pytest.mark.parametrize("write_archive", [damage_last, deflate_badly, compress_strangely])
def test_an_archive_that_cannot_be_read_replaces_nothing(tmp_path: Path, write_archive: Any) -> None:
    run, path = write(tmp_path / "run", FILES), tmp_path / RECORDS_FILE
    write_archive(path)
    with pytest.raises(CheckpointError, match="the records of the checkpoint"):
        unpack_records(path, entry_of(path), run)
    assert contents(run) == FILES


def test_an_entry_without_a_hash_is_refused(tmp_path: Path) -> None:
    RecordsPacker(write(tmp_path / "run", FILES)).pack(tmp_path)
    with pytest.raises(CheckpointError, match="differ from what was saved"):
        unpack_records(tmp_path / RECORDS_FILE, {"time": 1.0}, tmp_path / "new")


def test_a_line_without_end_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / RECORDS_FILE
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("metrics.jsonl", b"{}\n" + bytes(48 * 2**20))
    tracemalloc.start()
    try:
        unpack_records(path, entry_of(path), tmp_path / "new")
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()
    assert (tmp_path / "new" / "metrics.jsonl").read_bytes() == b"{}\n"


def test_a_checkpoint_keeps_its_kind_if_the_records_cannot_be_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Retention goes by it."""
    config = Config(
        name="tiny", runs=tmp_path, train=TrainConfig(steps=1), checkpoint={"remote": {"url": f"file://{tmp_path}"}}
    )
    write(tmp_path / "tiny", FILES)
    folder = tmp_path / "folder"
    folder.mkdir()
    maintainer = CheckpointMaintainer(MaintainerSettings.of(config, 1))

    def fail(*_: object, **options: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(zipfile.ZipFile, "open", fail)
        context = maintainer.context(1, folder)
    assert context["kind"] == "full" and RECORDS not in context and not list(folder.iterdir())
    assert "saved without the records of the run" in capsys.readouterr().err
    assert RECORDS in maintainer.context(1, folder)
    maintainer.close()
