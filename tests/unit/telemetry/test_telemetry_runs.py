"""Listing and comparing runs, and their commands."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headway.cli.application import application
from headway.core.command_line import print_json
from headway.core.errors import CheckpointError, HeadwayError
from headway.telemetry.goodput import goodput_of
from headway.telemetry.overlay import overlay_chart
from headway.telemetry.record import open_run
from headway.telemetry.runs import compare_runs, differences, list_runs, recorded_metrics

from .conftest import MakeRun, record, write_metrics


@pytest.fixture
def folder(make_run: MakeRun) -> Path:
    make_run("a")
    return make_run("b", learning_rate=1e-3).parent


def test_runs_of_a_folder(folder: Path) -> None:
    write_metrics(folder / "newest", [record(500, 9)])
    (folder / "no-run").mkdir()
    (folder / "a-file").write_text("")
    found = list_runs(folder)
    assert [item.name for item in found] == ["newest", "a", "b"]
    assert (found[1].state, found[1].step, found[1].total_steps, found[1].attempts) == ("finished", 100, 100, 2)
    assert found[1].validation_loss == 5.0 and found[0].state == "not started"


def test_an_empty_folder_and_none(tmp_path: Path) -> None:
    assert list_runs(tmp_path) == []
    with pytest.raises(CheckpointError, match="there is no folder"):
        list_runs(tmp_path / "nothing")


def test_only_keys_that_differ_are_compared(folder: Path) -> None:
    comparison = compare_runs([open_run(folder / name) for name in ("a", "b")])
    assert comparison.differences == {
        "name": ["a", "b"],
        "data.store": ["data/a", "data/b"],
        "optimizer.learning_rate": [3e-4, 1e-3],
    }


def test_differences_see_missing_keys_and_kinds() -> None:
    assert differences([{"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}]) == {"a.c": [None, 2]}
    assert differences([{"a": [1, 2]}, {"a": [1, 2]}, {"a": [2]}]) == {"a": [[1, 2], [1, 2], [2]]}
    assert differences([{"a": {"b": 1}}, {"a": None}]) == {"a.b": [1, None]}


def test_runs_of_one_name_are_told_apart_by_their_paths(make_run: MakeRun, tmp_path: Path) -> None:
    first = make_run("same")
    first.rename(tmp_path / "runs" / "kept")
    (tmp_path / "other").mkdir()
    (tmp_path / "runs" / "kept").rename(tmp_path / "other" / "same")
    write_metrics(first, [record(1, 1)])
    paths = [tmp_path / "other" / "same", first]
    assert compare_runs(list(map(open_run, paths))).names == [str(path) for path in paths]


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(application(["runs", "report"]), list(arguments))
    if isinstance(result.exception, HeadwayError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def test_the_list_command(folder: Path) -> None:
    header, first, *_ = invoke("runs", "list", str(folder)).splitlines()
    assert header.split()[:4] == ["RUN", "STATE", "STEP", "LOSS"]
    assert first.split()[:3] == ["a", "finished", "100/100"]
    assert [item["name"] for item in json.loads(invoke("runs", "list", str(folder), "--json"))] == ["a", "b"]


def test_the_list_command_prints_valid_json_for_a_diverged_run(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", [record(1, 1, **{"train/loss": "NaN"})])
    (item,) = json.loads(invoke("runs", "list", str(tmp_path), "--json"), parse_constant=pytest.fail)
    assert item["train_loss"] is None
    assert " nan " in invoke("runs", "list", str(tmp_path))


def test_the_show_command(folder: Path) -> None:
    text = invoke("runs", "show", str(folder / "a"))
    assert "attempt 1: died, steps 0 to 60" in text and "checkpoint 100:" in text
    shown = json.loads(invoke("runs", "show", str(folder / "a"), "--json"))
    assert shown["perplexity"] == pytest.approx(148.41, abs=0.01)
    assert [attempt["outcome"] for attempt in shown["attempt_list"]] == ["died", "finished"]


def test_the_report_command(folder: Path) -> None:
    assert invoke("report", str(folder / "a")).strip() == str(folder / "a" / "report.html")
    with pytest.raises(CheckpointError, match="is not a run directory"):
        invoke("report", str(folder))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_name_is_told_in_any_locale(encoding: str, tmp_path: Path) -> None:
    name = os.fsdecode("läuft…".encode() + b"\xff") if sys.platform == "linux" else "läuft…"
    write_metrics(tmp_path / name, [record(500, 9)])
    command = [sys.executable, "-m", "headway", "runs", "list", str(tmp_path)]
    strict = {**os.environ, "PYTHONIOENCODING": f"{encoding}:strict"}
    table = subprocess.run(command, capture_output=True, env=strict, check=True).stdout.decode(encoding)
    assert "uft" in table
    told = subprocess.run([*command, "--json"], capture_output=True, env=strict, check=True).stdout
    assert json.loads(told.decode(encoding))[0]["name"] == name


def test_json_has_no_number_for_what_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    """A run that has diverged is one that programs look at too."""
    print_json({"loss": math.nan, "rows": [{"perplexity": math.inf, "path": Path("a")}], "pair": (1.5, -math.inf)})

    def refuse(word: str) -> None:
        raise AssertionError(word)

    told = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert told == {"loss": None, "rows": [{"perplexity": None, "path": "a"}], "pair": [1.5, None]}


def test_one_run_that_cannot_be_read_does_not_hide_the_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("foreign", "unreadable", "nested", "dated"):
        (folder / name).mkdir()
        (folder / name / "config.yaml").write_text("train: {steps: 5}\n")
    (folder / "unreadable" / "metrics.jsonl").mkdir()
    (folder / "nested" / "config.yaml").write_text("a: " + "[" * 3000 + "]" * 3000)
    (folder / "dated" / "config.yaml").write_text("name: 2024-13-45\n")
    write_metrics(folder / "dated", [record(10**30, 1), record(2, 1)])
    is_file = Path.is_file

    def refused(path: Path) -> bool:
        if path.parent.name == "foreign":
            raise PermissionError(path)
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refused)
    found = {item.name: item for item in list_runs(folder)}
    assert found.keys() == {"a", "b", "unreadable", "nested", "dated"}
    assert found["dated"].step == 2 and found["unreadable"].total_steps == 5
    assert goodput_of(open_run(folder / "unreadable")) is None


def test_the_metrics_of_a_run_are_listed_with_their_values(tmp_path: Path) -> None:
    """Those of the history that counts: a repeated step has its newer value."""
    write_metrics(tmp_path / "mine", [
        {"step": 1, "attempt": 1, "time": 5.0, "train/loss": 4.0, "own/score": 7},
        {"step": 2, "attempt": 1, "time": 6.0, "train/loss": 900.0},
        {"step": 2, "attempt": 2, "time": 7.0, "train/loss": 2.5},
        {"step": 3, "attempt": 2, "time": 8.0, "train/loss": "NaN", "speed/step_seconds": 0.5},
    ])  # fmt: skip
    found = {one.name: one for one in recorded_metrics(open_run(tmp_path / "mine"))}
    assert list(found) == ["own/score", "speed/step_seconds", "train/loss"]
    loss = found["train/loss"]
    assert (loss.values, loss.last_step, loss.lowest, loss.highest) == (3, 3, 2.5, 4.0) and math.isnan(loss.last)
    assert found["own/score"].unit is None and found["speed/step_seconds"].unit == "seconds"
    app = application(["runs"])
    shown = CliRunner().invoke(app, ["runs", "metrics", str(tmp_path / "mine")])
    lines = [line.split() for line in shown.output.splitlines()]
    assert lines[0] == ["NAME", "LAST", "AT", "STEP", "LOWEST", "HIGHEST", "VALUES", "UNIT"]
    assert lines[2] == ["speed/step_seconds", "0.5", "3", "0.5", "0.5", "1", "seconds"]
    told = CliRunner().invoke(app, ["runs", "metrics", str(tmp_path / "mine"), "--json"])
    assert json.loads(told.output)[2]["last"] is None, "JSON has no NaN"
    both = CliRunner().invoke(app, ["runs", "metrics", str(tmp_path / "mine"), "--markdown"])
    assert both.exit_code == 2
    with pytest.raises(CheckpointError, match="does not exist"):
        CliRunner().invoke(app, ["runs", "metrics", str(tmp_path / "none")], catch_exceptions=False)


def test_a_group_of_runs_is_a_mean_with_a_band(tmp_path: Path) -> None:
    """Over the steps that all of them have."""
    runs = []
    for number, (loss, steps) in enumerate(((1.0, 9), (2.0, 5), (6.0, 7))):
        records = [record(step, 1, **{"train/loss": loss * step}) for step in range(1, steps + 1)]
        evaluated = {"step": steps, "attempt": 1, "evaluation/loss": loss}
        write_metrics(tmp_path / str(number), [*records, evaluated])
        runs.append(open_run(tmp_path / str(number)))
    chart = overlay_chart({"seeds": runs, "one": runs[0]}, "step")
    assert chart is not None and chart.plot is not None
    assert [entry.label for entry in chart.legend] == ["seeds: mean of 3 runs, lowest to highest", "one"]
    kinds = [line["kind"] for line in chart.plot["series"]]
    assert kinds == ["band", "band", "solid", "dots", "solid", "dots"]
    x, high, low, mean = chart.plot["data"][:4]
    at = x.index(5)
    assert (high[at], low[at], mean[at]) == (30.0, 5.0, 15.0) and mean[x.index(9)] is None
    timed = overlay_chart({"one": runs[0]}, "time")
    assert timed is not None and timed.plot is not None
    assert timed.plot["data"][0][-1] == 8.0 and timed.plot["x"] == "time (s)"
