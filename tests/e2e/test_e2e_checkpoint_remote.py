"""Checkpoints in a real object store, behind a proxy that does what networks do."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.checkpoint.discovery import find_latest
from headway.checkpoint.format.manifest import Manifest, step_name
from headway.checkpoint.index import CheckpointIndex
from headway.checkpoint.post_save import CheckpointMaintainer, MaintainerSettings
from headway.checkpoint.remote.files import sent_name
from headway.checkpoint.remote.objects import GivenUp, Objects, UnreachableError
from headway.checkpoint.remote.ownership import RESTARTED_FILE, read_claim
from headway.checkpoint.remote.tier import FencedError, RemoteTier, journal_of
from headway.checkpoint.store import CheckpointInfo, CheckpointStore
from headway.config import Config, TrainConfig, load_resolved
from headway.core.errors import CheckpointError
from headway.core.process.waiting import wait_until
from headway.core.storage import client
from headway.lab.doctor.lifecycle import examine_lifecycle
from headway.run.directory.ledger import Ledger
from support.object_storage import S3Server, SeaweedFs
from support.parts_table import SEAWEEDFS
from support.runs import headway, manifest, skip_without, state_hash
from support.s3_proxy import S3Proxy
from support.states import equal, make_state, names, save
from support.waits import LONG

skip_without("s3fs")


@pytest.fixture
def proxy(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    import s3fs

    proxy = S3Proxy(s3.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # what is tried again is to be tried by us
    monkeypatch.setattr(client, "FIRST_WAIT_SECONDS", 0.05)
    s3fs.S3FileSystem.clear_instance_cache()
    yield proxy
    proxy.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "tiny"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def place(s3: S3Server, proxy: S3Proxy, tmp_path: Path) -> Objects:
    """A folder of this test's own."""
    return Objects(f"{s3.url}/{tmp_path.name}/tiny")


def local(run: Path) -> CheckpointStore:
    return CheckpointStore(run / "checkpoints", max_shard_bytes=100, keep=9)


def send(tier: RemoteTier, run: Path, step: int) -> bool:
    return tier.publish(run / "checkpoints" / step_name(step), journal_of(run, step))


def newest(place: Objects, run: Path, attempt: int = 1, **options: Any) -> CheckpointInfo | None:
    return find_latest(local(run), lambda: RemoteTier.find(place, run).acquire(run, attempt), **options)


def once(*wanted: tuple[str, str, str], times: int = 1) -> Callable[[str, str, bytes], str | None]:
    """A rule: so many times for each of (method, part of the path, action)."""
    left = dict.fromkeys(wanted, times)

    def rule(method: str, path: str, body: bytes) -> str | None:
        for key in wanted:
            if key[0] == method and key[1] in path and left[key]:
                left[key] -= 1
                return key[2]
        return None

    return rule


def settings(run: Path, url: str, **remote: Any) -> dict[str, Any]:
    checkpoint = {"keep": 1, "remote": {"url": url, **remote}}
    config = Config(name=run.name, runs=run.parent, train=TrainConfig(steps=100), checkpoint=checkpoint)
    return MaintainerSettings.of(config, 1)


def test_a_run_whose_disk_is_gone_goes_on_from_the_bucket(place: Objects, run: Path, proxy: S3Proxy) -> None:
    for step in (1, 2):
        save(local(run), step)
    tier = RemoteTier.find(place, run).acquire(run, 1)
    assert send(tier, run, 1) and send(tier, run, 2) and not send(tier, run, 2)
    shutil.rmtree(run)
    run.mkdir()
    found = newest(place, run)
    assert found is not None and found.step == 2 and found.path == run / "checkpoints" / "step-00000002"
    assert equal(local(run).load(found), make_state(2)) and names(run / "checkpoints") == ["step-00000002"]
    claim = read_claim(run)
    assert claim is not None and claim.number == 2 and claim.url.endswith("/run-001")
    with pytest.raises(FencedError, match="attempt 1 no longer owns the remote checkpoints"):
        send(tier, run, 2)
    # What is here and as new is taken without a download.
    before = len(proxy.requests)
    assert newest(place, run, 2).path == found.path  # type: ignore[union-attr]
    assert not any("safetensors" in path for _, path, _ in proxy.requests[before:])


def test_an_upload_goes_on_where_it_was_cut_off(place: Objects, run: Path, proxy: S3Proxy) -> None:
    files = list(save(local(run), 1).files)
    assert len(files) > 2
    place.patience_seconds = 0.0
    tier = RemoteTier.find(place, run).acquire(run, 1)
    proxy.rules = [lambda method, path, body: "cut" if method == "PUT" and files[-1] in path else None]
    with pytest.raises(UnreachableError):
        send(tier, run, 1)
    assert proxy.done["cut"] and tier.manifest(1) is None, "half of a checkpoint must not be seen"
    assert newest(place, run.with_name("other"), notice=print) is None
    tier = RemoteTier.find(place, run).acquire(run, 1)
    proxy.rules, proxy.requests = [], []
    assert send(tier, run, 1)
    assert [proxy.sent(file) for file in files] == [0] * (len(files) - 1) + [1]
    assert not journal_of(run, 1).exists()
    # A file that has changed over there since is sent again.
    place.at(f"run-001/{step_name(1)}").remove(["manifest.json"])


def test_503_slowness_and_lost_answers_are_outlived(place: Objects, run: Path, proxy: S3Proxy) -> None:
    files = list(save(local(run), 1).files)
    tier = RemoteTier.find(place, run).acquire(run, 1)
    proxy.rules = [
        once(("PUT", files[0], "503"), ("HEAD", files[0], "503"), times=3),
        once(("PUT", files[1], "cut"), ("PUT", files[1], "slow")),
        once(("PUT", "manifest.json", "lost"), ("GET", "owners", "503")),
    ]
    assert send(tier, run, 1)
    assert proxy.done["503"] >= 3 and proxy.done["lost"] == 1 and proxy.done["cut"] == 1
    proxy.rules = [once(("GET", files[0], "cut"), ("GET", files[1], "503"), ("GET", files[1], "slow"))]
    shutil.rmtree(run)
    run.mkdir()
    found = newest(place, run)
    assert found is not None and equal(local(run).load(found), make_state(1))


def test_a_put_that_is_refused_for_no_reason_is_tried_again(place: Objects, run: Path, proxy: S3Proxy) -> None:
    """Taken for another's, it would cost a claim, or every upload of the attempt; some stores do it while they heal."""
    save(local(run), 1)
    proxy.rules = [once(("PUT", "owners", "412"), ("PUT", "manifest.json", "412"), times=2)]
    tier = RemoteTier.find(place, run).acquire(run, 1)
    assert tier.claim is not None and tier.claim.number == 1
    assert send(tier, run, 1) and proxy.done["412"] == 4 and tier.manifest(1) is not None
    place.patience_seconds, proxy.rules = 0.0, [once(("PUT", "owners", "412"), times=99)]
    with pytest.raises(UnreachableError, match="refuses to create an object that does not exist"):
        RemoteTier.find(place, run).acquire(run, 2)


def test_what_the_attempt_before_has_just_published_ends_no_uploads(
    place: Objects, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had looked whose the tier is when it was still its own."""
    other = run.with_name("other")
    save(local(run), 1), save(local(run), 2), save(local(other), 1), save(local(other), 2, seed=7)
    (other / "checkpoints" / step_name(1) / "manifest.json").write_bytes(
        (other / "checkpoints" / step_name(1) / "manifest.json").read_bytes() + b"\n"
    )
    tier, create, late = RemoteTier.find(place, run).acquire(run, 1), Objects.create, [1, 2]

    def too_late(self: Objects, name: str, content: bytes) -> bool:
        if late:
            self.write(name, (other / "checkpoints" / step_name(late.pop(0)) / "manifest.json").read_bytes())
        return create(self, name, content)

    monkeypatch.setattr(Objects, "create", too_late)
    assert send(tier, run, 1), "the same state is there"
    with pytest.raises(CheckpointError, match="has just published step-00000002"):
        send(tier, run, 2)
    assert tier.manifest(2) is None and send(tier, run, 2), "another one is withdrawn"


def test_who_gives_up_waiting_withdraws_nothing(place: Objects, run: Path, proxy: S3Proxy) -> None:
    """That a manifest could not be read in time does not tell that it is damaged."""
    save(local(run), 1)
    tier = RemoteTier.find(place, run).acquire(run, 1)
    assert send(tier, run, 1)
    proxy.rules = [lambda method, path, body: "503" if method != "DELETE" and "manifest" in path else None]
    place.stopping.set()
    with pytest.raises(GivenUp):
        send(tier, run, 1)
    proxy.rules = []
    assert tier.manifest(1) is not None


def test_a_stale_listing_hides_nothing_and_revives_nothing(place: Objects, run: Path, proxy: S3Proxy) -> None:
    for step in (1, 2, 3):
        save(local(run), step)
    tier = RemoteTier.find(place, run).acquire(run, 1)
    proxy.rules = [lambda method, path, body: "stale" if "list-type" in path and method == "GET" else None]
    send(tier, run, 1)
    assert tier.steps() == [1]
    send(tier, run, 2)
    tier.discard(1)
    send(tier, run, 3)
    assert proxy.done["stale"] > 1 and tier.steps() == [1, 3], "the listing still says what it said at first"
    assert [manifest.step for manifest in tier.manifests()] == [3]
    other = run.with_name("elsewhere") / "tiny"
    other.mkdir(parents=True)
    assert newest(place, other).step == 3  # type: ignore[union-attr]


def test_a_damaged_remote_checkpoint_is_passed_over(place: Objects, run: Path) -> None:
    for step in (1, 2):
        save(local(run), step)
    tier = RemoteTier.find(place, run).acquire(run, 1)
    send(tier, run, 1), send(tier, run, 2)
    folder = place.at(f"run-001/{step_name(2)}")
    file = next(name for name in folder.names() if name.endswith("0.safetensors"))
    content = folder.read(file)
    assert content is not None
    folder.write(file, content[:-1] + b"\x55")
    shutil.rmtree(run / "checkpoints")
    said: list[str] = []
    found = newest(place, run, notice=said.append)
    assert found is not None and found.step == 1
    assert "step-00000002: the download differs from the upload" in said[0]


def test_only_one_of_many_claims_at_once_is_the_owner(place: Objects, run: Path) -> None:
    tiers: list[RemoteTier] = []

    def claim(number: int) -> None:
        folder = run.with_name(f"run{number}")
        folder.mkdir()
        tiers.append(RemoteTier.find(place, folder).acquire(folder, number))

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(tier.claim.number for tier in tiers if tier.claim) == [1, 2, 3, 4, 5, 6]
    owners = 0
    for tier in tiers:
        try:
            tier.assert_owner()
            owners += 1
        except FencedError:
            pass
    assert owners == 1


def test_a_restarted_run_does_not_go_on_from_the_one_before(place: Objects, run: Path) -> None:
    save(local(run), 1)
    send(RemoteTier.find(place, run).acquire(run, 1), run, 1)
    shutil.rmtree(run)
    run.mkdir()
    (run / RESTARTED_FILE).touch()
    assert newest(place, run) is None
    claim = read_claim(run)
    assert claim is not None and claim.url.endswith("/run-002") and not (run / RESTARTED_FILE).exists()
    assert RemoteTier.find(place, run).steps() == [] and RemoteTier(place.at("run-001")).steps() == [1]


def test_a_store_that_does_not_answer(place: Objects, run: Path, proxy: S3Proxy) -> None:
    """A run goes on with what it has here, and never starts over because it cannot ask."""
    place.patience_seconds = 0.0
    proxy.rules = [lambda *_: "503"]
    with pytest.raises(CheckpointError, match="the remote ones cannot be read"):
        newest(place, run)
    save(local(run), 1)
    said: list[str] = []
    assert newest(place, run, notice=said.append).step == 1  # type: ignore[union-attr]
    assert "resuming from" in said[0]


def test_after_a_save_everything_happens_in_the_background(
    s3: S3Server, proxy: S3Proxy, run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Sent, indexed, pruned in both places, pinned while it is sent; a failure is loud and the next one is tried."""
    hold = threading.Event()

    def slow_then_fail(method: str, path: str, body: bytes) -> str | None:
        if method == "PUT" and "step-00000002/" in path and "shard" in path:
            hold.wait(LONG)
        return "503" if method == "PUT" and "step-00000003/" in path and "shard" in path else None

    proxy.rules = [slow_then_fail]
    url = f"{s3.url}/{tmp_path.name}-after"
    after = CheckpointMaintainer(settings(run, url, keep=2))
    store = CheckpointStore(run / "checkpoints", max_shard_bytes=100, after_save=after)
    save(store, 1)
    assert after.wait(LONG)
    save(store, 2)
    save(store, 3)
    assert names(run / "checkpoints") == ["step-00000002", "step-00000003"], "2 is pinned: it is being sent"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headway.checkpoint.remote_copies.PATIENCE_SECONDS", 0.2)
        assert after._remote is not None
        after._remote._uploader._tier().objects.patience_seconds = 0.2
        hold.set()
        assert after.wait(LONG)
    assert "step 3 is not uploaded" in capsys.readouterr().err
    proxy.rules = []
    save(store, 4)
    after.close(30)
    assert names(run / "checkpoints") == ["step-00000004"]
    tier = RemoteTier.find(Objects(f"{url}/tiny"), run)
    assert [manifest.step for manifest in tier.manifests()] == [2, 4]
    found = {entry.step: [(p.tier, p.complete) for p in entry.places] for entry in CheckpointIndex(run).entries()}
    assert found == {2: [("remote", True)], 4: [("local", True), ("remote", True)]}


def test_what_one_attempt_could_not_send_the_next_one_sends(s3: S3Server, proxy: S3Proxy, run: Path) -> None:
    url = f"{s3.url}/{run.parent.parent.name}-next"
    proxy.rules = [lambda method, path, body: "503" if method == "PUT" and "-001." in path else None]
    after = CheckpointMaintainer(settings(run, url))
    files = save(CheckpointStore(run / "checkpoints", max_shard_bytes=100, after_save=after), 1).files
    assert wait_until(lambda: proxy.done["503"], LONG)
    after.close(1.0)
    proxy.rules, proxy.requests = [], []
    second = CheckpointMaintainer(replace(settings(run, url), attempt=2))
    second.close(60)
    assert RemoteTier.find(Objects(f"{url}/tiny"), run).manifest(1) is not None
    assert proxy.sent("shard-00000.") == 0 and proxy.sent("shard-00000-001.") == 1 and len(files) > 2


def test_parts_of_a_large_file_come_and_go_in_flat_memory(place: Objects, run: Path, proxy: S3Proxy) -> None:
    """In parts both ways; a download that was cut off goes on in the middle of a file."""
    import torch

    state = {"model.large": torch.arange(12 * 2**20, dtype=torch.float32)}  # 48 MiB
    local(run).save(1, state, {"step": 1}, {})
    tier = RemoteTier.find(place, run).acquire(run, 1)
    assert send(tier, run, 1)
    puts = [size for method, path, size in proxy.requests if method == "PUT" and "safetensors" in path]
    assert max(puts) <= client.PART_BYTES + 2**16 and sum(puts) > 48 * 2**20
    found = tier.manifest(1)
    assert isinstance(found, Manifest)
    (file,) = found.files
    source, target = tier.objects.at(step_name(1)), run / "half"
    source.patience_seconds, sent = 0.0, sent_name(found, file)
    gets: list[str] = []

    def third_fails(method: str, path: str, body: bytes) -> str | None:
        gets.extend([path] if method == "GET" and file in path else [])
        return "503" if len(gets) > 2 else None

    proxy.rules = [third_fails]
    with pytest.raises(UnreachableError):
        source.download(sent, target, found.files[file].bytes)
    assert target.stat().st_size == 2 * client.PART_BYTES
    proxy.rules, proxy.requests = [], []
    source.download(sent, target, found.files[file].bytes)
    assert sum(method == "GET" for method, _, _ in proxy.requests) == 2
    assert target.read_bytes() == (run / "checkpoints" / step_name(1) / file).read_bytes()
    assert json.loads((run / "remote.json").read_text())["number"] == 1


@pytest.mark.parts(SEAWEEDFS)
@pytest.mark.parametrize("s3_server", [SeaweedFs], indirect=True)
def test_the_doctor_warns_of_a_lifecycle_rule_that_reaches_claims(s3: S3Server, tmp_path: Path) -> None:
    """As a real store has it."""
    bucket, files = f"rules-{os.getpid()}", s3.files()
    files.mkdir(bucket)
    remote = {"remote": {"url": f"s3://{bucket}/runs"}}
    loaded = Config(name="tiny", runs=tmp_path, checkpoint=remote)
    assert [finding.level for finding in examine_lifecycle(loaded)] == ["ok"]
    for prefix, level in (("runs/tiny/", "warning"), ("runs/other/", "ok")):
        rule = {"ID": "old", "Status": "Enabled", "Filter": {"Prefix": prefix}, "Expiration": {"Days": 30}}
        files.call_s3("put_bucket_lifecycle_configuration", Bucket=bucket, LifecycleConfiguration={"Rules": [rule]})
        (finding,) = examine_lifecycle(loaded)
        assert finding.level == level, finding
    missing = Config(name="tiny", runs=tmp_path, checkpoint={"remote": {"url": "s3://there-is-none/runs"}})
    (finding,) = examine_lifecycle(missing)
    assert finding.level == "note" and "cannot be read" in finding.what


@pytest.mark.slow
def test_a_killed_run_without_its_disk_ends_with_the_same_bits(
    tiny: Callable[..., Path], s3: S3Server, tmp_path: Path
) -> None:
    """Full checkpoints in the bucket, a kill, the whole run directory gone: another machine goes on."""
    config = tiny(
        train={"steps": 6},
        evaluation={"rows": 8, "every": "2 steps"},
        checkpoint={"every": "2 steps", "keep": 1, "remote": {"url": f"{s3.url}/{tmp_path.name}", "keep_best": 1}},
    )
    assert headway("train", config, "name=straight", "checkpoint.remote=null").returncode == 0
    killed = headway("train", config, "checkpoint.every=4 steps", faults="kill@step=6")
    assert killed.returncode != 0, killed.stderr
    run = tmp_path / "runs" / "tiny"
    # The kill has most likely come before the upload was done: let it be done as the next attempt would.
    CheckpointMaintainer(MaintainerSettings.of(load_resolved(run / "config.yaml"), 1)).close(30)
    shutil.rmtree(run)
    again = headway("train", config)
    assert again.returncode == 0, again.stderr
    assert f"downloading {s3.url}/{tmp_path.name}/tiny/run-001/step-00000004" in again.stderr
    assert state_hash(run, 6) == state_hash(tmp_path / "runs" / "straight", 6)
    assert [commit.last_step for commit in Ledger(run / "ledger.jsonl").commits()] == [4, 6]
    context = manifest(run, 6)["context"]
    assert context["kind"] == "full" and context["evaluation"]["step"] == 6 and "dropout" in context["config"]
    assert context["parent"]["step"] == 4 and context["metrics"]["evaluation/loss"] > 0
    found = {entry.step: [place.tier for place in entry.places] for entry in CheckpointIndex(run).entries()}
    assert found[6] == ["local", "remote"], again.stderr
    # Another config does not take this run for its own, and a restart leaves it alone.
    shutil.rmtree(run)
    other = headway("train", config, "seed=4")
    assert other.returncode == 2 and "belongs to run 'tiny' with seed 3" in other.stderr
    fresh = headway("train", config, "seed=4", "--restart", "train.steps=2")
    assert fresh.returncode == 0, fresh.stderr
    assert "downloading" not in fresh.stderr
