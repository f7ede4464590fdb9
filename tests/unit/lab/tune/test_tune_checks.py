"""What is refused before the first trial, and what a study's folder keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import CheckpointError, ConfigError, HeadwayError
from headway.core.machine.cores import usable_cores
from headway.data.made_of import made_of
from headway.lab.tune.checks import check_study
from headway.lab.tune.settings import StudySettings
from headway.lab.tune.study import Study, new_study, open_study
from headway.lab.tune.trial_run import HistoryReader
from support.runs import skip_without, write_config, write_corpus
from support.tune import write_study

skip_without("optuna")

LAYERS: dict[str, Any] = {"model.layers": [1, 2]}


def study_of(folder: Path, config: Path, space: dict[str, Any], *overrides: str, **settings: Any) -> Study:
    values = StudySettings.model_validate({"space": space, **settings})
    return new_study(config, list(overrides), values, folder / "study")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    return write_config(tmp_path)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({"model.layer": [1, 2]}, "unknown key 'model.layer'"),
        ({"model.layers": {"int": [3, 3]}}, "is empty"),
        ({"optimizer.learning_rate": {"log": [0, 1]}}, "0 has no logarithm"),
        ({"name": ["a", "b"]}, "its own name"),
        ({"data.store": ["a", "b"]}, r"its own data\.store"),
        ({}, "nothing to search"),
    ],
)
def test_a_space_that_no_trial_could_keep_is_refused(
    tmp_path: Path, config: Path, space: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        study_of(tmp_path, config, space)
    assert caught.value.fix
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    ("settings", "overrides", "words"),
    [
        ({"objective": "evaluation/accuracy"}, (), "no run of this config reports evaluation/accuracy"),
        ({}, ("data.validation=0",), r"no run of this config reports evaluation/loss"),
        ({"stopping": "asha"}, ("evaluation.every=null",), "none before the end"),
        ({"stopping": "asha", "objective": ["train/loss", "evaluation/loss"]}, (), "by one objective"),
        ({"budget": {"usd": 3}}, (), "needs the price"),
        ({"at_a_time": 1000}, (), f"need 1000 processors, and there are {usable_cores()}"),
        ({"at_a_time": 2, "workers_per_trial": 500}, ("train.global_batch=1000",), "2 trials at a time with 500"),
    ],
)
def test_what_the_config_or_the_machine_does_not_have_is_refused(
    tmp_path: Path, config: Path, settings: dict[str, Any], overrides: tuple[str, ...], words: str
) -> None:
    study = study_of(tmp_path, config, LAYERS, *overrides, **settings)
    with pytest.raises(HeadwayError, match=words) as caught:
        check_study(study)
    assert caught.value.fix
    assert not (tmp_path / "study").exists()


def test_a_task_reports_its_metrics_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, _ = write_study(tmp_path)
    space = {"task.options.width": [2, 4]}
    assert check_study(study_of(tmp_path, config, space, objective="evaluation/loss")) == 0
    with pytest.raises(ConfigError, match="reports evaluation/f1") as caught:
        check_study(study_of(tmp_path, config, space, objective="evaluation/f1"))
    assert caught.value.fix == "the task reports train/loss, evaluation/loss"


@pytest.mark.parametrize(
    "other",
    [
        {"space": {"model.layers": [1, 3]}},
        {"overrides": ("train.steps=11",)},
        {"seed": 4},
        {"sampler": "random"},
        {"stopping": "median"},
        {"objective": "train/loss"},
    ],
)
def test_a_study_of_another_config_is_refused(tmp_path: Path, config: Path, other: dict[str, Any]) -> None:
    study_of(tmp_path, config, LAYERS).save()
    given = {"space": LAYERS, "overrides": (), **other}
    with pytest.raises(ConfigError, match="a study of another config or space") as caught:
        study_of(tmp_path, config, given.pop("space"), *given.pop("overrides"), **given)
    assert "--dir" in str(caught.value.fix)


def test_more_trials_budget_and_parallel_ones_continue_a_study(tmp_path: Path, config: Path) -> None:
    first = study_of(tmp_path, config, LAYERS, trials=2)
    first.save()
    again = study_of(tmp_path, config, LAYERS, trials=9, at_a_time=3, keep=1, budget={"usd": 2.0})
    again.save()
    kept = open_study(tmp_path / "study")
    assert (kept.settings, kept.config) == (again.settings, first.config)


def test_two_processes_do_not_work_on_one_study(tmp_path: Path, config: Path) -> None:
    study = study_of(tmp_path, config, LAYERS)
    study.save()
    assert not study.is_worked_on
    with study.claimed():
        assert study.is_worked_on
        with pytest.raises(CheckpointError, match="another process works on this study"), study.claimed():
            pass
    assert not study.is_worked_on


def test_a_folder_without_a_study_and_a_broken_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no study"):
        open_study(tmp_path)
    for text in ("", "- 1\n", "settings: {}\nconfig: {}\n", "\x00", "settings: {space: {a: 1}}\n"):
        (tmp_path / "study.yaml").write_text(text)
        with pytest.raises(HeadwayError):
            open_study(tmp_path)


@pytest.mark.parametrize(
    "text", ["{", '{"op_code": 4}\n{"op_code": 4}\n', "[]\n[]\n", "\xff\n" * 3, '{"op_code": 99}\n' * 2]
)
def test_a_broken_journal_is_an_error_with_its_place(tmp_path: Path, config: Path, text: str) -> None:
    study = study_of(tmp_path, config, LAYERS)
    study.save()
    (study.folder / "journal.log").write_text(text, encoding="latin-1")
    if text == "{":  # half a line is what a kill leaves
        with study.claimed():
            assert study.open_journal().records == []
        return
    with pytest.raises(CheckpointError, match="the journal cannot be read"):
        study.open_journal()


def test_trials_share_a_store_unless_they_change_it(tmp_path: Path, config: Path) -> None:
    study = study_of(tmp_path, config, {"data.tokenizer.vocab_size": [300, 310], **LAYERS})

    def store(values: dict[str, Any], number: int) -> str:
        words = study.words_of(values, number)
        return str(json.loads(next(word for word in words if word.startswith("data.store=")).partition("=")[2]))

    own = {"data.tokenizer.vocab_size": 300, "model.layers": 1}
    assert store(own, 0) == str(study.base.data.store)
    others = [store({"data.tokenizer.vocab_size": 310, "model.layers": layers}, 1) for layers in (1, 2)]
    assert others[0] == others[1] != store(own, 2)
    assert Path(others[0]).parent == (study.folder / "stores").absolute()
    assert made_of(study.base.data)


def test_metrics_that_were_replaced_are_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "train/loss": 4.0}\n{"step": 2, "train/loss": 3.0}\n{"step": 3, "tr')
    reader = HistoryReader(tmp_path)
    assert reader.refresh() and reader.metrics.last_step == 2
    assert not reader.refresh()
    other = tmp_path / "other"
    other.write_text('{"step": 1, "train/loss": 5.0}\n')
    other.replace(path)
    assert reader.refresh() and reader.metrics.last_step == 1 and reader.metrics.last("train/loss") == 5.0
