"""What a command makes of the way its attempts end, one after another."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.config import Config
from headway.core.coordination.preemption_board import SIGNAL_KEY, Notice, post
from headway.core.errors import INTERRUPTED, DataError, Preempted
from headway.run.session.attempt import RunOptions
from headway.run.supervisor import supervisor
from headway.run.supervisor.attempt_monitor import AttemptMonitor
from headway.run.supervisor.error_report import WorkerDied
from headway.run.supervisor.restart_policy import AttemptOutcome, Decision
from headway.run.supervisor.worker_pool import WorkerPool

DIED = AttemptOutcome("died", "worker 2 died (signal 9)", 1, rank=2, step=7, signal=9)
CRASHED = AttemptOutcome("error", "worker 2 crashed", 1, rank=2, step=7, error="ValueError", frames=("a.py:1 f",))
SAVED = AttemptOutcome("preempted", "stopped by SIGUSR1; step 7 is saved", 75)
FINISHED = AttemptOutcome("finished", "finished", 0)


class Played:
    """Runs a command whose attempts end as they are told to."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.now = folder / "run", 0.0
        self.sizes: list[int] = []
        self.concluded: Callable[[], None] = lambda: None
        self._patch = monkeypatch

    def __call__(
        self,
        *endings: AttemptOutcome | Callable[[], AttemptOutcome],
        workers: Any = 1,
        restart: bool = False,
        **supervise: Any,
    ) -> None:
        """Each attempt takes one."""
        left = list(endings)
        values = {
            "name": self.run.name,
            "runs": self.run.parent,
            "determinism": "elastic",
            "parallel": {"workers": workers},
            "train": {"steps": 100, "sequence_length": 32, "global_batch": 8, "micro_batch": 1},
            "model": {"preset": "4m"},
            "supervise": {"max_delay_seconds": 0.001, **supervise},
        }
        sizes, concluded = self.sizes, self.concluded

        class Attempt(AttemptMonitor):
            def run(self) -> AttemptOutcome:
                if not self.has_begun:
                    self.journal.begin(self.config)
                sizes.append(self.config.parallel.workers)
                given = left.pop(0)
                ending = given if isinstance(given, AttemptOutcome) else given()
                # As workers make room, when it is time for more of them.
                self.control.asked_to_grow = ending is SAVED and self._around.pool.may_grow
                return ending

            def record_outcome(self, ending: AttemptOutcome, decision: Decision) -> None:
                super().record_outcome(ending, decision)
                concluded()

        self._patch.setattr(supervisor, "AttemptMonitor", Attempt)
        self._patch.setattr(
            supervisor, "WorkerPool", lambda config, devices: WorkerPool(config, devices, lambda: self.now)
        )
        supervisor.supervise(Config.model_validate(values), RunOptions(restart=restart), own_process=False)
        assert not left, "every attempt was made"

    def saves(self, step: int, ending: AttemptOutcome, seconds: float = 0.0) -> Callable[[], AttemptOutcome]:
        """An ending after a checkpoint, and after so long."""

        def make() -> AttemptOutcome:
            newest = max(self.run.glob("attempts/*"))
            post(newest, Notice("aws", "rebalance recommendation", "save"))
            post(newest, Notice("signal", "SIGUSR1", key=SIGNAL_KEY))
            (self.run / f"checkpoints/step-{step:08d}").mkdir(parents=True)
            self.now += seconds
            return ending

        return make

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.run.glob("attempts/*/attempt.json"))]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(tmp_path, monkeypatch)


def told(ending: AttemptOutcome, *numbers: int) -> Callable[[], AttemptOutcome]:
    """An ending beside which the command hears signals."""

    def make() -> AttemptOutcome:
        for number in numbers:
            signal.raise_signal(number)
        return ending

    return make


def test_a_worker_that_is_lost_and_tried_again_in_vain_is_no_failure(play: Played) -> None:
    """The budget is for bad luck; a machine that stays away would have used it up within the first hour."""
    again = [play.saves(step, SAVED, seconds) for step, seconds in ((10, 600.0), (20, 1200.0), (30, 2400.0))]
    play(DIED, DIED, again[0], DIED, again[1], DIED, again[2], FINISHED, workers="1:8", max_failures=1)
    assert play.sizes == [8, 8, 4, 8, 4, 8, 4, 8]
    decisions = [record["decision"] for record in play.records]
    assert decisions[:4] == [
        "failure 1 of 1 within 1 h 0 m",
        "worker 2 is lost for good; the run continues with 4 workers",
        "to continue with 8 workers again",
        "8 workers were tried again in vain; the run continues with 4 workers",
    ]


def test_a_machine_that_goes_while_workers_make_room_is_a_preemption(play: Played) -> None:
    """Another attempt would begin on it."""

    def announced() -> AttemptOutcome:
        post(play.run / "attempts/003", Notice("gcp", "preemption"))
        post(play.run / "attempts/003", Notice("signal", "SIGUSR1", key=SIGNAL_KEY))
        return play.saves(10, SAVED, 600.0)()

    with pytest.raises(Preempted, match="step 7 is saved"):
        play(DIED, DIED, announced, workers="1:8")
    assert play.sizes == [8, 8, 4]


def test_several_workers_are_lost_within_an_hour(play: Played) -> None:
    other = replace(DIED, rank=1)
    play(DIED, DIED, other, other, FINISHED, workers="1:8", max_failures=2)
    assert play.sizes == [8, 8, 4, 4, 2]


@pytest.mark.parametrize("failures", [3, 6])
def test_a_run_that_fails_with_any_number_of_workers_ends(play: Played, failures: int) -> None:
    died = replace(DIED, rank=0)
    with pytest.raises(WorkerDied, match=f"failure {failures + 1} within"):
        play(*[died] * (failures + 4), workers="1:8", max_failures=failures)
    assert play.sizes == [8, 8, 4, 4, 2, 2, *[1] * (failures - 2)]


def test_the_same_fault_twice_is_called_a_bug_when_it_comes_with_fewer_workers_too(play: Played) -> None:
    with pytest.raises(WorkerDied, match="this is a bug") as ended:
        play(CRASHED, CRASHED, replace(CRASHED, rank=0), workers="1:4", max_failures=5)
    assert play.sizes == [4, 4, 2] and "    a.py:1 f" in ended.value.what
    assert play.records[1]["decision"] == "worker 2 is lost for good; the run continues with 2 workers"


@pytest.mark.parametrize("ending", [DIED, CRASHED, replace(DIED, kind="hung", signal=None)])
def test_a_signal_while_a_failed_attempt_is_cleared_away_is_a_preemption(play: Played, ending: AttemptOutcome) -> None:
    with pytest.raises(Preempted, match="stopped by SIGTERM before the next attempt") as ended:
        play(told(ending, signal.SIGTERM))
    assert ended.value.what.startswith(ending.what)
    (record,) = play.records
    assert (record["kind"], record["exit_code"], record["stopped_by"]) == (ending.kind, 1, "SIGTERM")
    assert record["decision"] == "SIGTERM came"


def test_a_signal_between_two_attempts_is_a_preemption(play: Played) -> None:
    play.concluded = lambda: signal.raise_signal(signal.SIGTERM)
    with pytest.raises(Preempted, match="stopped by SIGTERM between two attempts"):
        play(DIED)


@pytest.mark.parametrize("whom", ["wait_for_dead_machine", "wait_for_orphaned_writers"])
def test_a_signal_while_others_are_waited_for_takes_nothing_from_them(
    play: Played, monkeypatch: pytest.MonkeyPatch, whom: str
) -> None:
    """An attempt would fence whoever still writes, before it ends."""

    def wait(run: Path, is_over: Callable[[], object]) -> None:
        signal.raise_signal(signal.SIGTERM)
        assert is_over()

    monkeypatch.setattr(supervisor, whom, wait)
    with pytest.raises(Preempted, match="stopped by SIGTERM before the first attempt"):
        play()
    assert not play.run.exists()


def test_nobody_waits_for_a_checkpoint_of_a_run_that_is_moved_aside(
    play: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "wait_for_orphaned_writers", lambda *_: pytest.fail("waits"))
    play(FINISHED, restart=True)


def test_a_signal_hides_nothing_that_would_have_ended_the_run(play: Played) -> None:
    with pytest.raises(DataError, match="no data"):
        play(told(AttemptOutcome("error", "no data", 3), signal.SIGTERM))
    with pytest.raises(WorkerDied, match="worker 2 died"):
        play(told(DIED, signal.SIGTERM), max_failures=0)
    play(told(FINISHED, signal.SIGTERM))
    with pytest.raises(Preempted, match="step 7 is saved"):
        play(told(SAVED, signal.SIGTERM), restart_preempted=True)


@pytest.mark.parametrize("ending", [DIED, AttemptOutcome("error", "interrupted", INTERRUPTED)])
def test_a_second_ctrl_c_is_an_interruption(play: Played, ending: AttemptOutcome) -> None:
    with pytest.raises(KeyboardInterrupt):
        play(told(ending, signal.SIGINT, signal.SIGINT))


def test_workers_that_were_preempted_go_on_if_the_run_is_to(play: Played) -> None:
    with pytest.raises(Preempted, match="step 7 is saved"):
        play(SAVED)
    play(SAVED, SAVED, FINISHED, restart_preempted=True, max_failures=0)
    assert len(play.sizes) == 4
