"""Dashboards and alert rules as data: made of the catalogue, whole, and as Grafana's library makes them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from headway.cli.application import application
from headway.core.errors import ConfigError
from headway.telemetry.catalogue import CATALOGUE, Unit
from headway.tracking.alert_rules import RULES, rules_document
from headway.tracking.dashboards import _UNITS, BOARDS, dashboard, export_dashboards, panel_of, panels, promql

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


def test_every_unit_is_one_of_grafana() -> None:
    assert set(_UNITS) == set(Unit)
    for name in CATALOGUE:
        assert panel_of(name).unit in {*_UNITS.values(), "binBps"}


def test_a_name_that_is_not_in_the_catalogue_is_refused() -> None:
    with pytest.raises(AssertionError, match="train/nothing is not in the catalogue"):
        promql("{train/nothing}")


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
    with pytest.raises(ConfigError, match="grafana-foundation-sdk is not installed"):
        export_dashboards(tmp_path)
