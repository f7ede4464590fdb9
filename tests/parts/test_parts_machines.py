"""Several machines that are killed, frozen and cut off: a run ends as if nothing had happened, bit for bit.

Each machine is a network namespace with a cable and a host name of its own; the run directory is a folder that all see.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headway.core.process.waiting import wait_until
from headway.lab.chaos.machines import can_make_namespaces
from headway.run.directory.ledger_proof import prove
from headway.run.directory.run_directory import RunDirectory
from support.machines import Machine, machines, wait_for_steps
from support.parts_table import NAMESPACES
from support.runs import headway, state_hash
from support.waits import LONG

pytestmark = [
    pytest.mark.parts(NAMESPACES),
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces need root, and `ip` (iproute2)"),
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


def strike(machine: Machine, fault: str) -> None:
    stands = machine.stands
    {"kill": stands.kill, "freeze": stands.freeze}.get(fault, lambda: stands.cut(fault))()  # type: ignore[arg-type]


def undo(machine: Machine, fault: str, command: list[str]) -> None:
    if fault == "kill":
        machine.start(*command)
    elif fault == "freeze":
        machine.stands.thaw()
    else:
        machine.stands.plug()


def ends(several: list[Machine]) -> list[int]:
    return [machine.wait() for machine in several]


def said(several: list[Machine]) -> str:
    return "\n".join(machine.text for machine in several)


FAULTS = ["kill", "freeze", "cut", "cut-out", "cut-in"]
_OF_TWO = [("run", fault) for fault in FAULTS] + [("elastic", "freeze"), ("elastic", "cut-out")]


@pytest.mark.parametrize(("determinism", "fault"), _OF_TWO)
def test_a_machine_that_is_lost_is_named_and_taken_in_again(
    config: Path, two: list[Machine], states: dict[str, str], fault: str, determinism: str
) -> None:
    first, second = two
    run, command = config.parent / "runs/hurt", words(config, determinism)
    for machine in two:
        machine.start(*command)
    wait_for_steps(run, 6)
    began = time.monotonic()
    strike(second, fault)
    first.says("machine 1 (machine-1) is lost", 60.0)
    named = time.monotonic() - began
    assert named < (3 if fault == "kill" else SILENCE + 4)
    if determinism == "elastic":
        wait_for_steps(run, 1)
    elif fault.startswith("cut"):
        second.says("the workers of this machine are ended", 60.0)
    undo(second, fault, command)
    if determinism == "run":
        wait_for_steps(run, 1)
    print(f"{fault}, {determinism}: named after {named:.1f} s, next step after {time.monotonic() - began:.1f} s")
    assert ends(two) == [0, 0], said(two)
    assert outcomes(config)[0].startswith("machine 1 (machine-1) is lost")
    if determinism == "run":
        assert " 1 worker on " not in first.text, "it was waited for"
    check(config, determinism, states)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lead_that_is_lost_and_comes_back_continues_the_run(
    config: Path, two: list[Machine], states: dict[str, str], fault: str
) -> None:
    first, second = two
    run, command = config.parent / "runs/hurt", words(config, "run")
    for machine in two:
        machine.start(*command)
    wait_for_steps(run, 6)
    began = time.monotonic()
    strike(first, fault)
    second.says("the lead is lost", 60.0)
    named = time.monotonic() - began
    undo(first, fault, command)
    wait_for_steps(run, 1)
    print(f"lead, {fault}: noticed after {named:.1f} s, next step after {time.monotonic() - began:.1f} s")
    assert ends(two) == [0, 0], said(two)
    check(config, "run", states)


def with_files_of_its_own(folder: Path, hosts: Path) -> tuple[str, ...]:
    """A command that runs another one where names are known by a file of its own, and by no server."""
    switch = folder / "nsswitch.conf"
    switch.write_text("hosts: files\n")
    mount = 'mount --bind "$0" /etc/hosts && mount --bind "$1" /etc/nsswitch.conf && shift && exec "$@"'
    return "unshare", "--mount", "sh", "-c", mount, str(hosts), str(switch)


@pytest.mark.parametrize("late", ["the name", "the lead"])
def test_a_lead_whose_name_appears_late_is_found(
    config: Path, two: list[Machine], states: dict[str, str], late: str
) -> None:
    """As names of pods do, some seconds after the pods; the lead does not wait for its own."""
    first, second = two
    hosts = config.parent / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    within = with_files_of_its_own(config.parent, hosts)
    lead, command = "lead.of-a-job:29450", words(config, "run")
    second.start(*command, lead=lead, within=within)
    if late == "the name":
        first.start(*command, lead=lead, within=within)
        first.says("is not known here, or not yet")
    time.sleep(5.0)
    assert "joined" not in second.text and second.stands.code is None
    with hosts.open("a") as file:  # of the same file, which is mounted elsewhere
        file.write(f"{first.stands.lead.partition(':')[0]} lead.of-a-job\n")
    began = time.monotonic()
    if late == "the lead":
        first.start(*command, lead=lead, within=within)
    second.says("has joined the lead at lead.of-a-job:29450")
    print(f"joined {time.monotonic() - began:.1f} s after {late} was there")
    assert ends(two) == [0, 0], said(two)
    check(config, "run", states)


def test_a_lead_whose_name_never_appears_ends_all_with_75(config: Path, two: list[Machine]) -> None:
    """So that a scheduler starts them again: 2 would fail a Job of Kubernetes for good."""
    hosts = config.parent / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    command = [*words(config, "run"), "supervise.rejoin_seconds=8"]
    for machine in two:
        machine.start(*command, lead="lead.of-a-job:29450", within=with_files_of_its_own(config.parent, hosts))
    assert ends(two) == [75, 75], said(two)
    assert "machine 1 did not come within" in two[0].text and "it cannot be reached" in two[1].text


def test_both_machines_are_lost_and_the_same_commands_continue(
    config: Path, two: list[Machine], states: dict[str, str]
) -> None:
    run, command = config.parent / "runs/hurt", words(config, "elastic")
    for machine in two:
        machine.start(*command)
    wait_for_steps(run, 6)
    began = time.monotonic()
    for machine in two:
        machine.stands.kill()
    for machine in two:
        machine.start(*command)
    wait_for_steps(run, 1)
    print(f"both killed: next step after {time.monotonic() - began:.1f} s")
    assert ends(two) == [0, 0], said(two)
    check(config, "elastic", states)


def test_a_lead_that_does_not_come_back_ends_the_others_for_their_scheduler(
    config: Path, two: list[Machine], states: dict[str, str]
) -> None:
    first, second = two
    command = [*words(config, "run"), "supervise.rejoin_seconds=8"]
    for machine in two:
        machine.start(*command)
    wait_for_steps(config.parent / "runs/hurt", 6)
    first.stands.kill()
    assert second.wait() == 75, second.text
    assert "the lead has been gone for" in second.text
    for machine in two:  # both are started again, as after the death of both
        machine.start(*words(config, "run"))
    assert ends(two) == [0, 0], said(two)
    check(config, "run", states)


def test_a_machine_that_is_cut_off_publishes_nothing(config: Path, two: list[Machine], states: dict[str, str]) -> None:
    first, second = two
    run, command = config.parent / "runs/hurt", words(config, "elastic")
    for machine in two:  # its writer process stops with its part of the second checkpoint half written
        machine.start(*command, faults="freeze@checkpoint.shard:2#1%1")
    wait_for_steps(run, 6)
    second.stands.freeze()
    second.stands.cut("cut")
    first.says("machine 1 (machine-1) is lost", 60.0)
    wait_for_steps(run, 1)  # the lead continues alone
    first.stands.freeze()
    before = published(run)
    second.stands.thaw()  # now it does what it was about to do, and nobody else does anything
    second.says("the workers of this machine are ended", 60.0)
    time.sleep(1.0)
    assert published(run) == before
    second.stands.plug()
    first.stands.thaw()
    assert ends(two) == [0, 0], said(two)
    check(config, "elastic", states)


def published(run: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file that later attempts, or readers, take for part of the run."""
    paths = [*run.glob("checkpoints/step-*/*"), *run.glob("*.jsonl"), run / "run.json"]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths if path.exists()}


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("when", ["import", "step", "save"])
def test_a_signal_to_any_machine_stops_all_and_saves(
    config: Path, two: list[Machine], states: dict[str, str], when: str, number: int
) -> None:
    run, command = config.parent / "runs/hurt", words(config, "run")
    for machine in two:
        machine.start(*command, faults="slow@checkpoint.shard:1" if when == "save" else "")
    if when == "import":
        assert wait_until(lambda: two[number].stands.answers_signals, LONG, 0.001)
    elif when == "step":
        wait_for_steps(run, 6)
    else:
        assert wait_until(lambda: any(run.glob("checkpoints/.*step-00000008*")), LONG, 0.001)
    two[number].stands.terminate()
    assert ends(two) == [75, 75], said(two)
    for machine in two:
        machine.start(*command)
    assert ends(two) == [0, 0], said(two)
    check(config, "run", states)


def test_of_three_machines_two_work_and_the_third_takes_the_place_of_a_lost_one(
    config: Path, tmp_path: Path, states: dict[str, str]
) -> None:
    with machines(3, tmp_path) as three:
        for machine in three:
            machine.start(*words(config, "elastic", "3"))
        three[0].says("is a hot spare: the run uses 2 of 3 machines")
        working = 1 if "machine 2 (machine-2) is a hot spare" in three[0].text else 2
        wait_for_steps(config.parent / "runs/hurt", 6)
        three[working].stands.kill()
        assert ends([three[0], three[3 - working]]) == [0, 0], said(three)
        assert " 1 worker on " not in three[0].text
        assert sum("is lost" in outcome for outcome in outcomes(config)) == 1, "the spare was never lost"
    check(config, "elastic", states)
