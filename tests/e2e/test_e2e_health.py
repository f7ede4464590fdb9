"""Trouble in mid-run: left out or rolled back, written down, and the same whatever is killed on the way."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.api import train
from headway.checkpoint.index import CheckpointIndex
from headway.config import load_config
from headway.core.errors import HeadwayError
from headway.core.process import faults as core_faults
from headway.core.process.waiting import wait_until
from headway.run.directory.ledger_proof import prove
from headway.training.health import rollback
from support.runs import headway, manifest, state_hash
from support.waits import LONG


class Here:
    """Trains in this process, which saves the start of another one; not for runs that are killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, config: Path, *overrides: str, faults: str = "") -> tuple[int, str]:
        """Exit code and what was said."""
        self._monkeypatch.setattr(core_faults, "_passed", type(core_faults._passed)())
        self._monkeypatch.setenv("HEADWAY_FAULTS", faults)
        self._capsys.readouterr()
        code = 0
        try:
            train(load_config(config, overrides))
        except HeadwayError as error:
            code = error.exit_code
            print(error.render(), file=sys.stderr)
        self._monkeypatch.setenv("HEADWAY_FAULTS", "")
        return code, self._capsys.readouterr().err


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(monkeypatch, capsys)


def ledger(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_rollback_is_the_same_through_kills_and_on_a_second_machine(
    tiny: Callable[..., Path], tmp_path: Path, here: Here
) -> None:
    runs = tmp_path / "runs"
    health = {"on_nonfinite": "rollback", "leave_out_steps": 2}
    config = tiny(train={"steps": 12}, checkpoint={"every": "3 steps"}, health=health)
    code, said = here(config, "name=whole", faults="nan@gradient=8")
    assert code == 0, said
    assert "step 8: the gradient is not finite; going back to step 6, and leaving out the rows of steps 7 to 8" in said
    newest = manifest(runs / "whole")
    assert newest["cursor"] == {"step": 12, "skipped_steps": 0, "skipped_in_row": 0, "left_out_steps": 2}
    assert newest["context"]["left_out"] == [[6, 8]]
    # Killed between the decision and going back, and then once more after it.
    killed = headway("train", config, "name=killed", faults="nan@gradient=8,kill@rollback=8")
    assert killed.returncode == 1 and "died (signal 9)" in killed.stderr
    assert "died (signal 9)" in headway("train", config, "name=killed", faults="kill@step=10").stderr
    assert here(config, "name=killed")[0] == 0
    # Somewhere else, where the trouble never came: the decision alone says which rows are left out.
    elsewhere = runs / "elsewhere"
    (elsewhere / "attempts").mkdir(parents=True)
    decisions = [line for line in ledger(runs / "whole") if line["kind"] == "decision"]
    (elsewhere / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in decisions))
    assert here(config, "name=elsewhere")[0] == 0
    assert state_hash(runs / "whole") == state_hash(runs / "killed") == state_hash(elsewhere)
    assert here(config, "name=clean")[0] == 0
    assert state_hash(runs / "clean") != state_hash(runs / "whole")
    assert here(config, "name=plain", "health.on_nonfinite=skip")[0] == 0
    assert state_hash(runs / "clean") == state_hash(runs / "plain"), "that a rollback may come changes nothing"
    # Killed before the first step was saved, it goes on from its beginning.
    assert headway("train", config, "name=begun", faults="kill@step=1").returncode == 1
    assert here(config, "name=begun")[0] == 0
    assert state_hash(runs / "begun") == state_hash(runs / "clean")
    for name in ("whole", "killed"):
        proof = prove(runs / name)
        assert not proof.problems, proof.problems
        assert proof.rows == 80 and sum(epoch.left_out for epoch in proof.epochs) == 16
        (commit,) = (commit for commit in proof.commits if commit.first_step == 6)
        assert sum(commit.rows.values()) == 8, "of three steps, two were left out"
        counted = prove(runs / name, every_row=False)
        assert not counted.problems and counted.epochs == proof.epochs
    # A ledger without the decision no longer explains the rows.
    lines = [line for line in ledger(runs / "whole") if line["kind"] != "decision"]
    (runs / "whole/ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    problems = prove(runs / "whole").problems
    assert any("for which the ledger has no decision" in problem for problem in problems)
    assert any("the ledger counts 8" in problem for problem in problems)


@pytest.mark.slow
def test_checkpoints_made_with_rows_that_are_left_out_now_are_removed(
    tiny: Callable[..., Path], tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    health = {"on_spike": "rollback", "spike_window": 3, "leave_out_steps": 4}
    config = tiny(checkpoint={"every": "1 steps", "keep": 9}, health=health)
    code, said = here(config, "name=whole", faults="spike@gradient=8")
    assert code == 0 and "removing step-00000006" in said and "going back to step 4" in said

    def crash(*_: object) -> None:
        raise RuntimeError("between the decision and going back")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError):
        patched.setattr("headway.training.health.rollback.fault_point", crash)
        here(config, "name=killed", faults="spike@gradient=8")
    assert "removing step-00000006" in here(config, "name=killed")[1]
    assert state_hash(tmp_path / "runs/whole") == state_hash(tmp_path / "runs/killed")
    assert not prove(tmp_path / "runs/killed").problems


def test_spikes_are_skipped_or_end_the_run_and_limits_hold(
    tiny: Callable[..., Path], tmp_path: Path, here: Here
) -> None:
    config = tiny(health={"spike_window": 3})
    skip, runs = "health.on_spike=skip", tmp_path / "runs"
    code, said = here(config, "name=skipped", skip, faults="spike@gradient=6")
    assert code == 0 and "its update is left out" in said
    assert manifest(runs / "skipped")["cursor"]["skipped_steps"] == 1
    # Stopped in the window of a spike; what is usual goes on from the checkpoint.
    assert here(config, "name=stopped", skip, faults="stop@step=4")[0] == 75
    assert here(config, "name=stopped", skip, faults="spike@gradient=6")[0] == 0
    assert state_hash(runs / "skipped") == state_hash(runs / "stopped")
    (decision,) = [line for line in ledger(runs / "skipped") if line["kind"] == "decision"]
    assert (decision["action"], decision["first_step"]) == ("skip", 5) and "grad norm" in decision["reason"]
    code, said = here(config, "name=ended", "health.on_spike=stop", faults="spike@gradient=6")
    assert code == 5 and "step 6: the grad norm of" in said
    assert manifest(runs / "ended")["step"] == 4, "nothing is saved of a step that is not well"
    limits = ["health.on_nonfinite=rollback", "health.rollback_limit=1", "checkpoint.every=1 h"]
    code, said = here(config, "name=limited", *limits, faults="nan@gradient=2,nan@gradient=3")
    assert code == 5 and "after 1 rollbacks" in said
    assert "going back to step 0" in said, "the beginning is saved too"


def test_a_death_in_a_rollback_does_not_bring_back_what_is_left_out(
    tiny: Callable[..., Path], tmp_path: Path, here: Here
) -> None:
    """States that are in memory only were made with the rows that are left out; written, they would push out all that
    there is to go back to."""
    health = {"on_nonfinite": "rollback", "leave_out_steps": 3}
    checkpoint = {"every": "4 steps", "keep": 1, "memory_every": "1 steps"}
    config = tiny(checkpoint=checkpoint, health=health)
    killed = headway("train", config, "name=killed", faults="nan@gradient=7,kill@rollback=7")
    assert killed.returncode == 1 and "died (signal 9)" in killed.stderr
    assert "step-00000006" not in killed.stderr
    code, said = here(config, "name=killed")
    assert code == 0, said
    assert here(config, "name=whole", faults="nan@gradient=7")[0] == 0
    assert state_hash(tmp_path / "runs/killed") == state_hash(tmp_path / "runs/whole")


def test_states_are_held_again_after_a_rollback(tiny: Callable[..., Path], here: Here) -> None:
    """Past a checkpoint that was saved and is gone: what is held after that is the newest all the same."""
    checkpoint = {"every": "4 steps", "keep": 9, "memory_every": "1 steps"}
    health = {"on_nonfinite": "rollback", "leave_out_steps": 6}
    config = tiny(checkpoint=checkpoint, health=health)
    killed = headway("train", config, faults="nan@gradient=10,kill@step=7:2")
    assert "going back to step 4" in killed.stderr and "died (signal 9)" in killed.stderr
    code, said = here(config)
    assert code == 0 and "checkpoints/step-00000006" in said, said


def is_remote(run: Path, step: int) -> bool:
    places = (place for entry in CheckpointIndex(run).entries() if entry.step == step for place in entry.places)
    return any(place.tier == "remote" and place.complete for place in places)


@pytest.mark.slow
def test_a_rollback_goes_for_the_remote_tier_too(
    tiny: Callable[..., Path], tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    planned = rollback._plan_rollback

    def planned_once_it_is_sent(job: Any, decision: Any) -> Any:
        if decision.step + 1 == 10 and job.config.name == "moved":
            assert wait_until(lambda: is_remote(runs / "moved", 8), LONG)
        return planned(job, decision)

    monkeypatch.setattr(rollback, "_plan_rollback", planned_once_it_is_sent)
    (tmp_path / "remote").mkdir()
    checkpoint = {"every": "4 steps", "keep": 9, "remote": {"url": f"file://{tmp_path}/remote"}}
    health = {"on_nonfinite": "rollback", "leave_out_steps": 3}
    config = tiny(train={"steps": 14}, checkpoint=checkpoint, health=health)
    # What was sent before is withdrawn, although the step is not saved again before the end of the disk.
    code, said = here(config, "name=moved", faults="nan@gradient=10,stop@step=11")
    assert code == 75 and "going back to step 4" in said and "/step-00000008: it was trained on rows" in said, said
    (runs / "moved").rename(elsewhere)
    # On another disk there is one checkpoint; those to go back to are remote.
    code, said = here(config, "name=moved", faults="nan@gradient=14")
    assert code == 0 and "downloading" in said and "going back to step 8" in said, said
    assert manifest(runs / "moved")["context"]["left_out"] == [[7, 10], [11, 14]]
    assert here(config, "name=whole", faults="nan@gradient=10,nan@gradient=14")[0] == 0
    assert state_hash(runs / "moved") == state_hash(runs / "whole")
    assert not prove(runs / "moved").problems and not prove(runs / "whole").problems
    for name in ("moved", "whole"):
        there = tmp_path / "remote" / name / "run-001"
        steps = {path.parent.name: json.loads(path.read_text()) for path in there.glob("step-*/manifest.json")}
        assert steps and all(m["state_sha256"] == state_hash(runs / "whole", m["step"]) for m in steps.values()), (
            steps.keys()
        )


@pytest.mark.slow
def test_a_rollback_is_the_same_on_two_workers_with_cut_weights(tiny: Callable[..., Path], tmp_path: Path) -> None:
    health = {"on_nonfinite": "rollback", "on_spike": "rollback", "spike_window": 3}
    config = tiny(
        determinism="elastic", train={"lanes": 2, "steps": 12}, checkpoint={"every": "3 steps"}, health=health
    )
    for name, strategy, workers in (("one", "auto", 1), ("two", "ddp", 2), ("cut", "zero3", 2)):
        faults = "nan@gradient=8,spike@gradient=11"
        arguments = [f"name={name}", f"parallel.strategy={strategy}", "-w", str(workers)]
        done = headway("train", config, *arguments, faults=faults)
        assert done.returncode == 0, done.stderr
        assert manifest(tmp_path / "runs" / name)["context"]["left_out"] == [[7, 8], [10, 11]]
    assert state_hash(tmp_path / "runs/one") == state_hash(tmp_path / "runs/two") == state_hash(tmp_path / "runs/cut")


@pytest.mark.parametrize("often", ["checkpoint.every=1 steps", "checkpoint.memory_every=1 steps"])
def test_a_run_killed_before_its_first_update_has_the_bits_of_one_that_was_not(
    tiny: Callable[..., Path], tmp_path: Path, often: str
) -> None:
    """The first two steps are skipped. In the third the worker dies, and the supervisor starts it again."""
    config, first = tiny(train={"steps": 4}, supervise={"max_failures": 1}), "nan@gradient=1,nan@gradient=2"
    whole = headway("train", config, "name=whole", often, faults=first)
    killed = headway("train", config, often, faults=f"{first},kill@update=2")
    assert (whole.returncode, killed.returncode) == (0, 0), killed.stderr
    assert killed.stderr.count("resuming from") == 1 and "step-00000002" in killed.stderr
    assert state_hash(tmp_path / "runs/tiny") == state_hash(tmp_path / "runs/whole")
