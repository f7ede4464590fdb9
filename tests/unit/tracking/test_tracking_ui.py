"""The page of `headway ui`: what it is answered, against computations of the test's own, and who may ask."""

from __future__ import annotations

import hashlib
import http.client
import json
import math
import re
import threading
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from headway.cli.application import application
from headway.core.errors import ConfigError
from headway.telemetry import html
from headway.telemetry.metrics import Metrics
from headway.telemetry.tags import change_tags
from headway.tracking.http_server import TOKEN_VARIABLE, Address, check_exposure
from headway.tracking.live_table import row
from headway.tracking.runs_folder import RunsFolder
from headway.tracking.ui import server as server_module
from headway.tracking.ui.curves import curve_of, smoothed, thinned
from headway.tracking.ui.histories import Histories
from headway.tracking.ui.pages import MOST_CURVES, BadQuery, NotFound, Pages
from headway.tracking.ui.server import UiServer
from support.tracking import WrittenRun

HOSTILE = '<img src=x onerror="alert(1)">\x1b[31m'
TOKEN = "t0ken-of-this-test-alone"
STATIC = Path(server_module.__file__).parent / "static"
SHARED = Path(html.__file__).parent / "static"


@pytest.fixture
def run(tmp_path: Path) -> WrittenRun:
    run = WrittenRun(tmp_path / "runs" / "one", budget={"usd": 12.5})
    run.begin(alive=True)
    for step in range(1, 21):
        run.step(step, **{"speed/mfu": 0.4})
    run.save(20, run.started + 45)
    return run


@pytest.fixture
def pages(run: WrittenRun) -> Pages:
    return Pages(RunsFolder(run.path.parent))


def history(values: dict[int, float], name: str = "train/loss", **more: float) -> Metrics:
    metrics = Metrics()
    for step, value in values.items():
        metrics.add({"step": step, "attempt": 1, "time": 100.0 + 2.0 * step, name: value, **more})
    return metrics


def test_a_thinned_curve_keeps_the_extremes_of_every_bucket() -> None:
    random = np.random.default_rng(7)
    x, values = np.sort(random.uniform(0, 1000, 5000)), random.normal(size=5000)
    kept = thinned(x, values, 200)
    assert len(kept) <= 200 and {0, 4999} <= set(kept.tolist()) and (np.diff(kept) > 0).all()
    width = (x[-1] - x[0]) / 99
    for number in range(99):  # one bucket after the other, as a person would do it
        inside = [i for i in range(5000) if number == min(98, int((x[i] - x[0]) / width))]
        assert min(inside, key=lambda i: values[i]) in kept and max(inside, key=lambda i: values[i]) in kept
    assert thinned(x[:50], values[:50], 50).tolist() == list(range(50))


def test_a_smoothed_value_is_the_mean_of_what_came_before_by_falling_weights() -> None:
    values = np.array([3.0, 1.0, 4.0, 1.0, 5.0])
    for place, found in enumerate(smoothed(values, 0.8).tolist()):
        weights = [0.8**age for age in range(place, -1, -1)]
        expected = sum(weight * value for weight, value in zip(weights, values[: place + 1], strict=True))
        assert found == pytest.approx(expected / sum(weights))
    assert smoothed(values, 0.0) is values


def test_smoothing_takes_every_point_and_thinning_none_of_the_steps() -> None:
    metrics = history({step: math.sin(step) for step in range(1, 3001)})
    curve, whole = (curve_of(metrics, "train/loss", smoothing=0.9, limit=limit) for limit in (100, 10_000))
    at = dict(zip(whole.steps.tolist(), whole.smooth.tolist(), strict=True))
    assert len(curve.x) <= 100 < len(whole.x) == curve.points == 3000
    assert [at[step] for step in curve.steps.tolist()] == curve.smooth.tolist()
    assert curve.values.tolist() == pytest.approx([math.sin(step) for step in curve.steps.tolist()])


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    metrics = history({1: 4.0, 2: math.nan, 3: 2.0, 4: math.inf})
    curve = curve_of(metrics, "train/loss", smoothing=0.5)
    assert curve.steps.tolist() == [1, 3] and (curve.points, curve.not_finite) == (4, 2)
    assert curve.smooth.tolist() == pytest.approx([4.0, (0.5 * 4.0 + 2.0) / 1.5])


def test_a_part_of_the_axis_has_one_point_beyond_each_end() -> None:
    curve = curve_of(history({step: float(step) for step in range(1, 11)}), "train/loss", between=(3.5, 6.5))
    assert curve.steps.tolist() == [3, 4, 5, 6, 7] and curve.points == 3
    assert curve_of(history({1: 1.0}), "train/loss", between=(5.0, 6.0)).points == 0


def test_positions_rise_whatever_the_records_say() -> None:
    metrics = Metrics()
    for step in range(1, 1001):
        metrics.add({"step": step, "attempt": 1, "train/loss": float(step), "train/items": float((-1) ** step * step)})
    curve = curve_of(metrics, "train/loss", axis="tokens", limit=50)
    assert len(curve.x) <= 50 and (np.diff(curve.x) >= 0).all()


def test_the_axes() -> None:
    metrics = history({1: 9.0, 5: 8.0, 10: 7.0}, **{"train/items": 512.0})
    assert curve_of(metrics, "train/loss").x.tolist() == [1, 5, 10]
    assert curve_of(metrics, "train/loss", axis="time").x.tolist() == [0, 8, 18]
    assert curve_of(metrics, "train/loss", axis="tokens").x.tolist() == [512, 1024, 1536]
    metrics.add({"step": 10, "attempt": 1, "time": 90.0, "evaluation/loss": 3.0})  # the clock was set back
    assert curve_of(metrics, "evaluation/loss", axis="time").x.tolist() == [8.0]
    assert curve_of(metrics, "evaluation/loss", axis="tokens").x.tolist() == [1536]
    assert len(curve_of(history({1: 9.0}), "train/loss", axis="tokens").x) == 0, "no items are recorded"
    assert len(curve_of(metrics, "train/nothing").x) == 0


def test_the_list_has_the_columns_of_top(pages: Pages, run: WrittenRun) -> None:
    [found] = pages.runs()["runs"]
    assert (found["name"], found["state"], found["live"]) == ("one", "running", True)
    assert (found["step"], found["total_steps"], found["loss"]) == (20, 100, pytest.approx(4.8))
    assert found["items_per_second"] == pytest.approx(256.0) and found["mfu"] == pytest.approx(0.4)
    assert found["eta_seconds"] is None, "its last step was long ago"
    assert found["spent_usd"] is None and found["last_step"] == run.started + 40
    [snapshot] = RunsFolder(run.path.parent).refresh()
    texts = row(snapshot, time.time())
    assert {**found["texts"], "time": ""} == {**texts, "time": ""} and texts["speed"] == "256 tok/s"
    assert found["saved"] == run.started + 45 and len(found["losses"]) == 20
    assert {"no step", "checkpoint old"} <= {alert["short"] for alert in found["alerts"]}
    run.step(21, **{"train/loss": "NaN"})
    later = Pages(RunsFolder(run.path.parent)).runs()["runs"][0]
    assert later["loss"] == later["texts"]["loss"] == "not finite" and later["losses"][-1] is None
    json.dumps(later, allow_nan=False)


def test_curves_follow_the_run_and_forget_what_a_restart_supersedes(pages: Pages, run: WrittenRun) -> None:
    query = {"metric": ["train/loss"], "run": ["one"]}
    found = pages.curves(query)["runs"]["one"]
    assert found["x"] == found["step"] == list(range(1, 21))
    assert found["value"] == found["smooth"] == pytest.approx([5.0 - step / 100 for step in range(1, 21)])
    assert "speed/mfu" in found["metrics"] and "time" not in found["metrics"]
    run.begin(alive=True)
    run.step(11, **{"train/loss": 1.0})
    assert pages.curves(query)["runs"]["one"]["step"] == list(range(1, 12))


@pytest.mark.parametrize(
    "change",
    [
        {"metric": []}, {"metric": ["a", "b"]}, {"axis": ["epoch"]}, {"smoothing": ["1"]}, {"smoothing": ["nan"]},
        {"points": ["1e9"]}, {"points": ["x"]}, {"from": ["1"]}, {"from": ["1"], "to": ["inf"]}, {"run": []},
        {"run": ["one"] * (MOST_CURVES + 1)},
    ],
)  # fmt: skip
def test_a_question_that_cannot_be_answered(pages: Pages, change: dict[str, list[str]]) -> None:
    with pytest.raises(BadQuery):
        pages.curves({"metric": ["train/loss"], "run": ["one"], **change})


@pytest.mark.parametrize("name", ["two", "../runs/one", "/etc", "", "."])
def test_only_runs_of_the_folder_are_read(pages: Pages, name: str) -> None:
    with pytest.raises(NotFound):
        pages.curves({"metric": ["train/loss"], "run": [name]})


def test_a_run_that_is_gone_takes_no_other_with_it(pages: Pages) -> None:
    assert list(pages.curves({"metric": ["train/loss"], "run": ["gone", "one", "../one"]})["runs"]) == ["one"]


def test_histories_of_many_runs_do_not_fill_the_memory(tmp_path: Path) -> None:
    histories, read = Histories(most_values=25), []
    for name in "abc":
        run = WrittenRun(tmp_path / name)
        run.begin()
        run.append(1, 1.0, **{"train/loss": 1.0})
        for step in range(2, 6):
            run.append(step, 1.0, **{"train/loss": 1.0})
        with histories.read(run.path) as metrics:
            read.append(metrics.size)
    assert read == [15, 15, 15] and len(histories) == 1
    with histories.read(tmp_path / "a") as metrics:
        assert metrics.last_step == 5, "it is read again"


@pytest.fixture
def served(run: WrittenRun) -> Iterator[UiServer]:
    yield from serving(run)


def serving(run: WrittenRun, token: str | None = None) -> Iterator[UiServer]:
    folder = RunsFolder(run.path.parent)
    with UiServer(Address("127.0.0.1", 0, "ui"), folder, token=token) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


def ask(
    server: UiServer, path: str, method: str = "GET", body: str | None = None, **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.address.port, timeout=10)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read()


def test_names_of_others_are_data_and_no_markup(run: WrittenRun, served: UiServer) -> None:
    run.path.rename(run.path.parent / HOSTILE.replace("/", "_"))
    status, headers, body = ask(served, "/api/runs")
    assert status == 200 and headers["Content-Type"] == "application/json"
    name = json.loads(body)["runs"][0]["name"]
    assert name == '<img src=x onerror="alert(1)">\\x1b[31m', "what would steer a terminal is spelt out"
    query = urllib.parse.urlencode({"run": name, "metric": "train/loss"})
    assert list(json.loads(ask(served, f"/api/curves?{query}")[2])["runs"]) == [name]
    assert b"onerror" not in ask(served, "/")[2], "the page itself has no names"


def test_nothing_but_its_own_files_is_loaded(served: UiServer) -> None:
    for path in ("/", "/app.js", "/api/runs", "/nothing"):
        policy = ask(served, path)[1]["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';") and "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
    own = [
        path
        for path in (*STATIC.iterdir(), SHARED / "format.js", SHARED / "scales.js")
        if path.suffix in (".js", ".css", ".html")
    ]
    for path in own:
        text = path.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(| style=| on\w+=\"", text)
        assert not re.search(r"(?:src|href)=\"(?:https?:)?//|@import|url\(|fetch\(\"http", text), path
        for name in re.findall(r"(?:from \"\.|(?:src|href)=\"?/?)([\w./]+)\"", text):
            assert ask(served, f"/{name.lstrip('/')}")[0] == 200, f"{path.name} takes {name}"


def test_there_is_no_way_to_other_files(served: UiServer, run: WrittenRun) -> None:
    for path in (
        "/../server.py", "/static/app.js", "/%2e%2e/server.py", "//etc/passwd", "/uplot/../../server.py", "/login.html",
        "/api/runs/one", f"/{run.path}/config.yaml", "/uplot/", "/favicon.ico",
    ):  # fmt: skip
        assert ask(served, path)[0] == 404, path
    for log in ("../config.yaml", "001/attempt.json", "001/../../metrics.jsonl", str(run.path / "config.yaml")):
        assert ask(served, f"/log?{urllib.parse.urlencode({'run': 'one', 'log': log})}")[0] == 404, log
    assert ask(served, "/run?run=two")[0] == ask(served, "/report?run=..")[0] == 404
    assert ask(served, "/api/curves?metric=train/loss&run=two")[0] == 404
    status, _, body = ask(served, "/api/curves?metric=train/loss&run=one&points=0")
    assert (status, body) == (400, b"points is no number that can be taken\n")
    assert ask(served, f"/api/curves?{'run=one&' * 100}")[0] == 400
    assert ask(served, "/api/runs", "DELETE")[0] == 501 and ask(served, "/api/runs", "POST", "x")[0] == 404
    status, headers, body = ask(served, "/", "HEAD")
    assert (status, body) == (200, b"") and int(headers["Content-Length"]) > 100


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:9500", 200), ("127.0.0.1", 200), ("[::1]:9500", 200), ("LOCALHOST", 200), ("127.0.0.1:1", 200),
        ("evil.example", 403), ("localhost.evil.example:9500", 403), ("127.0.0.1.evil.example", 403), ("", 403),
        ("10.0.0.1", 403), ("[::1", 403), ("evil.example@localhost", 200),
    ],
)  # fmt: skip
def test_a_name_that_points_here_is_refused(served: UiServer, host: str, status: int) -> None:
    """A page of another site can let its own name point to this machine, but not choose the Host header."""
    for path in ("/", "/api/runs"):
        assert ask(served, path, Host=host)[0] == status
    assert ask(served, "/login", "POST", "token=x", Host=host)[0] == (403 if status == 403 else 401)


def test_a_token_is_asked_for_and_remembered(run: WrittenRun) -> None:
    for server in serving(run, TOKEN):
        for path in ("/api/runs", "/app.js", "/nothing"):
            status, headers, body = ask(server, path)
            assert (status, headers["WWW-Authenticate"]) == (401, "Bearer") and b"train" not in body
        status, _, form = ask(server, "/")
        assert status == 401 and b'type="password"' in form and ask(server, "/style.css")[0] == 200
        assert ask(server, "/api/runs", Authorization=f"Bearer {TOKEN}")[0] == 200
        kind = {"Content-Type": "application/x-www-form-urlencoded"}
        assert ask(server, "/login", "POST", "token=wrong-token-of-a-guess", **kind)[0] == 401
        assert ask(server, "/login", "POST", "a=" + "b" * 5000, **kind)[0] == 404
        status, headers, _ = ask(server, "/login", "POST", f"token={TOKEN}", **kind)
        cookie = headers["Set-Cookie"]
        assert (status, headers["Location"]) == (303, "/") and TOKEN not in cookie
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert ask(server, "/api/runs", Cookie=cookie.partition(";")[0])[0] == 200
        for wrong in ("headway=", "headway=x", "other=1", f"headway={TOKEN}", 'headway="', "=;="):
            assert ask(server, "/api/runs", Cookie=wrong)[0] == 401, wrong


def test_beyond_this_machine_only_with_token_and_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="only with a token and TLS: HEADWAY_METRICS_TOKEN is not set") as caught:
        check_exposure(Address("0.0.0.0", 9500, "ui"), None)
    assert caught.value.where == "--host 0.0.0.0 --port 9500"
    assert "headway ui RUNS --host 0.0.0.0 --port 9500 --tls-cert FILE" in str(caught.value.fix)


def test_a_port_in_use_is_said_in_three_lines(run: WrittenRun, served: UiServer) -> None:
    words = ["ui", str(run.path.parent), "--port", str(served.address.port)]
    error = CliRunner().invoke(application(["ui"]), words).exception
    assert isinstance(error, ConfigError) and "Address already in use" in error.what
    assert error.where == f"--host 127.0.0.1 --port {served.address.port}" and error.fix


def test_an_error_of_the_server_is_not_hidden(
    served: UiServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(served.pages, "catalogue", lambda: int("x"))
    with pytest.raises(http.client.RemoteDisconnected):
        ask(served, "/api/catalogue")
    assert "ValueError: invalid literal" in capfd.readouterr().err


def test_the_charting_library_is_the_one_that_its_page_names() -> None:
    sums = re.findall(r"([0-9a-f]{64})  (\S+)", (SHARED / "uplot" / "README.md").read_text())
    assert {name for _, name in sums} == {"uPlot.iife.min.js", "uPlot.min.css"}
    for expected, name in sums:
        assert hashlib.sha256((SHARED / "uplot" / name).read_bytes()).hexdigest() == expected
    assert "MIT" in (SHARED / "uplot" / "LICENSE").read_text()


def test_a_metric_says_what_it_means(pages: Pages) -> None:
    found: dict[str, Any] = pages.catalogue()
    assert found["train/loss"]["help"] and found["speed/step_seconds"]["unit"] == "seconds"


def test_the_list_has_tags_and_the_keys_in_which_configs_differ(pages: Pages, run: WrittenRun) -> None:
    other = WrittenRun(run.path.parent / "two", budget={"usd": 1.0})
    other.begin(alive=False)
    change_tags(run.path, ["baseline", "slow"], note="as in the paper")
    answer = pages.runs({"column": ["budget.usd", "train.steps", "no.such"]})
    assert "budget.usd" in answer["keys"] and "name" not in answer["keys"] and "train.steps" not in answer["keys"]
    found = {one["name"]: one for one in answer["runs"]}
    assert {name: one["config"] for name, one in found.items()} == {
        "one": {"budget.usd": "12.5"},
        "two": {"budget.usd": "1.0"},
    }
    assert (found["one"]["tags"], found["one"]["note"]) == (["baseline", "slow"], "as in the paper")
    assert found["two"]["tags"] == [] and found["two"]["started"] == other.started
    change_tags(run.path, remove=["slow"])
    assert Pages(RunsFolder(run.path.parent)).runs()["runs"][0]["tags"] == ["baseline"]


def test_the_page_of_a_run(served: UiServer, run: WrittenRun) -> None:
    change_tags(run.path, ["<i>"], note="a & b")
    log = run.path / "attempts" / "001" / "worker-0.log"
    log.write_text("step 1\n<script>hit()</script>\nAuthorization: Bearer abcdefghijklmnop\n")
    status, headers, body = ask(served, "/run?run=one")
    page = body.decode()
    assert status == 200 and headers["Content-Type"].startswith("text/html")
    for expected in ("one", "&lt;i&gt;", "a &amp; b", "Attempts", "usd: 12.5", "step 1", 'data-run="one"'):
        assert expected in page, expected
    assert "<i>" not in page and "hit()</script>" not in page and "abcdefghijklmnop" not in page
    assert page.index("usd: 12.5") < page.index("The resolved config") < page.index("Curves") < page.index(">Log<")
    status, headers, body = ask(served, "/log?run=one&log=001/worker-0.log")
    assert status == 200 and headers["Content-Type"].startswith("text/plain") and b"step 1\n" in body
    assert b"abcdefghijklmnop" not in body


def test_a_report_runs_apart_from_the_page(served: UiServer) -> None:
    status, headers, body = ask(served, "/report?run=one")
    assert status == 200 and b'<div class="plot"' in body
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("sandbox allow-scripts; default-src 'none';") and "allow-same-origin" not in policy


def test_a_table_has_every_value(served: UiServer) -> None:
    status, headers, body = ask(served, "/api/table.csv?metric=train/loss&run=one")
    lines = body.decode().splitlines()
    assert status == 200 and headers["Content-Type"].startswith("text/csv")
    assert lines[0] == "run,step,train/loss" and len(lines) == 21 and lines[20].startswith("one,20,4.8")


def test_readings_of_machines_are_curves_of_the_run(pages: Pages, run: WrittenRun) -> None:
    readings = run.path / "attempts" / "001" / "system-node7.jsonl"
    moments = [run.started + 2.0 * step for step in (5, 10)]
    readings.write_text("".join(f'{{"time": {m}, "system/cpu_used": {n}.5}}\n' for n, m in enumerate(moments)))
    found = pages.curves({"metric": ["system/node7/cpu_used"], "run": ["one"]})["runs"]["one"]
    assert found["step"] == [5, 10] and found["value"] == [0.5, 1.5]
    assert "system/node7/cpu_used" in found["metrics"]
