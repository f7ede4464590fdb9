"""Spaces: ranges, conditions and constraints; what is wrong with one is refused with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import ConfigError
from headway.lab.tune.expressions import Expression
from headway.lab.tune.settings import Objective, load_settings
from headway.lab.tune.space import parse_space

BASE = {"model.dim": 64, "model.heads": 4, "optimizer.name": "adamw", "train.steps": 100}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("model.dim % model.heads == 0", True),
        ("optimizer.name == 'adamw' and not model.dim > 64", True),
        ("optimizer.name in ['muon', 'lion']", False),
        ("2 * model.heads - 1", 7),
        ("-model.heads ** 2", -16),
        ("min(model.dim, 10) // 3", 3),
        ("1 < model.heads < 4", False),
        ("true and null == null", True),
    ],
)
def test_an_expression_is_computed(text: str, value: object) -> None:
    assert Expression(text)(BASE) == value


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "model.dim.__class__()",
        "[x for x in [1]]",
        "(lambda: 1)()",
        "model['dim']",
        "f'{model.dim}'",
        "model.dim = 3",
        "open('/etc/passwd')",
        "9 if model.dim else 3",
        "1" * 501,
    ],
)
def test_what_is_no_expression_over_keys_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expression|characters"):
        Expression(text)


@pytest.mark.parametrize("text", ["9 ** 9 ** 9 > 0", "'a' * 9999999999 == 1", "model.dim / 0", "model.dim < 'a'"])
def test_an_expression_without_a_value_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="has no value here"):
        Expression(text)(BASE)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"log": [0, 1]}, "0 has no logarithm"),
        ({"log_int": [0, 8]}, "0 has no logarithm"),
        ({"uniform": [1, 1]}, "the range from 1 to 1 is empty"),
        ({"int": [8, 2]}, "the range from 8 to 2 is empty"),
        ({"int": [1.5, 2]}, "whole"),
        ({"choice": []}, "at least one value"),
        ({"choice": [1, 1]}, "given twice"),
        ({"uniform": [0, 1], "step": 0}, "a step is a number above 0"),
        ({"logarithmic": [1, 2]}, "has one of the kinds"),
        ({"log": [1, 2], "choice": [1]}, "has one of the kinds"),
        (3, "has one of the kinds"),
        ({"choice": [1], "when": "nothing.here > 1"}, "nothing.here"),
        ({"choice": [1], "when": "import os"}, "not an expression"),
    ],
)
def test_a_wrong_range_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_space({"model.layers": given}, (), BASE)
    assert "model.layers" in str(caught.value.where)
    assert caught.value.fix


def test_a_constraint_over_an_unknown_key_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"names model\.width"):
        parse_space({"model.layers": [1, 2]}, ["model.width > 3"], BASE)


def test_an_empty_space_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to search"):
        parse_space({}, (), BASE)


def test_a_grid_has_each_point_once_and_none_that_breaks_a_constraint() -> None:
    given = {
        "optimizer.name": ["adamw", "muon"],
        "optimizer.momentum": {"uniform": [0.8, 0.9], "step": 0.05, "when": "optimizer.name == 'muon'"},
        "model.heads": {"int": [3, 5]},
    }
    space = parse_space(given, ["model.dim % model.heads == 0"], BASE)
    points = [tuple(point.values()) for point in space.grid(BASE)]
    assert points == [("adamw", 4), ("muon", 0.8, 4), ("muon", pytest.approx(0.85), 4), ("muon", pytest.approx(0.9), 4)]


def test_lists_are_choices_too() -> None:
    space = parse_space({"optimizer.betas": [[0.9, 0.95], [0.9, 0.99]]}, (), BASE)
    found = space.ranges[0]
    assert found.names == ("[0.9, 0.95]", "[0.9, 0.99]")
    assert found.value_of("[0.9, 0.99]") == [0.9, 0.99]


def test_a_file_of_ranges_alone_is_a_space_and_options_come_on_top(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text("train.learning_rate: {log: [1e-5, 1e-2]}\n")
    found = load_settings(path, {"trials": 7, "sampler.name": "grid", "seed": None})
    assert found.space == {"train.learning_rate": {"log": [1e-5, 1e-2]}}
    assert (found.trials, found.sampler.name, found.seed) == (7, "grid", 0)
    path.write_text("space: {model.layers: [1]}\nsampler: {name: tpe, options: {n_startup_trials: 3}}\n")
    found = load_settings(path, {"sampler.name": "random"})
    assert (found.sampler.name, found.sampler.options) == ("random", {"n_startup_trials": 3})


def test_a_wrong_key_of_a_study_has_its_line_and_the_nearest_one(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text("space: {model.layers: [1]}\n\nsampeler: tpe\n")
    with pytest.raises(ConfigError, match="unknown key 'sampeler'") as caught:
        load_settings(path, {})
    assert caught.value.where == f"{path}:3"
    assert caught.value.fix == "did you mean sampler?"


@pytest.mark.parametrize(
    ("settings", "values", "counts"),
    [
        ({}, [3.0, 1.0, 2.0], 2.0),
        ({"of": "best"}, [3.0, 1.0, 2.0], 1.0),
        ({"of": "best", "direction": "maximize"}, [3.0, 1.0, 2.0], 3.0),
        ({"of": "best"}, [3.0, float("nan")], 3.0),
        ({}, [3.0, float("nan")], float("inf")),
        ({"direction": "maximize"}, [float("inf")], float("-inf")),
        ({"diverged": 99.0}, [float("nan")], 99.0),
        ({}, [], None),
    ],
)
def test_the_value_of_a_run(settings: dict[str, Any], values: list[float], counts: float | None) -> None:
    assert Objective.model_validate(settings).value_in(values) == counts
