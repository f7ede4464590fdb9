"""Dashboards and alert rules as data: made of the catalogue, whole, and as Grafana's library makes them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from headway.cli.application import application
from headway.config.loading.complaints import known_keys
from headway.core.errors import ConfigError
from headway.telemetry.catalogue import CATALOGUE, Unit
from headway.tracking.alert_rules import RULES, rules_document
from headway.tracking.dashboards import _UNITS, BOARDS, dashboard, export_dashboards, panel_of, panels, promql
from headway.tracking.kubernetes import Cluster, export_alerts

WANTED = {"training", "gpus", "system", "communication", "throughput", "checkpoints", "cost", "fleet"}
PROMETHEUS_NAMES = {entry.prometheus_name for entry in CATALOGUE.values()} | {"headway_build_info"}


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"headway_\w+", expression))


def test_every_expression_is_of_the_catalogue() -> None:
    expressions = [text for board in BOARDS for panel in panels(board) for text in panel.expressions.values()]
    for expression in [*map(promql, expressions), *(rule.promql for rule in RULES)]:
        assert names_in(expression) and names_in(expression) <= PROMETHEUS_NAMES, expression
        assert not re.search(r"\{\w+/|\{\{", expression), expression
    assert all('run=~"$run"' in promql(expression) for expression in expressions)


def test_alerts_advise_with_keys_of_the_config() -> None:
    keys = {*known_keys()}
    sections = {key.partition(".")[0] for key in keys}
    words = [word for rule in RULES for word in re.findall(r"\b[a-z]+\.[a-z_]+\b", rule.fix)]
    advised = {word for word in words if word.partition(".")[0] in sections and not word.endswith((".md", ".yaml"))}
    assert len(advised) > 5 and advised <= keys


def test_every_unit_is_one_of_grafana() -> None:
    assert set(_UNITS) == set(Unit)
    for name in CATALOGUE:
        assert panel_of(name).unit in {*_UNITS.values(), "binBps"}


def test_a_name_that_is_not_in_the_catalogue_is_refused() -> None:
    with pytest.raises(AssertionError, match="train/nothing is not in the catalogue"):
        promql("{train/nothing}")


def _objects(folder: Path, *words: str) -> dict[str, dict[str, dict[str, object]]]:
    """The objects of Kubernetes that commands write, by kind and name."""
    for verb in (["dashboards", "export"], ["alerts", "export", *words]):
        done = CliRunner().invoke(application([verb[0]]), [*verb, str(folder), "--kubernetes", "--namespace", "team"])
        assert done.exit_code == 0, done.output
    found: dict[str, dict[str, dict[str, object]]] = {}
    for path in folder.glob("headway-*.yaml"):
        for one in yaml.safe_load_all(path.read_text()):
            assert one["metadata"]["namespace"] == "team"
            found.setdefault(one["kind"], {})[one["metadata"]["name"]] = one
    return found


def test_objects_of_kubernetes_hold_the_same_dashboards_and_rules(tmp_path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate").validate
    found = _objects(tmp_path, "--image", "registry/headway:1", "--claim", "runs", "--release", "stack")
    assert {kind: len(names) for kind, names in found.items()} == {
        "ConfigMap": len(BOARDS), "PrometheusRule": 1, "Deployment": 1, "Service": 1, "ServiceMonitor": 1,
    }  # fmt: skip
    maps, monitoring = found["ConfigMap"], ("PrometheusRule", "ServiceMonitor")
    for kind in found.keys() - set(monitoring):
        for one in found[kind].values():
            validate(one, "1.37", strict=True)
    for board in BOARDS:
        one: Any = maps[f"headway-{board}-dashboard"]
        assert json.loads(one["data"][f"headway-{board}.json"]) == dashboard(board)
        assert one["metadata"]["labels"] == {"grafana_dashboard": "1"}, "what the sidecar looks for"
    rule: Any = found["PrometheusRule"]["headway-alerts"]
    assert rule["spec"] == rules_document() and rule["metadata"]["labels"]["release"] == "stack"
    pod: Any = found["Deployment"]["headway-exporter"]["spec"]
    service: Any = found["Service"]["headway-exporter"]
    monitor: Any = found["ServiceMonitor"]["headway-exporter"]
    assert service["spec"]["selector"] == pod["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (container,), (endpoint,) = pod["template"]["spec"]["containers"], monitor["spec"]["endpoints"]
    assert "--tls-cert" in container["command"] and container["env"][1]["name"] == "HEADWAY_METRICS_TOKEN"
    token = container["env"][1]["valueFrom"]["secretKeyRef"]
    assert (endpoint["scheme"], endpoint["authorization"]["credentials"]) == ("https", token)
    values = yaml.safe_load((tmp_path / "kube-prometheus-stack-values.yaml").read_text())
    assert values["grafana"]["sidecar"]["dashboards"]["label"] == "grafana_dashboard"
    dcgm = yaml.safe_load((tmp_path / "dcgm-exporter-values.yaml").read_text())["serviceMonitor"]
    (machine,) = dcgm["metricRelabelings"]
    assert re.fullmatch(machine["regex"], "tiny-0-x7k2p")[1] == "tiny-0"  # type: ignore[index]
    assert "Deployment" not in _objects(tmp_path / "without")


def test_an_exporter_without_its_image_or_its_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs an image with Headway and the claim with the runs"):
        export_alerts(tmp_path / "none", Cluster("team", "stack", claim="runs"))
    assert not (tmp_path / "none").exists()


def test_dashboards_are_those_that_are_wanted() -> None:
    assert set(BOARDS) == WANTED
    for board in BOARDS:
        made = dashboard(board)
        assert made["uid"] == f"headway-{board}" and made["schemaVersion"]
        assert [variable["name"] for variable in made["templating"]["list"]] == ["datasource", "run"]
        assert [panel["title"] for panel in made["panels"]] == [panel.title for panel in panels(board)]
        places = [(one["gridPos"]["x"], one["gridPos"]["y"]) for one in made["panels"]]
        assert len(set(places)) == len(places), "no panel covers another"
        for panel, source in zip(made["panels"], panels(board), strict=True):
            assert [target["expr"] for target in panel["targets"]] == list(map(promql, source.expressions.values()))
            assert panel["options"]["legend"]["showLegend"]


def test_rules_have_what_a_person_needs() -> None:
    rules = rules_document()["groups"][0]["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules) == len(RULES)
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"].endswith((".", "RUN"))
        assert re.fullmatch(r"\d+m", rule["for"])


def test_both_are_exported(tmp_path: Path) -> None:
    done = CliRunner().invoke(application(["dashboards", "alerts"]), ["dashboards", "export", str(tmp_path / "boards")])
    assert done.exit_code == 0, done.output
    files = sorted(path.name for path in (tmp_path / "boards").iterdir())
    assert files == sorted(f"headway-{board}.json" for board in BOARDS)
    assert json.loads((tmp_path / "boards" / "headway-cost.json").read_text()) == dashboard("cost")
    done = CliRunner().invoke(application(["dashboards", "alerts"]), ["alerts", "export", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert yaml.safe_load((tmp_path / "headway-alerts.yaml").read_text()) == rules_document()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(application(["alerts"]), ["alerts", "export", str(tmp_path / "file")])
    assert isinstance(done.exception, ConfigError) and "cannot be written" in str(done.exception)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "grafana_foundation_sdk", None)
    with pytest.raises(ConfigError, match="needs the package 'grafana-foundation-sdk'"):
        export_dashboards(tmp_path)
