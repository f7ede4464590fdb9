"""Specs of strategies and optimizers: how a config names them, and that their names stand in one file each."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import headway
from headway.config import (
    Config,
    MeshShape,
    OptimizerSpec,
    StrategySpec,
    effective_strategy,
    find_optimizer,
    find_strategy,
    override,
    resolve,
)
from headway.config.optimizers import OPTIMIZERS
from headway.config.specs import Package
from headway.config.strategies import AUTO, STRATEGIES
from headway.core.errors import ConfigError
from headway.run.session.parts import check_installed_for

SOURCE = Path(headway.__file__).parent
NAMES = re.compile(rf"(?<![\w.])({'|'.join({*STRATEGIES, *OPTIMIZERS} - {AUTO})})(?![\w])")
#: Files that may have a name, and the names there: their own, words that mean something else, examples in help pages.
ALLOWED = {
    "config/strategies.py": {*STRATEGIES},
    "config/optimizers.py": {*OPTIMIZERS, "zero2"},
    "lab/cli/bench.py": {"ddp", "fsdp", "zero1", "zero3", "muon"},
    "config/loading/document.py": {"single"},
    "api/start/recipe/shapes.py": {"muon"},
    "text/importing/store.py": {"single"},
    "data/tokenizing/begin_of_text.py": {"single"},
    "lab/plan/recommend.py": {"single"},
    "lab/verify/reproducibility.py": {"single"},
    "lab/compare/intervals.py": {"single"},
    "lab/tune/space.py": {"muon"},
}


def names_in(source: str) -> Iterator[str]:
    """Names of strategies and optimizers in the strings of a module that are no docstrings."""
    tree = ast.parse(source)
    docstrings = {
        id(line.value)
        for node in ast.walk(tree)
        for line in (node.body if isinstance(getattr(node, "body", None), list) else ())  # type: ignore[attr-defined]
        if isinstance(line, ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield from NAMES.findall(node.value)


def test_a_name_of_a_strategy_or_an_optimizer_stands_in_its_own_file_only() -> None:
    found = {}
    for path in SOURCE.rglob("*.py"):
        file, source = path.relative_to(SOURCE).as_posix(), path.read_text(encoding="utf-8")
        if NAMES.search(source) and (elsewhere := set(names_in(source)) - ALLOWED.get(file, set())):
            found[file] = elsewhere
    assert found == {}


def test_a_name_in_code_or_in_a_message_is_found() -> None:
    lines = [
        '"""The strategy ddp."""',
        'if name == "zero1":',
        '    fix = f"optimizer.name=lion, {or_else}"',
        "    muon()",
    ]
    assert sorted(names_in("\n".join(lines))) == ["lion", "zero1"]


@pytest.mark.parametrize(
    ("key", "value", "what", "fix"),
    [
        ("optimizer.name", "lyon", "should be 'adamw', 'muon', 'lion', 'adafactor' or 'adamw8bit' (given: 'lyon')",
         "did you mean lion?"),
        ("parallel.strategy", "zer3", "should be 'auto', 'single', 'ddp', ", "did you mean zero3?"),
        ("parallel.strategy", "{a: 1}", "should be 'auto', ", "parallel.strategy ("),
        ("optimizer.name", "no_module:SPEC", "cannot be imported", "importable from the working directory"),
        ("parallel.strategy", "json:nothing", "the module json has no StrategySpec nothing", "check the"),
        ("optimizer.name", "json:dumps", "json:dumps is no OptimizerSpec, but a function", "OptimizerSpec"),
    ],
)  # fmt: skip
def test_a_wrong_name_is_refused_where_it_is_given(key: str, value: str, what: str, fix: str) -> None:
    with pytest.raises(ConfigError) as error:
        override(Config.model_validate({"train": {"steps": 1}}), [f"{key}={value}"])
    assert what in error.value.what and fix in error.value.fix and error.value.where == f"override '{key}={value}'"


def test_a_run_whose_spec_is_gone_can_still_be_read() -> None:
    read = Config.model_validate({"parallel": {"strategy": "gone:SPEC"}, "optimizer": {"name": "gone:SPEC"}})
    assert read.optimizer.betas == Config().optimizer.betas
    with pytest.raises(ConfigError, match="gone cannot be imported"):
        find_strategy(read.parallel.strategy)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the user with a strategy and an optimizer that have every kind of wish."""

    def problems(config: Config, asked: object) -> Iterator[ConfigError]:
        if config.seed == 7:
            yield ConfigError(f"seed 7 is bad luck: {asked}", where="seed", fix="seed=8")

    missing = Package("no_such_module", "Missing", "missing-package")
    module = ModuleType("own")
    module.STRATEGY = StrategySpec(name="mine", build="own:Mine", problems=problems, needs=missing)  # type: ignore[attr-defined]
    module.OPTIMIZER = OptimizerSpec(  # type: ignore[attr-defined]
        name="mine",
        build="own:mine",
        moment_bytes=lambda name, shape: 0,
        betas=(0.5, 0.6),
        problems=problems,
        needs_whole_rows="mine needs whole rows",
        needs=missing,
    )
    monkeypatch.setitem(sys.modules, "own", module)
    return module


def config(**sections: Any) -> Config:
    return Config.model_validate({"train": {"steps": 1, "global_batch": 8}, **sections})


MINE = {"strategy": "own:STRATEGY", "workers": 2}
SHARDS = {"strategy": "zero3", "workers": 2}


@pytest.mark.parametrize(
    ("sections", "what"),
    [
        ({"seed": 7, "parallel": MINE}, "seed 7 is bad luck: 2"),
        ({"seed": 7, "optimizer": {"name": "own:OPTIMIZER"}}, "seed 7 is bad luck: False"),
        ({"seed": 7, "optimizer": {"name": "own:OPTIMIZER"}, "parallel": SHARDS}, "seed 7 is bad luck: True"),
        ({"determinism": "elastic", "parallel": MINE}, "strategy 'own:STRATEGY' has no sum in the fixed tree"),
        ({"parallel": {**MINE, "replicate": 2}}, "strategy 'own:STRATEGY' has one level"),
        ({"optimizer": {"name": "own:OPTIMIZER"}, "parallel": {"tensor": 2, "workers": 2}}, "mine needs whole rows"),
    ],
)  # fmt: skip
def test_what_a_spec_from_outside_refuses_is_refused(own: ModuleType, sections: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(config(**sections))
    assert what in error.value.what


def test_a_spec_from_outside_is_known_by_the_name_in_the_config(own: ModuleType) -> None:
    asked = resolve(config(parallel=MINE, optimizer={"name": "own:OPTIMIZER"}))
    assert find_strategy(asked.parallel.strategy).name == "own:STRATEGY"
    assert asked.optimizer.betas == (0.5, 0.6)
    assert config(optimizer={"name": "own:OPTIMIZER", "betas": [0.1, 0.2]}).optimizer.betas == (0.1, 0.2)


def test_a_lone_worker_has_the_strategy_for_one_unless_the_strategy_works_alone(own: ModuleType) -> None:
    assert effective_strategy("own:STRATEGY", MeshShape(dp_shard=2)) == "own:STRATEGY"
    assert effective_strategy("own:STRATEGY", MeshShape()) == "single"
    own.STRATEGY = replace(own.STRATEGY, works_alone=True)
    assert effective_strategy("own:STRATEGY", MeshShape()) == "own:STRATEGY"


@pytest.mark.parametrize("section", [{"parallel": MINE}, {"optimizer": {"name": "own:OPTIMIZER"}}])
def test_a_package_that_a_spec_needs_is_missed_before_a_run(own: ModuleType, section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="needs Missing, which is not installed") as error:
        check_installed_for(config(**section))
    assert "python -m pip install missing-package, or " in (error.value.fix or "")


def test_a_name_that_the_schema_has_not_seen_is_refused_too() -> None:
    for find in (find_strategy, find_optimizer):
        with pytest.raises(ConfigError, match="there is no 'unknown'"):
            find("unknown")


def test_each_strategy_that_headway_recommends_shards_more_than_the_one_before() -> None:
    """`simplest_strategy` relies on this order, `headway plan` prefers strategies by it."""
    own = [spec for spec in STRATEGIES.values() if not spec.is_deepspeed]
    shards = [spec.shards_moments + spec.shards_gradients + spec.shards_weights for spec in own]
    assert shards == sorted(shards)


@pytest.mark.parametrize("shards", [{"shards_weights": True}, {"shards_moments": True, "shards_weights": True}])
def test_shards_of_weights_without_those_of_gradients_are_no_strategy(shards: dict[str, bool]) -> None:
    with pytest.raises(ValueError, match="shards of weights imply"):
        StrategySpec(name="odd", build="odd:Odd", **shards)  # type: ignore[arg-type]
