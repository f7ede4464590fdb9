"""The journal: decisions are functions of it, so a study that is killed between any two of its lines ends the same."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import ConfigError
from headway.lab.tune.journal import FILE_NAME, Journal, repair, seed_of
from headway.lab.tune.scheduler import OptunaScheduler, verdict_of
from headway.lab.tune.settings import StudySettings
from headway.lab.tune.study import Study
from headway.lab.tune.tuner import due
from support.runs import skip_without

skip_without("optuna")

STEPS = 27
BASE: dict[str, Any] = {"name": "made", "base": "quickstart", "train": {"steps": STEPS}}


def made_study(folder: Path, **settings: Any) -> Study:
    space = {
        "train.learning_rate": {"log": [1e-5, 1e-1]},
        "train.micro_batch": {"int": [1, 8]},
        "optimizer.momentum": {"uniform": [0.0, 0.9], "step": 0.1, "when": "train.micro_batch > 4"},
        "model.layers": {"choice": [2, 4, 8]},
    }
    values = {"space": space, "trials": 9, "seed": 3, **settings}
    folder.mkdir(exist_ok=True)
    base = {"name": "made", "base": "quickstart", "train.steps": STEPS}
    return Study(folder, StudySettings.model_validate(values), base, folder)


def loss(values: Mapping[str, Any], step: int) -> float:
    """A loss with a best point, of which a step tells more and more."""
    far = abs(math.log10(values["train.learning_rate"]) + 3) + abs(values["model.layers"] - 4) / 4
    return far + values.get("optimizer.momentum", 0.3) / 10 + math.sin(far * 40) / step


def work(study: Study) -> list[Any]:
    """Do what a tuner does, with trials that are computed at once."""
    repair(study.folder)
    journal = study.open_journal()
    journal.recover()
    scheduler = OptunaScheduler(study, journal)
    left = [one for one in journal.records if not one.has_ended]
    while True:
        record = left.pop(0) if left else scheduler.propose()
        if record is None:
            return [
                (one.number, one.state, dict(one.values), dict(one.reports), one.objectives, one.notes)
                for one in journal.records
            ]
        for step in scheduler.thresholds(STEPS):
            found = journal.record(record.number)
            if verdict_of(found) is not None:
                break
            if step not in found.reports:
                scheduler.judge(record.number, step, loss(record.values, step))
        if verdict_of(journal.record(record.number)) is not None:
            journal.end(record.number, "pruned")
        else:
            journal.end(record.number, "complete", [loss(record.values, STEPS)])


RULES = [("tpe", "asha"), ("random", "hyperband"), ("nsgaii", "median"), ("grid", "asha")]


def check_kills(folder: Path, sampler: str, stopping: str, every: int) -> None:
    """Cut the journal of a whole study after every so many lines, in the middle of the next one, and go on."""
    settings: dict[str, Any] = {"sampler": sampler, "stopping": {"name": stopping, "first_steps": 3}}
    if sampler == "tpe":  # so that it does not only draw at random
        settings["sampler"] = {"name": "tpe", "options": {"n_startup_trials": 2}}
    if sampler == "grid":
        settings["space"] = {"train.learning_rate": [1e-4, 1e-3, 1e-2], "model.layers": [2, 4, 8]}
    whole = work(made_study(folder / "study", **settings))
    states = {one[1] for one in whole}
    assert len(whole) == 9
    assert "complete" in states
    assert stopping == "median" or "pruned" in states, "otherwise nothing was decided"
    lines = (folder / "study" / FILE_NAME).read_bytes().splitlines(keepends=True)
    for count in range(1, len(lines), every):
        killed = folder / "killed" / "study"
        shutil.rmtree(killed.parent, ignore_errors=True)
        killed.mkdir(parents=True)
        (killed / FILE_NAME).write_bytes(b"".join(lines[:count]) + lines[count][: len(lines[count]) // 2])
        (killed / f"{FILE_NAME}.lock").symlink_to(FILE_NAME)  # the lock of the killed process
        assert work(made_study(killed, **settings)) == whole, f"killed after line {count}"


@pytest.mark.parametrize(("sampler", "stopping"), RULES)
def test_a_kill_after_a_line_changes_nothing(tmp_path: Path, sampler: str, stopping: str) -> None:
    check_kills(tmp_path, sampler, stopping, every=11)


@pytest.mark.slow
@pytest.mark.parametrize(("sampler", "stopping"), RULES)
def test_a_kill_after_any_line_changes_nothing(tmp_path: Path, sampler: str, stopping: str) -> None:
    check_kills(tmp_path, sampler, stopping, every=1)


def test_equal_seeds_give_equal_trials_and_others_do_not(tmp_path: Path) -> None:
    first, again, other = (
        work(made_study(tmp_path / name, seed=seed)) for name, seed in (("a", 5), ("b", 5), ("c", 6))
    )
    assert first == again
    assert [one[2] for one in first] != [one[2] for one in other]


def test_the_seed_of_a_trial_is_a_hash_of_seed_and_number() -> None:
    # printf '7 3' | sha256sum begins with 0f3dc674.
    assert seed_of(7, 3) == 0x0F3DC674
    assert len({seed_of(0, number) for number in range(1000)}) == 1000


def test_a_key_whose_condition_fails_is_left_alone(tmp_path: Path) -> None:
    for one in work(made_study(tmp_path / "study", trials=20, sampler="random")):
        assert ("optimizer.momentum" in one[2]) == (one[2]["train.micro_batch"] > 4)


def test_points_that_break_a_constraint_are_drawn_again(tmp_path: Path) -> None:
    study = made_study(tmp_path / "study", sampler="random", constraints=["model.layers * train.micro_batch <= 8"])
    found = work(study)
    assert len(found) == 9
    assert all(one[2]["model.layers"] * one[2]["train.micro_batch"] <= 8 for one in found)


def test_constraints_that_no_point_keeps_are_refused(tmp_path: Path) -> None:
    study = made_study(tmp_path / "study", sampler="random", constraints=["model.layers > 8"])
    with pytest.raises(ConfigError, match="none of 200 points keeps the constraints"):
        work(study)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sampler": "cmaes"}, "reads none"),
        ({"sampler": "annealing"}, "there is no sampler 'annealing'"),
        ({"sampler": {"name": "tpe", "options": {"speed": 3}}}, "speed"),
        ({"stopping": {"name": "asha", "options": {"speed": 3}}}, "speed"),
        ({"sampler": "grid"}, "a grid needs a finite number of values"),
    ],
)
def test_what_optuna_does_not_have_is_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    study = made_study(tmp_path / "study", **settings)
    with pytest.raises(ConfigError, match=words):
        OptunaScheduler(study, study.open_journal())


def test_asha_promotes_by_the_values_at_the_rungs_alone(tmp_path: Path) -> None:
    """Computed by hand: at rung 3, of losses 5, 4, 6, 3 in turn, each but the third is the lowest one so far."""
    study = made_study(tmp_path / "study", sampler="random", stopping={"name": "asha", "first_steps": 3})
    journal = study.open_journal()
    scheduler = OptunaScheduler(study, journal)
    assert scheduler.thresholds(STEPS) == [3, 9]
    verdicts = []
    for value in (5.0, 4.0, 6.0, 3.0):
        record = scheduler.propose()
        assert record is not None
        verdicts.append(scheduler.judge(record.number, 3, value))
    assert verdicts == ["continue", "continue", "prune", "continue"]


def test_a_folder_that_was_renamed_keeps_its_study(tmp_path: Path) -> None:
    found = work(made_study(tmp_path / "before", stopping={"name": "hyperband", "first_steps": 3}))
    (tmp_path / "before").rename(tmp_path / "after")
    study = made_study(tmp_path / "after", stopping={"name": "hyperband", "first_steps": 3})
    assert work(study) == found


def test_a_diverged_trial_has_the_worst_value(tmp_path: Path) -> None:
    study = made_study(tmp_path / "study")
    journal: Journal = study.open_journal()
    scheduler = OptunaScheduler(study, journal)
    for value in (study.settings.objective[0].worst, 3.0):
        record = scheduler.propose()
        assert record is not None
        journal.end(record.number, "complete", [value])
    assert [one.number for one in study.open_journal().best()] == [1, 0]


def test_of_several_objectives_the_best_trials_are_those_that_no_other_dominates(tmp_path: Path) -> None:
    objectives = ["evaluation/loss", {"metric": "speed/tokens_per_second", "direction": "maximize"}]
    study = made_study(tmp_path / "study", sampler="nsgaii", objective=objectives, trials=4, keep=9)
    journal = study.open_journal()
    scheduler = OptunaScheduler(study, journal)
    for values in ([3.0, 10.0], [2.0, 8.0], [2.5, 7.0], [1.0, 1.0]):  # the third one is worse than the second in both
        record = scheduler.propose()
        assert record is not None
        journal.end(record.number, "complete", values)
    assert {one.number for one in study.open_journal().best()} == {0, 1, 3}
    assert scheduler.kept() == {0, 1, 3}


@pytest.mark.parametrize(
    ("recorded", "thresholds", "found"),
    [
        ([(1, 5.0), (2, 4.0), (3, 3.0), (9, 2.0)], [2, 6], [(2, 4.0), (9, 2.0)]),
        ([(4, 4.0), (8, 3.0)], [2, 3, 4, 5], [(4, 4.0), (8, 3.0)]),
        ([(1, 5.0)], [2, 6], []),
        ([(12, 1.0)], [2, 6], []),
    ],
)
def test_each_threshold_is_judged_by_the_first_value_from_there_on(
    recorded: list[tuple[int, float]], thresholds: list[int], found: list[tuple[int, float]]
) -> None:
    """The value of the last step, 12, is what the trial ends with, and a step counts once."""
    assert list(due(recorded, thresholds, 12)) == found
