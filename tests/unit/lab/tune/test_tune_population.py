"""Population based training: what a generation begins from follows from the journal alone."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headway.core.errors import ConfigError
from headway.lab.cli.tune import tune
from headway.lab.tune.journal import FILE_NAME, TrialRecord, repair
from headway.lab.tune.population import PopulationRule, PopulationScheduler
from headway.lab.tune.scheduler import BEGINS, verdict_of
from headway.lab.tune.settings import StoppingSettings, StudySettings
from headway.lab.tune.space import parse_space
from headway.lab.tune.study import Study
from support.runs import skip_without

skip_without("optuna")

STEPS, EVERY, SIZE = 12, 4, 4
RATE, DECAY, CLIP = "optimizer.learning_rate", "optimizer.weight_decay", "train.grad_clip"
SPACE: dict[str, Any] = {
    RATE: {"log": [1e-4, 1e-1]},
    DECAY: {"uniform": [0.0, 0.3], "step": 0.1},
    CLIP: {"choice": [0.5, 1.0, 2.0]},
}
BASE = {"name": "made", "base": "quickstart", "train.steps": STEPS}


def made_study(folder: Path, **settings: Any) -> Study:
    stopping = {"name": "pbt", "population": SIZE, "every_steps": EVERY}
    values = {"space": SPACE, "sampler": "random", "stopping": stopping, "seed": 3, **settings}
    folder.mkdir(exist_ok=True, parents=True)
    return Study(folder, StudySettings.model_validate(values), BASE, folder)


def rule(**stopping: Any) -> PopulationRule:
    sign = stopping.pop("sign", 1.0)
    return PopulationRule(parse_space(SPACE, [], {}), {}, StoppingSettings(name="pbt", **stopping), sign)


def generation(*losses: float | None) -> list[TrialRecord]:
    values = {RATE: 1e-2, DECAY: 0.2, CLIP: 1.0}
    return [
        TrialRecord(number, "failed" if loss is None else "complete", {**values, RATE: 1e-3 * (number + 1)}, {}, None)
        if loss is None
        else TrialRecord(number, "complete", {**values, RATE: 1e-3 * (number + 1)}, {}, (loss,))
        for number, loss in enumerate(losses)
    ]


def begins(before: list[TrialRecord], **options: Any) -> list[int | None]:
    found = [rule(**options).next_member(before, member, seed=member) for member in range(len(before))]
    return [None if one is None else one.begins for one in found]


def test_the_worst_quarter_takes_over_from_the_best_quarter() -> None:
    before = generation(5.0, 1.0, 4.0, 8.0, 2.0, 9.0, 3.0, 6.0)
    found = begins(before)
    assert [found[member] for member in (0, 1, 2, 4, 6, 7)] == [0, 1, 2, 4, 6, 7], "the others continue their own"
    assert {found[3], found[5]} <= {1, 4}
    own = rule().next_member(before, 7, seed=0)
    assert own is not None and own.kept == {RATE: 8e-3, DECAY: 0.2, CLIP: 1.0}, "and keep their values"
    drawn = {rule().next_member(before, 5, seed).begins for seed in range(30)}  # type: ignore[union-attr]
    assert drawn == {1, 4}, "each of the best is drawn at times"


def test_a_large_objective_and_one_without_a_value_are_ranked() -> None:
    assert begins(generation(1.0, 2.0, 3.0, 4.0), sign=-1.0)[:2] == [3, 1]
    assert begins(generation(None, 2.0, 3.0, math.inf)) == [1, 1, 2, 1]
    assert begins(generation(None, None, None, math.nan)) == [None] * 4


def test_values_move_to_neighbours_and_stay_within_their_ranges() -> None:
    values = {RATE: 1e-2, DECAY: 0.2, CLIP: 1.0}
    found = [rule(resample=0.0).explored(values, random.Random(seed)) for seed in range(100)]
    assert {round(one[RATE], 12) for one in found} == {8e-3, 1.2e-2}
    assert {round(one[DECAY], 12) for one in found} == {0.1, 0.3}, "by a step at least"
    assert {one[CLIP] for one in found} == {0.5, 2.0}
    at_the_end = [rule(resample=0.0).explored({**values, RATE: 1e-1}, random.Random(seed)) for seed in range(20)]
    assert {round(one[RATE], 12) for one in at_the_end} == {8e-2, 1e-1}
    anew = [rule(resample=1.0).explored(values, random.Random(seed))[RATE] for seed in range(200)]
    assert all(1e-4 <= value <= 1e-1 for value in anew)
    assert 60 < sum(value < math.sqrt(1e-4 * 1e-1) for value in anew) < 140, "evenly by the logarithm"


def work(study: Study) -> list[Any]:
    """Do what a tuner does, with trials that are computed at once: the loss depends on the whole line of values."""
    repair(study.folder)
    journal = study.open_journal()
    journal.recover()
    scheduler = PopulationScheduler(study, journal)
    left = [one for one in journal.records if not one.has_ended]
    while True:
        record = left.pop(0) if left else scheduler.propose()
        if record is None:
            break
        for step in scheduler.thresholds(STEPS):
            checkpoint = study.run_of(record.number) / "checkpoints" / f"step-{step:08d}"
            checkpoint.mkdir(parents=True, exist_ok=True)
            (checkpoint / "manifest.json").touch()
            if verdict_of(journal.record(record.number)) is None:
                scheduler.judge(record.number, step, loss(journal.records, record, step))
        verdict = verdict_of(journal.record(record.number))
        value = loss(journal.records, record, STEPS if verdict is None else verdict[1])
        journal.end(record.number, "complete", [value])
    return [(one.number, one.state, dict(one.values), dict(one.reports), one.objectives, one.notes)
            for one in journal.records]  # fmt: skip


def loss(records: list[TrialRecord], record: TrialRecord, step: int) -> float:
    before = 0.0
    if BEGINS in record.notes:
        parent, at = record.notes[BEGINS]
        before = loss(records, records[parent], at)
    values: Mapping[str, Any] = record.values
    far = abs(math.log10(values[RATE]) + 2.5) + values[DECAY]
    return (before / 2 + far + 1) / step**2


def test_a_kill_after_a_line_of_the_journal_changes_nothing(tmp_path: Path) -> None:
    whole = work(made_study(tmp_path / "study"))
    assert len(whole) == SIZE * STEPS // EVERY
    origins = [one[5].get(BEGINS) for one in whole]
    assert origins[:SIZE] == [None] * SIZE
    for number in range(SIZE, len(whole)):
        parent, step = origins[number]
        assert step == number // SIZE * EVERY and parent // SIZE == number // SIZE - 1
    assert any(parent % SIZE != number % SIZE for number, (parent, _) in enumerate(origins[SIZE:], SIZE))
    lines = (tmp_path / "study" / FILE_NAME).read_bytes().splitlines(keepends=True)
    for count in range(1, len(lines), 7):
        killed = tmp_path / "killed" / "study"
        shutil.rmtree(killed.parent, ignore_errors=True)
        killed.mkdir(parents=True)
        (killed / FILE_NAME).write_bytes(b"".join(lines[:count]) + lines[count][: len(lines[count]) // 2])
        assert work(made_study(killed)) == whole, f"killed after line {count}"


def test_a_generation_begins_when_the_one_before_has_ended(tmp_path: Path) -> None:
    study = made_study(tmp_path, keep=1)
    journal = study.open_journal()
    scheduler = PopulationScheduler(study, journal)
    members = [scheduler.propose() for _ in range(SIZE)]
    assert all(members) and scheduler.propose() is None
    for number in range(SIZE):
        assert scheduler.judge(number, EVERY, float(number)) == "continue", "no other run could begin from it yet"
        checkpoint = study.run_of(number) / "checkpoints" / f"step-{EVERY:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").touch()
        assert scheduler.judge(number, EVERY, float(number)) == "finish"
        assert scheduler.propose() is None
        journal.end(number, "complete", [float(number)])
    following = scheduler.propose()
    assert following is not None and following.notes[BEGINS] == [0, EVERY]
    assert scheduler.kept() == set(range(SIZE + 1)), "others may still begin from all of them"
    words = scheduler.words(following)
    assert words[-5:] == ["--from", str(study.run_of(0).absolute()), "--step", str(EVERY), "--accept-changes"]
    assert "checkpoint.keep_every='4 steps'" in scheduler.words(journal.record(0))


def test_the_best_member_names_the_run_that_it_began_from(tmp_path: Path) -> None:
    study = made_study(tmp_path / "study")
    study.save()
    found = work(study)
    done = CliRunner().invoke(tune, ["best", str(tmp_path / "study")])
    assert done.exit_code == 0, done.output
    (best,) = (one for one in found if done.output.startswith(f"trial {one[0]}:"))
    parent, step = best[5][BEGINS]
    assert f"runs/{parent:04d}, step {step}" in done.output.replace("\n", "")
    assert "again" not in done.output, "no command alone trains it again"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"space": {"model.layers": [2, 4]}}, "another model.layers"),
        ({"space": {"optimizer.name": ["adamw", "muon"]}}, "another optimizer.name"),
        ({"launcher": "slurm"}, "on one machine"),
    ],
)
def test_what_cannot_change_within_a_run_is_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    study = made_study(tmp_path, **settings)
    with pytest.raises(ConfigError, match=words):
        PopulationScheduler(study, study.open_journal())
