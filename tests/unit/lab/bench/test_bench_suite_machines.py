"""Machines that run the same suite: who leads, what a lost one costs, and what the others keep of a lost lead."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.core.coordination.launch_variables import LEAD, MACHINES, NODE, SECRET
from headway.core.errors import ConfigError, HeadwayError, Preempted
from headway.core.files.atomic import write_json
from headway.core.process.waiting import wait_until
from headway.lab.bench.blocks import find_blocks
from headway.lab.bench.machines import SuiteMachines, SuiteMembership, find_membership, measure_for_lead
from headway.lab.bench.matrix import plan_matrix, suite_config
from headway.lab.bench.messages import SUITE, Measure
from headway.lab.bench.results import CellResult, Repeat, read_results
from headway.lab.bench.spec import Spec
from headway.lab.bench.suite import Suite, load_suite
from headway.run.supervisor.machines.lead_connection import LeadConnection
from headway.run.supervisor.machines.machine_role import MachineRole
from support.bench import result
from support.ports import free_ports
from support.waits import LONG

ENVIRONMENT = {"HEADWAY_FAULTS": "", "HEADWAY_RESTARTS": "0", "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def suite() -> Suite:
    seconds = ("supervise.lost_seconds=5", "supervise.rejoin_seconds=5")
    return load_suite("smoke", ["machines=1,2", "workers=1", "train.device=cpu", *seconds], accelerator=False)


@pytest.fixture
def member(suite: Suite) -> Callable[[int], SuiteMembership]:
    """The membership of a machine of two, all of which are this one."""
    (port,) = free_ports(1)
    config = suite_config(suite)
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"machines": 2})})
    return lambda number: SuiteMembership(
        MachineRole(number, "127.0.0.1", port, b"a secret of the tests"), config, "the suite"
    )


@pytest.fixture
def other(member: Callable[[int], SuiteMembership]) -> Iterator[Callable[[], list[BaseException | None]]]:
    """Starts machine 1 as a thread, whose end is in the list."""
    threads: list[threading.Thread] = []

    def start() -> list[BaseException | None]:
        ends: list[BaseException | None] = []

        def measure() -> None:
            try:
                measure_for_lead(member(1))
            except HeadwayError as error:
                ends.append(error)
            else:
                ends.append(None)

        threads.append(threading.Thread(target=measure))
        threads[-1].start()
        return ends

    yield start
    for thread in threads:
        thread.join(LONG)


def spec_of(suite: Suite, folder: Path) -> Path:
    """The first cell on two machines, to be measured for the first time."""
    planned = next(planned for planned in plan_matrix(suite, {}) if planned.cell.machines == 2)
    assert planned.config is not None
    about: dict[str, Any] = {"environment_id": "0" * 8, "environment": {}, "settings": {}, "suite": "smoke"}
    begun = Repeat(number=1, status="failed", started=1.0)
    empty = CellResult(cell=planned.cell, key=planned.key, repeats=[begun], **about)
    write_json(folder / "cell.json", Spec(empty, planned.config, "synthetic", 512, 1, 1, 0).dump())
    return folder / "cell.json"


def test_what_is_missing_is_said_before_anything_is_measured(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_membership(load_suite("smoke", ["workers=1", "train.device=cpu"])) is None, "one machine asks nobody"
    with pytest.raises(ConfigError, match="this machine has no number; the run has 2 machines"):
        find_membership(suite)
    for name, value in ((NODE, "1"), (LEAD, "127.0.0.1:1"), (SECRET, "long enough to be no guess")):
        monkeypatch.setenv(name, value)
    found = find_membership(suite)
    assert found is not None and (found.role.number, found.role.leads, found.role.port) == (1, False, 1)
    monkeypatch.setenv(MACHINES, "1")
    with pytest.raises(ConfigError, match="the suite has cells on 2 machines, and 1 machine will measure it"):
        find_membership(suite)


def test_results_outlive_a_lead_that_is_stopped(
    member: Callable[[int], SuiteMembership], other: Callable[[], list[BaseException | None]], tmp_path: Path
) -> None:
    ends, measured = other(), result("ddp", 2, [100.0, 101.0])
    with pytest.raises(Preempted), SuiteMachines.of(member(0)) as first:
        assert first is not None
        first.gather(tmp_path)
        assert not read_results(tmp_path), "nobody has kept anything yet"
        first.keep(measured)
        raise Preempted("the pod is evicted")
    assert not ends, "it waits for another lead"
    with SuiteMachines.of(member(0)) as second:
        assert second is not None
        second.gather(tmp_path)
    assert wait_until(lambda: ends == [None], LONG), "the suite is measured"
    assert read_results(tmp_path) == [measured]


def test_an_error_of_the_lead_ends_the_others_alike(
    member: Callable[[int], SuiteMembership], other: Callable[[], list[BaseException | None]], tmp_path: Path
) -> None:
    ends = other()
    with pytest.raises(ConfigError), SuiteMachines.of(member(0)) as machines:
        assert machines is not None
        machines.gather(tmp_path)
        raise ConfigError("no cell can run", fix="another suite")
    assert wait_until(lambda: bool(ends), LONG)
    assert isinstance(ends[0], ConfigError) and "no cell can run" in str(ends[0])


def test_a_machine_that_is_lost_costs_the_measurement(
    member: Callable[[int], SuiteMembership], suite: Suite, tmp_path: Path
) -> None:
    lead = LeadConnection(member(1).role, member(1).hello, 5.0, messages=SUITE)

    def leave() -> None:
        wait_until(lambda: any(isinstance(message, Measure) for message in lead.take()), LONG, 0.01)
        lead.close()

    leaves = threading.Thread(target=leave)
    leaves.start()
    with SuiteMachines.of(member(0)) as machines, (tmp_path / "log").open("wb") as log:
        assert machines is not None
        assert machines.run(spec_of(suite, tmp_path), {**ENVIRONMENT}, log, LONG) == 1
    leaves.join()
    (told,) = find_blocks((tmp_path / "log").read_text().splitlines()).values
    (repeat,) = CellResult.model_validate(told).repeats
    assert repeat.status == "killed" and str(repeat.reason).startswith("machine 1 (")


def test_a_cell_whose_machines_do_not_come_stops_the_suite_to_be_continued(
    member: Callable[[int], SuiteMembership], suite: Suite, tmp_path: Path
) -> None:
    waits = member(0)
    supervise = waits.config.supervise.model_copy(update={"rejoin_seconds": 0.1})
    waits = SuiteMembership(waits.role, waits.config.model_copy(update={"supervise": supervise}), waits.identity)
    says = "1 machine of the 2 of ddp-w2-1m-fp32-b1-t64-m2 did not come"
    with pytest.raises(Preempted, match=says), SuiteMachines.of(waits) as machines:
        assert machines is not None
        machines.run(spec_of(suite, tmp_path), {**ENVIRONMENT}, io.BytesIO(), LONG)
