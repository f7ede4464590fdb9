"""A run whose loss is no number any more: its last good loss is not told as what came of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.cli.runs import runs as runs_verb
from headway.telemetry.charts import loss_chart, metric_chart
from headway.telemetry.metrics import Metrics, read_metrics
from headway.telemetry.overlay import overlay_chart
from headway.telemetry.record import open_run
from headway.telemetry.report import render_report
from headway.telemetry.runs import result_rows
from headway.telemetry.summary import summarize

from .conftest import MakeRun, record, write_attempt, write_metrics


@pytest.fixture
def diverged(tmp_path: Path) -> Path:
    """A finished run of 300 steps with NaN from step 200 on, and an evaluation before that."""
    run = tmp_path / "diverged"
    bad = {"train/loss": "NaN", "train/grad_norm": "Infinity"}
    records = [record(step, 1, **(bad if step >= 200 else {})) for step in range(1, 301)]
    write_metrics(run, [*records[:150], {"step": 150, "attempt": 1, "evaluation/loss": 5.0}, *records[150:]])
    (run / "config.yaml").write_text("train: {steps: 300, global_batch: 8, sequence_length: 16}\n")
    write_attempt(run, 1, started=1.0, ended=301.0, outcome="finished", exit_code=0, first_step=0, last_step=300)
    return run


def _history(values: list[Any]) -> Metrics:
    metrics = Metrics()
    for step, value in enumerate(values, 1):
        metrics.add({"step": step, "attempt": 1, "a": value})
    return metrics


@pytest.mark.parametrize(
    ("values", "since"),
    [
        ([1.0, 2.0], None),
        ([], None),
        ([1.0, "NaN", 2.0], None),
        ([1.0, "NaN", 2.0, "Infinity", "NaN"], 4),
        (["NaN"], 1),
    ],
)
def test_since_when_a_metric_is_not_finite(values: list[Any], since: int | None) -> None:
    assert _history(values).not_finite_since("a") == since


def test_the_summary_has_no_final_loss(diverged: Path) -> None:
    found = summarize(open_run(diverged))
    assert found.train_loss is None and found.train_loss_steps == 0 and found.train_loss_not_finite_since == 200
    assert (found.validation_loss, found.validation_step, found.validation_loss_not_finite_since) == (5.0, 150, None)


def test_an_evaluation_that_is_not_finite_hides_the_one_before(diverged: Path) -> None:
    with (diverged / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 300, "attempt": 1, "evaluation/loss": "NaN"}) + "\n")
    found = summarize(open_run(diverged))
    assert found.validation_loss is None and found.perplexity is None and found.validation_loss_not_finite_since == 300
    assert found.best_validation_loss == 5.0
    page = render_report(open_run(diverged))
    assert "<dd>not finite<small>since step 300, best 5.0000 at step 150</small>" in page


def test_the_report_says_so_and_is_not_green(diverged: Path) -> None:
    page = render_report(open_run(diverged))
    assert "<dd>not finite<small>since step 200</small>" in page and "at step 150" in page
    assert "The training loss has not been finite since step 200." in page
    assert '<span class="state warn">finished</span>' in page


def test_a_report_without_any_finite_loss_says_so(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", [record(step, 1, **{"train/loss": "NaN"}) for step in (1, 2)])
    assert "No finite loss has been recorded." in render_report(open_run(tmp_path / "run"))


def test_shown_and_compared_runs_say_so(diverged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row[0]: row[1] for row in result_rows([summarize(open_run(diverged))])}
    assert rows["training loss"] == "not finite since step 200"
    assert rows["validation loss"] == "5.0000 at step 150"
    runs_verb.show(diverged, json=False)
    assert "not finite since step 200" in capsys.readouterr().out
    runs_verb.show(diverged, json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["train_loss"] is None and told["train_loss_not_finite_since"] == 200


def test_charts_go_on_to_the_last_step_and_shade_what_is_not_finite(diverged: Path) -> None:
    for chart in (loss_chart(open_run(diverged)), metric_chart(open_run(diverged), "train/grad_norm", "Norm")):
        assert chart is not None and chart.plot is not None and chart.plot["reach"] == 300
        assert chart.plot["shades"] == [(199.5, 300.5)] and max(chart.plot["data"][0]) < 200
        assert chart.legend[-1].label == "not finite" and chart.legend[-1].kind == "band"


def test_single_steps_are_shaded_too_but_no_more_than_a_screen_shows(tmp_path: Path) -> None:
    run = tmp_path / "run"
    bad = {5, *range(1000, 9001, 2)}
    records = [record(step, 1, **({"train/loss": "NaN"} if step in bad else {})) for step in range(1, 10_001)]
    write_metrics(run, records)
    chart = loss_chart(open_run(run))
    assert chart is not None and len(read_metrics(run).series("train/loss")[0]) == 10_000
    # Two patches: one of a single step, one of all that lie closer than the screen can show.
    assert chart.plot is not None and len(chart.plot["shades"]) == 2


def test_compared_curves_say_where_they_end_and_how_they_were_smoothed(diverged: Path, make_run: MakeRun) -> None:
    short = make_run()
    chart = overlay_chart({"diverged": open_run(diverged), "short": open_run(short)}, "step")
    assert chart is not None and chart.plot is not None and chart.plot["reach"] == 300
    crosses = [index for index, one in enumerate(chart.plot["series"], 1) if one["kind"] == "cross"]
    assert [sum(value is not None for value in chart.plot["data"][index]) for index in crosses] == [1]
    assert [entry.label for entry in chart.legend] == ["diverged, not finite since step 200", "short"]
    write_metrics(short, [record(step, 2) for step in range(1, 401)])
    chart = overlay_chart({"long": open_run(short)}, "tokens")
    assert chart is not None and chart.legend[0].label == "long, mean over 5 steps"
