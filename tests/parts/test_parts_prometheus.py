"""A real Prometheus scrapes a real exporter of a real run; every expression of the dashboards gives data, and an alert
reaches a receiver through Alertmanager."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.core.process.waiting import wait_until
from headway.telemetry.catalogue import CATALOGUE, SYSTEM
from headway.tracking.alert_rules import RULES, export_rules
from headway.tracking.dashboards import BOARDS, panels, promql
from support.local_server import LocalServer
from support.parts_table import ALERTMANAGER, COMPOSE, PROMETHEUS, program
from support.ports import free_ports
from support.runs import headway, write_config, write_corpus
from support.tracking import WrittenRun
from support.waits import LONG

EXAMPLE = Path(__file__).parents[2] / "examples" / "monitoring"


def write_everything(path: Path) -> WrittenRun:
    """A run that trains, and has a value of every metric of the catalogue."""
    run = WrittenRun(path, budget={"usd": 100.0})
    run.begin(alive=True)
    values = {
        entry.prefix + ("one" if entry.label else ""): 0.5
        for entry in CATALOGUE.values()
        if entry.source not in (SYSTEM, "every record", "readers of the run directory")
    }
    for step in range(1, 30):
        run.step(step, **values)
    run.save(20, run.started + 40)
    readings = {
        entry.prefix + ("0" if entry.label else ""): 0.5 for entry in CATALOGUE.values() if entry.source == SYSTEM
    }
    (run.folder / "system-m1.jsonl").write_text(json.dumps({"time": 1.0, **readings}) + "\n")
    return run


@dataclass
class Stack:
    """Everything that runs, and where."""

    folder: Path
    prometheus: str = ""
    received: list[dict[str, Any]] = field(default_factory=list)
    training: WrittenRun | None = None
    step: int = 30

    def go_on(self) -> None:
        """Let the run that trains do a step."""
        assert self.training is not None
        self.step += 1
        self.training.step(self.step, time.time())  # a run that stands still has no ETA

    def query(self, expression: str) -> list[dict[str, Any]]:
        url = f"{self.prometheus}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return list(found["data"]["result"])


class Receiver(BaseHTTPRequestHandler):
    """Keeps the alerts that it gets."""

    stack: Stack

    def do_POST(self) -> None:
        self.stack.received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    prometheus, alertmanager = program("prometheus"), program("prometheus-alertmanager")
    if prometheus is None or alertmanager is None:
        pytest.skip("there is no Prometheus: apt-get install prometheus prometheus-alertmanager")
    folder = tmp_path_factory.mktemp("watched")
    stack = Stack(folder)
    write_corpus(folder)
    trained = headway("train", write_config(folder, health={"watch_seconds": 0.2}, telemetry={"usd_per_hour": 2.0}))
    assert trained.returncode == 0, trained.stderr
    stack.training = write_everything(folder / "runs" / "written")
    exporter_port, prometheus_port, alertmanager_port = free_ports(3)
    with ExitStack() as ends:
        receiver = LocalServer(Receiver, stack=stack)
        ends.callback(receiver.close)

        def start(*command: str | Path) -> None:
            process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            ends.callback(process.wait)
            ends.callback(process.terminate)

        export_rules(folder)
        scrape = yaml.safe_load((EXAMPLE / "prometheus.yaml").read_text())
        scrape["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        scrape["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{alertmanager_port}"]
        scrape["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{exporter_port}"]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(scrape))
        route = {"receiver": "webhook", "group_wait": "0s", "group_by": ["alertname", "run"]}
        webhook = {"name": "webhook", "webhook_configs": [{"url": f"{receiver.endpoint}/alerts"}]}
        (folder / "alertmanager.yaml").write_text(yaml.safe_dump({"route": route, "receivers": [webhook]}))
        start(sys.executable, "-m", "headway", "top", "runs", "--serve", f":{exporter_port}")
        start(
            alertmanager, "--config.file=alertmanager.yaml", f"--web.listen-address=127.0.0.1:{alertmanager_port}",
            "--cluster.listen-address=", "--storage.path=alerts",
        )  # fmt: skip
        start(
            prometheus, "--config.file=prometheus.yaml", "--storage.tsdb.path=series",
            f"--web.listen-address=127.0.0.1:{prometheus_port}",
        )  # fmt: skip
        stack.prometheus = f"http://127.0.0.1:{prometheus_port}"
        wait_until(lambda: answers(f"{stack.prometheus}/-/ready"), LONG, 0.1)
        wait_until(lambda: bool(stack.query("count_over_time(headway_build_info[1m]) > 3")), LONG, 0.2)
        yield stack


EXPRESSIONS = [
    pytest.param(expression, id=f"{board}: {panel.title}, {legend}")
    for board in BOARDS
    for panel in panels(board)
    for legend, expression in panel.expressions.items()
]


@pytest.mark.parts(PROMETHEUS)
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_of_the_dashboards_gives_data(stack: Stack, expression: str) -> None:
    query = promql(expression).replace("$run", ".*").replace("$__rate_interval", "20s")
    assert "$" not in query

    def found() -> bool:
        stack.go_on()  # a rate takes two scrapes, and progress
        return bool(stack.query(query))

    assert wait_until(found, 60.0, 0.5), query


@pytest.mark.parts(PROMETHEUS)
def test_a_run_that_was_trained_is_there(stack: Stack) -> None:
    """With the values of its own record."""
    last = [json.loads(line) for line in (stack.folder / "runs/tiny/metrics.jsonl").read_text().splitlines()]
    losses = [record["train/loss"] for record in last if "train/loss" in record]
    [found] = stack.query('headway_train_loss{run="tiny"}')
    assert float(found["value"][1]) == losses[-1]
    [found] = stack.query('headway_train_items_total{run="tiny"}')
    assert float(found["value"][1]) == sum(record.get("train/items", 0) for record in last)
    for name in ("headway_run_saves_total", "headway_evaluation_loss", "headway_cost_spent_usd"):
        assert stack.query(f'{name}{{run="tiny"}} > 0'), name
    assert stack.query('headway_run_state{run="tiny", state="finished"} == 1')
    assert stack.query('headway_run_info{run="written", job="4711"}'), "the scheduler's job, not the scrape's"


@pytest.mark.parts(ALERTMANAGER)
def test_an_alert_reaches_a_receiver(stack: Stack) -> None:
    run = WrittenRun(stack.folder / "runs" / "broken")
    run.begin(alive=True)
    run.step(1)
    assert wait_until(lambda: bool(stack.query('headway_run_state{run="broken", state="running"} == 1')), LONG, 0.5)
    run.end(time.time(), "failed: the disk is full", 4)

    def sent() -> list[dict[str, Any]]:
        return [
            alert
            for message in stack.received
            for alert in message["alerts"]
            if alert["labels"]["alertname"] == "HeadwayRunEndedBadly"
        ]

    assert wait_until(lambda: bool(sent()), LONG, 0.5)
    [alert] = sent()[:1]
    assert alert["labels"]["run"] == "broken" and alert["labels"]["severity"] == "critical"
    assert alert["annotations"]["summary"] == "broken has ended: failed"
    assert not any(alert["labels"].get("run") == "tiny" for message in stack.received for alert in message["alerts"])


@pytest.mark.parts(ALERTMANAGER)
def test_the_example_of_routes_is_one() -> None:
    """To Slack, PagerDuty, a webhook and e-mail, each with what it is for."""
    amtool = program("amtool")
    if amtool is None:
        pytest.skip("there is no amtool: apt-get install prometheus-alertmanager")
    file = EXAMPLE / "alertmanager.yaml"

    def routed(*labels: str) -> str:
        command = [amtool, "config", "routes", "test", f"--config.file={file}", *labels]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    subprocess.run([amtool, "check-config", file], check=True, capture_output=True)
    assert routed("alertname=HeadwayNoStep", "severity=critical") == "pagerduty,webhook,slack"
    assert routed("alertname=HeadwayBudgetNearlySpent", "severity=warning") == "email,webhook,slack"
    assert routed("alertname=Other", "severity=warning") == "slack"


@pytest.mark.parts(PROMETHEUS)
def test_the_example_of_prometheus_is_one(tmp_path: Path) -> None:
    promtool = program("promtool")
    if promtool is None:
        pytest.skip("there is no promtool: apt-get install prometheus")
    export_rules(tmp_path)
    (tmp_path / "prometheus.yaml").write_text((EXAMPLE / "prometheus.yaml").read_text())
    command = [promtool, "check", "config", "prometheus.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and f"{len(RULES)} rules" in done.stdout, done.stdout + done.stderr


@pytest.mark.parts(COMPOSE)
def test_the_compose_file_is_one(tmp_path: Path) -> None:
    checker = program("check-jsonschema")
    if checker is None:
        pytest.skip("there is no check-jsonschema: pip install '.[parts]'")

    def valid(text: str) -> bool:
        (tmp_path / "compose.yaml").write_text(text)
        command = [checker, "--builtin-schema", "vendor.compose-spec", "compose.yaml"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 0

    text = (EXAMPLE / "compose.yaml").read_text()
    assert valid(text) and not valid(text.replace("    image:", "    imagf:", 1))
    mounted = [volume for service in yaml.safe_load(text)["services"].values() for volume in service["volumes"]]
    here = {volume.split(":")[0] for volume in mounted if volume.startswith("./")}
    made_by_hand = {"./headway-alerts.yaml", "./dashboards", "./secrets"}
    assert {path for path in here if not (EXAMPLE / path).exists()} == made_by_hand
