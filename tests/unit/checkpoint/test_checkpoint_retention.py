"""Which checkpoints stay, and what is known of them."""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.checkpoint import index
from headway.checkpoint.contents import crossed, latest_evaluation, step_context, step_metrics
from headway.checkpoint.format.manifest import read_manifest
from headway.checkpoint.index import CheckpointIndex, on_network
from headway.checkpoint.lineage import Origin
from headway.checkpoint.post_save import CheckpointMaintainer, MaintainerSettings
from headway.checkpoint.pruning import Pruner
from headway.checkpoint.remote.acquire import acquire_tier
from headway.checkpoint.retention import Candidate, Rules, kept, outdated
from headway.checkpoint.run_identity import RunIdentity
from headway.checkpoint.store import CheckpointStore
from headway.config import Batches, Config, Interval, RetentionConfig, TrainConfig, resolve
from headway.core.process.messages import Messages
from support.runs import refuse_to_open
from support.states import make_state, names, save
from support.waits import LONG

NOW = 1_000_000.0


def made(*steps: int, **more: Any) -> list[Candidate]:
    """One every minute up to now."""
    return [Candidate(step, NOW - 60 * (len(steps) - 1 - n), **more) for n, step in enumerate(steps)]


def test_each_rule_keeps_what_it_says() -> None:
    candidates = made(*range(100, 1300, 100))
    assert outdated(candidates, Rules(keep=2), NOW) == list(range(100, 1100, 100))
    rules = Rules(keep=1, keep_every=Interval(450, "steps"))
    assert sorted(kept(candidates, rules, NOW)) == [500, 900, 1200]
    tokens = [Candidate(c.step, c.time, tokens=10 * c.step) for c in candidates]
    rules = Rules(keep=1, keep_every=Interval(5000, "tokens"))
    assert sorted(kept(tokens, rules, NOW)) == [500, 1000, 1200]
    rules = Rules(keep=1, keep_for_seconds=180)
    assert sorted(kept(candidates, rules, NOW)) == [900, 1000, 1100, 1200]
    hourly = [Candidate(step, NOW + 1800 * step) for step in range(8)]
    kept_hourly = sorted(kept(hourly, Rules(keep=1, keep_every=Interval(3600, "seconds")), NOW))
    assert len(kept_hourly) in (4, 5, 6) and kept_hourly[-1] == 7
    losses = dict(zip(range(100, 700, 100), [3.0, 1.0, 2.0, math.nan, 1.0, 5.0], strict=True))
    scored = [Candidate(step, NOW, metric=loss) for step, loss in losses.items()]
    reasons = kept([*scored, Candidate(50, NOW)], Rules(keep=1, keep_best=2), NOW)
    assert sorted(reasons) == [200, 500, 600]
    assert reasons[600] == "the newest" and reasons[500] == "among the best 2 by evaluation/loss"
    reasons = kept([*scored, Candidate(50, NOW)], Rules(keep=1, keep_best=2, keep_mode="max"), NOW)
    assert sorted(reasons) == [100, 600], "of 600, which is the newest and the best, the first reason is told"
    assert reasons[100] == "among the best 2 by evaluation/loss (highest)"
    equal = [Candidate(step, NOW, metric=0.5) for step in (1, 2, 3, 4)]
    for mode in ("min", "max"):
        assert sorted(kept(equal, Rules(keep=1, keep_best=2, keep_mode=mode), NOW)) == [3, 4], "of equal ones the newer"


def test_what_is_pinned_or_cannot_be_read_is_not_taken_for_old() -> None:
    candidates = [*made(1, 2, 3), Candidate(4, NOW, good=False)]
    assert outdated(candidates, Rules(keep=1), NOW, pinned=[1]) == [2]
    assert outdated([Candidate(1, NOW, good=False), *made(2, 3, 4)], Rules(keep=2), NOW) == [1, 2]


@pytest.mark.parametrize("resumed", [(2, 10), (1, 10)], ids=["by another attempt", "by the same, after a rollback"])
def test_what_a_run_has_passed_over_pushes_out_nothing(tmp_path: Path, resumed: tuple[int, int]) -> None:
    """Step 20's was damaged, so that the steps from 10 on were done again; another attempt goes on from 21."""
    config = Config(
        name="run",
        runs=tmp_path,
        train=TrainConfig(steps=99),
        checkpoint={"keep": 2, "remote": {"url": f"file://{tmp_path}/remote", "keep": 2}},
    )
    for folder in ("run", "remote"):
        (tmp_path / folder).mkdir()
    assert config.checkpoint.remote is not None
    tier = acquire_tier(config.checkpoint.remote, 1, RunIdentity(tmp_path / "run", None, "run"))
    directory = tmp_path / "run" / "checkpoints"
    after: CheckpointMaintainer | None = None
    left = {}
    saves = [(5, 1, 0), (10, 1, 0), (20, 1, 0), *((step, *resumed) for step in (13, 16, 21)), (23, 3, 21)]
    for step, attempt, start in saves:
        if after is None or step == 13:
            after = CheckpointMaintainer(MaintainerSettings.of(config, 1))
        store = CheckpointStore(directory, after_save=after)
        parent = {"step": start} if start else None
        store.save(step, make_state(step), {"step": step}, {"attempt": attempt, "parent": parent})
        assert after.wait(LONG)
        left[step] = [sorted(int(name[5:]) for name in names(directory)), [m.step for m in tier.manifests()]]
    assert after is not None
    after.close(60)
    assert left[16] == [[13, 16, 20]] * 2, "its turn comes when the run gets there"
    assert left[21] == [[16, 20, 21]] * 2, "it stays for somebody to look at, and counts for nothing"
    assert left[23] == [[21, 23]] * 2


def test_checkpoints_that_tell_nothing_of_their_origin_all_count() -> None:
    told = [Candidate(c.step, c.time, origin=Origin(1, 0)) for c in made(1, 2)]
    assert sorted(kept([*made(3), *told], Rules(keep=2), NOW)) == [2, 3]


def test_a_disk_that_does_not_answer_once_costs_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, folder = CheckpointStore(tmp_path / "checkpoints", keep=9), tmp_path / "checkpoints"
    for step in (10, 15, 20, 30, 35):
        save(store, step)
    stale = folder / "step-00000010" / "manifest.json"
    error = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    refuse_to_open(monkeypatch, lambda path: error if path == stale else None)
    Pruner(folder, Rules(keep=1, keep_every=Interval(10, "steps")))(store.info(35).manifest)
    assert names(folder) == [f"step-{step:08d}" for step in (10, 15, 20, 30, 35)], "15 stands in for 10"


def test_a_run_behind_a_link_has_one_place_in_the_remote_tier(tmp_path: Path) -> None:
    run = tmp_path / "disk" / "tiny-2"
    run.mkdir(parents=True)
    (tmp_path / "tiny").symlink_to(run)
    (tmp_path / "remote").mkdir()
    config = Config(
        name="tiny", train=TrainConfig(steps=4), checkpoint={"remote": {"url": f"file://{tmp_path}/remote"}}
    )
    remote = config.checkpoint.remote
    assert remote is not None
    claimed = acquire_tier(remote, 1, RunIdentity(tmp_path / "tiny", None, "tiny"))
    settings = replace(MaintainerSettings.of(resolve(config), 1), run=tmp_path / "tiny")
    store = CheckpointStore(tmp_path / "tiny" / "checkpoints", after_save=CheckpointMaintainer(settings))
    save(store, 4)
    assert isinstance(store.after_save, CheckpointMaintainer)
    store.after_save.close(30)
    assert [manifest.step for manifest in claimed.manifests()] == [4]


@given(
    st.lists(
        st.builds(
            Candidate,
            step=st.integers(0, 50),
            time=st.floats(0, 2 * NOW),
            metric=st.none() | st.floats(),
            tokens=st.none() | st.integers(0, 100),
            good=st.booleans(),
        ),
        unique_by=lambda c: c.step,
    ),
    st.builds(
        Rules,
        keep=st.integers(1, 3),
        keep_best=st.integers(0, 2),
        keep_mode=st.sampled_from(["min", "max"]),
        keep_every=st.sampled_from([None, Interval(7, "steps"), Interval(9, "tokens"), Interval(60, "seconds")]),
        keep_for_seconds=st.sampled_from([None, 3600]),
    ),
)
def test_the_newest_good_one_stays_and_what_stays_now_stays_the_next_time(
    candidates: list[Candidate], rules: RetentionConfig
) -> None:
    gone = outdated(candidates, rules, NOW)
    good = [c.step for c in candidates if c.good]
    assert not good or max(good) not in gone
    rest = [c for c in candidates if c.step not in gone]
    assert outdated(rest, rules, NOW) == []


def test_the_best_are_found_by_what_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    rules = Rules(keep=1, keep_best=1)
    store = CheckpointStore(run / "checkpoints", after_save=Pruner(run / "checkpoints", rules))
    run.mkdir()
    for step, loss in enumerate([3.0, 1.0, 2.0, 4.0], start=1):
        with (run / "metrics.jsonl").open("a") as file:
            for name, value in (("train/loss", 9.0), ("evaluation/loss", loss)):
                file.write(json.dumps({"step": step, "attempt": 1, "time": 0, name: value}) + "\n")
        save(store, step)
    assert names(store.directory) == ["step-00000002", "step-00000004"]
    assert step_metrics(run, 2) == {"train/loss": 9.0, "evaluation/loss": 1.0}
    assert latest_evaluation(run, 3) == {"step": 3, "evaluation/loss": 2.0}
    with (run / "metrics.jsonl").open("a") as file:  # a later attempt does step 3 again
        file.write('{"step":3,"attempt":2,"time":0,"train/loss":7.0}\n{"step":3,"att')
    assert step_metrics(run, 3) == {"train/loss": 7.0}
    assert step_metrics(run, 4) == {}, "what came of it before does not count any more"
    assert step_metrics(run, 1)["evaluation/loss"] == 3.0 and step_metrics(tmp_path / "none", 1) == {}
    with (run / "metrics.jsonl").open("a") as file:  # a rollback to step 2 leaves it out
        for more in ('"train/left_out_steps":1.0', '"checkpoint/saved_step":2.0'):
            file.write(f'\n{{"step":3,"attempt":2,"time":0,{more}}}\n')
    assert step_metrics(run, 3) == {"train/left_out_steps": 1.0, "checkpoint/saved_step": 2.0}
    monkeypatch.setattr("headway.checkpoint.contents._BLOCK_BYTES", 7)
    assert step_metrics(run, 2) == {"train/loss": 9.0, "evaluation/loss": 1.0}
    assert latest_evaluation(run, 1) == {"step": 1, "evaluation/loss": 3.0} and latest_evaluation(run, 0) is None


def test_the_highest_are_kept_here_and_in_the_remote_tier(tmp_path: Path) -> None:
    run = tmp_path / "run"
    best = {"keep": 1, "keep_best": 1, "keep_metric": "accuracy", "keep_mode": "max"}
    config = Config(
        name=run.name,
        runs=tmp_path,
        train=TrainConfig(steps=4),
        checkpoint={**best, "remote": {"url": f"file://{tmp_path}/remote", **best, "keep_mode": "min"}},
    )
    assert config.checkpoint.remote is not None
    run.mkdir()
    (tmp_path / "remote").mkdir()
    tier = acquire_tier(config.checkpoint.remote, 1, RunIdentity(run, None, run.name))
    after = CheckpointMaintainer(MaintainerSettings.of(config, 1))
    store = CheckpointStore(run / "checkpoints", after_save=after)
    for step, accuracy in enumerate([0.3, 0.9, 0.1, 0.5], start=1):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "attempt": 1, "time": 0, "accuracy": accuracy}) + "\n")
        store.save(
            step, make_state(step), {"step": step}, {"attempt": 1, "world_size": 1, **after.context(step, tmp_path)}
        )
        assert after.wait(LONG)
    after.close(30)
    assert names(run / "checkpoints") == ["step-00000002", "step-00000004"]
    assert [manifest.step for manifest in tier.manifests()] == [3, 4], "each tier has its own rules"


def test_numbers_too_large_for_a_float_are_unknown(tmp_path: Path) -> None:
    """Whatever wrote them: a callback of the user's, or another program."""
    huge = 10**400
    store = CheckpointStore(tmp_path / "checkpoints", keep=9)
    for step, accuracy in ((1, 0.5), (2, huge), (3, 0.1)):
        context = {"attempt": huge, "world_size": huge, "time": huge, "metrics": {"accuracy": accuracy}}
        store.save(step, make_state(step), {"step": step}, {**context, "parent": {"step": huge}})
    pruner = Pruner(store.directory, Rules(keep=1, keep_best=1, keep_metric="accuracy", keep_mode="max"))
    assert {c.step: c.metric for c in pruner.candidates()} == {1: 0.5, 2: None, 3: 0.1}
    assert sorted(pruner.kept()) == [1, 3]
    listed = CheckpointIndex(tmp_path)
    assert listed.rebuild((read_manifest(folder), str(folder)) for folder in store.folders())
    assert [(entry.step, entry.attempt, entry.parent_step) for entry in listed.entries()] == [
        (step, None, None) for step in (1, 2, 3)
    ]
    line = {"step": 3, "evaluation/loss": huge, "evaluation/perplexity": 2}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert latest_evaluation(tmp_path, 3) == {"step": 3, "evaluation/perplexity": 2.0}


@pytest.mark.parametrize(
    ("interval", "before", "now", "due"),
    [
        ("100 steps", 90, 99, False),
        ("100 steps", 90, 110, True),
        ("1k tokens", 3, 4, True),
        ("1k tokens", 4, 7, False),
        ("50 s", 1, 5, False),
        ("50 s", 1, 6, True),
    ],
)
def test_what_is_due_between_two_checkpoints(interval: str, before: int, now: int, due: bool) -> None:
    batches = Batches(((0, 8),), 32)  # 256 tokens per step
    assert crossed(Interval.parse(interval), (before, 10.0 * before), (now, 10.0 * now), batches) is due


def test_a_clock_that_was_ahead_does_not_put_off_what_is_due() -> None:
    hourly = Interval(3600, "seconds")
    assert crossed(hourly, (10, NOW + 30 * 86400), (20, NOW), None)
    assert not crossed(hourly, (10, NOW), (20, NOW + 10), None)


def settings(run: Path, **checkpoint: Any) -> MaintainerSettings:
    config = Config(name=run.name, runs=run.parent, train=TrainConfig(steps=9), checkpoint=checkpoint)
    return MaintainerSettings.of(config, 1)


def test_rules_survive_the_way_to_another_process(tmp_path: Path) -> None:
    best = {"keep_best": 1, "keep_metric": "x", "keep_mode": "max"}
    keys = {"keep": 2, "keep_every": "5k steps", **best, "keep_for": "1 h"}
    expected = Rules(2, Interval(5000, "steps"), 1, "x", "max", 3600)
    assert Rules.of(RetentionConfig(**keys)) == expected
    record = settings(tmp_path, **keys, remote={"url": "s3://b", "every": "1k tokens", **keys})
    pair = Messages[MaintainerSettings](MaintainerSettings)
    record = pair.decode(pair.encode(record))
    assert record.remote is not None and record.rules == record.remote.rules == expected
    assert record.remote.every == Interval(1000, "tokens")


def test_full_and_light_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 3\n")
    (tmp_path / "run.json").write_text('{"command": "x"}')
    after = CheckpointMaintainer(settings(tmp_path, full_every="4 steps"))
    contexts = {step: after.context(step, tmp_path) for step in (1, 3, 5, 6, 9)}
    assert [context["kind"] for context in contexts.values()] == ["full", "light", "full", "light", "full"]
    assert contexts[5]["config"] == "seed: 3\n" and contexts[5]["run"] == {"command": "x"}
    assert "config" not in contexts[3]


@pytest.mark.parametrize("wanted", ["local", "full"])
def test_a_record_of_an_earlier_version_does_not_travel_as_it_is(tmp_path: Path, wanted: str) -> None:
    (tmp_path / "config.yaml").write_text(f"telemetry:\n  git_diff: {wanted}\n")
    git = {"commit": "c", "diff": "+password = 'first'\n+word\n"}
    record = {"command": ["train", "https://me:second@example.org"], "git": git}
    (tmp_path / "run.json").write_text(json.dumps(record))
    told = step_context(tmp_path, 1, full=True)["run"]
    shown = {"diff": "+password = '***'\n+word\n"} if wanted == "full" else {}
    assert told == {"command": ["train", "https://***@example.org"], "git": {"commit": "c", **shown}}


def test_nothing_that_goes_wrong_after_a_save_ends_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pruner, "__call__", lambda self, manifest: 1 / 0)
    after = CheckpointMaintainer(settings(tmp_path, remote={"url": "nonsense://nowhere"}))
    save(CheckpointStore(tmp_path / "checkpoints", after_save=after), 1)
    after.close(30)
    said = capsys.readouterr().err
    assert "ZeroDivisionError" in said and "step 1 is not uploaded: this URL cannot be used" in said


def test_the_process_that_writes_loads_no_torch() -> None:
    code = "import headway.checkpoint.save.writer_process, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_registry_is_an_index_that_can_be_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, index = CheckpointStore(tmp_path / "checkpoints"), CheckpointIndex(tmp_path)
    manifests = [save(store, step) for step in (1, 2)]
    for manifest in manifests:
        assert index.add(manifest, "local", str(store.directory / f"step-{manifest.step:08d}"))
    assert index.add(manifests[1], "remote", "s3://b/step-2", complete=False)
    first, second = index.entries()
    assert (first.step, first.attempt, first.world_size, first.tensors) == (1, 1, 2, 7)
    assert [(p.tier, p.complete) for p in second.places] == [("local", True), ("remote", False)]
    index.forget("local", 1)
    index.forget("local", 2)
    assert [entry.step for entry in index.entries()] == [2]
    index.path.write_bytes(b"this is no database" * 100)
    assert index.entries() == [] and index.add(manifests[0], "local", "x")
    assert "is broken" in capsys.readouterr().err and [entry.step for entry in index.entries()] == [1]
    index.rebuild((manifest, "y") for manifest in manifests)
    assert [entry.places[0].place for entry in index.entries()] == ["y", "y"]
    with sqlite3.connect(index.path) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    said: list[str] = []
    nowhere = CheckpointIndex(tmp_path / "no" / "such", said.append)
    assert not nowhere.add(manifests[0], "local", "x") and not nowhere.forget("local", 1) and len(said) == 1


def test_what_a_live_run_does_while_its_checkpoints_are_listed_stays_in_the_index(tmp_path: Path) -> None:
    store, index = CheckpointStore(tmp_path / "checkpoints", keep=9), CheckpointIndex(tmp_path)
    found = [(save(store, step), f"step-{step}") for step in (1, 2)]
    index.rebuild(found)
    index.add(save(store, 3), "local", "of the run")
    store.discard(1)
    index.forget("local", 1)
    index.rebuild(found)
    assert [(entry.step, entry.places[0].place) for entry in index.entries()] == [(2, "step-2"), (3, "of the run")]
    index.add(save(store, 4), "local", "of the run")
    store.discard(3)
    (store.directory / "step-00000004" / "manifest.json").write_text("")
    index.rebuild(found)
    assert [entry.step for entry in index.entries()] == [2], "one is gone and one damaged, without a word of the run"


def _add_many(run: str, manifests: list[Any]) -> None:
    for manifest in manifests:
        assert CheckpointIndex(Path(run)).add(manifest, "local", "x")


def test_several_processes_write_to_the_registry_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_BUSY_SECONDS", 120.0)
    manifests = [save(CheckpointStore(tmp_path / "c", keep=40), step) for step in range(1, 25)]
    spawn = multiprocessing.get_context("fork")
    writers = [spawn.Process(target=_add_many, args=(str(tmp_path), manifests[n::3])) for n in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert [entry.step for entry in CheckpointIndex(tmp_path).entries()] == list(range(1, 25))


def test_network_file_systems_are_told_from_others(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/sda / ext4 rw 0 0\nhost:/x /mnt nfs4 rw 0 0\nx /mnt/inside ext4 rw 0 0\n")
    assert on_network(Path("/mnt/runs"), mounts) and not on_network(Path("/mntx"), mounts)
    assert not on_network(Path("/mnt/inside/runs"), mounts) and not on_network(tmp_path, tmp_path / "none")
