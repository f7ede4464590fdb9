"""What is killed when."""

from __future__ import annotations

import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.chaos.campaign import (
    BRING_POINTS,
    EVALUATION,
    FEWEST_STEPS,
    SAVE_POINTS,
    STAGE,
    STAGED,
    STEP_PHASES,
    UPLOAD_POINTS,
    Shape,
    Trial,
    plan_campaign,
)
from headway.chaos.report import CampaignResult, render, run_campaign
from headway.chaos.trial import Runs, TrialResult
from headway.config import load_config
from headway.core import faults

SHAPE = Shape(steps=40, save_every=5, evaluate_every=6, micro_batches={1: 4, 2: 2, 4: 1}, worker_counts=(1, 2, 4))


def test_a_campaign_follows_from_its_seed() -> None:
    first, again, other = (list(islice(plan_campaign(SHAPE, seed), 10)) for seed in (7, 7, 8))
    assert first == again != other
    assert all(trial.kills >= 12 for trial in first)


def test_the_fewest_steps_have_every_phase() -> None:
    shape = replace(SHAPE, steps=FEWEST_STEPS, save_every=2, evaluate_every=3)
    orders = [order for t in islice(plan_campaign(shape, 1), 99) for leg in t.legs for order in leg.orders]
    assert not any("=0" in order for order in orders if order.startswith(("kill@evaluation", "kill@checkpoint=")))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_campaign_that_is_stopped_leaves_no_run_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr("headway.chaos.trial.time.sleep", lambda _: signal.raise_signal(number))
    processes, popen = [], subprocess.Popen

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        processes.append(popen(["sleep", "60"], **options))
        return processes[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where tests run behind a shell
    try:
        with pytest.raises(KeyboardInterrupt):
            Runs(tmp_path / "config.yaml", [], tmp_path, 10).reference(1)
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
    micro_batches = {(workers, count) for workers, last in SHAPE.micro_batches.items() for count in range(1, last + 1)}
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
    monkeypatch.setattr("headway.chaos.trial.CheckpointStore.list", lambda self: infos)
    runs = Runs(tmp_path / "config.yaml", [], tmp_path, 6)
    assert runs._other_workers(tmp_path, [(2, 1), (3, 2), (5, 1)]) == []
    assert runs._other_workers(tmp_path, [(2, 1), (5, 2)]) == ["step-00000006 was made by 1 worker, and was to be by 2"]
