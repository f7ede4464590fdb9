"""From a suite to cells: axes, overrides, refusals, and what a result belongs to."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.core.errors import ConfigError
from headway.core.requirements import install_command
from headway.lab.bench import matrix
from headway.lab.bench.matrix import cell_config, cells_of, plan_matrix, unused_patterns
from headway.lab.bench.suite import built_in_suites, load_suite

ENVIRONMENT = {"machine": "one"}


def suite(folder: Path, text: str, *overrides: str, accelerator: bool = True):  # type: ignore[no-untyped-def]
    path = folder / "own.yaml"
    path.write_text(text)
    return load_suite(str(path), overrides, accelerator=accelerator)


@pytest.mark.parametrize("name", built_in_suites())
@pytest.mark.parametrize("accelerator", [True, False])
def test_built_in_suites_have_cells_that_the_config_accepts(name: str, accelerator: bool) -> None:
    found = load_suite(name, accelerator=accelerator)
    for planned in plan_matrix(found, ENVIRONMENT):
        assert planned.refused is None or "DeepSpeed is not installed" in planned.refused, planned


def test_the_strategy_suite_is_what_it_is_said_to_be() -> None:
    found = load_suite("strategies")
    assert set(found.strategy) == {"ddp", "fsdp", "zero1", "zero2", "zero3", "deepspeed_zero2", "deepspeed_zero3"}
    assert found.workers == [1, 2, 4] and found.model == ["117m"]
    config = cell_config(found, next(iter(cells_of(found))))
    assert (config.model.layers, config.model.heads, config.model.dim) == (12, 12, 768)


def test_axes_multiply_and_overrides_reach_suite_and_config(tmp_path: Path) -> None:
    found = suite(
        tmp_path,
        "strategy: [ddp, zero1]\nworkers: 2\nmodel: 1m\nsequence_length: [32]",
        "workers=1,2",
        "micro_batch=[1, 4]",
        "optimizer.name=lion",
        "config.train.max_grad_norm=0.5",
    )
    cells = list(cells_of(found))
    assert len(cells) == len({cell.name for cell in cells}) == 2 * 2 * 2
    assert [cell.workers for cell in cells] == [1] * 4 + [2] * 4
    config = cell_config(found, cells[-1])
    assert config.optimizer.name == "lion" and config.train.max_grad_norm == 0.5
    assert config.parallel.workers == 2 and config.train.micro_batch == 4 and config.train.global_batch == 8


def test_weak_cells_grow_with_workers_and_strong_ones_share_the_largest_batch(tmp_path: Path) -> None:
    found = suite(
        tmp_path,
        "workers: [1, 4]\nmodel: 1m\nsequence_length: 32\nmicro_batch: 2\nmicro_batches: 3\nscaling: [weak, strong]",
    )
    rows = {(cell.scaling, cell.workers): cell_config(found, cell).train.global_batch_rows for cell in cells_of(found)}
    assert rows == {("weak", 1): 6, ("weak", 4): 24, ("strong", 1): 24, ("strong", 4): 24}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("strategie: [ddp]", "did you mean strategy?"),
        ("strategy: [zero4]", "there is no strategy 'zero4'; did you mean zero"),
        ("model: [118m]", "there is no model '118m'; did you mean"),
        ("model: 1m\nconfig: {train: {precison: fp32}}", "did you mean train.precision?"),
        ("workers: [0]", "workers"),
        ("on_cpu: {stepps: 3}", "did you mean steps?"),
        ("model: 1m\nfaults: [{workers: 1, order: kill}]", "there is no such fault: 'kill'"),
        ("faults: [{strategy: zero4, order: kill@step=1}]", "there is no strategy 'zero4'; did you mean zero"),
        ("exclude: [{model: 118m, reason: why}]", "there is no model '118m'; did you mean"),
        ("model: 1m\nconfig: {parallel: {tensor: two}}", "parallel.tensor: should be a valid integer"),
        ("model: 1m\nconfig: {parallel: two}", "parallel"),
        (
            "strategy: [ddp, deepspeed_zero2]\nconfig: {optimizer: {nam: lion}}",
            "did you mean optimizer.name?",
        ),
    ],
)
def test_what_is_wrong_is_said_with_the_nearest_known_name(
    tmp_path: Path, text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        plan_matrix(suite(tmp_path, text), ENVIRONMENT)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("train.precision", "bf16", "precision=bf16"),
        ("parallel.strategy", "zero2", "strategy=zero2"),
        ("parallel.workers", "2", "workers=2"),
        ("model.preset", "4m", "model=4m"),
        ("model.vocab_size", "64", "vocab_size=64"),
        ("train.global_batch", "64", "micro_batches=..."),
        ("train.tokens", "1000", "steps=..."),
    ],
)
def test_no_key_of_the_config_makes_a_cell_something_else_than_its_name(
    tmp_path: Path, key: str, value: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as error:
        plan_matrix(suite(tmp_path, "model: 1m\nsequence_length: 32", f"{key}={value}"), ENVIRONMENT)
    assert error.value.where == f"config.{key}" and error.value.fix == f"{fix} in its place"


def test_a_suite_that_is_not_there_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean strategies"):
        load_suite("strategy")


def test_cells_that_cannot_run_have_a_reason_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = suite(
        tmp_path,
        "strategy: [ddp, single, deepspeed_zero2]\nworkers: [1, 2]\nmodel: 1m\nsequence_length: 32\n"
        "exclude: [{strategy: ddp, workers: 1, reason: known already}]",
    )
    monkeypatch.setattr(matrix, "find_spec", lambda name: None)
    planned = {(p.cell.strategy, p.cell.workers): p for p in plan_matrix(found, ENVIRONMENT)}
    assert planned["ddp", 2].config is not None and planned["single", 1].config is not None
    assert planned["ddp", 1].excluded == "known already" and planned["ddp", 1].config is None
    assert "cannot use 2 data-parallel workers" in str(planned["single", 2].refused)
    assert planned["deepspeed_zero2", 1].refused == f"DeepSpeed is not installed ({install_command('deepspeed')})"


def test_machines_without_accelerator_have_shapes_of_their_own(tmp_path: Path) -> None:
    text = "model: 7b\nprecision: bf16\non_cpu: {model: 1m, precision: fp32}"
    assert suite(tmp_path, text).model == ["7b"]
    small = suite(tmp_path, text, accelerator=False)
    assert small.model == ["1m"] and small.description == "shapes for a machine without accelerator"
    assert suite(tmp_path, f"description: why\n{text}", accelerator=False).description.startswith("why; shapes")
    assert suite(tmp_path, "model: 1m", accelerator=False).description == "", "it has nothing else for processors"
    assert suite(tmp_path, text, "model=4m", accelerator=False).model == ["4m"], "what is typed comes last"


def test_a_result_belongs_to_cell_measurement_and_environment(tmp_path: Path) -> None:
    text = "strategy: ddp\nmodel: 1m\nsequence_length: 32\n"

    def key(*overrides: str, environment: dict[str, str] = ENVIRONMENT) -> str:
        (planned,) = plan_matrix(suite(tmp_path, text, *overrides), environment)
        return planned.key

    first = key()
    assert key("repeats=9", "timeout_seconds=5", "retries=2") == first
    assert key("faults=[{workers: 2, order: kill@step=1}]") == first, "a fault of other cells"
    others = [
        key("steps=11"),
        key("seed=1"),
        key("optimizer.name=lion"),
        key("faults=[{strategy: ddp, order: kill@step=1}]"),
        key(environment={"machine": "two"}),
    ]
    assert len({first, *others}) == 6


@pytest.mark.parametrize(
    ("override", "kinds"),
    [
        ("parallel.tensor=2", {1: False, 2: True}),
        ("train.lanes=3", {1: False, 2: False, 3: True}),
        ("parallel.context=2", {2: True}),
    ],
)
def test_what_some_cells_can_do_is_planned_for_them(tmp_path: Path, override: str, kinds: dict[int, bool]) -> None:
    workers = ",".join(map(str, kinds))
    found = suite(tmp_path, "model: 1m\nsequence_length: 32", f"workers={workers}", override)
    assert {p.cell.workers: p.config is not None for p in plan_matrix(found, ENVIRONMENT)} == kinds


def test_what_no_cell_can_do_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    found = suite(tmp_path, "model: 1m\nsequence_length: 32\nstrategy: [ddp, zero3]", "parallel.tensor=2")
    with pytest.raises(ConfigError, match="cannot be arranged as tensor 2"):
        plan_matrix(found, ENVIRONMENT)
    every = "exclude: [{workers: 1, reason: why}]"
    assert plan_matrix(suite(tmp_path, f"model: 1m\n{every}", "parallel.tensor=2"), ENVIRONMENT)[0].excluded == "why"


def test_values_that_are_there_twice_make_one_cell(tmp_path: Path) -> None:
    twice = ("workers=1,1", "model=1m,1M", "precision=fp32,fp32", "scaling=weak,weak", "strategy=ddp,ddp")
    assert len(list(cells_of(suite(tmp_path, "micro_batch: [1, 1]", *twice)))) == 1


def test_patterns_that_fit_no_cell_are_named_and_models_are_written_in_any_case(tmp_path: Path) -> None:
    text = "model: 1m\nexclude: [{model: 1M, workers: 2, reason: a}, {model: 4m, reason: b}]\n"
    found = suite(tmp_path, text + "faults: [{workers: 3, order: kill@step=1}]", "workers=1,2")
    assert list(unused_patterns(found)) == ["exclude: no cell has model 4m", "faults: no cell has workers 3"]
