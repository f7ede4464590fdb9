"""A run as it stands: what was superseded is forgotten, totals of what was done stay, and only what is new is read."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest

from headway.core.coordination.heartbeat import Heartbeat
from headway.core.errors import CheckpointError
from headway.telemetry import tail as tail_module
from headway.telemetry.goodput import goodput_of
from headway.telemetry.record import open_run
from headway.telemetry.report import render_report
from headway.tracking.alert_rules import firing
from headway.tracking.exporter import exposition
from headway.tracking.live_run import NEWEST_BYTES, LiveRun
from headway.tracking.live_table import row
from headway.tracking.runs_folder import RunsFolder
from headway.tracking.ui.pages import Pages
from support.tracking import WrittenRun


@pytest.fixture
def run(tmp_path: Path) -> WrittenRun:
    return WrittenRun(tmp_path / "runs" / "one", budget={"usd": 12.5})


def test_a_run_that_trains(run: WrittenRun) -> None:
    run.begin(alive=True)
    for step in range(1, 41):
        run.step(step, **{"speed/mfu": 0.4, "mine/own": 1.5})
    run.save(20, run.started + 45)
    run.save(40, run.started + 80)
    run.append(40, run.started + 81, **{"checkpoint/saved_step": 40.0, "evaluation/loss": 3.0})
    snapshot = LiveRun(run.path).refresh(run.started + 82)
    values = snapshot.values
    assert (snapshot.state, snapshot.name, snapshot.job, snapshot.is_live) == ("running", "one", "4711", True)
    assert values["step"] == 40 and values["train/loss"] == pytest.approx(4.6)
    assert values["train/items"] == 40 * 512 and values["run/steps"] == 40 and values["run/saves"] == 1
    assert values["run/save_failures"] == values["run/upload_failures"] == 0
    assert values["run/last_saved_timestamp_seconds"] == run.started + 80
    assert values["run/last_step_timestamp_seconds"] == run.started + 80
    # 2 s a step by the times of their records, 60 to go.
    assert values["run/eta_seconds"] == pytest.approx(120.0)
    assert snapshot.items_per_second == pytest.approx(256.0) and snapshot.mfu == pytest.approx(0.4)
    assert values["run/budget_usd"] == 12.5 and values["run/total_steps"] == 100 and values["mine/own"] == 1.5
    assert values["run/state/running"] == 1 and values["run/state/failed"] == 0


def test_a_run_that_stands_still_has_no_time_left(run: WrittenRun) -> None:
    """Long pauses between its steps, as for evaluations, are no standstill."""
    run.begin(alive=True)
    for step in range(1, 11):
        run.step(step, run.started + 2 * step)
    live = LiveRun(run.path)
    assert live.refresh(run.started + 79).values["run/eta_seconds"] == pytest.approx(180.0)
    still = live.refresh(run.started + 81).values
    assert "run/eta_seconds" not in still and still["run/last_step_timestamp_seconds"] == run.started + 20
    run.step(11, run.started + 120)
    run.step(12, run.started + 122)
    assert "run/eta_seconds" in live.refresh(run.started + 320).values
    assert "run/eta_seconds" not in live.refresh(run.started + 323).values


@pytest.mark.parametrize("newest", [False, True])
def test_the_time_of_a_run_is_that_of_its_report(run: WrittenRun, newest: bool) -> None:
    """One attempt measured its time, one recorded its end, and of one the last record is known; a clock jumped."""
    run.begin(run.started)
    run.step(1)
    run.end(run.started + 700, "preempted")
    run.write_attempt(**json.loads((run.folder / "attempt.json").read_text()), seconds=100.0)
    run.begin(run.started + 1000)
    run.step(2, run.started + 1030)
    run.begin(run.started + 2000)
    run.step(3, run.started + 2010, **{"health/clock_jump_seconds": 3.0})
    run.end(run.started + 2020, "finished")
    values = LiveRun(run.path, newest=newest).refresh().values
    assert values["run/running_seconds"] == pytest.approx(100 + 30 + 17)
    assert values["run/running_seconds"] == pytest.approx(open_run(run.path).seconds)


def test_the_time_of_a_run_is_unknown_where_that_of_an_attempt_is(run: WrittenRun) -> None:
    run.begin(run.started)
    run.begin(run.started + 1000, alive=True)
    run.step(1)
    assert "run/running_seconds" not in LiveRun(run.path).refresh().values


def test_failed_saves_are_known_though_no_record_of_them_is_written(run: WrittenRun) -> None:
    """The page of the first worker has them, and on another machine, or in the end, the records."""
    run.begin(alive=True)
    run.step(10)
    run.append(10, run.started + 20, **{"checkpoint/failed_step": 8.0})
    live = LiveRun(run.path)
    values = live.refresh().values
    assert (values["run/save_failures"], values["run/failed_saves_in_row"]) == (1, 1)
    page = Heartbeat(run.folder / "heartbeat-0")
    page.count_failed_saves(4, 3)
    snapshot = live.refresh()
    assert (snapshot.values["run/save_failures"], snapshot.values["run/failed_saves_in_row"]) == (4, 3)
    assert "HeadwaySaveFailing" in [alert.name for alert in firing(snapshot, run.started + 30)]
    text = exposition(RunsFolder(run.path.parent)).decode()
    assert 'headway_run_save_failures_total{run="one"} 4.0' in text
    for step in (8.0, 8.0, 8.0):  # what waited is written
        run.append(10, run.started + 31, **{"checkpoint/failed_step": step})
    assert live.refresh().values["run/save_failures"] == 4
    page.count_failed_saves(4, 0)
    snapshot = live.refresh()
    assert snapshot.values["run/failed_saves_in_row"] == 0
    assert "HeadwaySaveFailing" not in [alert.name for alert in firing(snapshot, run.started + 30)]
    record = json.loads((run.folder / "attempt.json").read_text())
    run.write_attempt(**{**record, "host": "elsewhere"})
    page.count_failed_saves(9, 9)
    assert LiveRun(run.path).refresh().values["run/save_failures"] == 4, "a page of another machine is not read"


def test_what_a_restart_supersedes_is_forgotten_and_totals_stay(run: WrittenRun) -> None:
    run.begin()
    live = LiveRun(run.path)
    for step in range(1, 31):
        run.step(step)
    run.append(30, run.started + 60, **{"evaluation/loss": 2.5})
    assert live.refresh().values["evaluation/loss"] == 2.5
    run.end(run.started + 61, "died", 1)
    run.begin(run.started + 100)
    for step in range(21, 26):
        run.step(step, run.started + 100 + 2 * step)
    values = live.refresh().values
    assert "evaluation/loss" not in values, "it was of a state that is gone"
    assert values["step"] == 25 and values["attempt"] == 2
    assert values["train/items"] == 35 * 512 and values["run/steps"] == 35, "work that was done stays"
    assert live.refresh().values == LiveRun(run.path).refresh().values, "step by step as at once"


def test_a_worker_of_an_abandoned_attempt_changes_nothing(run: WrittenRun) -> None:
    run.begin()
    run.step(1)
    run.attempt = 2
    run.step(1)
    run.attempt = 1
    run.step(9)
    assert LiveRun(run.path).refresh().values["step"] == 1


def test_goodput_is_that_of_the_report(run: WrittenRun) -> None:
    """Of a run that died, repeated steps, was stopped by Ctrl-C and went on a day later."""
    start = run.started
    run.begin(start)
    for step in range(1, 31):
        run.step(step, start + 10 + 2 * step)
    run.end(start + 80, "failed: a reason", 1)
    run.begin(start + 90)
    for step in range(21, 41):
        run.step(step, start + 60 + 2 * step)
    run.end(start + 150, "preempted", 130)
    run.begin(start + 86400)
    for step in range(41, 101):
        run.step(step, start + 86400 + 2 * (step - 40))
    run.end(start + 86400 + 130, "finished")
    found = LiveRun(run.path).refresh().values["run/goodput_ratio"]
    expected = goodput_of(open_run(run.path))
    assert expected is not None and found == pytest.approx(expected.ratio, rel=0.01)
    assert found == pytest.approx(100 * 2.0 * 0.75 / (150 + 130), rel=0.01), "computed by hand"


def test_a_loss_that_is_not_finite_is_shown_as_such(run: WrittenRun) -> None:
    run.begin()
    run.step(1, **{"train/loss": "NaN"})
    snapshot = LiveRun(run.path).refresh()
    assert math.isnan(snapshot.values["train/loss"]) and len(snapshot.losses) == 1


def test_failures_within_the_window_count(run: WrittenRun) -> None:
    for number, outcome in enumerate(("died", "preempted", "failed: why", "finished")):
        run.begin(run.started + 3000 * number)
        run.end(run.started + 3000 * number + 10, outcome)
    values = LiveRun(run.path).refresh(run.started + 7000).values
    assert (values["run/recent_failures"], values["run/allowed_failures"]) == (1, 3)
    assert LiveRun(run.path).refresh(run.started + 3000).values["run/recent_failures"] == 2


def test_only_what_is_new_is_read(run: WrittenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    original = tail_module.parse_json_lines

    def counting(lines: list[bytes]) -> object:
        parsed.append(len(lines))
        return original(lines)

    monkeypatch.setattr(tail_module, "parse_json_lines", counting)
    run.begin()
    for step in range(1, 501):
        run.step(step)
    live = LiveRun(run.path)
    live.refresh()
    assert sum(parsed) == 500
    parsed.clear()
    live.refresh()
    assert parsed == []
    run.step(501)
    assert live.refresh().values["step"] == 501 and parsed == [1]


def test_names_of_a_users_own_are_limited(run: WrittenRun) -> None:
    run.begin()
    for step in range(1, 400):
        run.step(step, **{f"mine/{step}": 1.0})
    assert sum(name.startswith("mine/") for name in LiveRun(run.path).refresh().values) == 200


def test_readings_of_machines(run: WrittenRun) -> None:
    run.begin(alive=True)
    run.step(1)
    for machine, temperature in (("m1", 60.0), ("m2", 91.0)):
        lines = [json.dumps({"time": 1.0, "gpu/temperature_celsius/0": t}) for t in (20.0, temperature)]
        (run.folder / f"system-{machine}.jsonl").write_text("\n".join(lines) + '\n{"time": 2.0, "gpu/temp')
    machines = LiveRun(run.path).refresh().machines
    assert {name: one["gpu/temperature_celsius/0"] for name, one in machines.items()} == {"m1": 60.0, "m2": 91.0}


def test_damaged_files_hurt_nothing(run: WrittenRun) -> None:
    run.begin()
    run.step(1)
    (run.path / "config.yaml").write_text("{")
    (run.folder / "attempt.json").write_bytes(b"\xff{")
    with run.metrics.open("a") as file:
        file.write('nonsense\n{"step": "x"}\n{"step": true, "attempt": []}\n[]\n')
    run.step(2)
    assert LiveRun(run.path).refresh().values["step"] == 2


def test_a_folder_follows_runs_that_come_and_go(tmp_path: Path, run: WrittenRun) -> None:
    folder = RunsFolder(run.path.parent)
    run.begin()
    run.step(1)
    now = run.metrics.stat().st_mtime
    assert [one.name for one in folder.refresh(now)] == ["one"]
    other = WrittenRun(run.path.parent / "other")
    (run.path.parent / "no-run").mkdir()
    other.begin()
    assert [one.name for one in folder.refresh(now)] == ["one", "other"]
    shutil.rmtree(other.path)
    assert [one.name for one in folder.refresh(now)] == ["one"]


def test_a_link_to_a_run_of_the_folder_is_no_second_run(tmp_path: Path, run: WrittenRun) -> None:
    run.begin(alive=True)
    (run.path.parent / "latest").symlink_to(run.path.name)
    elsewhere = WrittenRun(tmp_path / "elsewhere" / "one")
    elsewhere.begin(alive=True)
    (run.path.parent / "linked").symlink_to(elsewhere.path)
    assert [one.name for one in RunsFolder(run.path.parent).refresh()] == ["linked", "one"]


def test_a_run_that_ended_leaves_after_an_hour_and_comes_back(run: WrittenRun) -> None:
    folder = RunsFolder(run.path.parent)
    run.begin()
    run.step(1)
    run.end(run.started + 10, "finished")
    assert folder.refresh(run.started + 3600)
    assert not folder.refresh(run.started + 3700) and not folder.refresh(run.started + 3800)
    run.begin(alive=True)
    run.step(2)
    found = folder.refresh()
    assert found[0].values["run/steps"] == 2, "its whole history counts again"


def test_a_run_of_another_machine_stays_for_a_day(run: WrittenRun) -> None:
    run.begin()
    run.write_attempt(started=run.started, host="elsewhere", pid=1)
    run.step(1)
    seen = run.metrics.stat().st_mtime
    folder = RunsFolder(run.path.parent)
    assert folder.refresh(seen + 7200)[0].state == "not ended"
    assert not folder.refresh(seen + 90_000)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no folder"):
        RunsFolder(tmp_path / "none")


def test_an_anomaly_is_seen_by_every_reader(run: WrittenRun) -> None:
    """Of a run whose steps take longer since other processes came, until it ends."""
    run.begin(alive=True)
    for step in range(1, 301):
        slow = step > 200
        seconds = 4.0 if slow else 2.0
        busy = {"health/cpu_wait_share": 0.4 * slow, "health/cpu_used_by_others": 1.5 * slow}
        run.step(step, **{"speed/step_seconds": seconds, "speed/data_wait_share": 0.0, **busy})
    live = LiveRun(run.path)
    snapshot = live.refresh()
    [anomaly] = snapshot.anomalies
    assert anomaly.label == "slower: other processes" and "a step takes 4 s, 2 s were usual" in anomaly.text
    assert snapshot.values["run/anomalies"] == snapshot.values["run/anomaly/slower: other processes"] == 1
    [alert] = [one for one in firing(snapshot, run.started + 610) if one.name == "HeadwayAnomaly"]
    assert (alert.short, alert.text, alert.fix) == (anomaly.label, anomaly.text, anomaly.advice)
    assert "slower: other processes" in row(snapshot, run.started + 610)["alerts"]
    text = exposition(RunsFolder(run.path.parent)).decode()
    assert 'headway_run_anomaly{anomaly="slower: other processes",run="one"} 1.0' in text
    assert 'headway_run_anomalies{run="one"} 1.0' in text
    [listed] = Pages(RunsFolder(run.path.parent)).runs()["runs"]
    assert {"short": anomaly.label, "severity": "warning", "text": anomaly.text, "fix": anomaly.advice} in listed[
        "alerts"
    ]
    assert "slower: other processes" in render_report(open_run(run.path)) and "201" not in anomaly.text
    run.end(run.started + 1200, "finished")
    assert live.refresh().anomalies == () and live.refresh().values["run/anomalies"] == 0


def test_a_lone_gradient_spike_is_one_row_of_the_report_and_no_alert(run: WrittenRun) -> None:
    run.begin(alive=True)
    for step in range(1, 61):
        norm = 40.0 if step == 23 else 0.5
        health = {"health/loss_deviations": 0.5, "health/grad_norm_deviations": norm}
        run.step(step, **{"speed/data_wait_share": 0.0}, **health)
    snapshot = LiveRun(run.path).refresh()
    assert snapshot.anomalies == () and snapshot.values["run/anomalies"] == 0
    assert "HeadwayAnomaly" not in [one.name for one in firing(snapshot, run.started + 130)]
    page = render_report(open_run(run.path))
    assert page.count("gradient spike") == 1 and re.search(r"<td[^>]*>23</td>\s*<td[^>]*>gradient spike</td>", page)


def test_the_limit_of_spikes_and_the_kind_of_memory_are_those_of_the_run(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "one", health={"spike_deviations": 12.0})
    (run.path / "run.json").write_text(json.dumps({"hardware": {"accelerators": [{"name": "one"}]}}))
    run.begin(alive=True)
    for step in range(1, 400):
        run.step(step, **{"health/loss_deviations": 10.0, "memory/peak_gib": 40.0 + step / 100})
    assert [one.label for one in LiveRun(run.path).refresh().anomalies] == [
        "data wait",
        "memory growth: gpu memory",
    ]


def test_a_drift_that_began_before_the_newest_records_is_seen_too(run: WrittenRun) -> None:
    """With 4,000 steps of about 250 bytes, of which the newest two thirds are slow, `top` reads half."""
    run.begin(alive=True)
    with run.metrics.open("a") as file:
        for step in range(1, 4001):
            record = {"step": step, "attempt": 1, "time": run.started + step, "train/loss": 3.0, "train/items": 512.0}
            values = {
                "speed/step_seconds": 1.0 if step < 1400 else 1.5,
                "speed/data_wait_share": 0.0,
                "x/more": "y" * 160,
            }
            file.write(json.dumps({**record, **values}) + "\n")
    assert run.metrics.stat().st_size > 2 * NEWEST_BYTES - 100_000
    [anomaly] = LiveRun(run.path, newest=True).refresh().anomalies
    assert anomaly == LiveRun(run.path).refresh().anomalies[0]
    assert anomaly.text == "a step takes 1.5 s, 1 s were usual"


def test_samples_of_a_file_that_has_no_lines_there_hurt_nothing(run: WrittenRun) -> None:
    run.metrics.write_text("x" * 2 * NEWEST_BYTES + "\n")
    run.begin(alive=True)
    run.step(1)
    assert LiveRun(run.path, newest=True).refresh().values["step"] == 1


def test_of_a_run_that_ended_long_ago_no_history_is_read(run: WrittenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.begin()
    run.metrics.write_text("x" * 2 * NEWEST_BYTES + "\n")
    run.end(run.started + 10, "finished")
    monkeypatch.setattr("headway.tracking.live_run.open_regular", lambda path: pytest.fail("it is read"))
    assert RunsFolder(run.path.parent, newest=True).refresh(run.started + 10_000) == []
