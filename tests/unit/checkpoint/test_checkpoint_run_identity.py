"""The remote place belongs to one run: another takes, replaces and removes nothing there, and is told whose it is."""

from __future__ import annotations

import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headway.checkpoint.discovery import bring_earlier, find_latest
from headway.checkpoint.format.manifest import step_name
from headway.checkpoint.post_save import CheckpointMaintainer, MaintainerSettings
from headway.checkpoint.remote.acquire import acquire_tier, find_tier, is_sent
from headway.checkpoint.remote.ownership import FencedError, OtherRunError, read_claim
from headway.checkpoint.remote.tier import RemoteTier, SupersededError, journal_of
from headway.checkpoint.remote.tier_reader import CLAIM
from headway.checkpoint.run_identity import IDENTITY, OF_RUN, new_run_id, read_run_id, run_identity
from headway.checkpoint.store import CheckpointInfo, CheckpointStore
from headway.checkpoint.verify_remote import remote_checkpoints, verify_remote
from headway.config import Config, TrainConfig, identity, resolve
from headway.core.errors import CheckpointError
from headway.core.files.atomic import write_json
from headway.core.files.hashes import fingerprint
from support.states import equal, make_state, names

Made = tuple[Config, Path]


def make_run(folder: Path, seed: int = 3, steps: int = 9, with_id: bool = True) -> Config:
    """A run directory as an attempt leaves it, whose remote place all runs of a test share."""
    (remote := folder.parent / "remote").mkdir(exist_ok=True)
    checkpoint = {"keep": 9, "remote": {"url": f"file://{remote}"}}
    config = resolve(Config(name="tiny", runs=folder, seed=seed, train=TrainConfig(steps=steps), checkpoint=checkpoint))
    run = Path(config.run_directory)
    record = {"fingerprints": {"config": fingerprint(identity(config))}, **({"id": new_run_id()} if with_id else {})}
    write_json(run / "run.json", record)
    return config


def run_of(config: Config) -> Path:
    return Path(config.run_directory)


def save(config: Config, step: int, state: int | None = None, **more: Any) -> CheckpointInfo:
    """With what an attempt says of a checkpoint; `state` is the seed of its tensors."""
    store = CheckpointStore(run_of(config) / "checkpoints", keep=9)
    made_by = {OF_RUN: run_identity(config).record()} if read_run_id(run_of(config)) else {}
    context = {IDENTITY: fingerprint(identity(config)), "attempt": 1, **made_by, **more}
    store.save(step, make_state(step if state is None else state), {"step": step}, context)
    return store.info(step)


def claim(config: Config, attempt: int = 1, data: str | None = None) -> RemoteTier:
    assert config.checkpoint.remote is not None
    return acquire_tier(config.checkpoint.remote, attempt, run_identity(config, data), patience_seconds=0)


def send(tier: RemoteTier, config: Config, step: int) -> bool:
    return tier.publish(run_of(config) / "checkpoints" / step_name(step), journal_of(run_of(config), step))


def newest(config: Config, said: list[str] | None = None) -> CheckpointInfo | None:
    store = CheckpointStore(run_of(config) / "checkpoints")
    return find_latest(store, partial(claim, config, 2), (said if said is not None else []).append)


def place(tmp_path: Path, generation: int = 1) -> Path:
    return tmp_path / "remote" / "tiny" / f"run-{generation:03d}"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def a(tmp_path: Path) -> Config:
    """Has step 2 here, has claimed the place, and was killed before it sent anything."""
    config = make_run(tmp_path / "a", seed=3)
    claim(config)
    save(config, 2)
    return config


@pytest.fixture
def b(tmp_path: Path) -> Config:
    """Another seed, the same URL and name."""
    return make_run(tmp_path / "b", seed=4)


def empty(tmp_path: Path) -> None:
    """Remove all that tells whose the place is, as a clean-up may."""
    for path in place(tmp_path).rglob("*.json"):
        if path.parent.name in ("owners", "run-001"):
            path.unlink()


def finish(config: Config, *steps: int) -> RemoteTier:
    tier = claim(config)
    for step in steps:
        save(config, step)
        assert send(tier, config, step)
    return tier


# Two runs


def test_a_place_that_another_run_has_claimed_is_refused_before_a_step(a: Config, b: Config, tmp_path: Path) -> None:
    before = contents(place(tmp_path))
    with pytest.raises(
        OtherRunError, match=r"belongs to run 'tiny' with seed 3 \(id .*claimed by attempt 1 on"
    ) as told:
        newest(b)
    assert told.value.exit_code == 2 and "--restart" in str(told.value.fix) and "name=" in str(told.value.fix)
    assert contents(place(tmp_path)) == before and read_claim(run_of(b)) is None
    assert finish(a, 4).steps() == [4]


def test_the_steps_of_a_run_that_came_later_are_not_taken(a: Config, b: Config, tmp_path: Path) -> None:
    """The claim is gone, so the place is free for another run; the first one has a checkpoint here, and its claim."""
    empty(tmp_path)
    finish(b, 4, 9)
    before = contents(place(tmp_path))
    with pytest.raises(OtherRunError, match="run 'tiny' with seed 4"):
        newest(a)
    assert names(run_of(a) / "checkpoints") == ["step-00000002"] and contents(place(tmp_path)) == before
    empty(tmp_path)  # now only its checkpoints tell
    with pytest.raises(OtherRunError, match=r"belongs to run 'tiny' with seed 4 .* as its newest checkpoint says"):
        newest(a)


def test_the_loser_replaces_nothing(a: Config, b: Config, tmp_path: Path) -> None:
    """It has the last step too, and a claim of before; no restart lies between."""
    tier = RemoteTier(claim(a, 2).objects, read_claim(run_of(a)), run_identity(a))
    empty(tmp_path)
    finish(b, 2, 9)
    save(a, 9)
    before = contents(place(tmp_path))
    for step in (2, 9):
        with pytest.raises(OtherRunError, match="seed 4"):
            send(tier, a, step)
    for act in (tier.discard, tier.set_aside):
        with pytest.raises(OtherRunError):
            act(9)
    assert contents(place(tmp_path)) == before


def test_a_checkpoint_of_another_run_in_the_own_place_is_neither_read_nor_replaced_nor_pruned(
    a: Config, b: Config, tmp_path: Path
) -> None:
    tier = finish(a, 2, 4)
    other = save(b, 6).path
    place(tmp_path).joinpath("step-00000006").mkdir()
    for path in other.iterdir():
        (place(tmp_path) / "step-00000006" / path.name).write_bytes(path.read_bytes())
    before = contents(place(tmp_path) / "step-00000006")
    save(a, 6)
    assert a.checkpoint.remote is not None
    assert not is_sent(a.checkpoint.remote, run_identity(a), save(b, 6).manifest, patience_seconds=0)
    with pytest.raises(OtherRunError, match="holds checkpoints of run 'tiny' with seed 4"):
        newest(a)
    with pytest.raises(OtherRunError):
        send(tier, a, 6)
    with pytest.raises(OtherRunError):
        tier.discard(6)
    assert [m.step for m in tier.own_manifests()] == [2, 4], "by which rules keep and remove"
    store = CheckpointStore(run_of(make_run(tmp_path / "again")) / "checkpoints")
    assert bring_earlier(store, lambda: RemoteTier(tier.objects, identity=run_identity(a)), 6, lambda _: True) == 4
    assert contents(place(tmp_path) / "step-00000006") == before
    damage = {
        verify_remote(c).place[-1]: verify_remote(c).damage
        for c in remote_checkpoints(f"file://{tmp_path}/remote/tiny")
    }
    assert damage["2"] == damage["4"] == () and "is of run 'tiny' with seed 4" in damage["6"][0].what


@pytest.mark.parametrize("other_data", [False, True])
def test_an_empty_directory_continues_the_run_of_its_config_and_data(tmp_path: Path, other_data: bool) -> None:
    a = make_run(tmp_path / "a")
    tier = claim(a, data="d1")
    save(a, 2)
    send(tier, a, 2)
    elsewhere = make_run(tmp_path / "elsewhere")
    mine = read_run_id(run_of(a))
    assert read_run_id(run_of(elsewhere)) != mine
    if other_data:
        with pytest.raises(OtherRunError, match="its data differs"):
            claim(elsewhere, data="d2")
        tier.assert_owner()
        return
    found = find_latest(CheckpointStore(run_of(elsewhere) / "checkpoints"), partial(claim, elsewhere, data="d1"))
    assert found is not None and found.step == 2
    assert read_run_id(run_of(elsewhere)) == mine == json.loads((run_of(elsewhere) / "run.json").read_text())["id"]
    with pytest.raises(FencedError):
        tier.assert_owner()


def test_a_directory_with_checkpoints_of_its_own_continues_no_other_run(tmp_path: Path) -> None:
    """Though its config is the same: two such runs may have trained beside each other."""
    tier = finish(make_run(tmp_path / "a"), 2, 4)
    second = make_run(tmp_path / "second")
    save(second, 3)
    with pytest.raises(OtherRunError, match="this run has checkpoints of its own"):
        newest(second)
    tier.assert_owner()


def test_of_several_generations_a_new_directory_finds_its_own(a: Config, b: Config, tmp_path: Path) -> None:
    send(claim(a), a, 2)
    (run_of(b) / ".restarted").touch()
    assert finish(b, 3).url.endswith("/run-002")
    elsewhere = make_run(tmp_path / "elsewhere", seed=3)
    assert newest(elsewhere).step == 2 and claim(elsewhere, 3).url.endswith("/run-001")  # type: ignore[union-attr]
    third = make_run(tmp_path / "third", seed=4)
    assert newest(third).step == 3  # type: ignore[union-attr]


def test_two_runs_that_come_at_once_do_not_both_get_the_place(
    tmp_path: Path, b: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have seen that it is nobody's."""
    a = make_run(tmp_path / "a", seed=3)
    assert a.checkpoint.remote is not None
    seen = find_tier(a.checkpoint.remote, run_identity(a))
    claim(b)
    with pytest.raises(OtherRunError, match="seed 4"):
        seen.acquire(run_of(a), 1, run_identity(a))
    (place(tmp_path) / "run.json").unlink()
    with monkeypatch.context() as patch:  # nor if that is lost, and a listing is behind
        patch.setattr("headway.checkpoint.remote.ownership.TierOwnership.last", lambda *_: 0)
        patch.setattr("headway.checkpoint.remote.ownership.TierOwnership.record_owner", lambda *_: None)
        with pytest.raises(OtherRunError, match="seed 4"):
            seen.acquire(run_of(a), 1, run_identity(a))
    assert names(place(tmp_path) / "owners") == ["00000001.json"]


def test_what_an_older_attempt_saved_does_not_replace_what_a_newer_one_published(tmp_path: Path) -> None:
    """One run on two machines, not bit for bit the same."""
    one = make_run(tmp_path / "one")
    first = claim(one)
    save(one, 9, state=1, **{CLAIM: 1})
    two = make_run(tmp_path / "two")
    second = claim(two)
    save(two, 9, state=2, **{CLAIM: 2})
    assert send(second, two, 9)
    with pytest.raises(FencedError):
        send(first, one, 9)
    again = claim(one, 2)  # the same command
    before = contents(place(tmp_path) / "step-00000009")
    with pytest.raises(SupersededError, match=r"saved by attempt 1, which has had the run later \(claim 2 after 1\)"):
        send(again, one, 9)
    assert contents(place(tmp_path) / "step-00000009") == before
    other = make_run(tmp_path / "other")
    store = CheckpointStore(run_of(other) / "checkpoints")
    found = find_latest(store, partial(claim, other))
    assert found is not None and equal(store.load(found), make_state(2))
    save(other, 9, state=5, **{CLAIM: 4})
    (run_of(other) / "checkpoints" / "step-00000009").exists()


def test_a_run_that_goes_back_replaces_its_own_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = make_run(tmp_path / "one")
    tier = claim(one)
    save(one, 4, state=1, **{CLAIM: 1})
    assert send(tier, one, 4)
    save(one, 4, state=2, **{CLAIM: 1})
    assert send(tier, one, 4) and "it holds another state" in capsys.readouterr().err


# Claims that are removed


@pytest.mark.parametrize("removed", [(1,), (2,), (1, 2), (3,), (2, 3), (1, 2, 3)])
def test_with_claims_removed_the_next_attempt_owns_the_place_and_the_one_before_does_not(
    tmp_path: Path, removed: tuple[int, ...]
) -> None:
    config = make_run(tmp_path / "a")
    earlier = [claim(config, attempt) for attempt in (1, 2, 3)]
    for number in removed:
        (place(tmp_path) / "owners" / f"{number:08d}.json").unlink()
    (run_of(config) / "remote.json").unlink()  # a machine that knows of none has only the place to go by
    tier = claim(config, 4)
    assert tier.claim is not None and tier.claim.number == 4
    save(config, 2)
    assert send(tier, config, 2)
    for before in earlier:
        with pytest.raises(FencedError):
            before.assert_owner()
    assert names(place(tmp_path) / "owners")[-1] == "00000004.json"


def test_a_new_claim_is_higher_than_any_that_a_checkpoint_names(tmp_path: Path) -> None:
    """Nothing else may be left: what is saved under it has to count as newer."""
    config = make_run(tmp_path / "a")
    tier = claim(config)
    save(config, 2, state=1, **{CLAIM: 7})
    send(tier, config, 2)
    empty(tmp_path)
    again = claim(make_run(tmp_path / "b"))
    assert again.claim is not None and again.claim.number == 8


@pytest.mark.parametrize("with_hint", [True, False])
def test_of_two_machines_whose_claims_are_all_gone_one_publishes(
    tmp_path: Path, with_hint: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    one = make_run(tmp_path / "one")
    first = claim(one)
    two = make_run(tmp_path / "two")
    second = claim(two)
    save(one, 2, state=1, **{CLAIM: 1}), save(two, 2, state=2, **{CLAIM: 2}), save(two, 4)
    for path in (place(tmp_path) / "owners").iterdir():
        path.unlink()
    if not with_hint:
        (place(tmp_path) / "newest.json").unlink()
        assert send(second, two, 2), "makes its claim again"
    with pytest.raises(FencedError, match=r"attempt 1 on .* has claimed them since|attempt 1 no longer owns"):
        send(first, one, 2)
    assert send(second, two, 4)
    assert "00000002.json, by which attempt 1 owns the remote checkpoints, was removed" in capsys.readouterr().err
    assert names(place(tmp_path) / "owners") == ["00000002.json"]


def test_after_an_emptied_place_one_of_two_machines_publishes(tmp_path: Path) -> None:
    """The first to notice makes its claim again, though it is the older one: nothing is left that could tell."""
    one = make_run(tmp_path / "one")
    first = claim(one)
    two = make_run(tmp_path / "two")
    second = claim(two)
    save(one, 2), save(one, 6), save(two, 4)
    (place(tmp_path) / "step-00000001").mkdir()  # an empty folder would pass for one that is not mounted
    empty(tmp_path)
    assert send(first, one, 2)
    with pytest.raises(FencedError):
        send(second, two, 4)
    third = claim(two, 2)
    assert send(third, two, 4)
    with pytest.raises(FencedError):
        send(first, one, 6)


def test_a_claim_in_the_place_of_the_own_one_counts(tmp_path: Path, b: Config) -> None:
    """All was removed, and somebody has begun to count from 1."""
    one = make_run(tmp_path / "one")
    first = claim(one)
    save(one, 2)
    empty(tmp_path)
    (place(tmp_path) / "step-00000001").mkdir()
    claim(b)
    with pytest.raises(OtherRunError, match="belongs to run 'tiny' with seed 4"):
        send(first, one, 2)


def test_an_emptied_mount_is_no_place_to_claim_again(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one")
    tier = claim(one)
    save(one, 2)
    (tmp_path / "remote").rename(tmp_path / "unmounted")
    (tmp_path / "remote").mkdir()
    with pytest.raises(Exception, match="everything that this attempt uploaded there is gone"):
        send(tier, one, 2)
    assert not list((tmp_path / "remote").iterdir())


def test_generations_are_found_when_their_claims_are_gone(tmp_path: Path) -> None:
    config = make_run(tmp_path / "a")
    finish(config, 2)
    restarted = make_run(tmp_path / "b")
    (run_of(restarted) / ".restarted").touch()
    finish(restarted, 4)
    for path in (tmp_path / "remote").rglob("owners/*.json"):
        path.unlink()
    assert [c.manifest.step for c in remote_checkpoints(f"file://{tmp_path}/remote/tiny")] == [4]  # type: ignore[union-attr]
    third = make_run(tmp_path / "third")
    (run_of(third) / ".restarted").touch()
    assert claim(third).url.endswith("/run-003")


def test_the_end_of_an_attempt_that_lost_the_place_says_so(
    a: Config, b: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[tuple[int, float | None]] = []
    after_save = CheckpointMaintainer(MaintainerSettings.of(a, 1), lambda *upload: told.append(upload))
    assert after_save.wait(30) and told[0][0] == 2 and told[0][1] is not None
    for path in place(tmp_path).rglob("*.json"):
        path.unlink()
    claim(b)
    after_save(save(a, 4).manifest)
    assert after_save.wait(30)
    after_save.close(30)
    assert told[1:] == [(4, None)]
    assert (
        after_save.lost is not None and "step 4 is not uploaded: the remote tier belongs to run" in after_save.lost.what
    )
    assert after_save.lost.fix and "nothing more is uploaded" in capsys.readouterr().err


def test_what_a_newer_upload_made_up_for_is_not_lost(tmp_path: Path) -> None:
    """Only one step was another attempt's."""
    one = make_run(tmp_path / "one")
    claim(one)
    two = make_run(tmp_path / "two")
    second = claim(two)
    save(two, 4, state=2, **{CLAIM: 2})
    assert send(second, two, 4)
    save(one, 4, state=1, **{CLAIM: 1})
    claim(one, 2)
    after_save = CheckpointMaintainer(MaintainerSettings.of(one, 2))
    assert after_save.wait(30)
    after_save(save(one, 6, **{CLAIM: 3}).manifest)
    after_save.close(30)
    assert after_save.lost is None
    assert sorted(m.step for m in claim(one, 3).own_manifests()) == [4, 6]


# Checkpoints of before runs had ids


def forget_ids(tmp_path: Path, *configs: Config) -> None:
    """Make the place and run directories what an older version has left there."""
    for path in (place(tmp_path) / "run.json", place(tmp_path) / "newest.json"):
        path.unlink(missing_ok=True)
    files = [*place(tmp_path).glob("owners/*.json"), *(run_of(config) / "remote.json" for config in configs)]
    for path in files:
        if path.exists():
            record = json.loads(path.read_text())
            path.write_text(json.dumps({k: v for k, v in record.items() if k not in ("run", "config", "data")}))


def test_checkpoints_of_an_older_version_are_the_run_s_of_their_config(tmp_path: Path) -> None:
    old = make_run(tmp_path / "old", with_id=False)
    finish(old, 2, 4)
    forget_ids(tmp_path, old)
    write_json(run_of(old) / "run.json", {"id": new_run_id()})  # as the first attempt by this version does
    tier = claim(old, 2)
    assert json.loads((place(tmp_path) / "run.json").read_text())["id"] == read_run_id(run_of(old))
    save(old, 4, state=8)
    assert send(tier, old, 4), "its own, which it may replace"
    elsewhere = make_run(tmp_path / "elsewhere")
    assert newest(elsewhere).step == 4  # type: ignore[union-attr]


def test_the_claim_of_an_older_version_gives_no_right_to_the_steps_of_another_run(tmp_path: Path, b: Config) -> None:
    """Both have claimed the place by the older version, and one has sent."""
    old = make_run(tmp_path / "old", with_id=False)
    claim(old)
    save(old, 2)
    (run_of(b) / "run.json").unlink()
    finish(b, 4, 9)
    forget_ids(tmp_path, old, b)
    before = contents(place(tmp_path))
    with pytest.raises(OtherRunError, match="made with another config: they belong to another run"):
        newest(old)
    assert contents(place(tmp_path)) == before


def test_an_older_checkpoint_with_a_config_that_the_run_never_had_is_left_alone(tmp_path: Path, b: Config) -> None:
    """Beside the run's own: which of two runs has begun there cannot be told any more."""
    old = make_run(tmp_path / "old", with_id=False)
    finish(old, 2)
    (run_of(b) / "run.json").unlink()
    other = save(b, 6).path
    (place(tmp_path) / "step-00000006").mkdir()
    for path in other.iterdir():
        (place(tmp_path) / "step-00000006" / path.name).write_bytes(path.read_bytes())
    forget_ids(tmp_path, old)
    said: list[str] = []
    assert newest(old, said).step == 2  # type: ignore[union-attr]
    assert "step-00000006: it has no run id, and was made with a config that this run never had" in said[0]
    save(old, 6, state=1)
    before = contents(place(tmp_path) / "step-00000006")
    with pytest.raises(OtherRunError, match="it may belong to another run, and is not replaced"):
        send(claim(old, 3), old, 6)
    assert contents(place(tmp_path) / "step-00000006") == before
    assert [m.step for m in claim(old, 4).own_manifests()] == [2]


def test_the_id_is_found_again_when_run_json_is_lost(a: Config) -> None:
    mine = read_run_id(run_of(a))
    (run_of(a) / "run.json").write_text("{")
    assert read_run_id(run_of(a)) == mine, "the claim has it"
    (run_of(a) / "remote.json").unlink()
    assert read_run_id(run_of(a)) == mine, "the checkpoint has it"
    run_of(a).rename(run_of(a).with_name("other"))
    assert read_run_id(run_of(a).with_name("other")) is None, "a checkpoint under another name is no proof"


def test_claims_and_records_that_cannot_be_read_do_not_open_the_place(a: Config, b: Config, tmp_path: Path) -> None:
    (place(tmp_path) / "run.json").write_text("[" * 50_000)
    with pytest.raises(OtherRunError, match="seed 3"):  # the claim still says it
        newest(b)
    (place(tmp_path) / "run.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="at most 64"):
        newest(b)
    (place(tmp_path) / "run.json").write_text("{}")
    (place(tmp_path) / "owners" / "00000001.json").write_text('{"number": "x"}')
    tier = RemoteTier(claim(a, 2).objects, read_claim(run_of(a)), run_identity(a))
    assert tier.claim is not None and tier.claim.number == 2
    stopped = threading.Event()
    stopped.set()
    tier.assert_owner()
