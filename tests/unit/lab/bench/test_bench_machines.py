"""Cells on several machines: how they are started, and efficiency against one machine."""

from __future__ import annotations

import csv
import io
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from headway.api.clusters.bench_job import bench_job
from headway.clouds.launchers.launcher import find_launcher
from headway.clouds.launchers.slurm import SCRIPT
from headway.core.coordination.launched import MachinePart
from headway.core.errors import ConfigError
from headway.lab.bench import local
from headway.lab.bench.analysis import by_setting, efficiency
from headway.lab.bench.charts import setting_charts
from headway.lab.bench.findings import findings
from headway.lab.bench.launchers import launch_command, lead_file
from headway.lab.bench.matrix import cells_of, plan_matrix
from headway.lab.bench.metrics_file import render_csv
from headway.lab.bench.results import CellResult
from headway.lab.bench.runner import open_matrix, run_matrix
from headway.lab.bench.suite import Cell, load_suite
from headway.run.supervisor.machines.interfaces import interface_of
from support.bench import result
from support.ports import free_ports

CPU = ("train.device=cpu", "strategy=ddp")


def recorded(machines: int, workers: int, speeds: Sequence[float]) -> CellResult:
    """Recorded results of a cell in a suite that compares numbers of machines."""
    found = result("ddp", machines * workers, speeds)
    cell = Cell.model_validate({**found.cell.model_dump(), "machines": machines})
    key = f"{found.key}-{machines}"
    return found.model_copy(update={"cell": cell, "key": key, "settings": {**found.settings, "machines": [1, 2, 4]}})


def test_every_machine_of_a_cell_has_as_many_workers() -> None:
    cells = list(cells_of(load_suite("smoke", [*CPU, "machines=1,2", "workers=1,2"])))
    assert [(cell.machines, cell.workers) for cell in cells] == [(1, 1), (1, 2), (2, 2), (2, 4)]
    names = [cell.name for cell in cells]
    assert len(set(names)) == 4 and names[-1].endswith("-m2") and names[1] + "-m2" == names[2]


def test_strong_cells_share_the_rows_of_all_machines() -> None:
    suite = load_suite("smoke", [*CPU, "machines=1,4", "workers=2", "scaling=strong"])
    configs = [planned.config for planned in plan_matrix(suite, {})]
    assert [config.train.global_batch for config in configs if config] == [8, 8]


def test_efficiency_is_that_against_one_machine_with_as_many_workers_each() -> None:
    # Two workers share a machine's memory bus, so they are no base for machines with one worker, or the other way.
    results = [
        recorded(1, 1, [100, 102]), recorded(2, 1, [180, 184]), recorded(4, 1, [320, 330]),
        recorded(1, 2, [150, 152]), recorded(2, 2, [290, 292]),
    ]  # fmt: skip
    shares = [efficiency(one, results) for one in results]
    assert shares == [None, pytest.approx(182 / 2 / 101), pytest.approx(325 / 4 / 101), None,
                      pytest.approx(291 / 2 / 151)]  # fmt: skip
    rows = list(csv.DictReader(io.StringIO(render_csv(results))))
    assert [row["machines"] for row in rows] == ["1", "2", "4", "1", "2"]
    assert rows[2]["scaling_efficiency"] == str(shares[2]) and rows[2]["base_workers"] == "1"
    groups = by_setting(results)
    assert sorted(setting.workers_per_machine for setting in groups) == [1, 2]
    said = "\n".join(findings(results))
    assert "times the tokens/s of one machine on 4 machines" in said and "as many times the machines" in said


def test_the_chart_of_efficiency_names_machines() -> None:
    pytest.importorskip("matplotlib")
    several = [recorded(1, 2, [100, 102]), recorded(2, 2, [180, 184])]
    charts = {one.name: one.chart.svg for one in setting_charts(several, {"ddp": 0})}
    assert "2 machines" in charts["efficiency"] and "4 workers" not in charts["efficiency"]


def test_a_launcher_starts_a_process_on_every_machine() -> None:
    words = launch_command("srun --nodes {machines} --ntasks-per-node 1", Path("spec.json"), 4, 2)
    assert words[:5] == ["srun", "--nodes", "2", "--ntasks-per-node", "1"]
    assert words[-2:] == ["headway.lab.bench.local", "spec.json"]
    for launcher in ("local", "torchrun"):
        with pytest.raises(ConfigError, match="starts workers on this machine only"):
            open_matrix(load_suite("smoke", [*CPU, "machines=1,2"]), Path("unused"), launcher)


def test_slurm_starts_a_step_for_each_cell(tmp_path: Path) -> None:
    job = bench_job("smoke", [*CPU, "machines=1,2", "workers=2"], out=tmp_path)
    assert (job.machines, job.config.parallel.workers) == (2, 2)
    script = find_launcher("slurm").files(job)[SCRIPT]
    assert "#SBATCH --nodes=2" in script and "HEADWAY_" not in script
    (line,) = [line for line in script.splitlines() if "headway bench run" in line]
    assert line.strip().startswith("headway bench run") and "--launcher 'srun --nodes={machines}" in line
    contained = bench_job("smoke", [*CPU, "machines=2", "launch.slurm.container=x"])
    assert "outside of a container" in next(iter(find_launcher("slurm").problems(contained))).what


@pytest.fixture
def part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str, str], MachinePart]:
    """The part of a machine on which the name of machine 0 stands for an address; the folder is shared."""
    monkeypatch.setattr(local, "VISIBILITY_TIMEOUT", 0.0)

    def of(number: int, name: str, address: str) -> MachinePart:
        monkeypatch.setenv("HEADWAY_NODE", str(number))
        monkeypatch.setenv("HEADWAY_LEAD", f"{name}:29450")
        stands_for = {"alpha": address}
        ask = socket.getaddrinfo
        with monkeypatch.context() as patch:
            patch.setattr(socket, "getaddrinfo", lambda host, *a, **k: ask(stands_for.get(host, host), *a, **k))
            cell = Cell.model_validate({**result("ddp", 4, [1.0]).cell.model_dump(), "machines": 2})
            return local._part(cell, lead_file(tmp_path / "cell.json"))

    return of


def own_address() -> str:
    """An address of this machine that is not loopback."""
    found = (one for name, ones in psutil.net_if_addrs().items() for one in ones if one.family == socket.AF_INET)
    return next((one.address for one in found if not one.address.startswith("127.")), "")


@pytest.mark.skipif(not own_address(), reason="this machine has loopback alone")
def test_a_first_machine_whose_name_stands_for_loopback_there_takes_the_address_that_the_others_reach(
    part: Callable[[int, str, str], MachinePart],
) -> None:
    with pytest.raises(ConfigError, match=r"alpha, stands for 127\.0\.1\.1 there, and machine 1 does not say"):
        part(0, "alpha", "127.0.1.1")
    other = part(1, "alpha", own_address())
    assert (other.first_rank, other.address) == (2, "alpha")
    first = part(0, "alpha", "127.0.1.1")
    assert (first.first_rank, first.address, first.interface) == (0, own_address(), interface_of(own_address()))
    part(1, "alpha", "192.0.2.7")
    with pytest.raises(ConfigError, match=r"192\.0\.2\.7, as machine 1 knows it, is no address that it has"):
        part(0, "alpha", "127.0.1.1")


def test_loopback_that_is_asked_for_stays(part: Callable[[int, str, str], MachinePart]) -> None:
    assert part(0, "127.0.0.1", "").address == "127.0.0.1" and part(0, "localhost", "").address == "localhost"
    assert part(1, "alpha", "127.0.1.1").address == "alpha"
    assert part(0, "alpha", "127.0.1.1").address == "127.0.1.1", "both machines are this one"
    with pytest.raises(ConfigError, match="is not known here"):
        part(0, "a" * 64, "")  # longer than a label of a name may be


#: Starts the rest of its command line once on each machine, all of which are this one.
_LAUNCHER = """
import os, subprocess, sys
machines, port, *command = sys.argv[1:]
variables = {"HEADWAY_LEAD": f"127.0.0.1:{port}"}
started = [
    subprocess.Popen(command, env={**os.environ, **variables, "HEADWAY_NODE": str(number)})
    for number in range(int(machines))
]
sys.exit(max(abs(process.wait()) for process in started))
"""


@pytest.mark.slow
def test_two_machines_on_loopback_are_measured_and_compared_with_one(tmp_path: Path) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(_LAUNCHER)
    suite = load_suite("smoke", [*CPU, "machines=1,2", "workers=1"], accelerator=False)
    launcher = f"{sys.executable} {script} {{machines}} {free_ports(1)[0]}"
    one, two = run_matrix(open_matrix(suite, tmp_path / "results", launcher))
    assert (one.status, two.status) == ("ok", "ok"), (one.last_failure, two.last_failure)
    assert (two.cell.machines, two.cell.workers, two.measured[0].items) == (2, 2, 2 * one.measured[0].items)
    assert len(two.measured[0].peak_memory_bytes_by_worker) == 2
    assert efficiency(two, [one, two]) is not None
