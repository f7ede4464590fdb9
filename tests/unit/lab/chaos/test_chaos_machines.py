"""Campaigns with several machines: their plan, the machines, and how a trial is carried out and judged."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path

import pytest

from headway.config import load_config, resolve
from headway.core.errors import ConfigError
from headway.core.files.atomic import append_json_line
from headway.core.process.table import STOPPED, process_state
from headway.core.process.waiting import wait_until
from headway.lab.chaos import machine_trial
from headway.lab.chaos.campaign import Stage
from headway.lab.chaos.machine_plan import FAULTS_PER_TRIAL, MachineFault, MachineTrial, plan_machine_campaign
from headway.lab.chaos.machine_trial import MachineRuns
from headway.lab.chaos.machines import Cut, Machine, can_make_namespaces, standing_machines
from headway.lab.chaos.report import CampaignResult, render, run_campaign
from headway.lab.chaos.trial import TrialResult
from support.waits import LONG


def plan(seed: int, can_cut: bool = True, count: int = 19) -> list[MachineTrial]:
    return list(islice(plan_machine_campaign(3, 100, 5.0, can_cut=can_cut, seed=seed), count))


def test_a_plan_follows_from_its_seed_and_every_fault_of_every_machine_comes_equally_often() -> None:
    assert plan(7) == plan(7) != plan(8)
    faults = [fault for trial in plan(7) for fault in trial.faults]
    assert len(faults) == 19 * FAULTS_PER_TRIAL
    counts = Counter((fault.kind, fault.machines) for fault in faults)
    assert len(counts) == 3 * 6 + 1 and set(counts.values()) == {FAULTS_PER_TRIAL}
    assert ("kill", (0, 1, 2)) in counts
    for trial in plan(7):
        steps = [fault.step for fault in trial.faults]
        assert steps == sorted(steps) and steps[0] > 0 and steps[-1] < 75
    held = [fault.seconds for fault in faults if fault.kind in ("freeze", "cut", "cut-out", "cut-in")]
    assert 0 < sum(seconds < 5 for seconds in held) < len(held) / 2, "some are shorter than it takes to be lost"
    assert not any(5 <= seconds < 6 for seconds in held)
    assert {fault.kind for trial in plan(7, can_cut=False) for fault in trial.faults} == {"kill", "freeze", "stop"}


@pytest.mark.skipif(sys.platform != "linux", reason="states of processes come from /proc")
def test_all_processes_of_a_machine_stop_and_end_together(tmp_path: Path) -> None:
    with standing_machines(2, namespaces=False) as machines:
        for machine in machines:  # one process of its own session, whose parent is gone
            machine.start(["sh", "-c", "setsid sleep 600 & sleep 600"], tmp_path / "log", {})
            assert wait_until(lambda m=machine: len(m.processes) == 3, LONG)  # type: ignore[misc]
        first, second = machines
        first.freeze()
        frozen = [STOPPED] * 3
        assert wait_until(lambda: [s.state for pid in first.processes if (s := process_state(pid))] == frozen, LONG)
        first.thaw()
        first.kill()
        # The shell may learn of its child's end before its own comes.
        assert first.wait(LONG) in (-signal.SIGKILL, 128 + signal.SIGKILL)
        assert wait_until(lambda: not first.processes, LONG)
        assert len(second.processes) == 3 and second.code is None
    assert not second.processes


def _environment(pid: int) -> str | None:
    """Read what a process was started with; None once it has ended, as those before `sleep` do during the listing."""
    try:
        return Path(f"/proc/{pid}/environ").read_text()
    except OSError:
        return None


@pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces need root, and `ip` (iproute2)")
def test_all_that_runs_in_a_namespace_is_killed_without_any_mark(tmp_path: Path) -> None:
    """Ray's workers overwrite the environment that the others are known by."""
    with standing_machines(1, namespaces=True) as (machine,):
        machine.start(["env", "-i", str(shutil.which("sleep")), "600"], tmp_path / "log", {})
        assert wait_until(lambda: [_environment(pid) for pid in machine.processes] == [""], LONG)
        machine.kill()
        assert machine.wait(LONG) == -signal.SIGKILL


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the handled signals come from /proc")
def test_a_command_answers_signals_once_it_handles_them(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(75)); print('x', flush=True)\ntime.sleep(600)"
    )
    with standing_machines(1, namespaces=False) as (machine,):
        machine.start([sys.executable, "-S", "-c", code], tmp_path / "log", {})
        assert wait_until(lambda: (tmp_path / "log").read_text() == "x\n", LONG)
        assert machine.answers_signals
        machine.terminate()
        assert machine.wait(LONG) == 75
        assert not machine.answers_signals


class Scripted(Machine):
    """A machine whose commands end as written, and which notes what is done to it."""

    def __init__(self, number: int, codes: Sequence[int | None], did: list[str]) -> None:
        super().__init__(number, "127.0.0.1:1")
        self._codes, self._did = list(codes), did

    def start(self, command: Sequence[str], log: Path, variables: Mapping[str, str]) -> None:
        assert command[-4:] == ["--node", str(self.number), "--lead", "127.0.0.1:1"] and variables["HEADWAY_SECRET"]
        self._did.append(f"start {self.number}")

    @property
    def code(self) -> int | None:
        return self._codes.pop(0) if len(self._codes) > 1 else self._codes[0]

    @property
    def answers_signals(self) -> bool:
        return True

    def kill(self) -> None:
        self._did.append(f"kill {self.number}")

    def terminate(self) -> None:
        self._did.append(f"terminate {self.number}")

    def cut(self, kind: Cut) -> None:
        self._did.append(f"{kind} {self.number}")

    def plug(self) -> None:
        self._did.append(f"plug {self.number}")

    def end(self) -> None:
        pass


Scene = Callable[..., tuple[str | None, list[str]]]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """Carry out faults of machines whose commands end as written; return the problem, and what was done."""
    monkeypatch.setattr(machine_trial, "_LOOK_SECONDS", 0.001)

    def play(codes: Sequence[Sequence[int | None]], *faults: MachineFault) -> tuple[str | None, list[str]]:
        did: list[str] = []
        machines = [Scripted(number, own, did) for number, own in enumerate(codes)]
        runs = MachineRuns(tmp_path / "c.yaml", [], tmp_path, [Stage(0, 9, {})], machines=machines, workers=1)
        append_json_line(tmp_path / "trial-001" / "metrics.jsonl", {"step": 4, "train/loss": 1.0, "attempt": 1})
        return runs._disturb(tmp_path / "trial-001", MachineTrial(1, faults)), did

    (tmp_path / "trial-001").mkdir()
    return play


def test_all_commands_are_started_again_when_one_asks_for_it(scene: Scene) -> None:
    problem, did = scene([[None, 75, 0], [None, 0, 0]])
    assert problem is None and did == ["start 0", "start 1"] * 2


def test_another_exit_code_is_a_problem(scene: Scene) -> None:
    problem, did = scene([[1], [0]])
    assert problem == "a machine's command ended with exit code 1" and did == ["start 0", "start 1"]


def test_faults_come_in_turn_and_are_undone(scene: Scene) -> None:
    beyond = MachineFault(5, "stop", (0,))
    faults = [MachineFault(2, "cut-in", (1,)), MachineFault(2, "kill", (0, 1)), MachineFault(3, "stop", (1,)), beyond]
    running = [None] * 12
    problem, did = scene([[*running, 0], [*running, 0]], *faults)
    assert problem is None
    assert did[2:] == ["cut-in 1", "plug 1", "kill 0", "kill 1", "start 0", "start 1", "terminate 1"]


def test_recoveries_are_counted_by_kind_and_only_up_to_the_next_fault(tmp_path: Path) -> None:
    run, result = tmp_path / "trial-001", TrialResult(1, (2,))
    runs = MachineRuns(tmp_path / "c.yaml", [], tmp_path, [Stage(0, 9, {})], machines=[], workers=1)
    run.mkdir()
    for time, attempt in ((1.0, 1), (2.0, 1), (4.0, 1), (12.0, 2), (13.0, 2), (30.0, 3)):
        append_json_line(run / "metrics.jsonl", {"time": time, "attempt": attempt, "train/loss": 1.0})
    for time, order in ((2.5, "freeze@machine"), (5.0, "kill@machine"), (14.0, "cut@machine")):
        append_json_line(tmp_path / "trial-001.faults.jsonl", {"time": time, "order": order})
    runs._count_faults(run, result)
    assert result.recoveries_by_kind == {"kill@machine": [7.0], "cut@machine": [16.0]}, "the freeze was no loss"
    assert result.recovery_seconds == [7.0, 16.0] and result.kills.total() == 3


def test_the_table_says_as_what_the_machines_stand_and_whether_rows_were_lost() -> None:
    kinds = {"kill@machine": [7.0, 9.0]}
    trials = [
        TrialResult(1, (3,), Counter({"kill@machine": 2}), state_sha256="a", recoveries_by_kind=kinds),
        TrialResult(2, (3,), Counter({"stop@machine": 1}), ["ledger: x"], state_sha256="a", rows_differ=True),
    ]
    text = render(CampaignResult(0, "a", trials, machines="3 machines (network namespaces)"))
    assert "3 faults in 2 runs on 3 machines (network namespaces)" in text and "FAIL  run 2: ledger: x" in text
    assert "kill@machine                    2   next step after 8.0 s, 9.0 s at most" in text
    assert "runs with rows lost or repeated 1" in text


@pytest.mark.parametrize("more", [{"remote": "s3://a/b"}, {"changes": True}, {"worker_counts": (1, 2)}])
def test_what_a_campaign_with_machines_does_not_test_is_refused(
    tiny: Callable[..., Path], tmp_path: Path, more: dict[str, object]
) -> None:
    options = {"kills": 1, "seed": 0, "worker_counts": (1,), "machines": 3, **more}
    with pytest.raises(ConfigError, match="several machines"):
        run_campaign(resolve(load_config(tiny())), tmp_path / "out", **options)  # type: ignore[arg-type]
    assert not os.path.lexists(tmp_path / "out")
