"""A run that starts on another disk takes its records from the remote tier."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from headway.checkpoint import records
from headway.checkpoint.format.sealing import SEALED
from headway.checkpoint.records import RECORDS, RECORDS_FILE, RecordsPacker, segments_of
from headway.checkpoint.remote.acquire import acquire_tier
from headway.checkpoint.remote.objects import Objects
from headway.checkpoint.remote.sealed_objects import SealedObjects
from headway.checkpoint.remote.tier import RemoteTier, journal_of
from headway.checkpoint.remote.tier_reader import CLAIM
from headway.checkpoint.run_identity import IDENTITY, OF_RUN, RUN_ID, read_run_id, run_identity
from headway.checkpoint.store import CheckpointStore
from headway.config import Config, TrainConfig, identity, resolve
from headway.core.files.atomic import write_json
from headway.core.files.foreign import read_json_object
from headway.core.files.hashes import fingerprint
from headway.run.directory.fetch_records import fetch_records
from headway.run.directory.ledger import Ledger
from headway.run.directory.run_directory import RunDirectory
from support.states import make_state

ID = "0123456789abcdef" * 2
DATA = "d" * 64


def config_of(runs: Path, remote: Path, seed: int = 3, encrypt: bool = False) -> Config:
    remote.mkdir(exist_ok=True)
    checkpoint = {"remote": {"url": f"file://{remote}", "encrypt": encrypt}}
    return resolve(Config(name="tiny", runs=runs, seed=seed, train=TrainConfig(steps=9), checkpoint=checkpoint))


def begin(config: Config, attempt: int) -> RemoteTier:
    """Begin an attempt by hand, as `fetch_records` finds its traces."""
    run = Path(config.run_directory)
    folder = run / "attempts" / f"{attempt:03d}"
    folder.mkdir(parents=True)
    write_json(folder / "attempt.json", {"number": attempt, "started": 1000.0 * attempt, "usd_per_hour": 2.0})
    write_json(run / "run.json", {RUN_ID: read_run_id(run) or ID})
    assert config.checkpoint.remote is not None
    return acquire_tier(config.checkpoint.remote, attempt, run_identity(config, DATA), patience_seconds=0)


def save(config: Config, tier: RemoteTier, first: int, step: int) -> None:
    """Do some steps, and send the checkpoint after them."""
    run = Path(config.run_directory)
    with (run / "metrics.jsonl").open("a") as file:
        for one in range(first + 1, step + 1):
            file.write(json.dumps({"step": one, "attempt": 1, "train/loss": 1.0}) + "\n")
    assert tier.claim is not None
    context: dict[str, Any] = {IDENTITY: fingerprint(identity(config)), "attempt": tier.claim.attempt}
    context |= {OF_RUN: run_identity(config).record(), CLAIM: tier.claim.number, "data": DATA}
    context[RECORDS] = RecordsPacker(run).pack(run)
    store = CheckpointStore(run / "checkpoints", keep=9)
    store.save(step, make_state(step), {"step": step}, context)
    shutil.move(run / RECORDS_FILE, store.info(step).path / RECORDS_FILE)
    assert tier.publish(store.info(step).path, journal_of(run, step))
    Ledger(run / "ledger.jsonl").commit(tier.claim.attempt, first, step, {"corpus": 8 * (step - first)}, f"step-{step}")


@pytest.fixture
def here(tmp_path: Path) -> Config:
    """A run that has sent steps 2 and 4."""
    config = config_of(tmp_path / "here", tmp_path / "remote")
    tier = begin(config, 1)
    save(config, tier, 0, 2)
    save(config, tier, 2, 4)
    return config


def test_an_empty_folder_gets_ledger_curves_account_and_numbers(here: Config, tmp_path: Path) -> None:
    there = config_of(tmp_path / "there", tmp_path / "remote")
    assert fetch_records(there, DATA)
    run, old = RunDirectory(Path(there.run_directory)), RunDirectory(Path(here.run_directory))
    assert run.metrics_path.read_text() == old.metrics_path.read_text()
    # Its own line follows a save: the attempt that continues writes that of step 4.
    assert Ledger(run.ledger_path).committed_step == 2 and read_run_id(run.path) == ID
    (record,) = run.attempt_records()
    saved = read_json_object(old.checkpoints / "step-00000004" / "manifest.json")["context"][RECORDS]["time"]
    assert (record["outcome"], record["last_sign"], record["usd_per_hour"]) == ("died", saved, 2.0)
    attempt = run.begin_attempt("a test")
    assert attempt.number == 2
    attempt.finish("done", 0)


def test_lines_that_checkpoints_share_are_sent_once_and_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(records, "_SEGMENT_BYTES", 80)
    config = config_of(tmp_path / "here", tmp_path / "remote")
    tier, sent, upload = begin(config, 1), list[str](), Objects.upload
    monkeypatch.setattr(Objects, "upload", lambda self, name, path: sent.append(name) or upload(self, name, path))
    for step in range(2, 10, 2):
        save(config, tier, step - 2, step)
    segments = [name for name in sent if name.startswith("records/")]
    assert len(segments) == len(set(segments)) == 7, "4 of metrics, 3 of the ledger"
    tier.discard(2)  # they belong to all
    there = config_of(tmp_path / "there", tmp_path / "remote")
    assert fetch_records(there, DATA)
    taken, mine = (Path(one.run_directory, "metrics.jsonl").read_text() for one in (there, config))
    assert taken == mine and len(mine.splitlines()) == 8
    (tmp_path / "remote/tiny/run-001" / segments[0]).unlink()
    lacking = config_of(tmp_path / "lacking", tmp_path / "remote")
    assert not fetch_records(lacking, DATA) and "are not there as a whole" in capsys.readouterr().err


@pytest.mark.parametrize("version", ["this", "an earlier one"])
def test_names_of_encrypted_lines_tell_nothing_about_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """Whoever has the store could otherwise test guesses about what was lost, learned or spent."""
    pytest.importorskip("cryptography")
    monkeypatch.setattr(records, "_SEGMENT_BYTES", 80)
    monkeypatch.setenv("HEADWAY_ENCRYPTION_KEY", "ab" * 32)
    config = config_of(tmp_path / "here", tmp_path / "remote", encrypt=True)
    tier = begin(config, 1)
    with monkeypatch.context() as patch:
        if version != "this":
            patch.setattr(SealedObjects, "sealed_name", lambda _, name: name + SEALED)
        save(config, tier, 0, 4)
        save(config, tier, 4, 8)
    tier = begin(config, 2)
    save(config, tier, 8, 12)
    run = Path(config.run_directory)
    newest = tier.manifest(12)
    assert newest is not None
    plain = {segment.sha256 for segment in segments_of(newest.context[RECORDS])}
    names = [path.name for path in (tmp_path / "remote/tiny/run-001/records").iterdir()]
    assert len(names) == len(plain) > 4 and all(name.endswith(f"-{RECORDS_FILE}{SEALED}") for name in names)
    shown = plain & {name[:64] for name in names}
    assert not shown if version == "this" else shown < plain, "those from before stay, and are not sent again"
    there = config_of(tmp_path / "there", tmp_path / "remote", encrypt=True)
    assert fetch_records(there, DATA)
    assert Path(there.run_directory, "metrics.jsonl").read_text() == (run / "metrics.jsonl").read_text()


def test_nothing_is_taken_twice_nor_by_the_directory_that_had_the_run_last(here: Config, tmp_path: Path) -> None:
    before = Path(here.run_directory, "ledger.jsonl").read_text()
    assert not fetch_records(here, DATA)
    assert Path(here.run_directory, "ledger.jsonl").read_text() == before
    there = config_of(tmp_path / "there", tmp_path / "remote")
    assert fetch_records(there, DATA) and not fetch_records(there, DATA)


def test_a_directory_that_had_the_run_earlier_gets_the_newer_records(here: Config, tmp_path: Path) -> None:
    there = config_of(tmp_path / "there", tmp_path / "remote")
    assert fetch_records(there, DATA)
    Ledger(Path(there.run_directory, "ledger.jsonl")).commit(1, 2, 4, {"corpus": 16}, "step-4")
    save(there, begin(there, 2), 4, 6)
    before = Path(here.run_directory, "metrics.jsonl").read_text()
    assert fetch_records(here, DATA)
    run = RunDirectory(Path(here.run_directory))
    assert [json.loads(line)["step"] for line in run.metrics_path.read_text().splitlines()] == [1, 2, 3, 4, 5, 6]
    assert [record["number"] for record in run.attempt_records()] == [1, 2]
    (aside,) = run.path.glob("set-aside/records-*")
    assert (aside / "metrics.jsonl").read_text() == before
    assert (aside / "attempts" / "001" / "attempt.json").exists(), "all that is replaced is kept"


@pytest.mark.parametrize("data", [DATA, "e" * 64])
def test_another_run_gets_none(here: Config, tmp_path: Path, data: str) -> None:
    other = config_of(tmp_path / "there", tmp_path / "remote", seed=3 if data != DATA else 4)
    assert not fetch_records(other, data)
    assert not Path(other.run_directory).exists()


def test_damaged_records_are_passed_over_with_a_warning(
    here: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = (tmp_path / "remote").rglob(f"step-00000004/*{RECORDS_FILE}")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    there = config_of(tmp_path / "there", tmp_path / "remote")
    assert not fetch_records(there, DATA)
    assert "records of the checkpoint differ from what was saved" in capsys.readouterr().err
    assert not Path(there.run_directory, "ledger.jsonl").exists()


def test_retention_removes_the_records_of_a_checkpoint_with_it(here: Config, tmp_path: Path) -> None:
    assert here.checkpoint.remote is not None
    tier = acquire_tier(here.checkpoint.remote, 1, run_identity(here, DATA), patience_seconds=0)
    tier.discard(2)
    assert [path.parent.name for path in (tmp_path / "remote").rglob(f"*{RECORDS_FILE}")] == ["step-00000004"]


def test_records_of_another_size_are_not_downloaded(
    here: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = (tmp_path / "remote").rglob(f"step-00000004/*{RECORDS_FILE}")
    path.write_bytes(path.read_bytes() + b"x")
    monkeypatch.setattr(Objects, "download", lambda *_: pytest.fail("downloaded"))
    assert not fetch_records(config_of(tmp_path / "there", tmp_path / "remote"), DATA)
    assert "records of the checkpoint differ from what was saved" in capsys.readouterr().err
