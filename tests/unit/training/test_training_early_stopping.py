"""Early stopping follows from the recorded evaluations, whatever ends the process in between."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.api import train
from headway.checkpoint.store import CheckpointStore
from headway.config import load_config
from headway.config.sections.early_stopping import EVALUATIONS, EarlyStoppingConfig, reason_to_stop
from headway.core.errors import ConfigError
from headway.run.directory.run_directory import RunDirectory
from headway.run.session.attempt import final_step
from headway.telemetry.record import open_run
from headway.telemetry.report import write_report
from headway.training.evaluation.early_stopping import EvaluationHistory, recorded_evaluations
from headway.training.evaluation.evaluate import Evaluation
from headway.training.job import Callback, Job


@pytest.mark.parametrize(
    ("losses", "patience", "min_delta", "stops"),
    [
        ([3.0, 2.0, 1.0, 0.5], 1, 0.0, None),
        ([3.0, 3.0], 1, 0.0, 2),
        ([3.0, 2.0, 2.5, 2.1, 1.9], 3, 0.0, None),
        ([3.0, 2.0, 2.5, 2.1, 2.0], 3, 0.0, 5),
        ([3.0, 2.95, 2.92, 2.8], 2, 0.1, 3),  # small steps add up to nothing
        ([3.0, 2.95, 2.85, 2.8], 2, 0.1, None),  # but one below the best by more does
        ([None, None], 2, 0.0, 2),
        ([3.0, None, 2.0, None, None], 2, 0.0, 5),
    ],
)
def test_patience_counts_evaluations_since_the_best(
    losses: list[float | None], patience: int, min_delta: float, stops: int | None
) -> None:
    wanted = EarlyStoppingConfig(patience=patience, min_delta=min_delta)
    found = [n for n in range(1, len(losses) + 1) if reason_to_stop(wanted, list(enumerate(losses[:n], 1)))]
    assert found[:1] == ([] if stops is None else [stops])
    assert reason_to_stop(None, list(enumerate(losses, 1))) is None


def test_evaluations_that_the_run_has_gone_back_behind_do_not_count() -> None:
    context: dict[str, Any] = {}
    history = EvaluationHistory(EarlyStoppingConfig(patience=1), context)
    for step, loss in ((10, 3.0), (20, math.nan)):
        history.add(step, Evaluation(loss, 1))
    assert history.reason_to_stop(10) is None and "3.0000 of step 10" in str(history.reason_to_stop(20))
    assert context == {EVALUATIONS: [[10, 3.0], [20, None]]} and history.has(20) and not history.has(15)
    history.go_back(10)
    assert not history.has(20)  # it is evaluated anew, also if the next attempt does it
    history.add(15, Evaluation(2.0, 1))
    assert context == {EVALUATIONS: [[10, 3.0], [15, 2.0]]} and history.reason_to_stop(15) is None
    history.add(15, Evaluation(2.5, 1))
    assert context == {EVALUATIONS: [[10, 3.0], [15, 2.5]]}


def test_without_evaluations_it_is_refused(tiny: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="goes by evaluations"):
        load_config(tiny(train={"early_stopping": {"patience": 2}}))


class _Dies(Callback):
    """The machine is lost in step 3, after the checkpoint of step 2."""

    def on_step(self, job: Job, step: int, metrics: dict[str, float]) -> None:
        if step == 3:
            raise RuntimeError("lost")


def test_a_run_that_was_killed_stops_at_the_same_step(
    tiny: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # No loss is 10 nats below the first one, so the third evaluation ends the run.
    wanted = {"steps": 10, "early_stopping": {"patience": 2, "min_delta": 10.0}}
    config = load_config(
        tiny(train=wanted, evaluation={"every": "1 steps", "rows": 2}, checkpoint={"every": "2 steps"})
    )
    whole = train(config.model_copy(update={"name": "whole"}))
    assert whole.step == 3
    with pytest.raises(RuntimeError, match="lost"):
        train(config, callbacks=[_Dies()])
    RunDirectory(config.run_directory).metrics_path.unlink()  # its checkpoints are all that is left
    assert train(config).step == 3
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith(("step ", "stopped "))]
    # The last step has a line, which says nothing of steps that will not come, and the last line says why.
    assert said[-3].startswith("step 3/10 · ") and "eta" not in said[-3]
    assert said[-2].startswith("step 3 · validation loss")
    assert said[-1].startswith("stopped early at step 3: the validation loss has not been below")
    assert final_step(config) == 3
    hashes = [CheckpointStore(config.runs / name / "checkpoints").info(3).state_sha256 for name in ("whole", "tiny")]
    assert hashes[0] == hashes[1]
    record = open_run(config.run_directory)
    assert record.state == "finished" and len(record.attempts) == 2
    train(config)  # does not begin anything
    assert "is finished: it stopped early at step 3" in capfd.readouterr().err
    assert len(open_run(config.run_directory).attempts) == 2
    # With more patience it goes on.
    longer = config.train.model_copy(update={"early_stopping": EarlyStoppingConfig(patience=4, min_delta=10.0)})
    assert train(config.model_copy(update={"train": longer})).step == 5
    assert "Stopped early: the validation loss" in write_report(whole.directory).read_text()


def test_a_run_without_kept_evaluations_takes_those_of_its_history(tmp_path: Path) -> None:
    losses = {1: 3.5, 2: math.nan, 3: 3.0}
    lines = [json.dumps({"attempt": 1, "step": step, "evaluation/loss": loss}) for step, loss in losses.items()]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert recorded_evaluations({}, tmp_path, 2) == [[1, 3.5], [2, None]]
    kept = {EVALUATIONS: [[1, 1.0], [5, 2.0]]}
    assert recorded_evaluations(kept, tmp_path, 4) == [[1, 1.0]]
    # Its step was saved without an evaluation, which the next attempt has made up for.
    assert recorded_evaluations(kept, tmp_path, 3) == [[1, 1.0], [3, 3.0]]
    assert recorded_evaluations(kept, tmp_path, 1) == [[1, 1.0]]


def test_a_run_whose_checkpoint_lacks_the_last_evaluation_is_finished_all_the_same(
    tiny: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    config = load_config(
        tiny(train={"steps": 10}, evaluation={"every": "1 steps", "rows": 2}, checkpoint={"every": "2 steps"})
    )
    with pytest.raises(RuntimeError, match="lost"):
        train(config, callbacks=[_Dies()])
    wanted = EarlyStoppingConfig(patience=1, min_delta=10.0)
    config = config.model_copy(update={"train": config.train.model_copy(update={"early_stopping": wanted})})
    train(config)
    assert final_step(config) == 2
    train(config)
    assert "is finished: it stopped early at step 2" in capfd.readouterr().err
    assert len(open_run(config.run_directory).attempts) == 2


def test_another_figure_counts_and_may_rise() -> None:
    wanted = EarlyStoppingConfig(patience=2, metric="evaluation/f1", mode="max")
    history = EvaluationHistory(wanted, {})
    for step, f1 in enumerate((0.5, 0.7, 0.6, 0.7), 1):
        history.add(step, Evaluation(1.0 / step, 1, figures={"evaluation/f1": f1}))
    assert history.reason_to_stop(3) is None
    assert history.reason_to_stop(4) == "evaluation/f1 has not been above 0.7000 of step 2 in 2 evaluations"
    with pytest.raises(ConfigError, match="early stopping goes by evaluation/f1, and an evaluation gives"):
        history.add(5, Evaluation(0.1, 1))
