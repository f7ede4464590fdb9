"""The remote tier of a run is that run's: nobody else takes it, takes from it, or removes anything there."""

from __future__ import annotations

import errno
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headway.checkpoint.discovery import find_latest
from headway.checkpoint.index import FILE_NAME, REMOTE, CheckpointIndex
from headway.checkpoint.post_save import CheckpointMaintainer, MaintainerSettings
from headway.checkpoint.remote.acquire import acquire_tier, find_tier, is_sent, resolve_identity
from headway.checkpoint.remote.objects import Objects, UnreachableError
from headway.checkpoint.remote.ownership import RESTARTED_FILE
from headway.checkpoint.remote.tier import RemoteTier, journal_of
from headway.checkpoint.remote.uploader import Uploader
from headway.checkpoint.run_identity import run_identity
from headway.checkpoint.store import CheckpointInfo, CheckpointStore
from headway.config import Config, RemoteConfig, TrainConfig, identity, load_config, load_resolved, resolve
from headway.core.errors import CheckpointError, ConfigError
from headway.core.files.hashes import fingerprint
from support.states import make_state
from support.waits import LONG


def config_of(folder: Path, url: str, steps: int, **remote: Any) -> Config:
    checkpoint = {"keep": 9, "remote": {"url": url, **remote}}
    return resolve(Config(name="tiny", runs=folder, train=TrainConfig(steps=steps), checkpoint=checkpoint))


def save(config: Config, step: int, after_save: Any = None) -> CheckpointInfo:
    run = Path(config.run_directory)
    store = CheckpointStore(run / "checkpoints", keep=9, after_save=after_save)
    context = {"identity": fingerprint(identity(config))}
    store.save(step, make_state(step), {"step": step}, context)
    return store.info(step)


def claim(config: Config, attempt: int = 1) -> RemoteTier:
    assert config.checkpoint.remote is not None
    return acquire_tier(config.checkpoint.remote, attempt, run_identity(config), patience_seconds=0)


@pytest.fixture
def mine(tmp_path: Path) -> Config:
    """A run that has sent steps 3, 6 and 9."""
    (tmp_path / "remote").mkdir()
    config = config_of(tmp_path / "mine", f"file://{tmp_path}/remote", 9)
    tier = claim(config)
    for step in (3, 6, 9):
        folder = save(config, step).path
        assert tier.publish(folder, journal_of(Path(config.run_directory), step))
    return config


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("here", [None, 1, 10])
def test_another_run_of_the_same_name_leaves_it_alone(mine: Config, tmp_path: Path, here: int | None) -> None:
    other = config_of(tmp_path / "other", f"file://{tmp_path}/remote", 12)
    if here is not None:
        save(other, here)
    before = contents(tmp_path / "remote")
    store = CheckpointStore(Path(other.run_directory) / "checkpoints")
    with pytest.raises(ConfigError, match="made with another config: they belong to another run"):
        find_latest(store, partial(claim, other))
    assert contents(tmp_path / "remote") == before
    tier = find_tier(RemoteConfig(url=f"file://{tmp_path}/remote"), run_identity(mine))
    assert tier.steps() == [3, 6, 9]


def test_another_run_that_could_not_ask_at_its_start_sends_nothing(mine: Config, tmp_path: Path) -> None:
    other = config_of(tmp_path / "other", f"file://{tmp_path}/remote", 12, keep=1)
    before = contents(tmp_path / "remote")
    told: list[tuple[int, float | None]] = []
    after_save = CheckpointMaintainer(MaintainerSettings.of(other, 1), lambda *upload: told.append(upload))
    save(other, 10, after_save)
    after_save.close(30)
    assert set(told) == {(10, None)} and contents(tmp_path / "remote") == before


def test_the_run_itself_goes_on_with_it(mine: Config, tmp_path: Path) -> None:
    run = Path(mine.run_directory)
    changed = config_of(tmp_path / "mine", f"file://{tmp_path}/remote", 12)
    assert claim(changed, 2).steps() == [3, 6, 9], "by the claim in its directory, whatever its config is now"
    (run / "remote.json").unlink()
    assert claim(changed, 3).steps() == [3, 6, 9], "by its checkpoints"
    assert claim(config_of(tmp_path / "elsewhere", f"file://{tmp_path}/remote", 9), 4).steps() == [3, 6, 9]
    tier = claim(changed, 5)
    assert tier.publish(save(changed, 12).path, journal_of(run, 12))
    back = config_of(tmp_path / "third", f"file://{tmp_path}/remote", 9)
    assert claim(back, 6).steps() == [3, 6, 9, 12], "also by an older one, when it has been changed since"


def test_a_tier_of_which_nothing_can_be_read_is_not_taken(mine: Config, tmp_path: Path) -> None:
    for path in (tmp_path / "remote").rglob("manifest.json"):
        path.write_text("{}")
    before = contents(tmp_path / "remote")
    with pytest.raises(ConfigError, match="is unknown"):
        claim(config_of(tmp_path / "other", f"file://{tmp_path}/remote", 12))
    assert contents(tmp_path / "remote") == before and claim(mine, 2).steps() == [3, 6, 9]


def test_a_run_that_starts_over_has_a_tier_of_its_own(mine: Config, tmp_path: Path) -> None:
    other = config_of(tmp_path / "other", f"file://{tmp_path}/remote", 12)
    run = Path(other.run_directory)
    run.mkdir(parents=True)
    (run / RESTARTED_FILE).touch()
    tier = claim(other)
    assert tier.url.endswith("/run-002") and tier.steps() == []
    assert resolve_identity(tier, run_identity(other)) == run_identity(other)


def test_an_upload_that_failed_is_made_up_for_by_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "remote").mkdir()
    config = config_of(tmp_path / "mine", f"file://{tmp_path}/remote", 99, every="50 steps")
    publish, failing = RemoteTier.publish, [True]

    def answer(tier: RemoteTier, *arguments: Any) -> bool:
        if failing[0]:
            raise CheckpointError("the store is away", where=tier.url)
        return publish(tier, *arguments)

    monkeypatch.setattr(RemoteTier, "publish", answer)
    after_save = CheckpointMaintainer(MaintainerSettings.of(config, 1))
    save(config, 1, after_save)
    assert after_save.wait(LONG)
    failing[0] = False
    for step in (2, 3):
        save(config, step, after_save)
        assert after_save.wait(LONG)
    tier = find_tier(RemoteConfig(url=f"file://{tmp_path}/remote"), run_identity(config))
    assert tier.steps() == [2], "step 2 made up for step 1, and 3 was not due"
    after_save.close(30)


def test_what_was_on_its_way_when_the_run_went_back_pushes_out_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for one, the state that is left out would take the place of the one to go on from, and then go."""
    (tmp_path / "remote").mkdir()
    config = config_of(tmp_path / "mine", f"file://{tmp_path}/remote", 99, keep=1)
    publish, begun, going_on = RemoteTier.publish, threading.Event(), threading.Event()

    def slowly(tier: RemoteTier, folder: Path, *arguments: Any) -> bool:
        if folder.name == "step-00000008":
            begun.set()
            assert going_on.wait(LONG)
        return publish(tier, folder, *arguments)

    monkeypatch.setattr(RemoteTier, "publish", slowly)
    after_save = CheckpointMaintainer(MaintainerSettings.of(config, 1))
    save(config, 4, after_save)
    assert after_save.wait(LONG)
    save(config, 8, after_save)
    assert begun.wait(LONG)
    after_save.note_rollback(4, ((5, 7),))
    going_on.set()
    assert after_save.wait(LONG)
    tier = find_tier(RemoteConfig(url=f"file://{tmp_path}/remote"), run_identity(config))
    assert [manifest.step for manifest in tier.manifests()] == [4]
    after_save.close(30)


def test_what_goes_wrong_after_an_upload_does_not_make_it_fail(
    mine: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise CheckpointError("the listing does not come")

    told: list[tuple[int, float | None]] = []
    run = Path(mine.run_directory)
    stopping = threading.Event()
    uploader = Uploader(run, partial(claim, mine, 2), fail, lambda *upload: told.append(upload), stopping)
    info = save(mine, 8)
    uploader.submit(info.path, info.manifest)
    uploader.close(30)
    assert [step for step, seconds in told if seconds is not None] == [8] and len(told) == 1
    assert "after the upload of step 8: the listing does not come" in capsys.readouterr().err


def test_what_is_not_uploaded_since_another_attempt_has_the_tier_is_said_each_time(
    mine: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be long before the end: the metrics tell of each, and the end of the last."""
    told: list[tuple[int, float | None]] = []
    longer = config_of(tmp_path / "mine", f"file://{tmp_path}/remote", 13)
    after_save = CheckpointMaintainer(MaintainerSettings.of(longer, 1), lambda *upload: told.append(upload))
    save(longer, 10, after_save)
    assert after_save.wait(LONG) and told[-1] == (10, told[-1][1]) and told[-1][1] is not None
    claim(longer, 2)
    for step in (11, 12, 13):
        save(longer, step, after_save)
        assert after_save.wait(LONG)
    after_save.close(60)
    assert told[-3:] == [(11, None), (12, None), (13, None)]
    said = capsys.readouterr().err
    assert said.count("nothing more is uploaded") == 1
    assert "step 13 is not uploaded: attempt 1 no longer owns the remote checkpoints" in said


def test_where_the_index_cannot_be_used_the_store_tells_what_was_sent(mine: Config, tmp_path: Path) -> None:
    """Otherwise each call of a finished run's command would make an attempt, which could not note it either."""
    run, remote = Path(mine.run_directory), mine.checkpoint.remote
    assert remote is not None
    (run / FILE_NAME).mkdir()
    manifest = CheckpointStore(run / "checkpoints", keep=9).info(9).manifest
    assert not CheckpointIndex(run).add(manifest, REMOTE, "x") and CheckpointIndex(run).entries() == []
    assert is_sent(remote, run_identity(mine), manifest, patience_seconds=0)
    assert not is_sent(
        remote, run_identity(mine), manifest.model_copy(update={"state_sha256": "another"}), patience_seconds=0
    )
    next((tmp_path / "remote").rglob("step-00000009/manifest.json")).write_text("{}")
    assert not is_sent(remote, run_identity(mine), manifest, patience_seconds=0), (
        "nobody knows, so it is sent, which tells why"
    )
    (run / FILE_NAME).rmdir()
    CheckpointIndex(run).add(manifest, REMOTE, f"{remote.url}/tiny/run-001/step-00000009")
    assert is_sent(remote, run_identity(mine), manifest, patience_seconds=0), "by the index: the store is not asked"


@pytest.mark.parametrize("url", ["file://mnt/shared", "local://mnt"])
def test_a_relative_path_is_no_place_for_copies(tmp_path: Path, url: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        f"name: tiny\ntrain: {{steps: 1}}\ndata: {{sources: x}}\ncheckpoint: {{remote: {{url: '{url}'}}}}\n"
    )
    with pytest.raises(ConfigError, match="is a relative path"):
        load_config(path)
    for good in ("file:///mnt/shared/", "file://~/copies"):
        assert load_config(path, [f"checkpoint.remote.url={good}"]).checkpoint.remote
    assert load_resolved(path).checkpoint.remote is not None, "a run that has it can still be read"
    assert RemoteConfig(url="file:///mnt/shared/").url == "file:///mnt/shared"
    assert Objects(RemoteConfig(url="file:///").url).local


def test_all_that_is_brought_is_flushed_before_it_has_its_name(
    mine: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, fsync = set(), os.fsync

    def note(descriptor: int) -> None:
        flushed.add(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    store = CheckpointStore(tmp_path / "back" / "checkpoints")
    store.directory.mkdir(parents=True)
    found = find_latest(store, partial(claim, mine, 2))
    assert found is not None and {"manifest.json", *found.manifest.files} <= flushed


@pytest.mark.parametrize("here", [None, 1])
def test_a_full_disk_here_is_no_damage_there(
    mine: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: int | None
) -> None:
    """An older checkpoint has no more room, or has it: then steps that are safe would be done again."""
    fetch = Objects.download

    def full(self: Objects, name: str, path: Path, *arguments: Any) -> None:
        if "step-00000009" in self.url:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fetch(self, name, path, *arguments)

    monkeypatch.setattr(Objects, "download", full)
    back = config_of(tmp_path / "back", f"file://{tmp_path}/remote", 9)
    if here is not None:
        save(back, here)
    store, said = CheckpointStore(Path(back.run_directory) / "checkpoints"), []
    with pytest.raises(CheckpointError, match="step 9 cannot be stored here: No space left on device"):
        find_latest(store, partial(claim, back), said.append)
    assert said == [] and [folder.name for folder in store.folders()] == ([] if here is None else ["step-00000001"])


def test_a_start_that_was_sent_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "remote").mkdir()
    config = config_of(tmp_path / "mine", f"file://{tmp_path}/remote", 99, every="50 steps")
    after_save = CheckpointMaintainer(MaintainerSettings.of(config, 1))
    for step in (0, 2, 3):
        save(config, step, after_save)
        assert after_save.wait(LONG)
    tier = find_tier(RemoteConfig(url=f"file://{tmp_path}/remote"), run_identity(config))
    assert tier.steps() == [0]
    after_save.close(30)


def test_a_store_that_cannot_refuse_a_second_claim_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Objects("memory://bucket/tiny")
    assert RemoteTier.find(place, tmp_path).acquire(tmp_path, 1).claim is not None
    put = type(place._files).pipe_file

    def regardless(self: Any, path: str, value: bytes, mode: str = "overwrite") -> None:
        put(self, path, value)

    monkeypatch.setattr(type(place._files), "pipe_file", regardless)
    before = place.at("run-001/owners").names()
    with pytest.raises(ConfigError, match="If-None-Match"):
        RemoteTier.find(place, tmp_path).acquire(tmp_path, 2)
    assert place.at("run-001/owners").names() == before == ["00000001.json"]


def test_a_bucket_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Objects("memory://nothing/x")

    def refuse(*_: object, **__: object) -> None:
        raise FileNotFoundError("https://storage.googleapis.com/upload/storage/v1/b/nothing/o")  # as gcsfs says it

    monkeypatch.setattr(type(place._files), "pipe_file", refuse)
    with pytest.raises(CheckpointError, match="there is no such bucket"):
        place.create("a", b"")


def test_a_folder_that_is_not_mounted_is_no_empty_tier(mine: Config, tmp_path: Path) -> None:
    """Or a run whose disk is lost, too, would start over, and a run here would fill the disk below."""
    remote, away = tmp_path / "remote", tmp_path / "unmounted"
    elsewhere = config_of(tmp_path / "elsewhere", f"file://{remote}", 9)
    store = CheckpointStore(Path(elsewhere.run_directory) / "checkpoints")
    remote.rename(away)
    with pytest.raises(CheckpointError, match=f"cannot be read: .* there is no folder {remote}"):
        find_latest(store, partial(claim, elsewhere))
    assert not remote.exists()
    remote.mkdir()  # the place where it is mounted
    with pytest.raises(UnreachableError, match="everything that this run uploaded there is gone"):
        claim(mine, 2)
    assert not list(remote.iterdir())
    remote.rmdir()
    away.rename(remote)
    found = find_latest(store, partial(claim, elsewhere))
    assert found is not None and found.step == 9
