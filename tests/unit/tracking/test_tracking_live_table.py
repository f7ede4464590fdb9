"""The table of `headway top`, as a user sees it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from headway.cli.application import application
from headway.tracking.live_run import Snapshot
from headway.tracking.live_table import pause_seconds, row, sparkline, table
from headway.tracking.runs_folder import RunsFolder
from support.tracking import WrittenRun

NOW = 1_760_000_100.0


def shown(snapshots: list[Snapshot], width: int = 200, height: int | None = None) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(table(snapshots, NOW, width, height))
    return console.export_text()


def snapshot(name: str = "one", state: str = "running", **values: float) -> Snapshot:
    usual = {
        "step": 1200.0,
        "run/total_steps": 10_000.0,
        "train/loss": 3.21401,
        "cost/spent_usd": 3.1,
        "run/budget_usd": 18.4,
        "run/eta_seconds": 8040.0,
        "run/started_timestamp_seconds": NOW - 500,
        "run/last_step_timestamp_seconds": NOW - 1,
        "run/last_saved_timestamp_seconds": NOW - 12,
        "run/running_seconds": 495.0,
    }
    values = {**usual, **values}
    losses = (4.0, 3.5, 3.2)
    return Snapshot(name, Path(name), state, state, values, losses=losses, items_per_second=41_234.0, mfu=0.521)


def test_a_run_in_one_row() -> None:
    text = shown([snapshot()])
    parts = ("one", "running", "1,200/10,000", "3.2140", "█▄▁", "41.2k tok/s", "52.1 %")
    more = ("1 s ago", "8 m 15 s", "2 h 14 m", "$3.10 of $18.40", "12 s ago")
    assert re.search(" +".join(map(re.escape, (*parts, *more))), text)
    assert "1 run: 1 running" in text


@pytest.mark.parametrize("width", [45, 60, 80, 100, 130, 200])
def test_numbers_are_whole_at_every_width(width: int) -> None:
    """Columns are left out, names continue on the next line and alerts are cut, but no number is."""
    bad = {"train/loss": float("nan"), "cost/spent_usd": 17.5, "run/last_step_timestamp_seconds": NOW - 901}
    name = "a-run-with-a-long-name-" * 3
    text = shown([snapshot(name, **bad), snapshot("b", "failed")], width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "running" in text and "1,200/10,000" in text and ("3.2140" in text) == (width >= 60)
    assert name in "".join(line.split()[0] for line in text.splitlines()[4:] if line.strip()), "the name is whole"
    assert text.count("…") <= 1 and not re.search(r"[\d%$]…", text), "only the alerts of one run are cut"
    assert ("ALERTS" in text) == (width >= 80) and ("RECENT LOSS" in text) == (width == 200)


def test_long_names_take_the_lines_of_other_runs() -> None:
    runs = [snapshot("a-run-with-a-long-name-" * 5, "finished", step=float(number)) for number in range(30)]
    text = shown(runs, 80, height=20)
    assert len(text.splitlines()) <= 20 and "(27 below)" in text


def test_a_run_that_has_ended_says_how_fast_and_long_it_was_and_what_it_cost() -> None:
    cells = row(snapshot(state="finished"), NOW)
    assert (cells["speed"], cells["mfu"], cells["time"]) == ("41.2k tok/s", "52.1 %", "8 m 15 s")
    assert (cells["spent"], cells["last_step"]) == ("$3.10 of $18.40", "1 s ago")


def test_runs_that_do_not_fit_are_counted_and_live_ones_come_first() -> None:
    runs = [snapshot(f"old{number}", "finished") for number in range(30)] + [snapshot("live")]
    text = shown(runs, height=12)
    assert "live" in text and len(text.splitlines()) <= 12 and "31 runs" in text and "(24 below)" in text


@pytest.mark.parametrize(
    ("values", "alert"),
    [
        ({"train/loss": float("nan")}, "loss not finite"),
        ({"run/last_step_timestamp_seconds": NOW - 901}, "no step"),
        ({"run/last_saved_timestamp_seconds": NOW - 7201}, "checkpoint old"),
        ({"cost/spent_usd": 17.0}, "budget nearly spent"),
        ({"health/checkpoints_that_fit": 1.0}, "disk nearly full"),
        ({"run/recent_failures": 3.0, "run/allowed_failures": 3.0}, "last restart"),
    ],
)
def test_alerts(values: dict[str, float], alert: str) -> None:
    assert row(snapshot(**values), NOW)["alerts"] == alert
    assert row(snapshot(), NOW)["alerts"] == ""


def test_a_run_that_has_ended_is_not_stalled() -> None:
    old = {"run/last_step_timestamp_seconds": NOW - 9000, "run/last_saved_timestamp_seconds": NOW - 9000}
    assert row(snapshot(state="finished", **old), NOW)["alerts"] == ""


def test_sparklines() -> None:
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8]) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([1.0, float("nan"), 3.0]) == "▁x█"
    assert sparkline([float("nan")]) == "x"
    assert len(sparkline(list(range(1000)))) <= 16


def test_once_and_json(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "runs" / "one")
    run.begin(alive=True)
    for step in range(1, 11):
        run.step(step)
    printed = CliRunner().invoke(application(["top"]), ["top", str(run.path.parent), "--once"])
    assert printed.exit_code == 0 and re.search(r"one +running +10/100 +4\.9000", printed.output)
    printed = CliRunner().invoke(application(["top"]), ["top", str(run.path.parent), "--json"])
    [found] = json.loads(printed.output)
    assert found["run"] == "one" and found["values"]["train/loss"] == pytest.approx(4.9) and found["alerts"]


def test_names_cannot_steer_the_terminal(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "runs" / "evil\x1b[31m")
    run.begin(alive=True)
    run.step(1)
    text = shown(RunsFolder(run.path.parent).refresh())
    assert "\x1b" not in text and "evil\\x1b[31m" in text


def test_watching_takes_at_most_a_fiftieth_of_a_processor() -> None:
    assert pause_seconds(3.0, 0.01) == 3.0
    assert pause_seconds(3.0, 0.15) == pytest.approx(7.5)


def test_runs_of_a_study_are_a_group(tmp_path: Path) -> None:
    """They have the study's name before their own, in the folder of studies; in the study itself, their own alone."""
    WrittenRun(tmp_path / "alone")
    study = tmp_path / "lab"
    for name in ("0000", "0001"):
        WrittenRun(study / "runs" / name)
    (tmp_path / "no-study" / "runs").mkdir(parents=True)
    assert {one.name for one in RunsFolder(tmp_path, ended_seconds=float("inf")).refresh()} == {"alone"}
    (study / "study.yaml").write_text("settings: {}\n")
    runs = RunsFolder(tmp_path, ended_seconds=float("inf"))
    assert {one.name for one in runs.refresh()} == {"alone", "lab/0000", "lab/0001"}
    assert {one.path for one in runs.refresh()} == {tmp_path / "alone", *(study / "runs").iterdir()}
    inside = RunsFolder(study, ended_seconds=float("inf"))
    assert {one.name for one in inside.refresh()} == {"0000", "0001"}
