"""Changing the keys of a run's checkpoints: `headway checkpoints reseal`, also when it is killed on the way."""

from __future__ import annotations

import secrets
from functools import partial
from pathlib import Path

import pytest

from headway.checkpoint.format.sealing import encryption_key
from headway.checkpoint.format.signing import key_to_sign_with
from headway.checkpoint.records import RECORDS, RecordsPacker
from headway.checkpoint.remote.acquire import acquire_tier, find_tier
from headway.checkpoint.remote.tier import RESEALING, RemoteTier, journal_of
from headway.checkpoint.reseal import SEALED_WITH, Keys
from headway.checkpoint.run_identity import run_identity
from headway.checkpoint.store import CheckpointStore
from headway.checkpoint.verify import verify_checkpoint
from headway.checkpoint.verify_remote import remote_checkpoints, verify_remote
from headway.config import Config, RemoteConfig, TrainConfig, dump_config
from headway.core.errors import CheckpointError, ConfigError
from headway.run.directory.reseal import reseal
from headway.run.directory.run_directory import RunDirectory
from support.runs import in_child
from support.states import equal, make_state, names

pytest.importorskip("cryptography")

OLD = Keys(secrets.token_hex(32), "the old secret that signs")
NEW = Keys(secrets.token_hex(32), "the new secret that signs")
STEPS = (2, 4)


@pytest.fixture(params=["remote", "both"])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run with signed checkpoints here and in a remote tier, encrypted there or in both places."""
    for name in ("ENCRYPTION", "SIGNING"):
        monkeypatch.delenv(f"HEADWAY_{name}_KEY", raising=False)
    (tmp_path / "remote").mkdir()
    run = RunDirectory(tmp_path / "runs" / "tiny")
    remote = {"url": f"file://{tmp_path}/remote", "encrypt": True}
    encrypts = request.param == "both"
    config = Config(name="tiny", train=TrainConfig(steps=4), checkpoint={"remote": remote, "encrypt": encrypts})
    attempt = run.begin_attempt("train")
    run.config_path.write_text(dump_config(config))
    run.record_path.write_text('{"id": "%s"}' % ("ab" * 16))
    run.metrics_path.write_text('{"step": 1}\n')
    with OLD.in_use():
        tier = acquire_tier(RemoteConfig(**remote), 1, run_identity(config, run=run.path))
        store = CheckpointStore(
            run.checkpoints, sign_with=key_to_sign_with(), encrypt_with=encryption_key() if encrypts else None
        )
        for step in STEPS:
            scratch = tmp_path / f"records-{step}"
            scratch.mkdir()
            context = {"attempt": 1, "of_run": tier.identity.record(), RECORDS: RecordsPacker(run.path).pack(scratch)}
            store.save(step, make_state(step), {"step": step}, context)
            (scratch / "records.zip").rename(store.info(step).path / "records.zip")
            tier.publish(store.info(step).path, journal_of(run.path, step))
        tier.set_aside(4)
    attempt.finish("finished", 0)
    return run


def both_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, old, new in (("ENCRYPTION", OLD.encryption, NEW.encryption), ("SIGNING", OLD.signing, NEW.signing)):
        assert old and new
        monkeypatch.setenv(f"HEADWAY_{kind}_KEY", old)
        monkeypatch.setenv(f"HEADWAY_NEW_{kind}_KEY", new)


def tier_of(run: RunDirectory) -> RemoteTier:
    remote = RemoteConfig(url=f"file://{run.path.parent.parent}/remote", encrypt=True)
    return find_tier(remote, run_identity(Config(name="tiny"), run=run.path))


def readable(run: RunDirectory, keys: Keys) -> set[str]:
    """The checkpoints that these keys alone open in full, with the state that was saved."""
    found = set()
    with keys.in_use():
        for step in STEPS:
            path = run.checkpoints / f"step-{step:08d}"
            try:
                if verify_checkpoint(path, tensors=True).good:
                    store = CheckpointStore(run.checkpoints)
                    assert equal(store.load(store.info(step)), make_state(step))
                    found.add(f"here {step}")
            except ConfigError:
                pass
        try:
            there = remote_checkpoints(tier_of(run).url)
        except (CheckpointError, ConfigError):
            there = []
        for checkpoint in there:
            found |= {f"there {checkpoint.manifest.step}"} if verify_remote(checkpoint).good else set()
    return found


ALL = {"here 2", "here 4", "there 2"}


def test_all_checkpoints_get_the_new_keys(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    assert readable(run, OLD) == ALL and not readable(run, NEW)
    both_keys(monkeypatch)
    done = reseal(run, "headway checkpoints reseal")
    assert not done.failed and len(done.changed) == 4 and not done.left
    assert readable(run, NEW) == ALL and not readable(run, OLD)
    # The state keeps its name, the set-aside one and the records came along, and nothing of the old key is left.
    with NEW.in_use():
        tier = tier_of(run)
        manifest = tier.manifest(2)
        assert manifest is not None and manifest.context[SEALED_WITH] == NEW.name
        assert tier.records.fetch(manifest, run.path.parent / "records.zip")
        assert tier.objects.read("step-00000004/manifest.set-aside.json", 2**20) is not None
    places = [run.path.parent.parent / "remote" / "tiny" / "run-001" / f"step-{step:08d}" for step in STEPS]
    assert [len(names(place)) for place in places] == [3, 3]
    # A second time there is nothing to do, and the run is free.
    again = reseal(run, "headway checkpoints reseal")
    assert not again.changed and len(again.left) == 4
    run.claim().release()


@pytest.mark.parametrize(
    "fault",
    ["reseal.files:1", "checkpoint.discard:1", "reseal.files:2", "reseal.files:3", "reseal.files:4",
     "reseal.manifest:1", "reseal.manifest:2"],
)  # fmt: skip
def test_a_kill_at_any_moment_loses_nothing(run: RunDirectory, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    both_keys(monkeypatch)
    code = in_child(partial(reseal, run, "x"), faults=f"kill@{fault}")
    assert code == -9, "every point is passed"
    assert readable(run, OLD) | readable(run, NEW) == ALL
    # Meanwhile no attempt begins, here or elsewhere, that had only one of the keys.
    with pytest.raises(CheckpointError, match="change of the keys of its checkpoints is not finished"):
        run.claim()
    with NEW.in_use():
        tier = tier_of(run)
        if tier.objects.read(RESEALING) is not None:
            elsewhere = run_identity(Config(name="tiny"), run=run.path.parent / "elsewhere" / "tiny")
            remote = RemoteConfig(url=f"file://{run.path.parent.parent}/remote", encrypt=True)
            with pytest.raises(CheckpointError, match="change of the keys of these checkpoints is not finished"):
                acquire_tier(remote, 1, elsewhere)
    done = reseal(run, "headway checkpoints reseal")
    assert not done.failed and readable(run, NEW) == ALL and not readable(run, OLD)
    run.claim().release()
    assert not [name for name in names(run.checkpoints) if name.startswith(".")]


def test_a_kill_between_two_renames_loses_nothing(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system that cannot swap two names."""
    both_keys(monkeypatch)
    monkeypatch.setattr("headway.checkpoint.format.folders.exchange", lambda one, other: False)
    assert in_child(partial(reseal, run, "x"), faults="kill@checkpoint.replace:1") == -9
    assert "here 4" in readable(run, OLD)
    assert not reseal(run, "x").failed and readable(run, NEW) == ALL


def test_a_checkpoint_that_no_key_opens_is_reported(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    with Keys(secrets.token_hex(32), "one more secret that signs").in_use():
        other = CheckpointStore(run.path.parent / "other", sign_with=key_to_sign_with())
        other.save(6, make_state(6), {"step": 6}, {})
        other.info(6).path.rename(run.checkpoints / "step-00000006")
    both_keys(monkeypatch)
    done = reseal(run, "headway checkpoints reseal")
    assert len(done.failed) == 1 and "signed with another key" in done.failed[0].what
    assert readable(run, NEW) == ALL
    with pytest.raises(CheckpointError, match="not finished"):
        run.claim()


def test_two_keys_are_needed(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    for variables in ({}, {"HEADWAY_NEW_ENCRYPTION_KEY": NEW.encryption}, {"HEADWAY_ENCRYPTION_KEY": OLD.encryption}):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, str(value))
            with pytest.raises(ConfigError, match="takes the present key and another one"):
                reseal(run, "x")
    both_keys(monkeypatch)
    monkeypatch.setenv("HEADWAY_NEW_ENCRYPTION_KEY", "abc")
    with pytest.raises(ConfigError, match="32 bytes"):
        reseal(run, "x")
    with run.claim(), pytest.raises(CheckpointError, match="in use"):
        monkeypatch.setenv("HEADWAY_NEW_ENCRYPTION_KEY", str(NEW.encryption))
        reseal(run, "x")
