"""The sink for OpenTelemetry: what a collector gets, what is refused, and what happens when it does not answer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.proto")

from headway.config.sections.track import TrackConfig
from headway.core.errors import ConfigError, HeadwayError
from headway.tracking.follow import follow
from headway.tracking.follower import Waiting
from headway.tracking.sink import Refused
from headway.tracking.sinks import check_trackers, resolve
from support.followers import append, record, steps, write_run
from support.otlp import Collector

OVER = Waiting(lambda: True, sleep=lambda seconds: None, patience_seconds=0.0)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    for name in ("ENDPOINT", "HEADERS", "METRICS_ENDPOINT", "METRICS_HEADERS", "CERTIFICATE"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)
    found = Collector()
    yield found
    found.close()


def tracker(endpoint: str | None) -> TrackConfig:
    return TrackConfig.model_validate({"opentelemetry": {} if endpoint is None else {"endpoint": endpoint}})


def send(run: Path, endpoint: str | None) -> list[str]:
    said: list[str] = []
    follow(run, tracker(endpoint), "track.0", report=said.append, waiting=OVER)
    return said


def test_a_collector_gets_each_value_at_its_time(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "pretraining")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=a%20b,site=x")
    records = [*steps(1, 4), record(4, evaluation__loss="NaN", my__own=3.0)]
    run = write_run(tmp_path, records, outcomes=("died", "finished"))
    send(run, collector.endpoint)
    moments = {one["step"]: int(1e9 * one["time"]) for one in records}
    assert collector.values("headway.train.loss") == [(moments[step], 1 / step) for step in (1, 2, 3, 4)]
    assert collector.values("headway.step") == [(moments[step], float(step)) for step in (1, 2, 3, 4)]
    ((_, value),) = collector.values("headway.evaluation.loss")
    assert math.isnan(value)
    assert [value for _, value in collector.values("headway.my.own")] == [3.0]
    resources = {json.dumps(resource, sort_keys=True) for *_, resource in collector.points()}
    assert [json.loads(text) for text in resources] == [
        {
            "service.name": "pretraining", "service.instance.id": "ab" * 16, "headway.run": "tiny", "team": "a b",
            "site": "x",
        }
    ]  # fmt: skip
    facts = [attributes for name, _, _, attributes, _ in collector.points() if name == "headway.run.info"]
    assert facts[-1]["headway.git.commit"] == "0123abc" and facts[-1]["headway.dataset.corpus"] == "d" * 64
    states = [(attributes, time) for name, _, time, attributes, _ in collector.points() if name == "headway.run.status"]
    assert states == [({"status": "finished"}, 2002 * 10**9)]
    messages = {
        metric.name: metric
        for request in collector.requests
        for resource in request.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert (messages["headway.speed.step_seconds"].unit, messages["headway.train.loss"].unit) == ("s", "1")
    assert "Mean loss" in messages["headway.train.loss"].description and not messages["headway.my.own"].description

    before = len(list(collector.points()))
    append(run, steps(3, 6, 2))  # of which two were repeated
    send(run, collector.endpoint)
    losses = [value for _, value in collector.values("headway.train.loss")]
    assert losses == [1 / step for step in range(1, 7)]
    assert len(list(collector.points())) > before


def test_a_batch_that_may_have_arrived_is_sent_again_the_same(collector: Collector, tmp_path: Path) -> None:
    run = write_run(tmp_path, steps(1, 4))
    send(run, collector.endpoint)
    cursor = next((run / "tracking").glob("opentelemetry-*.json"))
    known = json.loads(cursor.read_text())
    cursor.write_text(json.dumps({**known, "place": 0, "pending": known["place"]}))  # as a kill leaves it
    send(run, collector.endpoint)
    values = collector.values("headway.train.loss")
    assert len(values) == 8 and values[:4] == values[4:]


def test_changed_steps_are_another_instance(collector: Collector, tmp_path: Path) -> None:
    records = [*steps(1, 4), *steps(3, 5, 2, factor=3.0)]
    send(write_run(tmp_path, records, outcomes=("died", "finished"), configs=("one", "two")), collector.endpoint)
    found: dict[str, list[float]] = {}
    for name, value, _, _, resource in collector.points():
        if name == "headway.train.loss":
            found.setdefault(resource["service.instance.id"], []).append(value)
    assert found == {"ab" * 16: [1, 1 / 2, 1 / 3, 1 / 4], f"{'ab' * 16}-1": [3 / 3, 3 / 4, 3 / 5]}


@pytest.mark.parametrize(("code", "error"), [(400, Refused), (403, Refused), (413, Refused), (503, HeadwayError)])
def test_a_collector_that_refuses_ends_the_follower(
    collector: Collector, tmp_path: Path, code: int, error: type[HeadwayError]
) -> None:
    run = write_run(tmp_path, steps(1, 4))
    collector.code = code
    with pytest.raises(error) as raised:
        send(run, collector.endpoint)
    assert isinstance(raised.value, Refused) == (code < 500) and str(code) in raised.value.what
    collector.code = 200
    send(run, collector.endpoint)
    assert [value for _, value in collector.values("headway.train.loss")] == [1 / step for step in range(1, 5)]


def test_points_that_are_rejected_are_told_once(
    collector: Collector, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    collector.rejected = 3
    send(write_run(tmp_path, steps(1, 4)), collector.endpoint)
    assert capsys.readouterr().err.count("rejects 3 points: too old") == 1


def test_what_is_wrong_is_found_before_the_first_step(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(what: str, endpoint: str | None = None) -> Any:
        with pytest.raises(ConfigError, match=what) as raised:
            check_trackers([tracker(endpoint)])
        return raised.value

    check_trackers([tracker(collector.endpoint)])
    assert not collector.requests, "nothing is sent"
    collector.token = "Bearer good one"
    error = refused("refuses access", collector.endpoint)
    assert "OTEL_EXPORTER_OTLP_HEADERS" in str(error.fix)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Bearer%20good%20one")
    check_trackers([tracker(collector.endpoint)])
    error = refused("no OpenTelemetry collector: it answers 404", f"{collector.endpoint}/other")
    assert "track.0.opentelemetry.endpoint" in str(error.fix)
    collector.close()
    check_trackers([tracker(collector.endpoint)])
    assert "does not answer now" in capsys.readouterr().err
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Zx81qwertz")
    assert "Zx81qwertz" not in str(refused("no list of pairs", collector.endpoint))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=a%0Ab")
    refused("line end", collector.endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team: Zx81qwertz==")  # as curl takes it
    assert "Zx81qwertz" not in str(refused("a name that no header can have", collector.endpoint))
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_HEADERS")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "https://me:Zx81qwertz@h")
    assert "Zx81qwertz" not in str(refused("has a credential in it"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "host:4317")
    assert refused("no address").where == "OTEL_EXPORTER_OTLP_ENDPOINT"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "https://h")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", "/none.pem")
    refused("a certificate cannot be read")


def test_where_it_sends_follows_the_environment(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    def place(endpoint: str | None = None) -> str:
        return resolve(tracker(endpoint), "track.0").place

    assert place() == "http://localhost:4318/v1/metrics"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://one:1/")
    assert place() == "http://one:1/v1/metrics"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://two:1/mine")
    assert place() == "http://two:1/mine"
    assert place("http://three:1") == place("http://three:1/v1/metrics") == "http://three:1/v1/metrics"
