"""Several machines that are killed, frozen and cut off: a run ends as if nothing had happened, bit for bit.

Each machine is a network namespace with a cable and a host name of its own; the run directory is a folder that all see.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headway.runs.ledger_proof import prove
from headway.runs.run_directory import RunDirectory
from parts_table import NAMESPACES
from support import headway, state_hash
from support_machines import Machine, can_make_machines, machines, wait_for_steps

pytestmark = [
    pytest.mark.parts(NAMESPACES),
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_make_machines(), reason="network namespaces need root, and `ip` (iproute2)"),
]

STEPS = 24
SILENCE = 5


@pytest.fixture(scope="module")
def states() -> dict[str, str]:
    """Hashes of uninterrupted runs, by determinism."""
    return {}


@pytest.fixture
def config(tiny: Callable[..., Path]) -> Path:
    return tiny(
        train={"steps": STEPS},
        checkpoint={"every": "4 steps"},
        supervise={"lost_seconds": SILENCE, "rejoin_seconds": 90, "max_failures": 0},
    )


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[Machine]]:
    with machines(2, tmp_path) as made:
        yield made


def words(config: Path, determinism: str, count: str = "2") -> list[str]:
    return [str(config), "name=hurt", f"determinism={determinism}", "--machines", count]


def check(config: Path, determinism: str, states: dict[str, str]) -> None:
    """The run has ended in the state of one that nothing has happened to, and has used every row once."""
    if determinism not in states:
        whole = headway("train", config, "name=whole", f"determinism={determinism}", "--workers", "2")
        assert whole.returncode == 0, whole.stderr
        states[determinism] = state_hash(config.parent / "runs/whole")
    run = config.parent / "runs/hurt"
    assert state_hash(run) == states[determinism]
    proof = prove(RunDirectory(run).path)
    assert not proof.problems, proof


def outcomes(config: Path) -> list[str]:
    paths = sorted((config.parent / "runs/hurt").glob("attempts/*/attempt.json"))
    return [json.loads(path.read_text())["outcome"] for path in paths]


@pytest.mark.parametrize("determinism", ["run", "elastic"])
@pytest.mark.parametrize("fault", ["killed", "frozen", "cut off"])
def test_a_machine_that_is_lost_is_named_and_taken_in_again(
    config: Path, two: list[Machine], states: dict[str, str], fault: str, determinism: str
) -> None:
    first, second = two
    run, command = config.parent / "runs/hurt", words(config, determinism)
    for machine in two:
        machine.start(*command)
    wait_for_steps(run, 6)
    began = time.monotonic()
    {
        "killed": lambda: second.signal_all(signal.SIGKILL),
        "frozen": lambda: second.signal_all(signal.SIGSTOP),
        "cut off": second.cut,
    }[fault]()
    first.says("machine 1 (hw-b) is lost", 60.0)
    named = time.monotonic() - began
    assert named < (3 if fault == "killed" else SILENCE + 4)
    if determinism == "elastic":
        wait_for_steps(run, 1)
        print(f"{fault}: named after {named:.1f} s, next new step after {time.monotonic() - began:.1f} s")
    if fault == "killed":
        second.start(*command)
    elif fault == "frozen":
        second.signal_all(signal.SIGCONT)
    else:
        second.says("the workers of this machine are ended", 60.0)
        second.plug()
    assert [first.wait(), second.wait()] == [0, 0], first.text + second.text
    assert outcomes(config)[0].startswith("machine 1 (hw-b) is lost")
    if determinism == "run":
        assert " 1 worker on " not in first.text, "it was waited for"
    check(config, determinism, states)


@pytest.mark.parametrize("fault", ["killed", "frozen", "cut off"])
def test_a_lead_that_is_lost_and_comes_back_continues_the_run(
    config: Path, two: list[Machine], states: dict[str, str], fault: str
) -> None:
    first, second = two
    command = words(config, "run")
    for machine in two:
        machine.start(*command)
    wait_for_steps(config.parent / "runs/hurt", 6)
    {
        "killed": lambda: first.signal_all(signal.SIGKILL),
        "frozen": lambda: first.signal_all(signal.SIGSTOP),
        "cut off": first.cut,
    }[fault]()
    second.says("the lead is lost", 60.0)
    if fault == "killed":
        first.start(*command)
    elif fault == "frozen":
        first.signal_all(signal.SIGCONT)
    else:
        first.plug()
    assert [first.wait(), second.wait()] == [0, 0], first.text + second.text
    check(config, "run", states)


def test_a_lead_that_does_not_come_back_ends_the_others_for_their_scheduler(
    config: Path, two: list[Machine], states: dict[str, str]
) -> None:
    first, second = two
    command = [*words(config, "run"), "supervise.rejoin_seconds=8"]
    for machine in two:
        machine.start(*command)
    wait_for_steps(config.parent / "runs/hurt", 6)
    first.signal_all(signal.SIGKILL)
    assert second.wait() == 75, second.text
    assert "the lead has been gone for" in second.text
    for machine in two:  # both are started again, as after the death of both
        machine.start(*words(config, "run"))
    assert [first.wait(), second.wait()] == [0, 0], first.text + second.text
    check(config, "run", states)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("when", ["import", "step", "save"])
def test_a_signal_to_any_machine_stops_all_and_saves(
    config: Path, two: list[Machine], states: dict[str, str], when: str, number: int
) -> None:
    command = words(config, "run")
    for machine in two:
        machine.start(*command, faults="slow@checkpoint=8" if when == "save" else "")
    run = config.parent / "runs/hurt"
    if when == "import":
        time.sleep(0.4)
    else:
        wait_for_steps(run, 6 if when == "step" else 8)
    two[number].signal(signal.SIGTERM)
    assert [machine.wait() for machine in two] == [75, 75], two[0].text + two[1].text
    for machine in two:
        machine.start(*command)
    assert [machine.wait() for machine in two] == [0, 0], two[0].text + two[1].text
    check(config, "run", states)


def test_of_three_machines_two_work_and_the_third_takes_the_place_of_a_lost_one(
    config: Path, tmp_path: Path, states: dict[str, str]
) -> None:
    with machines(3, tmp_path) as three:
        for machine in three:
            machine.start(*words(config, "elastic", "3"))
        three[0].says("is a hot spare: the run uses 2 of 3 machines")
        working = 1 if "machine 2 (hw-c) is a hot spare" in three[0].text else 2
        wait_for_steps(config.parent / "runs/hurt", 6)
        three[working].signal_all(signal.SIGKILL)
        assert [three[0].wait(), three[3 - working].wait()] == [0, 0], three[0].text
        assert " 1 worker on " not in three[0].text
        assert sum("is lost" in outcome for outcome in outcomes(config)) == 1, "the spare was never lost"
    check(config, "elastic", states)
