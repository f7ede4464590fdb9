"""Runs whose config or data change on the way: what their ledger proves, held against a recount of the text itself."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.config import load_resolved
from headway.config.derived.lanes import LaneGrid
from headway.data.feeding.token_feed import TokenFeed
from headway.data.pinned import open_run_store
from headway.run.directory.ledger import Ledger
from headway.telemetry.record import open_run
from support.runs import WORDS, headway, state_hash, write_config


@pytest.fixture
def own(tmp_path: Path) -> Callable[..., Path]:
    """Writes a config for a corpus of this test's own, no two rows of which are alike."""
    counter = itertools.count(1000)
    with (tmp_path / "corpus.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(60):
            words = [f"{WORDS[n % len(WORDS)]} {next(counter)}" for n in range(40)]
            file.write(json.dumps({"text": " ".join(words)}) + "\n")
    return partial(write_config, tmp_path)


def run_of(folder: Path) -> Path:
    return folder / "runs/tiny"


def texts_used(run: Path) -> list[Counter[bytes]]:
    """The tokens of every row that each commit in the ledger stands for, read from the store."""
    config = load_resolved(run / "config.yaml")
    feed = TokenFeed.of(
        config.row_settings, LaneGrid(1, 1, 1), open_run_store(config.data, config.run_directory, config.segments)
    )
    used = []
    for commit in Ledger(run / "ledger.jsonl").commits():
        rows: Counter[bytes] = Counter()
        for step in range(commit.first_step, commit.last_step):
            for picks in feed.picks(step, 0):
                rows.update(tokens.tobytes() for tokens in feed.read(step, picks).tokens[:, :-1].astype(np.int64))
        used.append(rows)
    return used


def ledger(run: Path) -> dict[str, Any]:
    done = headway("ledger", run, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def append(folder: Path, words: str, documents: int = 30) -> None:
    with (folder / "corpus.jsonl").open("a", encoding="utf-8") as file:
        for number in range(documents):
            text = " ".join(f"{words} {number * 1000 + place}" for place in range(40))
            file.write(json.dumps({"text": text}) + "\n")


def test_a_changed_batch_uses_every_row_once(own: Callable[..., Path], tmp_path: Path) -> None:
    config = own(train={"steps": 6})
    assert headway("data", "prepare", config).returncode == 0
    assert headway("train", config).returncode == 0
    refused = headway("train", config, "train.steps=12", "train.global_batch=4")
    assert refused.returncode == 2 and "train.global_batch was 8 and is now 4" in refused.stderr
    shorter = headway("train", config, "train.steps=4", "--accept-changes")
    assert shorter.returncode == 2 and "the run has done 6 steps; train.steps=4 is fewer" in shorter.stderr
    done = headway("train", config, "train.steps=12", "train.global_batch=4", "--accept-changes")
    assert done.returncode == 0, done.stderr
    assert "from step 6 on: 4 rows of 32 tokens a step" in done.stderr
    assert "the learning rate was" in done.stderr and "in step 7" in done.stderr
    found = ledger(run_of(tmp_path))
    assert [e["used"] for e in found["epochs"]] == [6 * 8 + 6 * 4] and found["epochs"][0]["twice"] == 0
    rows: Counter[bytes] = Counter()
    for part in texts_used(run_of(tmp_path)):
        rows += part
    assert set(rows.values()) == {1} and len(rows) == 72
    # The same command goes on, and so does a run that was killed before its first checkpoint of the new segment.
    more = ("train.steps=16", "train.global_batch=8")
    killed = headway("train", config, *more, "--accept-changes", faults="kill@step=13")
    assert "died (signal 9)" in killed.stderr, killed.stderr
    again = headway("train", config, *more)
    assert again.returncode == 0 and "resuming from" in again.stderr, again.stderr
    found = ledger(run_of(tmp_path))
    assert [s["segment"]["first_step"] for s in found["segments"]] == [0, 6, 12]
    assert open_run(run_of(tmp_path)).tokens == (6 * 8 + 6 * 4 + 4 * 8) * 32


@pytest.mark.slow
def test_a_killed_run_with_changes_comes_out_as_one_that_was_not(own: Callable[..., Path], tmp_path: Path) -> None:
    config, changed = own(train={"steps": 4}), ("train.steps=10", "train.global_batch=4", "--accept-changes")
    assert headway("data", "prepare", config).returncode == 0
    for name, faults in (("whole", ""), ("killed", "kill@gradient=7")):
        assert headway("train", config, f"name={name}").returncode == 0
        done = headway("train", config, f"name={name}", *changed, faults=faults)
        assert (done.returncode == 0) == (not faults), done.stderr
    resumed = headway("train", config, "name=killed", *changed[:2])
    assert resumed.returncode == 0, resumed.stderr
    assert state_hash(tmp_path / "runs/killed") == state_hash(tmp_path / "runs/whole")


def test_data_that_grows_joins_when_asked(own: Callable[..., Path], tmp_path: Path) -> None:
    config = own(train={"steps": 4})
    assert headway("data", "prepare", config).returncode == 0
    assert headway("train", config).returncode == 0
    append(tmp_path, "new")
    prepared = headway("data", "prepare", config)
    assert prepared.returncode == 0 and "reads this store as it was" in prepared.stderr, prepared.stderr
    # It goes on with what it had, and says how to take what is new.
    kept = headway("train", config, "train.steps=6", "--accept-changes", "data.store=" + str(tmp_path / "store"))
    assert kept.returncode == 0, kept.stderr
    found = ledger(run_of(tmp_path))
    assert [s["segment"]["first_step"] for s in found["segments"]] == [0, 4]
    joined = next(change for change in found["segments"][1]["segment"]["changes"] if change.startswith("data was"))
    assert "more rows" in joined
    rows: Counter[bytes] = Counter()
    for part in texts_used(run_of(tmp_path)):
        rows += part
    assert set(rows.values()) == {1} and len(rows) == 48


def test_a_run_goes_on_with_its_own_data_when_the_store_has_grown(own: Callable[..., Path], tmp_path: Path) -> None:
    config = own()
    assert headway("data", "prepare", config).returncode == 0
    for name in ("whole", "kept"):
        stopped = headway("train", config, f"name={name}", faults="kill@step=5")
        assert "died" in stopped.stderr
    assert headway("train", config, "name=whole").returncode == 0
    append(tmp_path, "other")
    assert headway("data", "prepare", config).returncode == 0
    done = headway("train", config, "name=kept")
    assert done.returncode == 0 and "continues with what it had" in done.stderr, done.stderr
    assert state_hash(tmp_path / "runs/kept") == state_hash(tmp_path / "runs/whole")
    ledger(tmp_path / "runs/kept")


def test_other_data_is_refused_until_an_epoch_is_begun(own: Callable[..., Path], tmp_path: Path) -> None:
    config = own(train={"steps": 4})
    assert headway("data", "prepare", config).returncode == 0
    assert headway("train", config).returncode == 0
    text = (tmp_path / "corpus.jsonl").read_text().splitlines()
    (tmp_path / "corpus.jsonl").write_text("\n".join(text[:40]) + "\n")
    assert headway("data", "prepare", config).returncode == 0
    refused = headway("train", config, "train.steps=6", "--accept-changes")
    assert refused.returncode == 3 and "documents of 'corpus'" in refused.stderr and "--start-epoch" in refused.stderr
    done = headway("train", config, "train.steps=6", "--accept-changes", "--start-epoch")
    assert done.returncode == 0 and "an epoch of all data begins" in done.stderr, done.stderr
    found = ledger(run_of(tmp_path))
    assert found["epochs"][0]["unused"] == found["epochs"][0]["rows"] - 32


def test_another_length_goes_on_where_it_can(own: Callable[..., Path], tmp_path: Path) -> None:
    config = own(train={"steps": 4})
    assert headway("data", "prepare", config).returncode == 0
    assert headway("train", config).returncode == 0
    longer = ("train.steps=6", "train.sequence_length=64", "--accept-changes")
    refused = headway("train", config, *longer)
    assert refused.returncode == 2 and "--start-epoch" in refused.stderr, refused.stderr
    done = headway("train", config, "train.steps=6", "train.sequence_length=16", "--accept-changes")
    assert done.returncode == 0, done.stderr
    assert [e["used"] for e in ledger(run_of(tmp_path))["epochs"]] == [4 * 8 * 2 + 2 * 8]


@pytest.mark.parametrize("lost", [6, 4])
def test_a_run_that_goes_back_finds_the_segment_of_its_step(
    own: Callable[..., Path], tmp_path: Path, lost: int
) -> None:
    """Checkpoints from `lost` on are damaged: of 4 and 6, step 4 begins the second segment."""
    config = own(train={"steps": 4}, checkpoint={"every": "2 steps", "keep": 9})
    assert headway("data", "prepare", config).returncode == 0
    assert headway("train", config).returncode == 0
    changed = ("train.steps=6", "train.global_batch=4")
    assert headway("train", config, *changed, "--accept-changes").returncode == 0
    for folder in (run_of(tmp_path) / "checkpoints").glob("step-*"):
        if int(folder.name[5:]) >= lost:
            data = next(folder.glob("*.safetensors"))
            data.write_bytes(data.read_bytes()[:-1])
    done = headway("train", config, *changed)
    assert done.returncode == 0, done.stderr
    found = ledger(run_of(tmp_path))
    assert found["rows"] == 4 * 8 + 2 * 4 and found["rollbacks"]


@pytest.mark.slow
def test_a_lost_disk_takes_no_segment_along(own: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "remote").mkdir()
    remote = f"checkpoint.remote.url=file://{tmp_path}/remote"
    config = own(train={"steps": 4})
    assert headway("data", "prepare", config).returncode == 0
    assert headway("train", config, remote).returncode == 0
    changed = ("train.steps=8", "train.global_batch=4", remote)
    assert headway("train", config, *changed, "--accept-changes").returncode == 0
    shutil.rmtree(run_of(tmp_path))
    done = headway("train", config, *changed)
    assert done.returncode == 0, done.stderr
    segments = load_resolved(run_of(tmp_path) / "config.yaml").segments
    assert [(segment.first_step, segment.global_batch) for segment in segments] == [(0, 8), (4, 4)]
    assert ledger(run_of(tmp_path))["rows"] == 4 * 8 + 4 * 4


@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_a_run_from_before_projections_were_apart_asks_first(
    tiny: Callable[..., Path], tmp_path: Path, optimizer: str
) -> None:
    """Its config has no such key. It continues as it was, or with changes where its moments have the same shapes."""
    config, name = tiny(train={"steps": 4}), f"optimizer.name={optimizer}"
    whole = "optimizer.projections=whole"
    assert headway("train", config, name, whole, "name=undisturbed").returncode == 0
    assert headway("train", config, name, whole, faults="stop@step=2").returncode == 75
    kept = run_of(tmp_path) / "config.yaml"
    lines = kept.read_text(encoding="utf-8").splitlines(keepends=True)
    kept.write_text("".join(line for line in lines if "projections:" not in line), encoding="utf-8")
    shutil.copytree(run_of(tmp_path), tmp_path / "runs/other")
    refused = headway("train", config, name)
    assert refused.returncode == 2
    assert "optimizer.projections was not set and is now apart" in refused.stderr
    assert "--accept-changes" in refused.stderr
    changed = headway("train", config, name, "name=other", "--accept-changes")
    if optimizer == "adafactor":
        assert changed.returncode == 4 and "in the checkpoint and F32 [3, 32] here" in changed.stderr
    else:
        assert changed.returncode == 0, changed.stderr
        assert state_hash(tmp_path / "runs/other") != state_hash(tmp_path / "runs/undisturbed")
    assert headway("train", config, name, whole).returncode == 0
    assert state_hash(run_of(tmp_path)) == state_hash(tmp_path / "runs/undisturbed")
