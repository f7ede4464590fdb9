"""Ray Train places two machines on two nodes: processes and a node are killed, and the run ends with the same bits.

Each node is a network namespace, so that it dies with all that runs on it. A third one has Ray's head and the driver.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from headway.api.clusters.bench_job import bench_job
from headway.clouds.launchers.ray_job import ray_command
from headway.core.coordination.heartbeat import read_heartbeat
from headway.core.files.foreign import read_json_lines
from headway.core.process.waiting import wait_until
from headway.lab.bench.results import read_results
from headway.lab.chaos.machines import can_make_namespaces
from support.machines import Machine, machines
from support.parts_table import RAY
from support.runs import headway, saved_step, state_hash
from support.waits import LONG

pytestmark = [
    pytest.mark.parts(RAY),
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces need root, and `ip` (iproute2)"),
]

STEPS, PORT = 48, 6379
#: Every attempt takes a tenth of a second or more for most steps, so that it does not end before it is killed.
SLOW = ",".join(f"slow@step={step}#*" for step in range(1, STEPS, 6))
#: The driver.
_FIT = """
import json, sys
import ray
import headway
from headway.clouds.launchers.ray import fit

ray.init(_node_ip_address=sys.argv[1])
result = fit(headway.load_config(sys.argv[2], sys.argv[4:]), machines=2)
found = {"step": result.metrics["step"], "exit_code": result.metrics["exit_code"], "path": result.checkpoint.path}
json.dump({**found, "loss": result.metrics["train/loss"]}, open(sys.argv[3], "w"))
"""


def node_process(machine: Machine) -> psutil.Process:
    """The process of `headway train` that a worker of Ray has started on a machine."""
    for pid in machine.stands.processes:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if "headway-ray-" in " ".join(process.cmdline()) and process.parent().name().startswith("ray::"):
                return process
    raise AssertionError("no node process")


@dataclass
class Cluster:
    """Ray on machines that are network namespaces: the head, where drivers run, and nodes."""

    head: Machine
    nodes: list[Machine]
    folder: Path
    scratch: Path
    variables: dict[str, str]

    def start_ray(self, machine: Machine, *words: str) -> None:
        words += (f"--node-ip-address={machine.stands.address}", f"--temp-dir={self.scratch}/{machine.number}")
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *words, "--block"]
        machine.stands.start(command, self.folder / f"node-{machine.number}.log", self.variables)

    def join(self, machine: Machine) -> None:
        self.start_ray(machine, f"--address={self.variables['RAY_ADDRESS']}", "--num-cpus=1")

    def said(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-6000:] for path in sorted(self.folder.glob("*.log")))

    def drive(self, command: list[str]) -> None:
        self.head.stands.start(command, self.folder / "the-driver.log", self.variables)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        assert wait_until(lambda: condition() or self.head.stands.code is not None, LONG, 0.2), self.said()
        assert self.head.stands.code is None, self.said()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A head without processors, and two nodes with one each."""
    pytest.importorskip("ray", reason="there is no Ray: pip install '.[ray]'")
    variables = {
        "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
        "RAY_memory_monitor_refresh_ms": "0", "RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    scratch = Path(tempfile.mkdtemp(prefix="hw-ray-"))  # a path that is short enough for sockets
    try:
        with machines(3, tmp_path) as (head, *nodes):
            # Otherwise some of Ray's actors look for a cluster among all processes of this machine.
            variables["RAY_ADDRESS"] = f"{head.stands.address}:{PORT}"
            made = Cluster(head, nodes, tmp_path, scratch, variables)
            made.start_ray(head, "--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false")
            for node in nodes:
                made.join(node)
            assert wait_until(lambda: "Ray runtime started" in made.said(), LONG, 0.2), made.said()
            yield made
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def test_two_nodes_continue_to_equal_bits_when_processes_or_a_node_are_killed(
    cluster: Cluster, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    config = tiny(train={"steps": STEPS}, supervise={"max_failures": 9})
    out, run, nodes = tmp_path / "result.json", tmp_path / "runs/two", cluster.nodes
    own = ["name=two", f"launch.ray.storage={tmp_path / 'ray'}", "launch.ray.max_failures=9"]
    cluster.variables["HEADWAY_FAULTS"] = SLOW

    def newest_attempt() -> int:
        """The newest attempt that has done a step."""
        records = [record for record in read_json_lines(run / "metrics.jsonl") if "train/loss" in record]
        return max((int(record["attempt"]) for record in records), default=0)

    def killed(what: str, kill: Callable[[], object]) -> None:
        attempt, step, began = newest_attempt(), saved_step(run), time.monotonic()
        kill()
        cluster.wait_for(lambda: newest_attempt() > attempt)
        print(f"{what} killed: next step after {time.monotonic() - began:.1f} s")
        cluster.wait_for(lambda: saved_step(run) > step)  # so that the next attempt continues from there

    def kill_worker() -> None:
        reading = read_heartbeat(run / f"attempts/{newest_attempt():03d}/heartbeat-1")
        assert reading is not None
        os.kill(reading.pid, signal.SIGKILL)

    def lose_a_node() -> None:
        nodes[1].stands.kill()
        cluster.join(nodes[1])

    cluster.drive([sys.executable, "-c", _FIT, cluster.head.stands.address, str(config), str(out), *own])
    cluster.wait_for(lambda: saved_step(run) > 0)
    started = node_process(nodes[1])
    killed("worker of the node process", kill_worker)
    assert node_process(nodes[1]) == started, "the lead starts workers again, not Ray"
    killed("node process", lambda: node_process(nodes[1]).kill())
    killed("Ray worker", lambda: os.kill(node_process(nodes[1]).ppid(), signal.SIGKILL))
    killed("node", lose_a_node)
    assert cluster.head.wait() == 0, cluster.said()
    found = json.loads(out.read_text())
    assert (found["step"], found["exit_code"]) == (STEPS, 0) and found["loss"] > 0
    assert found["path"] == str(run / f"checkpoints/step-{STEPS:08d}")
    whole = headway("train", config, "name=whole", "--workers", "2")
    assert whole.returncode == 0, whole.stderr
    assert state_hash(run) == state_hash(tmp_path / "runs/whole")


def test_a_suite_over_two_nodes_survives_a_machine_in_a_cell_and_its_lead_between_cells(
    cluster: Cluster, tmp_path: Path
) -> None:
    suite = ("machines=1,2", "workers=1", "train.device=cpu", f"config.runs={tmp_path / 'runs'}")
    job = bench_job("smoke", suite)
    (tmp_path / "config.yaml").write_text(job.config_text())
    _, *command = ray_command(job, str(tmp_path / "config.yaml"))
    cluster.drive([sys.executable, *command])
    log = tmp_path / "the-driver.log"

    def kill_when(said: str, number: int) -> None:
        """Kill the command of a machine, and all that it has started."""
        cluster.wait_for(lambda: said in log.read_text(errors="replace"))
        for pid in psutil.pids():
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.environ().get("HEADWAY_NODE") == str(number) and str(tmp_path) in " ".join(
                    process.cmdline()
                ):
                    process.kill()

    kill_when("ddp-w2-1m-fp32-b1-t64-m2: worker", 1)
    kill_when("[3/4]", 0)
    assert cluster.head.wait() == 0, cluster.said()
    done = headway("bench", "collect", log, "--output", "collected", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = {one.cell.name: one for one in read_results(tmp_path / "collected")}
    assert {name: one.status for name, one in found.items()} == {
        "ddp-w1-1m-fp32-b1-t64": "ok",
        "zero3-w1-1m-fp32-b1-t64": "ok",
        "ddp-w2-1m-fp32-b1-t64-m2": "killed",
        "zero3-w2-1m-fp32-b1-t64-m2": "ok",
    }
    assert "machine 1" in str(found["ddp-w2-1m-fp32-b1-t64-m2"].repeats[0].reason)
