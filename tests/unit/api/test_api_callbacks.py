"""Callbacks given to `headway.train`, named in a config, and modules trained by the same function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headway
from headway.core.errors import ConfigError
from headway.training.job import Callback, load_callbacks
from support.runs import config_values, state_hash, write_config, write_corpus
from support.runs import headway as run_headway

MODULE = """
import os
from pathlib import Path
from headway import Callback

class Steps(Callback):
    def on_step(self, job, step, metrics):
        metrics["mine/double"] = 2.0 * step
        with Path("steps.txt").open("a") as file:
            file.write(f"{os.environ.get('RANK', '0')} {step}\\n")

class Needs(Callback):
    def __init__(self, value):
        self.value = value

class Stranger:
    pass
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_callbacks.py").write_text(MODULE, encoding="utf-8")
    write_corpus(tmp_path)
    assert run_headway("data", "prepare", write_config(tmp_path)).returncode == 0
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Squares:
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([index / 16.0]), "y": torch.tensor([index**2 / 256.0])}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    difference: torch.Tensor = model(batch["x"]) - batch["y"]
    return difference.square().mean()


class Count(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step(self, job: Any, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(step)


def test_a_language_model_is_trained_with_callbacks_given_and_named(own_module: Path) -> None:
    count = Count()
    values = config_values(own_module)
    values["train"]["steps"] = 3
    values["callbacks"] = ["own_callbacks:Steps"]
    run = headway.train(headway.Config.model_validate(values), callbacks=[count])
    assert count.steps == [1, 2, 3]
    assert (own_module / "steps.txt").read_text().split() == ["0", "1", "0", "2", "0", "3"]
    assert run.metrics.last("mine/double") == 6.0


def test_every_worker_makes_the_callbacks_that_a_config_names(own_module: Path) -> None:
    config = write_config(own_module)
    done = run_headway("train", config, "train.steps=2", "parallel.workers=2", "callbacks=[own_callbacks:Steps]")
    assert done.returncode == 0, done.stderr
    assert sorted((own_module / "steps.txt").read_text().splitlines()) == ["0 1", "0 2", "1 1", "1 2"]


def test_objects_do_not_go_to_worker_processes(own_module: Path) -> None:
    values = config_values(own_module)
    values["parallel"] = {**values.get("parallel", {}), "workers": 2}
    with pytest.raises(ConfigError, match="objects of this process"):
        headway.train(headway.Config.model_validate(values), callbacks=[Count()])


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("own_callbacks:Missing", "no class Missing"),
        ("no_such_module:Steps", "cannot be imported"),
        ("own_callbacks:Needs", "cannot be made"),
        ("own_callbacks:Stranger", "is no callback"),
    ],
)
def test_a_name_that_gives_no_callback_is_refused(own_module: Path, name: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as refused:
        load_callbacks([name])
    assert refused.value.where == "callbacks.0" and refused.value.fix


def test_a_dry_run_refuses_them_too(own_module: Path) -> None:
    config = write_config(own_module)
    done = run_headway("train", config, "callbacks=[own_callbacks:Missing]", "--dry-run")
    assert done.returncode == 2 and "no class Missing" in done.stderr


def test_what_is_no_name_of_a_class_is_refused_as_config() -> None:
    with pytest.raises(Exception, match="callbacks"):
        headway.Config.model_validate({"callbacks": ["no class"]})


def test_a_module_is_trained_by_the_same_function(tmp_path: Path) -> None:
    values = {
        "runs": str(tmp_path),
        "train": {"steps": 4, "global_batch": 8, "device": "cpu"},
        "parallel": {"threads": 1},
        "telemetry": {"report": False},
    }
    by_function = headway.Config.model_validate({**values, "name": "function"})
    by_trainer = headway.Config.model_validate({**values, "name": "trainer"})
    count = Count()
    run = headway.train(
        by_function, model=model(), dataset=Squares(), loss=loss, validation=Squares(), callbacks=[count]
    )
    headway.Trainer(model(), Squares(), loss, by_trainer, validation=Squares()).fit()
    assert count.steps == [1, 2, 3, 4] and run.validation_loss is not None
    assert state_hash(tmp_path / "function") == state_hash(tmp_path / "trainer")


@pytest.mark.parametrize("given", [{"model": nn.Linear(1, 1)}, {"dataset": Squares()}, {"validation": Squares()}])
def test_what_belongs_together_is_asked_for(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="dataset"):
        headway.train(headway.Config.model_validate({"train": {"steps": 1}}), **given)


def test_public_names_are_found_in_a_notebook() -> None:
    assert dir(headway) == sorted([*headway.__all__, "__version__"]), "the public names, and no others"
    assert all(getattr(headway, name) is not None for name in headway.__all__)
