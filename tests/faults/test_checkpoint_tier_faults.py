"""Kills while a checkpoint is sent to the remote tier, brought from it, or removed there.

Kills are real (SIGKILL), in forked children; the remote tier is a folder (`file://`), as on a shared file system.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from headway.checkpoint.discovery import find_latest
from headway.checkpoint.format.manifest import step_name
from headway.checkpoint.post_save import CheckpointMaintainer, MaintainerSettings
from headway.checkpoint.remote.objects import Objects
from headway.checkpoint.remote.tier import FencedError, RemoteTier, journal_of
from headway.checkpoint.store import CheckpointStore
from headway.config import Config, TrainConfig
from headway.core.errors import ConfigError
from support.runs import in_child
from support.states import equal, make_state, names, save


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "tiny"
    store = CheckpointStore(path / "checkpoints", max_shard_bytes=100, keep=9)
    for step in (1, 2, 3):
        save(store, step)
    return path


@pytest.fixture
def tier(run: Path, tmp_path: Path) -> RemoteTier:
    """Claimed, with step 1."""
    tier = RemoteTier.find(Objects(f"file://{tmp_path}/remote/tiny"), run).acquire(run, 1)
    send(tier, run, 1)
    return tier


def send(tier: RemoteTier, run: Path, step: int) -> bool:
    return tier.publish(run / "checkpoints" / step_name(step), journal_of(run, step))


def newest_elsewhere(tier: RemoteTier, folder: Path) -> int:
    """What a new machine would take; it must be whole, and nothing may be passed over."""
    said: list[str] = []
    folder.mkdir(parents=True, exist_ok=True)
    store = CheckpointStore(folder / "checkpoints")
    found = find_latest(store, lambda: RemoteTier(tier.objects), said.append)
    assert found is not None and said == []
    assert equal(store.load(found), make_state(found.step))
    return found.step


@pytest.mark.parametrize("order", [*(f"upload.file:{n}" for n in (1, 2, 3)), "upload.manifest"])
def test_a_kill_while_sending(tier: RemoteTier, run: Path, tmp_path: Path, order: str) -> None:
    assert in_child(lambda: send(tier, run, 2), f"kill@{order}") == -signal.SIGKILL
    assert newest_elsewhere(tier, tmp_path / "before") == 1, "half of a checkpoint must not be seen"
    sent: list[str] = []
    original = Objects.upload
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Objects, "upload", lambda self, name, path: (sent.append(name), original(self, name, path))[1])
        assert send(tier, run, 2)
    before = {"upload.file:1": 0, "upload.file:2": 1, "upload.file:3": 2}.get(order)
    total = len(CheckpointStore(run / "checkpoints").info(2).manifest.files)
    assert len(sent) == (0 if before is None else total - before), "what had arrived is not sent again"
    assert newest_elsewhere(tier, tmp_path / "after") == 2


def test_a_kill_while_bringing(tier: RemoteTier, run: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    store = CheckpointStore(elsewhere / "checkpoints")
    for order in ("bring.part:1", "bring.part:2", "bring.rename"):
        killed = in_child(lambda: find_latest(store, lambda: RemoteTier(tier.objects)), f"kill@{order}")
        assert killed == -signal.SIGKILL
        assert list(store.folders()) == []
    assert newest_elsewhere(tier, elsewhere) == 1
    assert names(elsewhere / "checkpoints") == ["step-00000001"]


def test_a_kill_while_removing_what_is_too_old(tier: RemoteTier, run: Path, tmp_path: Path) -> None:
    send(tier, run, 2)
    assert in_child(lambda: tier.discard(1), "kill@upload.discard") == -signal.SIGKILL
    assert [manifest.step for manifest in tier.manifests()] == [2]
    assert newest_elsewhere(tier, tmp_path / "new") == 2
    tier.discard(1)
    assert names(Path(tier.url.removeprefix("file://"))) == ["newest.json", "owners", "step-00000002"]


def test_what_will_not_be_finished_is_removed(tier: RemoteTier, run: Path, tmp_path: Path) -> None:
    """An upload and a removal that were killed, once a newer checkpoint is there; not what was set aside."""
    save(CheckpointStore(run / "checkpoints", keep=9), 4)
    send(tier, run, 3)
    assert tier.set_aside(3)
    assert in_child(lambda: send(tier, run, 2), "kill@upload.manifest") == -signal.SIGKILL
    assert in_child(lambda: tier.discard(1), "kill@upload.discard") == -signal.SIGKILL
    remote = {"url": f"file://{tmp_path}/remote"}
    config = Config(name=run.name, runs=run.parent, train=TrainConfig(steps=9), checkpoint={"remote": remote})
    for step in (4, 6):
        CheckpointMaintainer(MaintainerSettings.of(config, 1)).close(60)  # sends the newest one
        folders = [name for name in names(Path(tier.url.removeprefix("file://"))) if name.startswith("step-")]
        assert folders == ["step-00000003", *(step_name(s) for s in (4, 6) if s <= step)]
        assert not list((run / ".uploads").iterdir())
        if step == 4:
            for later in (5, 6):
                save(CheckpointStore(run / "checkpoints", keep=9), later)
            assert in_child(lambda: send(tier, run, 5), "kill@upload.manifest") == -signal.SIGKILL


def test_a_zombie_cannot_publish_remove_or_hide(tier: RemoteTier, run: Path, tmp_path: Path) -> None:
    """Claimed by a newer attempt while the old one was sending: its manifest does not come."""
    put = Objects.upload

    def taken_over_meanwhile(self: Objects, name: str, path: Path) -> object:
        RemoteTier.find(Objects(f"file://{tmp_path}/remote/tiny"), run).acquire(run, 2)
        return put(self, name, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Objects, "upload", taken_over_meanwhile)
        with pytest.raises(FencedError, match="attempt 2 on"):
            send(tier, run, 2)
    assert tier.manifest(2) is None
    for action in (tier.discard, tier.set_aside):
        with pytest.raises(FencedError):
            action(1)


def test_what_a_zombie_sends_late_touches_nothing_of_the_one_that_has_the_run(
    tier: RemoteTier, run: Path, tmp_path: Path
) -> None:
    """Both do the same step, and what they save differs; of the first the process was stopped while it sent a file."""
    place, late, put = Objects(f"file://{tmp_path}/remote/tiny"), [True], Objects.upload
    other = tmp_path / "elsewhere" / "tiny"
    save(CheckpointStore(other / "checkpoints", max_shard_bytes=100), 2, seed=7)

    def published_meanwhile(self: Objects, name: str, path: Path) -> object:
        if late:
            late.clear()
            assert send(RemoteTier.find(place, other).acquire(other, 2), other, 2)
        return put(self, name, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Objects, "upload", published_meanwhile)
        with pytest.raises(FencedError, match="attempt 2 on"):
            send(tier, run, 2)
    new = CheckpointStore(tmp_path / "new" / "checkpoints")
    new.directory.mkdir(parents=True)
    found = find_latest(new, lambda: RemoteTier(tier.objects))
    assert found is not None and found.step == 2 and equal(new.load(found), make_state(7))
    sent = names(Path(tier.objects.at(step_name(2)).url.removeprefix("file://")))
    assert len(sent) == len(found.manifest.files) + 2, "the manifest, its files, and the one that came late"


def test_a_zombie_that_wakes_up_while_it_removes_stops(tier: RemoteTier, run: Path, tmp_path: Path) -> None:
    """It removes a step that whoever has the run does again, or replaces one that is his."""
    send(tier, run, 2)
    place, remove = Objects(f"file://{tmp_path}/remote/tiny"), Objects.remove
    removed: list[str] = []

    def taken_over_meanwhile(self: Objects, name: object) -> None:
        removed.extend(name)  # type: ignore[call-overload]
        RemoteTier.find(place, run).acquire(run, 2)
        remove(self, removed[-1:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Objects, "remove", taken_over_meanwhile)
        with pytest.raises(FencedError):
            tier.discard(2)
    assert removed == ["manifest.json"]


@pytest.mark.parametrize("refused", [False, True])
def test_what_others_have_left_in_the_folder_of_a_step_goes_when_it_is_published(
    tier: RemoteTier, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: bool
) -> None:
    """Where it must not be removed, the checkpoint is there all the same."""
    folder, remove = tier.objects.at(step_name(2)), Objects.remove
    folder.write("0123456789abcdef-shard-00000.safetensors", b"of a machine that is gone")

    def forbidden(self: Objects, names: list[str]) -> None:
        if refused and any(name.startswith("0123456789abcdef") for name in names):
            raise ConfigError("the store denies access", where=self.url)
        remove(self, names)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Objects, "remove", forbidden)
        assert send(tier, run, 2)
    assert newest_elsewhere(tier, tmp_path / "new") == 2
    assert len(folder.names()) == len(CheckpointStore(run / "checkpoints").info(2).manifest.files) + 1 + refused
    assert ("are not removed: the store denies access" in capsys.readouterr().err) == refused


def test_a_checkpoint_whose_files_have_their_own_names_is_read_and_removed(
    tier: RemoteTier, run: Path, tmp_path: Path
) -> None:
    """As `headway checkpoints copy` sends it, and as runs did."""
    folder = Path(tier.objects.at(step_name(1)).url.removeprefix("file://"))
    for path in folder.glob("*-shard-*"):
        path.rename(folder / path.name[17:])
    assert set(names(folder)) == {*CheckpointStore(run / "checkpoints").info(1).manifest.files, "manifest.json"}
    assert newest_elsewhere(tier, tmp_path / "new") == 1
    tier.discard(1)
    assert not folder.exists()


def test_the_writer_of_an_old_attempt_stops_sending(
    tier: RemoteTier, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tier.acquire(run, 2)
    remote = {"url": f"file://{tmp_path}/remote"}
    config = Config(name=run.name, runs=run.parent, train=TrainConfig(steps=9), checkpoint={"remote": remote})
    after = CheckpointMaintainer(MaintainerSettings.of(config, 1))
    after.close(30)
    assert "nothing more is uploaded: attempt 2 owns the run now" in capsys.readouterr().err
    assert tier.manifest(3) is None
