"""The report: whole, self-contained, escaped, for runs of any length and state."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from headway.config import Batches
from headway.telemetry import html, metrics, report
from headway.telemetry.charts import loss_chart, metric_chart
from headway.telemetry.curves import POINTS, envelope, short_number, smooth, thin, token_scale
from headway.telemetry.record import open_run
from headway.telemetry.report import write_report

from .conftest import START, MakeRun, record, write_attempt, write_metrics


class Page(HTMLParser):
    """Checks that elements are closed in order, and collects text, tags and ids."""

    VOID = ("meta", "br", "hr", "img", "input", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.plots = [
            json.loads(found) for found in re.findall(r'<script type="application/json">(.*?)</script>', text)
        ]
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture
def page(make_run: MakeRun) -> Page:
    return Page(write_report(make_run()).read_text())


def test_it_says_how_the_run_went(page: Page) -> None:
    text = page.text
    for expected in (
        "demo finished",
        "Step 100 of 100",
        "Validation loss 5.0000",
        "Perplexity 148.41",
        "Tokens 819.2k",
        "MFU n/a",
        "Cost $1.00",
        "Attempts 2 20 steps done again after restarts",
        "train python 95 900,000",
        "Validation share 10.0 %",
        "Parameters 4,000,000",
        "Test CPU, 2 usable cores",
        "torch 2.13.0",
        "with uncommitted changes",
        "global_batch: 32",
        "Once upon a time",
    ):
        assert expected in text, expected


def test_where_the_time_went_has_no_column_of_seconds_that_are_none(page: Page) -> None:
    assert "Spent on Time Share" in page.text and "Seconds" not in page.text


def test_it_has_all_charts(page: Page) -> None:
    assert page.tags.count("figure") == 4 == len(page.plots)
    loss = page.plots[0]
    assert {one["kind"] for one in loss["series"]} == {"dots", "solid"}
    assert loss["level"]["text"] == "uniform guess: ln 8,192 = 9.01"
    assert [mark["text"] for mark in loss["marks"]] == ["attempt 2"]
    for title in ("Loss", "Throughput", "Learning rate", "Gradient norm"):
        assert title in page.words


def test_it_loads_nothing(page: Page) -> None:
    assert [link for link in page.links if not link.startswith("#")] == []
    assert not {"link", "img", "iframe"} & set(page.tags)


def test_ids_are_unique(page: Page) -> None:
    assert len(page.ids) == len(set(page.ids))


def test_every_text_is_escaped(make_run: MakeRun) -> None:
    run = make_run()
    evil = "<script>alert(1)</script>"
    facts = json.loads((run / "run.json").read_text())
    facts["command"] = ["headway", evil]
    facts["environment"]["variables"] = {"HEADWAY_X": evil}
    facts["model"] = {evil: evil}
    facts["git"] |= {"diff_sha256": evil, "changed": [evil]}
    (run / "run.json").write_text(json.dumps(facts))
    (run / "config.yaml").write_text(
        (run / "config.yaml").read_text().replace("precision: fp32", f"precision: '{evil}'")
    )
    (run / "attempts/002/attempt.json").write_text(json.dumps({"outcome": evil, "host": evil, "command": evil}))
    page = Page(write_report(run).read_text())
    assert page.tags.count("script") == Page(write_report(make_run("plain")).read_text()).tags.count("script")
    assert page.text.count(evil) >= 8


def test_the_command_can_be_typed_again(make_run: MakeRun) -> None:
    run = make_run()
    facts = json.loads((run / "run.json").read_text())
    facts["command"] = ["headway", "train", "a.yaml", "checkpoint.every=3 steps"]
    (run / "run.json").write_text(json.dumps(facts))
    assert "headway train a.yaml 'checkpoint.every=3 steps'" in Page(write_report(run).read_text()).text


@pytest.mark.parametrize(("waited", "shown"), [((0.0, 0.4), True), ((0.0, 0.09), False), ((), False)])
def test_neighbours_are_told_with_figures(make_run: MakeRun, waited: tuple[float, ...], shown: bool) -> None:
    run = make_run()
    with (run / "metrics.jsonl").open("a") as file:
        for step, share in enumerate(waited, start=1000):
            values = {"health/cpu_wait_share": share, "health/cpu_used_by_others": 2.5 * share}
            file.write(json.dumps({"step": step, "attempt": 9, "time": 2e9, **values}) + "\n")
    text = Page(write_report(run).read_text()).text
    said = "threads waited 20% of their time for a processor, at most 40%; other processes used 0.5 processors, at most"
    assert (f"{said} 1.0" in text) == shown and ("Shared processors" in text) == shown


def test_changes_are_named_and_their_text_is_shown_only_where_it_was_to_travel(make_run: MakeRun) -> None:
    """Whatever an earlier version has written into the record of the run."""
    run = make_run()
    facts = json.loads((run / "run.json").read_text())
    facts["git"] |= {"diff_sha256": "5a" * 32, "diff_bytes": 70, "changed": ["a.py"], "diff": "+word = 'x'\n"}
    facts["git"]["diff_file"] = "attempts/001/uncommitted.diff"
    (run / "run.json").write_text(json.dumps(facts))
    page = Page(write_report(run).read_text()).text
    assert "5a" * 32 in page and "a.py" in page and "attempts/001/uncommitted.diff in the run directory" in page
    assert "+word" not in page
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**config, "telemetry": {"git_diff": "full"}}))
    assert "+word = 'x'" in Page(write_report(run).read_text()).text


def test_credentials_of_an_earlier_version_are_not_shown(make_run: MakeRun) -> None:
    run = make_run()
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["checkpoint"] = {"remote": {"url": "s3://AK:fir/st@bucket", "options": {"key": "se/cond"}}}
    config["telemetry"] = {"alert": "curl -H 'Authorization: Bearer third'"}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    facts = json.loads((run / "run.json").read_text())
    facts["command"] = ["headway", "train", "a.yaml", "checkpoint.remote.options.key=fourth"]
    (run / "run.json").write_text(json.dumps(facts))
    command = "headway train a.yaml data.remote_options.key=fi/fth 'checkpoint.every=3 steps'"
    (run / "attempts/002/attempt.json").write_text(json.dumps({"number": 2, "command": command}))
    page = write_report(run).read_text()
    assert "s3://***@bucket" in page and "data.remote_options.key=***" in page
    assert [word for word in ("fir/st", "se/cond", "third", "fourth", "fi/fth") if word in page] == []


def test_a_text_of_a_chart_cannot_end_its_script(make_run: MakeRun) -> None:
    run = make_run()
    chart = loss_chart(open_run(run))
    assert chart is not None and chart.plot is not None
    marked = replace(chart, plot={**chart.plot, "y": "</script><b>"})
    assert "</script><b>" not in html.figure(marked) and "\\u003c/script>" in html.figure(marked)


def test_equal_runs_give_equal_charts(make_run: MakeRun) -> None:
    run = make_run()
    assert loss_chart(open_run(run)) == loss_chart(open_run(run))


@pytest.mark.parametrize("state", ["empty", "one step", "diverged"])
def test_runs_with_little_to_show(tmp_path: Path, state: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("name: run\n")
    if state == "one step":
        write_metrics(run, [record(1, 1)])
    if state == "diverged":
        write_metrics(run, [record(s, 1, **{"train/loss": "NaN", "train/grad_norm": "Infinity"}) for s in (1, 2, 3)])
    text = Page(write_report(run).read_text()).text
    assert "not started" in text and "n/a" in text
    assert ("No step has been recorded yet" in text) == (state == "empty")


@pytest.mark.parametrize(
    ("started", "ended"),
    [(START + 900, START), (-1e300, 1e300), (0, 10**400)],
    ids=["back", "no calendar", "no number"],
)
def test_whatever_the_clock_did_there_is_a_report(make_run: MakeRun, started: float, ended: float) -> None:
    """It went back, or its times are in no calendar."""
    run = make_run()
    shutil.rmtree(run / "attempts")
    write_attempt(run, 2, started=started, ended=ended, outcome="finished", exit_code=0)
    manifest = run / "checkpoints" / "step-00000100" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "context": {"time": ended, "attempt": 2}}))
    page = Page(write_report(run).read_text()).text
    assert "Finished" in page and "Spent on" in page if ended == START else "Attempts" in page


def test_long_runs_make_small_pages(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_metrics(run, [record(step, 1) for step in range(1, 30_001)])
    assert write_report(run).stat().st_size < 500_000


def test_the_records_are_parsed_once(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    read, files = metrics.read_json_lines, []

    def counted(path: Path) -> Iterator[dict[str, Any]]:
        files.append(path.name)
        return read(path)

    monkeypatch.setattr(metrics, "read_json_lines", counted)
    monkeypatch.setattr(report, "_charts", lambda run: "")
    write_report(make_run())
    assert files == ["metrics.jsonl"]


def test_another_place_may_be_chosen(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    assert write_report(run, tmp_path / "new" / "page.html") == tmp_path / "new" / "page.html"
    assert (tmp_path / "new" / "page.html").exists() and not (run / "report.html").exists()


def test_it_needs_no_matplotlib(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert len(Page(write_report(make_run()).read_text()).plots) == 4


def test_the_gradient_norm_gets_a_logarithmic_axis_when_it_spans_much(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_metrics(run, [record(step, 1, **{"train/grad_norm": 10.0 ** (step % 5)}) for step in range(1, 21)])
    chart = metric_chart(open_run(run), "train/grad_norm", "Gradient norm", may_be_log=True)
    flat = metric_chart(open_run(run), "train/grad_norm", "Gradient norm")
    assert chart is not None and flat is not None
    assert chart.plot is not None and chart.plot["log_y"] and flat.plot is not None and not flat.plot["log_y"]


def test_an_unknown_metric_has_no_chart(make_run: MakeRun) -> None:
    assert metric_chart(open_run(make_run()), "no/such", "None") is None


def test_smoothing_keeps_level_and_length() -> None:
    assert smooth(np.full(50, 3.0), 5).tolist() == pytest.approx([3.0] * 50)
    assert smooth(np.array([1.0, 2.0, 6.0]), 1).tolist() == pytest.approx([1.5, 3.0, 4.0])
    values = np.random.default_rng(0).normal(size=1000)
    expected = [values[max(0, i - 7) : i + 8].mean() for i in range(1000)]
    assert smooth(values, 7).tolist() == pytest.approx(expected)


def test_an_envelope_loses_no_spike() -> None:
    values = np.zeros(100_003)
    values[77_777], values[5] = 9.0, -4.0
    steps = np.arange(1, 100_004)
    middles, low, high = envelope(steps, values, 500)
    assert len(middles) == len(low) == len(high) == 500
    assert high.max() == 9.0 and low.min() == -4.0
    assert abs(int(middles[high.argmax()]) - 77_778) < 210


def test_thinning_keeps_both_ends() -> None:
    steps, _ = thin(np.arange(10_000), np.arange(10_000.0))
    assert len(steps) == POINTS and steps[0] == 0 and steps[-1] == 9_999
    assert len(thin(np.arange(7), np.arange(7.0))[0]) == 7


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.5, "0.5"), (1200, "1,200"), (20_000, "20k"), (1.5e9, "1.5B"), (2.5e-4, "2.5e-4"), (1e-5, "1e-5")],
)
def test_tick_labels(value: float, text: str) -> None:
    assert short_number(value) == text


def test_the_axis_of_tokens_follows_a_batch_ramp() -> None:
    tokens, steps = token_scale(Batches(((0, 2), (10, 8)), 16))
    at = np.array([-1.0, 0.0, 5.0, 10.0, 20.0])
    assert tokens(at).tolist() == [-32.0, 0.0, 160.0, 320.0, 1600.0]
    assert steps(tokens(at)).tolist() == at.tolist()
