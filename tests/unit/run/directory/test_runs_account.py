"""The account of a run, from the records of attempts that ended, were killed, or run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.config import Config
from headway.core.coordination.lease import read_lease
from headway.core.machine.system import host_name
from headway.run.directory import run_directory
from headway.run.directory.account import account_of, fleet_account, measured_saves, save_seconds
from headway.run.directory.run_directory import Attempt, RunDirectory
from headway.run.session.spending import meter_of
from headway.telemetry.record import Run, stored_bytes
from support.runs import headway_in_copy

HOUR = 3600.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.yaml").write_text(yaml.safe_dump({"cost": {"storage_usd_per_gib_month": 0.0}}))
    return path


def write_attempt(run: Path, number: int, **record: Any) -> Path:
    folder = run / "attempts" / f"{number:03d}"
    folder.mkdir(parents=True)
    (folder / "attempt.json").write_text(json.dumps({"number": number, "host": "elsewhere", "pid": 1, **record}))
    return folder


def set_time(path: Path, moment: float) -> None:
    os.utime(path, (moment, moment))


def record_steps(run: Path, *records: dict[str, Any]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_ended_attempts_by_their_own_prices(run: Path) -> None:
    now = time.time()
    write_attempt(run, 1, started=now - 10 * HOUR, ended=now - 9 * HOUR, seconds=HOUR, outcome="died", usd_per_hour=2.0)
    times = {"started": now - 8.5 * HOUR, "ended": now - 8 * HOUR, "seconds": 0.5 * HOUR}
    write_attempt(run, 2, **times, outcome="finished", usd_per_hour=10.0, restarts=1)
    cost = account_of(Run(run))
    assert (cost.compute_usd, cost.idle_usd) == pytest.approx((2.0 + 5.0, 1.0))
    assert account_of(Run(run), before=2).total_usd == pytest.approx(2.0 + 1.0)


def test_a_price_that_no_record_has_is_that_of_the_config(run: Path) -> None:
    write_attempt(run, 1, started=0.0, ended=HOUR, seconds=HOUR, outcome="finished", usd_per_hour=None)
    assert account_of(Run(run), 3.0).total_usd == pytest.approx(3.0)
    assert not account_of(Run(run)).is_known


def test_a_killed_attempt_counts_to_its_last_record_or_write_but_not_beyond_the_next(run: Path) -> None:
    start = time.time() - 10 * HOUR
    folder = write_attempt(run, 1, started=start, usd_per_hour=1.0)
    set_time(folder / "attempt.json", start)
    record_steps(run, {"step": 1, "attempt": 1, "time": start + HOUR, "train/loss": 1.0})
    assert account_of(Run(run)).total_usd == pytest.approx(1.0)
    log = folder / "worker-0.log"
    log.touch()
    set_time(log, start + 2 * HOUR)
    assert account_of(Run(run)).total_usd == pytest.approx(2.0)
    times = {"started": start + 1.5 * HOUR, "ended": start + 1.5 * HOUR, "seconds": 0.0}
    write_attempt(run, 2, **times, outcome="finished", usd_per_hour=1.0)
    assert account_of(Run(run)).total_usd == pytest.approx(1.5)


def test_the_times_of_files_in_a_copy_of_a_run_mean_nothing(run: Path) -> None:
    folder = write_attempt(run, 1, started=time.time() - 10 * HOUR, usd_per_hour=1.0)
    (folder / "worker-0.log").touch()
    assert account_of(Run(run)).total_usd == pytest.approx(0.0)


def test_the_next_attempt_notes_the_last_sign_of_a_killed_one(run: Path) -> None:
    """Its own record of the death would be a newer write than any of the dead."""
    start = time.time() - HOUR
    folder = write_attempt(run, 1, started=start, usd_per_hour=1.0)
    set_time(folder / "attempt.json", start)
    (folder / "worker-0.log").touch()
    set_time(folder / "worker-0.log", start + 1800.0)
    RunDirectory(run).begin_attempt("headway train").finish("finished", 0)
    record = json.loads((folder / "attempt.json").read_text())
    assert record["outcome"] == "died" and record[run_directory.LAST_SIGN_KEY] == pytest.approx(start + 1800.0)
    assert account_of(Run(run)).total_usd == pytest.approx(0.5, abs=1e-3)


def test_an_attempt_that_runs_is_billed_until_now(run: Path) -> None:
    import psutil

    now = time.time()
    born = psutil.Process().create_time()
    write_attempt(run, 1, host=host_name(), pid=os.getpid(), started=born, usd_per_hour=HOUR)
    assert account_of(Run(run)).total_usd == pytest.approx(now - born, abs=5.0)


def test_storage_counts_what_is_kept_since_the_newest_record(run: Path) -> None:
    (run / "config.yaml").write_text(yaml.safe_dump({"cost": {"storage_usd_per_gib_month": 365.25 * 24 / 12}}))
    shard = run / "checkpoints" / "step-00000002" / "shard-00000.safetensors"
    shard.parent.mkdir(parents=True)
    with shard.open("wb") as file:
        file.truncate(2**30)  # a hole; it costs a dollar an hour
    record_steps(run, {"step": 2, "attempt": 1, "time": time.time() - 2 * HOUR, "cost/storage_usd": 0.25})
    assert stored_bytes(run) == 2**30
    assert account_of(Run(run)).storage_usd == pytest.approx(2.25, rel=1e-3)


def test_a_save_takes_the_longest_of_the_newest_ones(run: Path) -> None:
    steps = [
        {
            "step": n,
            "attempt": 1,
            "time": 1.0 + n,
            "train/loss": 1.0,
            "checkpoint/write_seconds": 100.0 if n == 1 else n,
        }
        for n in range(1, 9)
    ]
    steps[3]["checkpoint/stall_seconds"] = 0.5
    record_steps(run, *steps)
    saves = measured_saves(Run(run).metrics)
    assert saves == {"stall": [0.5], "write": [4.0, 5.0, 6.0, 7.0, 8.0], "upload": []}
    assert save_seconds(saves) == 8.5
    assert save_seconds({"write": []}) == 0.0


def set_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Set the wall clock; the monotonic one goes on."""
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + seconds)


def pass_time(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let time pass by every clock."""
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + seconds)
    set_clock(monkeypatch, seconds)


def begin(run: Path, seconds: float = 0.0) -> Attempt:
    """Begin an attempt that has run for some time already, at a dollar an hour."""
    (run / "attempts").mkdir(exist_ok=True)
    return RunDirectory(run).begin_attempt("headway train", None, time.time() - seconds, usd_per_hour=1.0)


@pytest.mark.parametrize("jump", [-2 * HOUR, 2 * HOUR])
def test_an_attempt_that_runs_is_billed_by_a_clock_that_nobody_sets(
    run: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    attempt = begin(run)
    assert attempt._lock is not None
    pass_time(monkeypatch, HOUR)
    set_clock(monkeypatch, jump)
    attempt._lock.renew()
    meter = meter_of(Config.model_validate({"cost": {"usd_per_hour": 1.0}}), run, attempt.number)
    assert meter is not None
    assert Run(run).state == "running" and meter.now().total_usd == pytest.approx(1.0, abs=0.01)
    assert account_of(Run(run)).total_usd == pytest.approx(1.0, abs=0.01)


def test_an_attempt_that_was_killed_is_billed_by_its_lease_also_after_a_reboot(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease holds seconds since the start, which mean the same by the clock of another boot."""
    attempt = begin(run, HOUR)
    assert attempt._lock is not None
    attempt._lock.release()
    path = attempt.directory / "attempt.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "host": "elsewhere", "started": time.time() + 5 * HOUR}))
    set_clock(monkeypatch, -2 * HOUR)
    assert account_of(Run(run)).total_usd == pytest.approx(1.0, abs=0.02)
    renewed = read_lease(run)
    assert renewed is not None
    path.write_text(json.dumps({**record, "host": "elsewhere", "started": renewed.until - 60.0}))
    for file, seconds in ((path, 5.0), (run / "metrics.jsonl", 7.0)):
        file.touch()
        set_time(file, renewed.until - 60.0 + seconds)
    begin(run).finish("finished", 0)
    noted = json.loads(path.read_text())[run_directory.RAN_KEY]
    assert noted == pytest.approx(HOUR + 7.0, abs=0.5), "until its last write, wherever that was"
    assert account_of(Run(run)).attempts_usd[1] == pytest.approx(1.0, abs=0.02)


def test_machines_that_are_held_are_billed_by_that_clock_too(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, facts = RunDirectory(run), {"usd_per_hour": 1.0}
    directory.attempts.mkdir()
    with directory.claim() as lock:
        directory.begin_attempt("headway train", lock, **facts).finish("failed", 1)
        pass_time(monkeypatch, HOUR / 2)
        set_clock(monkeypatch, -2 * HOUR)
        directory.begin_attempt("headway train", lock, **facts, restarts=1).finish("finished", 0)
    assert account_of(Run(run)).idle_usd == pytest.approx(0.5, abs=0.01)


def test_without_a_lease_jumps_that_the_run_saw_do_not_count(run: Path) -> None:
    """As of earlier versions, whose owners' files do not say how long an attempt ran."""
    start = time.time()
    write_attempt(run, 1, started=start, usd_per_hour=1.0)
    steps = [
        {"step": 1, "attempt": 1, "time": start + HOUR, "train/loss": 1.0},
        {"step": 2, "attempt": 1, "time": start - HOUR, "train/loss": 1.0, "health/clock_jump_seconds": -3 * HOUR},
    ]
    record_steps(run, *steps)
    assert account_of(Run(run)).total_usd == pytest.approx(3.0, abs=0.01)
    record_steps(run, {**steps[1], "health/clock_jump_seconds": 5 * HOUR})
    assert account_of(Run(run)).total_usd == 0.0, "never less than nothing"


def test_a_fleet_is_listed_with_the_dearest_run_first(tmp_path: Path) -> None:
    """Runs, and nothing else that lies there; a run without a price is unknown, not free."""
    for name, price in (("cheap", 1.0), ("dear", 4.0), ("unknown", None)):
        run = tmp_path / name
        run.mkdir()
        config = {"name": name, **({"budget": {"usd": 9.0}} if name == "dear" else {})}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        now = time.time()
        write_attempt(
            run, 1, started=now - 2 * HOUR, ended=now, seconds=2 * HOUR, outcome="finished", usd_per_hour=price
        )
    (tmp_path / "notes").mkdir()
    fleet = fleet_account(tmp_path)
    assert [(one.name, one.total_usd, one.budget_usd) for one in fleet] == [
        ("dear", 8.0, 9.0), ("cheap", 2.0, None), ("unknown", None, None),
    ]  # fmt: skip
    assert {one.usd_per_hour for one in fleet} == {None}, "nothing runs"
    code, printed = headway_in_copy("cost", "show", str(tmp_path))
    assert code == 0 and printed.rstrip().endswith("3 runs · cost $10.00 · 1 n/a"), printed
