"""Corpus, store and checkpoints in Google Cloud Storage: with its client `gcsfs`, and a server that answers as its JSON
API does (tests/support/gcs_server.py)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.checkpoint.discovery import find_latest
from headway.checkpoint.format.manifest import step_name
from headway.checkpoint.remote.files import sent_name
from headway.checkpoint.remote.objects import Objects
from headway.checkpoint.remote.tier import FencedError, RemoteTier, journal_of
from headway.checkpoint.store import CheckpointStore
from headway.core.errors import CheckpointError, ConfigError
from headway.core.storage import PART_BYTES
from support.gcs_server import GcsServer
from support.object_storage import (
    GLOBS,
    contend_for_an_object,
    find_by_glob,
    lose_a_machine,
    prepare_from_both,
    put_folder,
)
from support.parts_table import GCSFS
from support.states import equal, make_state, save

# Or gcsfs asks over gRPC first, which this server does not speak, of what kind the bucket is.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
pytestmark = pytest.mark.parts(GCSFS)

OPTIONS = {"token": "anon"}


@pytest.fixture(scope="module")
def module_server() -> Iterator[GcsServer]:
    server = GcsServer()
    yield server
    server.close()


@pytest.fixture
def server(module_server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> GcsServer:
    gcsfs = pytest.importorskip("gcsfs", reason="there is no client: pip install '.[gcs]'")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", module_server.endpoint)
    gcsfs.GCSFileSystem.clear_instance_cache()
    return module_server


@pytest.fixture
def url(server: GcsServer, tmp_path: Path) -> str:
    """A folder of this test's own."""
    return f"gs://{server.bucket}/{tmp_path.name}"


def test_one_of_many_makes_an_object(url: str) -> None:
    """What fencing rests on."""
    contend_for_an_object(Objects(url, OPTIONS))


def test_what_is_wrong_is_said(server: GcsServer) -> None:
    other = Objects(f"gs://{server.private}/x", OPTIONS)
    for ask in (lambda: other.read("a"), other.names, lambda: other.create("a", b"")):
        with pytest.raises(ConfigError, match="denies access: Anonymous caller does not have"):
            ask()
    with pytest.raises(CheckpointError, match="there is no such bucket"):
        Objects("gs://nothing/x", OPTIONS).create("a", b"")


def test_a_checkpoint_is_published_by_its_owner_alone_and_brought(url: str, tmp_path: Path) -> None:
    run, place = tmp_path / "runs" / "tiny", Objects(f"{url}/tiny", OPTIONS)
    run.mkdir(parents=True)
    here = CheckpointStore(run / "checkpoints", max_shard_bytes=100, keep=9)
    manifest = [save(here, step) for step in (1, 2)][1]
    first = RemoteTier.find(place, run).acquire(run, 1)
    assert first.publish(run / "checkpoints" / step_name(1), journal_of(run, 1))
    second = RemoteTier.find(place, run).acquire(run, 2)
    with pytest.raises(FencedError, match="attempt 1 no longer owns"):
        first.publish(run / "checkpoints" / step_name(2), journal_of(run, 2))
    assert second.publish(run / "checkpoints" / step_name(2), journal_of(run, 2))
    assert [manifest.step for manifest in second.manifests()] == [1, 2]
    second.discard(1)
    assert second.steps() == [2]
    assert place.at("run-001").at(step_name(2)).names() == sorted(
        [*(sent_name(manifest, file) for file in manifest.files), "manifest.json"]
    )
    shutil.rmtree(run)
    run.mkdir()
    found = find_latest(here, lambda: RemoteTier.find(place, run).acquire(run, 3))
    assert found is not None and found.step == 2 and equal(here.load(found), make_state(2))


def test_an_upload_goes_on_by_the_versions_that_the_store_gave(
    url: str, server: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "tiny"
    manifest = save(CheckpointStore(run / "checkpoints", max_shard_bytes=100), 1)
    files = list(manifest.files)
    folder, tier = run / "checkpoints" / step_name(1), RemoteTier.find(Objects(url, OPTIONS), run).acquire(run, 1)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setenv("HEADWAY_FAULTS", "crash@upload.manifest")
        tier.publish(folder, journal_of(run, 1))
    tier.objects.write(f"{step_name(1)}/{sent_name(manifest, files[-1])}", (folder / files[-1]).read_bytes())
    before = server.uploads
    assert len(files) > 2 and tier.publish(folder, journal_of(run, 1))
    assert server.uploads - before == 3, "the file that somebody wrote since, the manifest and the hint"


def test_large_files_go_in_pieces_and_come_from_where_a_download_was_cut_off(
    url: str, server: GcsServer, tmp_path: Path
) -> None:
    large, copy, place = tmp_path / "large", tmp_path / "copy", Objects(url, OPTIONS)
    large.write_bytes(os.urandom(2**20) * 51)
    server.ranges.clear()
    place.upload("large", large)
    copy.write_bytes(large.read_bytes()[:1000])
    before = len(server.ranges)
    place.download("large", copy, large.stat().st_size)
    assert copy.read_bytes() == large.read_bytes()
    sent, brought = server.ranges[:before], server.ranges[before:]
    assert len(sent) == 2, "gcsfs sends pieces of 50 MiB"
    assert brought[0] == f"bytes=1000-{PART_BYTES + 999}" and len(brought) == 4


@pytest.fixture
def bucket(server: GcsServer, every_format: Path) -> str:
    """A corpus in the bucket; returns its URL."""
    url = f"gs://{server.bucket}/corpus"
    if not Objects(url, OPTIONS).stat("g.txt"):
        put_folder(Objects(url, OPTIONS), every_format)
    return url


@pytest.mark.parametrize(("pattern", "names"), GLOBS.items())
def test_globs(bucket: str, every_format: Path, pattern: str, names: list[str]) -> None:
    find_by_glob(bucket, every_format, pattern, names, storage_options=OPTIONS)


def test_a_bucket_prepares_to_the_same_tokens_as_a_folder(bucket: str, every_format: Path, tmp_path: Path) -> None:
    prepare_from_both(bucket, every_format, tmp_path, storage_options=OPTIONS)


def test_a_run_on_a_machine_that_is_gone_goes_on_from_gcs(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSSPEC_GS_TOKEN", "anon")  # or credentials are looked for, seconds long in each process
    lose_a_machine(Objects(url, OPTIONS), tmp_path)
