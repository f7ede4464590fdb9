"""What is killed when."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.checkpoint.save.writer_locks import open_writer_lock
from headway.checkpoint.store import CheckpointStore
from headway.config import load_config
from headway.core.files.atomic import append_json_line
from headway.core.files.foreign import read_json_lines
from headway.core.process import faults
from headway.lab.chaos import trial as trial_module
from headway.lab.chaos.campaign import (
    BRING_POINTS,
    EVALUATION,
    FEWEST_STEPS,
    SAVE_POINTS,
    STAGE,
    STAGED,
    STEP_PHASES,
    UPLOAD_POINTS,
    Leg,
    Shape,
    Stage,
    Trial,
    plan_campaign,
)
from headway.lab.chaos.report import CampaignResult, render, run_campaign
from headway.lab.chaos.trial import End, Runs, TrialResult
from headway.run.directory.ledger import Rollback
from support.states import equal, make_state, save

STAGE_OF_ALL = Stage(0, 40, {1: 4, 2: 2, 4: 1})
SHAPE = Shape([STAGE_OF_ALL], save_every=5, evaluate_every=6, worker_counts=(1, 2, 4))


def test_a_campaign_follows_from_its_seed() -> None:
    first, again, other = (list(islice(plan_campaign(SHAPE, seed), 10)) for seed in (7, 7, 8))
    assert first == again != other
    assert all(trial.kills >= 12 for trial in first)


def test_the_fewest_steps_have_every_phase() -> None:
    shape = replace(SHAPE, stages=[replace(STAGE_OF_ALL, last=FEWEST_STEPS)], save_every=2, evaluate_every=3)
    orders = [order for t in islice(plan_campaign(shape, 1), 99) for leg in t.legs for order in leg.orders]
    assert not any("=0" in order for order in orders if order.startswith(("kill@evaluation", "kill@checkpoint=")))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_campaign_that_is_stopped_leaves_no_run_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr("headway.lab.chaos.trial.time.sleep", lambda _: signal.raise_signal(number))
    processes, popen = [], subprocess.Popen

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        processes.append(popen(["sleep", "60"], **options))
        return processes[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where tests run behind a shell
    try:
        with pytest.raises(KeyboardInterrupt):
            Runs(tmp_path / "config.yaml", [], tmp_path, [Stage(0, 10, {})]).reference(1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert processes[0].returncode == -signal.SIGKILL


def test_a_campaign_that_is_stopped_tells_what_it_has_found(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def carry_out(runs: Runs, trial: Trial, expected: str) -> TrialResult:
        if trial.number > 1:
            raise KeyboardInterrupt
        return TrialResult(1, (1,), Counter({"kill@update": 3}), state_sha256=expected)

    monkeypatch.setattr(Runs, "reference", lambda *_: "a")
    monkeypatch.setattr(Runs, "carry_out", carry_out)
    config = load_config(tiny(), ["train.steps=40"])
    result = run_campaign(config, tmp_path / "chaos", kills=9, seed=1, worker_counts=[1])
    assert result.stopped and not result.passed and result.controls == {}
    text = render(result)
    assert text.startswith("3 kills in 1 run on 1 worker (") and text.endswith("stopped before its end")


def test_kills_of_a_stage_come_in_it() -> None:
    stages = [replace(STAGE_OF_ALL, first=first, last=first + 10) for first in range(0, 40, 10)]
    for trial in islice(plan_campaign(replace(SHAPE, stages=stages), 3), 40):
        assert [leg.stage for leg in trial.legs] == [0, 0, 1, 1, 2, 2, 3, 3]
        for leg in trial.legs:
            steps = [int(o.point.split("=")[1]) for t in leg.orders for o in faults.parse_orders(t) if "=" in o.point]
            steps += [leg.supervisor_at] if leg.supervisor_at is not None else []
            assert all(leg.stage * 10 < step < (leg.stage + 1) * 10 for step in steps), leg
        assert [leg.supervisor_at is None for leg in trial.legs] == [False, True] * 4


def test_every_phase_is_hit_and_the_number_of_workers_changes() -> None:
    trials = list(islice(plan_campaign(SHAPE, 1), 170))
    orders = [order for trial in trials for leg in trial.legs for order in leg.orders]
    points = {order.point.split("=")[0] for text in orders for order in faults.parse_orders(text)}
    assert points == {*STEP_PHASES, EVALUATION, STAGE, STAGED, *(f"checkpoint.{point}" for point in SAVE_POINTS)}
    backward = {
        (leg.workers, order.count)
        for trial in trials
        for leg in trial.legs
        for text in leg.orders
        for order in faults.parse_orders(text)
        if order.point.startswith("backward")
    }
    alone = {o.point for t in trials for o in faults.parse_orders(t.legs[-1].orders[-1])}
    assert alone == {f"checkpoint.{point}" for point in SAVE_POINTS}
    assert {trial.memory_every for trial in trials} == {None, 2}, "with a tier in memory and without"
    micro_batches = {
        (workers, count) for workers, last in STAGE_OF_ALL.micro_batches.items() for count in range(1, last + 1)
    }
    assert backward == micro_batches, "in the middle of an accumulation too"
    for trial in trials:
        workers = [leg.workers for leg in trial.legs]
        assert all(a != b for a, b in pairwise(workers))
        assert [leg.supervisor_at is None for leg in trial.legs] == [False, False, True], "the last one has to end"
        for leg in trial.legs:
            parsed = [order for text in leg.orders for order in faults.parse_orders(text)]
            assert all(order.rank is not None and order.rank < leg.workers for order in parsed)
            starts = [order.start for order in parsed]
            assert starts == list(range(1, len(starts) + 1)), "each start of the workers has its own kill"


def test_with_a_remote_tier_uploads_and_downloads_are_killed_too_and_disks_are_lost() -> None:
    trials = list(islice(plan_campaign(replace(SHAPE, remote=True), 1), 170))
    orders = [
        order for trial in trials for leg in trial.legs for text in leg.orders for order in faults.parse_orders(text)
    ]
    points = {order.point.split("=")[0] for order in orders}
    assert {f"upload.{p}" for p in UPLOAD_POINTS} | {f"bring.{p}" for p in BRING_POINTS} < points
    legs = [leg for trial in trials for leg in trial.legs]
    assert not any(trial.legs[0].disk_lost for trial in trials), "at first there is nothing to be lost"
    assert 100 < sum(leg.disk_lost for leg in legs) < 240
    for leg in legs:
        assert leg.disk_lost == any("bring." in order for order in leg.orders)
        starts = [order.start for text in leg.orders for order in faults.parse_orders(text)]
        assert starts == list(range(1, len(starts) + 1)), "each start of the workers has its own kill"
    assert not any("upload." in o for t in islice(plan_campaign(SHAPE, 1), 99) for leg in t.legs for o in leg.orders)


def test_a_campaign_fails_when_a_state_differs_or_a_control_is_not_found_out() -> None:
    def result(state: str, control: str | None) -> CampaignResult:
        trial = TrialResult(1, (1, 2), Counter({"kill@update": 3}), state_sha256=state, recovery_seconds=[2.0])
        if state != "a":
            trial.problems.append("the last state is b, not a")
        return CampaignResult(0, "a", [trial], {"moments": control})

    assert result("a", None).passed and "passed" in render(result("a", None))
    assert not result("b", None).passed and result("b", None).mismatches == 1
    assert not result("a", "the control 'moments' came out as if nothing had been lost").passed
    assert "FAIL" in render(result("b", None)) and result("b", None).record()["kills"] == 3


def test_limits_are_judged_where_they_are_given() -> None:
    trials = [
        TrialResult(number, (1,), Counter({"kill@update": 1}), state_sha256="a", recovery_seconds=took, own_seconds=own)
        for number, took, own in ((1, [2.0, 11.5], [0.5]), (2, [10.0, 12.25], [2.5]))
    ]
    told = CampaignResult(0, "a", trials)
    assert told.passed and "longest 12.2 s" in render(told) and told.record()["too_slow"] == []
    kept = CampaignResult(0, "a", trials, max_recovery_seconds=13, max_overhead_seconds=3)
    assert kept.passed and kept.record()["max_overhead_seconds"] == 3
    slow = CampaignResult(0, "a", trials, max_recovery_seconds=10, max_overhead_seconds=2)
    assert slow.failed and not slow.record()["passed"]
    recovery, overhead = slow.record()["too_slow"]
    assert recovery == (
        "from a kill to the next new step: 2 of 4 took longer than 10 s, the longest 12.25 s in run 2"
    ), "10 s are within 10 s"
    assert overhead.startswith("until new workers are started") and "1 of 2 took longer than 2.0 s" in overhead
    assert f"FAIL  {recovery}" in render(slow) and render(slow).endswith("FAILED")
    one_within = CampaignResult(0, "a", trials, max_recovery_seconds=13, max_overhead_seconds=2)
    assert one_within.too_slow == [overhead] and one_within.failed


def test_a_limit_that_nothing_was_measured_for_was_not_kept() -> None:
    of_writers = [TrialResult(1, (1,), Counter({"kill@checkpoint.shard": 3}), state_sha256="a", recovery_seconds=[1.0])]
    (problem,) = CampaignResult(0, "a", of_writers, max_recovery_seconds=10, max_overhead_seconds=2).too_slow
    assert "nothing was measured, so the limit of 2.0 s was not tested" in problem
    assert not CampaignResult(0, "a", [], stopped=True, max_recovery_seconds=10).failed


def controlled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control: str, end: Callable[[Path], object]) -> Any:
    """What is said of a control whose run comes to its end by `end`; the undisturbed run is there."""
    save(CheckpointStore(tmp_path / "reference" / "checkpoints"), 4)
    runs, run = Runs(tmp_path / "config.yaml", [], tmp_path, [Stage(0, 4, {})]), tmp_path / f"control-{control}"

    def command(name: str, leg: Leg, *more: str) -> End:
        if leg.orders:
            save(CheckpointStore(run / "checkpoints"), 2)
        else:
            end(run)
        return End(0)

    monkeypatch.setattr(runs, "_command", command)
    return runs.control(control, 1)


def test_what_tells_of_a_loss_is_not_the_cursor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights and moments beside another cursor have another name, and yet nothing was lost."""

    def end(run: Path) -> None:
        store = CheckpointStore(run / "checkpoints")
        store.save(4, make_state(4), {"step": 4, "skipped_steps": 1}, {"attempt": 2, "world_size": 1})

    said = controlled(tmp_path, monkeypatch, "moments", end)
    assert said == "the control 'moments' ended with the weights and moments of a run without losses"


@pytest.mark.parametrize(("rollbacks", "skipped_ranges", "told"), [(1, [], True), (0, [], False), (1, [(1, 2)], False)])
def test_where_rows_are_used_twice_the_ledger_has_to_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollbacks: int, skipped_ranges: list[tuple[int, int]], told: bool
) -> None:
    proof = SimpleNamespace(problems=[], skipped_ranges=skipped_ranges, rollbacks=[Rollback(1, "why", ())] * rollbacks)
    monkeypatch.setattr("headway.lab.chaos.trial.prove", lambda run: proof)

    def end(run: Path) -> None:
        store = CheckpointStore(run / "checkpoints")
        (info,) = store.list()
        assert info.step == 1 and equal(store.load(info), make_state(2)), "behind its weights"
        save(store, 4, seed=5)

    said = controlled(tmp_path, monkeypatch, "cursor", end)
    assert said == (None if told else "the control 'cursor' used rows twice, and the ledger does not show it")


def test_a_lost_disk_is_why_steps_are_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = SimpleNamespace(problems=["a gap"], skipped_ranges=[], rollbacks=[Rollback(1, "why", ())])
    monkeypatch.setattr("headway.lab.chaos.trial.prove", lambda run: proof)
    runs = Runs(tmp_path / "config.yaml", [], tmp_path, [Stage(0, 4, {})])
    assert runs._ledger_problems(tmp_path, disks_lost=1) == ["ledger: a gap"]
    assert runs._ledger_problems(tmp_path) == [
        "ledger: a gap",
        "ledger: steps in a checkpoint were rolled back: why",
    ]


@pytest.mark.parametrize("stops", [0, 2])
def test_a_disk_is_lost_when_there_is_something_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: int
) -> None:
    """How far an upload has got when a supervisor is killed depends on the machine; that a download is killed does not:
    the run is stopped, which saves and sends, until something has come."""
    orders = list[tuple[str, ...]]()
    monkeypatch.setattr(trial_module, "remote_manifests", lambda url: [url] if len(orders) >= stops else [])
    runs, run = (
        Runs(tmp_path / "config.yaml", [], tmp_path, [Stage(0, 9, {})], "file:///remote"),
        tmp_path / "trial-001",
    )
    save(CheckpointStore(run / "checkpoints"), 3)

    def stopped(name: str, leg: Leg, *more: str) -> End:
        orders.append((name, str(leg.workers), *leg.orders, *more))
        save(CheckpointStore(run / "checkpoints"), 3 + len(orders))
        return End(75)

    monkeypatch.setattr(runs, "_command", stopped)
    assert runs._upload("trial-001", Leg(2, (), 7), "tier") is None
    assert orders == [("trial-001", "2", f"stop@update={step}", "tier") for step in (3, 4)[:stops]]
    assert runs._lose_disk(run) and not (run / "checkpoints").exists()


def test_an_upload_that_does_not_come_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_module, "remote_manifests", lambda url: [])
    runs = Runs(tmp_path / "config.yaml", [], tmp_path, [Stage(0, 9, {})], "file:///remote")
    monkeypatch.setattr(runs, "_command", lambda *_: End(75))
    assert runs._upload("trial-001", Leg(1, (), 7)) == "nothing reached the remote tier"
    monkeypatch.setattr(runs, "_command", lambda *_: End(0))
    assert runs._upload("trial-001", Leg(1, (), 7)) == "a command that was asked to stop ran to the end"
    monkeypatch.setattr(runs, "_command", lambda *_: End(4))
    assert runs._upload("trial-001", Leg(1, (), 7)) == "a command that was asked to stop ended with exit code 4"


def test_a_lost_disk_takes_along_what_is_still_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would have to be brought from the remote tier otherwise."""
    run, step = tmp_path / "trial-001", "checkpoints/step-00000001"
    (run / step).mkdir(parents=True)
    monkeypatch.setattr("headway.lab.chaos.trial.remote_manifests", lambda url: {1: url})
    lock = open_writer_lock(run, 0)

    def write_on() -> None:
        while (run / step).exists():
            time.sleep(0.001)
        (run / step).mkdir(parents=True)
        os.close(lock)

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write_on)
        assert Runs(tmp_path / "config.yaml", [], tmp_path, [Stage(0, 4, {})], "file:///remote")._lose_disk(run)
        writing.result()
    assert not (run / "checkpoints").exists()


def test_one_is_singular_and_none_is_said() -> None:
    trial = TrialResult(
        1, (1,), Counter({"kill@update": 1}), state_sha256="b", recovery_seconds=[2.0], disks_lost=1, problems=["x"]
    )
    text = render(CampaignResult(0, "a", [trial]))
    assert text.startswith("1 kill in 1 run on 1 worker (") and "1 state differs from the undisturbed run's" in text
    assert "lost 1 time:" in text and "(1 kill)" in text
    several = TrialResult(2, (1, 2), Counter({"kill@update": 2}), state_sha256="a", disks_lost=2)
    text = render(CampaignResult(0, "a", [several, several]))
    assert text.startswith("4 kills in 2 runs on 1, 2 workers (") and "0 states differ" in text
    stopped = render(CampaignResult(0, "a", stopped=True)).splitlines()
    assert stopped == ["0 kills in 0 runs (seed 0, 0.0 s): nothing was compared", "stopped before its end"]


def test_a_checkpoint_by_another_number_of_workers_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the variables of an agent left in the environment, every leg would be one worker's."""
    made = [(2, 1, 1), (4, 3, 2), (6, 4, 1)]  # step, attempt, workers
    infos = [
        SimpleNamespace(path=Path(f"step-{step:08d}"), context={"attempt": attempt, "world_size": workers})
        for step, attempt, workers in made
    ]
    monkeypatch.setattr("headway.lab.chaos.trial.CheckpointStore.list", lambda self: infos)
    runs = Runs(tmp_path / "config.yaml", [], tmp_path, [Stage(0, 6, {})])
    assert runs._other_workers(tmp_path, [(2, 1), (3, 2), (5, 1)]) == []
    assert runs._other_workers(tmp_path, [(2, 1), (5, 2)]) == ["step-00000006 was made by 1 worker, not by 2"]


def test_a_kill_that_an_attempt_outlives_as_it_begins_is_no_recovery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that sends what the attempt before has left dies before there is a step; nothing has to begin anew."""
    run = tmp_path / "run"
    run.mkdir()
    attempts = [SimpleNamespace(started=started) for started in (0.0, 10.0, 40.0)]
    monkeypatch.setattr(trial_module, "open_run", lambda _: SimpleNamespace(attempts=attempts))
    steps = [(1, 5.0), (2, 14.0), (2, 38.0), (3, 43.0)]
    for attempt, moment in steps:
        append_json_line(run / "metrics.jsonl", {"attempt": attempt, "time": moment, "train/loss": 1.0})
    others = [("stop@update=2", 20.0), ("hang@data=23", 38.5)]  # which end nothing that goes on by itself
    kills = [("kill@update=3", 9.0), ("kill-group@upload.manifest:1", 11.0), ("kill@reduce=7", 39.0)]
    for order, moment in sorted([*kills, *others], key=lambda order: order[1]):
        append_json_line(tmp_path / "run.faults.jsonl", {"order": order, "time": moment})
    result = TrialResult(1, (1,))
    object.__new__(Runs)._count_kills(run, result)
    assert result.kills.total() == 3 and result.recovery_seconds == [5.0, 4.0] and result.own_seconds == [1.0, 1.0]


def ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], *, supervisor_at: int | None, last_step: int
) -> End:
    """How a leg of this command ends, whose run has come to a step."""
    monkeypatch.setattr(trial_module, "train_command", lambda *_: command)
    monkeypatch.setattr(trial_module, "read_metrics", lambda *_, **__: SimpleNamespace(last_step=last_step))
    return Runs(tmp_path / "config.yaml", [], tmp_path, [Stage(0, 4, {})])._command("run", Leg(1, (), supervisor_at))


def test_how_a_command_ended_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = ended(tmp_path, monkeypatch, ["sleep", "60"], supervisor_at=2, last_step=3)
    assert killed.killed and killed.problem is None
    (told,) = read_json_lines(tmp_path / "run.faults.jsonl")
    assert told["order"] == "kill@supervisor"
    by_itself = ended(tmp_path, monkeypatch, ["sh", "-c", "exit 4"], supervisor_at=2, last_step=1)
    assert by_itself.problem == "ended with exit code 4"
    assert ended(tmp_path, monkeypatch, ["true"], supervisor_at=None, last_step=4).problem is None
    by_another = ended(tmp_path, monkeypatch, ["sh", "-c", "kill -KILL $$"], supervisor_at=2, last_step=1)
    assert by_another.problem == f"ended with exit code {-signal.SIGKILL}"
    assert len(list(read_json_lines(tmp_path / "run.faults.jsonl"))) == 1, "the others were not killed as planned"


def test_a_run_waits_for_the_death_of_its_supervisor_before_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be done before it where this process is kept from looking for long; its last records may be missing."""
    order = "import json, os; f = open(os.environ['HEADWAY_FAULTS_LOG'], 'a'); f.write(json.dumps({}) + chr(10))"
    tell = order.format("{'order': os.environ['HEADWAY_FAULTS'], 'time': 1.0}")
    waits = [sys.executable, "-c", f"import time; {tell}; f.close(); time.sleep(600)"]
    killed = ended(tmp_path, monkeypatch, waits, supervisor_at=2, last_step=1)
    assert killed.killed and killed.problem is None
    waited, told = read_json_lines(tmp_path / "run.faults.jsonl")
    assert (waited["order"], told["order"]) == ("hang@data=3#*", "kill@supervisor")
    again = ended(tmp_path, monkeypatch, ["sh", "-c", "exit 4"], supervisor_at=2, last_step=1)
    assert again.problem == "ended with exit code 4", "who waited in a command before does not wait in this one"
    quick = [sys.executable, "-c", tell]
    assert ended(tmp_path, monkeypatch, quick, supervisor_at=None, last_step=4).problem is None
    assert list(read_json_lines(tmp_path / "run.faults.jsonl"))[-1]["order"] == "", "the last command is to end"


@pytest.mark.parametrize("supervisor_at", [2, None])
def test_a_command_that_stands_still_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supervisor_at: int | None
) -> None:
    monkeypatch.setattr(trial_module, "LEG_SECONDS", 0.2)
    still = ended(tmp_path, monkeypatch, ["sleep", "60"], supervisor_at=supervisor_at, last_step=1)
    assert still.problem is not None and still.problem.startswith("was stuck")


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("end", [End(1), End(-9, stood_still=True)])
def test_every_command_of_a_run_has_to_end_as_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, end: End
) -> None:
    """Though the last state comes out right, since the next command makes up for it."""
    legs = [Leg(1, (), 2), Leg(2, (), 3), Leg(1, (), None)]
    ends = [End(-9, killed=True), End(-9, killed=True), End(0)]
    ends[failing] = end
    runs, run = Runs(tmp_path / "config.yaml", [], tmp_path, [Stage(0, 4, {})]), tmp_path / "trial-001"
    run.mkdir()
    coming = iter(ends)
    monkeypatch.setattr(runs, "_command", lambda *_: next(coming))
    monkeypatch.setattr(trial_module, "open_run", lambda _: SimpleNamespace(attempts=[]))
    for check in ("_count_kills", "_other_workers", "_damage", "_ledger_problems"):
        monkeypatch.setattr(runs, check, lambda *_: [])
    monkeypatch.setattr(runs, "_last", lambda _: SimpleNamespace(state_sha256="a"))
    (problem,) = runs.carry_out(Trial(1, tuple(legs)), "a").problems
    workers = ("1 worker", "2 workers", "1 worker")[failing]
    assert problem == f"command {failing + 1}, on {workers}, {end.problem}"


def test_a_control_that_stands_still_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(tmp_path / "config.yaml", [], tmp_path, [Stage(0, 4, {})])
    monkeypatch.setattr(runs, "_command", lambda *_: End(-9, stood_still=True))
    said = runs.control("cursor", 1)
    assert said is not None and said.startswith("the control 'cursor' was stuck")
