"""Names that users, their scripts and their files rely on are still there."""

from __future__ import annotations

from pathlib import Path

import pytest

from net import lists


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lists.train_everything(tmp_path_factory.mktemp("everything"))


def test_no_config_key_is_gone(tmp_path: Path) -> None:
    """Nor is a type, a choice or a default. A key may be gone from the reference where it is understood as an alias."""
    found = lists.config_keys()
    gone = lists.missing("config", found)
    assert lists.without_aliases(gone, found, tmp_path) == []


def test_a_key_that_is_gone_is_no_alias(tmp_path: Path) -> None:
    lines = ["train.stepz = 3", "train.steps = 3"]
    assert lists.without_aliases(lines, [], tmp_path) == lines[:1]


def test_no_verb_and_no_option_is_gone() -> None:
    assert lists.missing("verbs", lists.verbs()) == []


def test_no_name_of_the_python_interface_is_gone() -> None:
    assert lists.missing("python", lists.python_names()) == []


def test_no_name_of_a_metric_is_gone_from_a_run(everything: Path) -> None:
    assert lists.missing("metrics", lists.metrics(everything)) == []


def test_no_name_of_a_metric_and_of_a_variable_is_gone_from_the_source() -> None:
    assert lists.missing("metrics in the source", lists.metrics_in_source()) == []
    assert lists.missing("variables", lists.variables()) == []


def test_nothing_is_gone_from_a_run_directory(everything: Path, tmp_path: Path) -> None:
    assert lists.missing("files", lists.files(everything)) == []
    kept = lists.kept_copy(tmp_path) / "trained" / "earlier"
    assert lists.missing("records", lists.records(everything, kept)) == []


@pytest.mark.slow
def test_no_key_is_gone_from_results_of_commands(tmp_path: Path) -> None:
    lists.kept_copy(tmp_path)
    assert lists.missing("results", lists.results(tmp_path)) == []
