"""Going back, comparing, copying and pruning: `headway checkpoints`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from headway.checkpoint import transfer
from headway.checkpoint.format.folders import discard
from headway.checkpoint.index import CheckpointIndex
from headway.checkpoint.remote.acquire import acquire_tier
from headway.checkpoint.remote.tier import RemoteTier, journal_of
from headway.checkpoint.retention import Rules
from headway.checkpoint.run_identity import RunIdentity, run_identity
from headway.checkpoint.store import CheckpointStore
from headway.checkpoint.verify import Verification
from headway.cli.application import application
from headway.config import Config, RemoteConfig, TrainConfig, dump_config, identity, load_resolved, override
from headway.core.console import warning
from headway.core.errors import CheckpointError, ConfigError
from headway.core.files.hashes import fingerprint
from headway.run.directory import restore as restore_module
from headway.run.directory.ledger import Ledger
from headway.run.directory.restore import prune, restore
from headway.run.directory.run_directory import RunDirectory
from headway.run.session.start import check_nothing_lost
from headway.telemetry.record import open_run
from headway.telemetry.runs import list_runs
from headway.telemetry.summary import summarize
from support.states import make_state, names, save

app = application(["checkpoints"])


def invoke(*arguments: object) -> tuple[Any, BaseException | None]:
    result = CliRunner().invoke(app, ["checkpoints", *map(str, arguments), "--json"])
    return (json.loads(result.stdout) if result.stdout else None), result.exception


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run with checkpoints of steps 1 to 4, all but the last of them in its remote tier too, and a ledger."""
    run = RunDirectory(tmp_path / "runs" / "tiny")
    (tmp_path / "remote").mkdir()
    remote = {"url": f"file://{tmp_path}/remote"}
    config = Config(name="tiny", train=TrainConfig(steps=4), checkpoint={"keep": 2, "remote": remote})
    attempt = run.begin_attempt("train")
    run.config_path.write_text(dump_config(config))
    store, ledger = CheckpointStore(run.checkpoints, keep=9), Ledger(run.ledger_path)
    tier = acquire_tier(RemoteConfig(**remote), 1, run_identity(config, run=run.path))
    context = {"attempt": 1, "identity": fingerprint(identity(config)), "config": dump_config(config), "run": {"a": 1}}
    for step in (1, 2, 3, 4):
        store.save(step, make_state(step), {"step": step}, context)
        ledger.commit(1, step - 1, step, {"corpus": 8}, f"step-{step:08d}")
        if step < 4:
            tier.publish(run.checkpoints / f"step-{step:08d}", journal_of(run.path, step))
    attempt.finish("finished", 0)
    return run


def remote_of(tmp_path: Path) -> RemoteTier:
    from headway.checkpoint.transfer import remote_tier

    return remote_tier(f"file://{tmp_path}/remote/tiny")


def test_going_back_sets_later_steps_aside_everywhere(run: RunDirectory, tmp_path: Path) -> None:
    run.metrics_path.write_text('{"step": 4, "attempt": 1}\n')
    found, error = invoke("restore", run.path, "--step", 2)
    assert error is None and found["step"] == 2 and len(found["set_aside"]) == 3
    assert names(run.checkpoints) == ["step-00000001", "step-00000002"]
    assert names(run.path / "set-aside" / "002") == ["step-00000003", "step-00000004"]
    assert Ledger(run.ledger_path).committed_step == 2
    assert [manifest.step for manifest in remote_of(tmp_path).manifests()] == [1, 2]
    assert list((tmp_path / "remote" / "tiny" / "run-001" / "step-00000003").glob("*-shard-00000.safetensors"))
    start = CheckpointStore(run.checkpoints).newest(warning)
    assert start is not None and start.step == 2
    check_nothing_lost(run, start)
    assert [record["outcome"] for record in run.attempt_records()] == ["finished", "restored"]
    assert {entry.step for entry in CheckpointIndex(run.path).entries()} == {1, 2}
    (listed,) = list_runs(run.path.parent)
    assert summarize(open_run(run.path)).step == listed.step == 2
    attempt = run.begin_attempt("headway train")
    assert open_run(run.path).step == 2, "nothing was trained since"
    with run.metrics_path.open("a") as metrics:
        metrics.write(f'{{"step": 3, "attempt": {attempt.number}}}\n')
    assert open_run(run.path).step == 3


def test_a_step_that_is_only_in_the_remote_tier_comes_back(run: RunDirectory) -> None:
    path = run.checkpoints / "step-00000002" / "shard-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    assert restore(run, 2).step == 2
    assert CheckpointStore(run.checkpoints).verify(2).good


@pytest.mark.parametrize("left", [(), (1, 2)])
def test_the_newest_of_both_tiers_is_restored(run: RunDirectory, tmp_path: Path, left: tuple[int, ...]) -> None:
    """What is here may all be damaged, or older; nothing newer is set aside for it."""
    for path in run.checkpoints.glob("*/shard-*"):
        if int(path.parent.name[5:]) not in left:
            path.write_bytes(b"damaged")
    found = restore(run)
    assert found.step == 3 and found.set_aside == (str(run.path / "set-aside" / "002" / "step-00000004"),)
    assert [manifest.step for manifest in remote_of(tmp_path).manifests()] == [1, 2, 3]


def test_a_lost_run_comes_back_from_a_url(run: RunDirectory, tmp_path: Path) -> None:
    back = RunDirectory(tmp_path / "elsewhere" / "tiny")
    found = restore(back, source=f"file://{tmp_path}/remote/tiny")
    assert found.step == 3 and CheckpointStore(back.checkpoints).verify(3).good
    assert back.config_path.read_text() == run.config_path.read_text()
    assert json.loads(back.record_path.read_text()) == {"a": 1}
    assert restore(RunDirectory(tmp_path / "third"), 4, str(run.path)).step == 4


def test_an_earlier_step_of_a_lost_run_stays_the_one_to_go_on_from(run: RunDirectory, tmp_path: Path) -> None:
    back = RunDirectory(tmp_path / "elsewhere" / "tiny")
    found = restore(back, 1, f"file://{tmp_path}/remote/tiny")
    assert found.step == 1 and len(found.set_aside) == 2
    assert [manifest.step for manifest in remote_of(tmp_path).manifests()] == [1], "or 3 would come back by itself"


@pytest.mark.slow
def test_a_lost_run_comes_back_where_its_remote_tier_cannot_be_used(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copies = tmp_path / "copies"
    shutil.copytree(run.checkpoints / "step-00000004", copies / "step-00000004")
    (tmp_path / "remote").rename(tmp_path / "away")
    (tmp_path / "remote").write_text("no folder")
    assert restore(RunDirectory(tmp_path / "elsewhere" / "tiny"), 4, str(copies)).step == 4
    assert "later checkpoints in the remote tier are not set aside" in capsys.readouterr().err


def test_restoring_is_refused_while_the_run_is_in_use_and_changes_nothing(run: RunDirectory) -> None:
    attempt = run.begin_attempt("train")
    for arguments in (("restore", run.path, "--step", 1), ("prune", run.path, "--keep", 1)):
        _, error = invoke(*arguments)
        assert isinstance(error, CheckpointError) and "in use by attempt 2" in error.what
    attempt.finish("finished", 0)
    with pytest.raises(CheckpointError, match="no checkpoint of step 7 verifies"):
        restore(run, 7)
    assert open_run(run.path).state == "finished" and [r["number"] for r in run.attempt_records()] == [1, 2]
    assert restore(run, 4).step == 4, "the run is free again"
    assert len(names(run.checkpoints)) == 4 and Ledger(run.ledger_path).committed_step == 4


@pytest.mark.parametrize("lies", ["here", "in the remote tier", "elsewhere", "at a URL"])
def test_what_training_would_remove_is_refused_before_anything_is_set_aside(
    run: RunDirectory, tmp_path: Path, lies: str
) -> None:
    """The rows of step 2 were left out, so what comes after it and knows nothing of that is of another run."""
    source = {"elsewhere": str(tmp_path / "copies"), "at a URL": f"file://{tmp_path}/bucket"}.get(lies)
    if source is not None:
        invoke("copy", run.path, source)
    if lies != "here":
        shutil.rmtree(run.checkpoints / "step-00000003")
    Ledger(run.ledger_path).decide(1, 2, 3, "rollback", "a spike")
    before = names(run.checkpoints), [manifest.step for manifest in remote_of(tmp_path).manifests()]
    with pytest.raises(CheckpointError, match="step 3 was trained on rows that are skipped now"):
        restore(run, 3, source)
    assert (names(run.checkpoints), [manifest.step for manifest in remote_of(tmp_path).manifests()]) == before
    assert not (run.path / "set-aside").exists() and open_run(run.path).state == "finished"
    assert restore(run, source=source).step == 2, "the newest that training would go on from"


def test_the_newest_checkpoint_may_still_be_on_its_way(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(run.checkpoints)
    newest = max(info.step for info in store.list())
    monkeypatch.setattr(restore_module, "wait_for_orphaned_writers", lambda _: save(store, newest + 1))
    assert restore(run).step == newest + 1


def test_a_checkpoint_of_another_config_is_refused(run: RunDirectory, tmp_path: Path) -> None:
    other = RunDirectory(tmp_path / "other")
    other.begin_attempt("train").finish("finished", 0)
    other.config_path.write_text(dump_config(Config(name="other", seed=4, train=TrainConfig(steps=4))))
    with pytest.raises(ConfigError, match="was made with another config"):
        restore(other, source=str(run.path))


def test_prune_by_the_rules_of_the_run_or_a_number(run: RunDirectory) -> None:
    found, _ = invoke("prune", run.path, "--dry-run")
    assert found["removed"] == [1, 2] and len(names(run.checkpoints)) == 4
    found, _ = invoke("prune", run.path)
    assert found["removed"] == [1, 2] and set(found["kept"]) == {"3", "4"}
    assert names(run.checkpoints) == ["step-00000003", "step-00000004"]
    path = run.checkpoints / "step-00000004" / "shard-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    stay, gone = prune(run, Rules(keep=1))
    assert gone == [] and set(stay) == {3, 4}, "4 is damaged, so 3 is the newest that counts"


def test_prune_takes_none_of_those_for_the_newest_that_training_would_remove(run: RunDirectory) -> None:
    """A kill came between the decision to leave out step 2 and the removal of what was made with it."""
    Ledger(run.ledger_path).decide(1, 2, 3, "rollback", "a spike")
    stay, gone = prune(run, Rules(keep=1))
    assert gone == [1] and stay[2] == "the newest" and sorted(stay) == [2, 3, 4]


def test_prune_keeps_the_best_by_the_rule_of_the_run(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    for step, accuracy in enumerate([0.2, 0.9, 0.4, 0.3], start=1):
        with run.metrics_path.open("a") as file:
            file.write(json.dumps({"step": step, "attempt": 1, "time": 0, "accuracy": accuracy}) + "\n")
    rules = ["keep=1", "keep_best=1", "keep_metric=accuracy", "keep_mode=max"]
    config = override(load_resolved(run.config_path), [f"checkpoint.{rule}" for rule in rules])
    run.config_path.write_text(dump_config(config))
    found, _ = invoke("prune", run.path, "--dry-run")
    assert found["kept"] == {"2": "among the best 1 by accuracy (highest)", "4": "the newest"}
    assert set(prune(run, Rules(keep=1, keep_best=1, keep_metric="accuracy"), dry_run=True)[0]) == {1, 4}
    assert capsys.readouterr().err == ""
    stay, _ = prune(run, Rules(keep=1, keep_best=1, keep_metric="acuracy"), dry_run=True)
    assert set(stay) == {4} and "no checkpoint has the metric 'acuracy'" in capsys.readouterr().err


def test_copies_are_verified_and_made_once(run: RunDirectory, tmp_path: Path) -> None:
    copied, _ = invoke("copy", run.path, tmp_path / "copies", "--step", 3)
    assert [c["step"] for c in copied] == [3] and names(tmp_path / "copies") == ["step-00000003"]
    before = (tmp_path / "copies" / "step-00000003").stat()
    copied, _ = invoke("copy", run.path, tmp_path / "copies")
    assert [c["step"] for c in copied] == [1, 2, 3, 4]
    assert (tmp_path / "copies" / "step-00000003").stat().st_ino == before.st_ino
    url = f"file://{tmp_path}/bucket"
    copied, _ = invoke("copy", run.checkpoints / "step-00000004", url)
    assert [c["place"] for c in copied] == [f"{url}/step-00000004"]
    listed, _ = invoke("list", url)
    assert [(entry["step"], entry["cursor"]) for entry in listed] == [(4, {"step": 4})]
    invoke("copy", url, tmp_path / "back")
    assert CheckpointStore(tmp_path / "back").verify(4).good
    (tmp_path / "copies" / "step-00000004" / "shard-00000.safetensors").unlink()
    _, error = invoke("copy", tmp_path / "copies" / "step-00000004", tmp_path / "more")
    assert isinstance(error, CheckpointError) and "is damaged" in error.what and not (tmp_path / "more").exists()
    _, error = invoke("copy", run.path, tmp_path / "copies")
    assert isinstance(error, CheckpointError) and "something else is there" in error.what


def test_a_copy_that_is_not_what_was_there_gets_no_name(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copyfile

    def flip(source: Path, target: Path) -> None:
        copy(source, target)
        if target.name.startswith("shard"):
            target.write_bytes(target.read_bytes()[:-1] + b"\x55")

    monkeypatch.setattr(shutil, "copyfile", flip)
    _, error = invoke("copy", run.path, tmp_path / "copies", "--step", 3)
    assert isinstance(error, CheckpointError) and "the copy differs from the original" in error.what
    assert names(tmp_path / "copies") == []


@pytest.mark.parametrize("target", ["copies", "url"])
def test_what_a_live_run_removes_while_it_is_copied_is_left_out(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    """Step 1 before it is looked at, step 2 while its files are read."""
    verify, gone = transfer.verify_checkpoint, run.checkpoints / "step-00000001"

    def late(path: Path) -> Verification:
        if path == gone:
            discard(path)
        found = verify(path)
        if path.name == "step-00000002" and path.parent == run.checkpoints:
            discard(path)
        return found

    monkeypatch.setattr(transfer, "verify_checkpoint", late)
    there = f"file://{tmp_path}/bucket" if target == "url" else str(tmp_path / "copies")
    copied = transfer.copy_checkpoints(str(run.path), there)
    assert [found.manifest.step for found in copied] == [3, 4]
    said = capsys.readouterr().err
    assert all(f"{name}: it was removed while it was copied" in said for name in ("step-00000001", "step-00000002"))


def test_what_comes_from_a_url_replaces_no_good_checkpoint_of_another_state(run: RunDirectory, tmp_path: Path) -> None:
    url, other = f"file://{tmp_path}/bucket", CheckpointStore(tmp_path / "other")
    invoke("copy", run.path, url)
    state = make_state(4)
    state["model.embedding"][0, 0] += 0.5
    kept = other.save(4, state, {"step": 4}, {})
    _, error = invoke("copy", url, other.directory)
    assert isinstance(error, CheckpointError) and "something else is there already" in error.what
    assert other.info(4).state_sha256 == kept.state_sha256


def test_a_copy_from_a_url_takes_nothing_away(run: RunDirectory, tmp_path: Path) -> None:
    """Neither what has the name of a checkpoint nor what another copy brings."""
    url, target = f"file://{tmp_path}/bucket", tmp_path / "target"
    invoke("copy", run.path, url)
    precious, coming = target / "step-00000003" / "precious.pt", target / ".bring-step-00000004" / "shard"
    for path in (precious, coming):
        path.parent.mkdir(parents=True)
        path.touch()
    _, error = invoke("copy", url, target, "--step", 3)
    assert isinstance(error, CheckpointError) and "something else is there already" in error.what
    copied, _ = invoke("copy", url, target, "--step", 2)
    assert [c["step"] for c in copied] == [2] and precious.exists() and coming.exists()


def test_a_remote_checkpoint_that_was_set_aside_is_replaced_whole(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    restore(run, 2)
    aside = tmp_path / "remote/tiny/run-001/step-00000003/manifest.set-aside.json"
    assert aside.exists()
    store = CheckpointStore(run.checkpoints, keep=9)
    store.save(3, make_state(9), {"step": 3}, {"attempt": 3})
    remote = load_resolved(run.config_path).checkpoint.remote
    assert remote is not None
    acquire_tier(remote, 3, RunIdentity(run.path, None, run.path.name)).publish(
        run.checkpoints / "step-00000003", journal_of(run.path, 3)
    )
    assert not aside.exists() and "replaces the checkpoint that was set aside" in capsys.readouterr().err
    assert len(list(aside.parent.glob("*shard-00000.safetensors"))) == 1, "what was set aside has gone"


@pytest.mark.parametrize("scheme", ["", "file://"])
@pytest.mark.parametrize("damaged", ["shard-00000.safetensors", "manifest.json"])
def test_a_damaged_checkpoint_is_replaced_by_a_good_one_from_elsewhere(
    run: RunDirectory, tmp_path: Path, scheme: str, damaged: str
) -> None:
    invoke("copy", run.path, tmp_path / "copies")
    (run.checkpoints / "step-00000004" / damaged).write_bytes(b"")
    assert restore(run, 4, f"{scheme}{tmp_path}/copies").step == 4
    assert CheckpointStore(run.checkpoints).verify(4).good


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_damaged_checkpoint_stays_when_none_comes_in_its_place(
    run: RunDirectory, tmp_path: Path, scheme: str
) -> None:
    folder = run.checkpoints / "step-00000004"
    invoke("copy", run.path, tmp_path / "copies", "--step", 3)
    (folder / "shard-00000.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="there is no checkpoint of step 4 to copy"):
        restore(run, 4, f"{scheme}{tmp_path}/copies")
    assert folder.exists()


def test_list_shows_both_tiers(run: RunDirectory) -> None:
    registry = CheckpointIndex(run.path)
    registry.add(CheckpointStore(run.checkpoints).info(3).manifest, "remote", "file:///x")
    listed, _ = invoke("list", run.path)
    assert [[place["tier"] for place in entry["places"]] for entry in listed] == [["local"]] * 2 + [
        ["local", "remote"],
        ["local"],
    ]
    output = CliRunner().invoke(app, ["checkpoints", "list", str(run.path)]).stdout
    assert "local+remote" in output.splitlines()[3]


def test_diff_of_runs_names_one_of_their_checkpoints(run: RunDirectory) -> None:
    refused = CliRunner().invoke(app, ["checkpoints", "diff", str(run.path), str(run.path)])
    assert isinstance(refused.exception, CheckpointError)
    assert "a run" in refused.exception.what and "/checkpoints/step-" in str(refused.exception.fix)


def test_diff_tells_tensors_and_sizes_of_differences(tmp_path: Path) -> None:
    one, other = CheckpointStore(tmp_path / "a"), CheckpointStore(tmp_path / "b", max_shard_bytes=50)
    save(one, 3), save(other, 3)
    folders = tmp_path / "a" / "step-00000003", tmp_path / "b" / "step-00000003"
    found, _ = invoke("diff", *folders)
    assert found["same_state"] and found["differences"] == []
    changed = make_state(3)
    changed["model.embedding"][0, 0] += 0.5
    changed["optimizer.counts"] = changed["optimizer.counts"].to(torch.int32)
    changed["model.mask"][0] ^= True
    del changed["model.half"]
    other.save(4, changed, {"step": 4}, {})
    found, _ = invoke("diff", folders[0], tmp_path / "b" / "step-00000004", "--values")
    differences = {d["name"]: d for d in found["differences"]}
    assert {name: d["what"] for name, d in differences.items()} == {
        "model.embedding": "values",
        "model.half": "only in the first",
        "model.mask": "values",
        "optimizer.counts": "dtype",
    }
    assert differences["model.embedding"]["elements"] == 1 and not found["same_state"]
    assert differences["model.embedding"]["largest_absolute"] == pytest.approx(0.5)
    assert differences["model.mask"]["largest_relative"] == 1.0
    assert found["cursor"] == {"step": [3, 4]} and found["equal_tensors"] == 3
