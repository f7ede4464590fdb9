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
from pathlib import Path

import psutil
import pytest

from headway.core.coordination.heartbeat import read_heartbeat
from headway.core.files.foreign import read_json_lines
from headway.core.process.waiting import wait_until
from headway.lab.chaos.machines import can_make_namespaces
from parts_table import RAY
from support import headway, saved_step, state_hash
from support_machines import Machine, machines
from waits import LONG

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


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder for what Ray keeps on a node, whose path is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="hw-ray-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_two_nodes_continue_to_equal_bits_when_processes_or_a_node_are_killed(
    tiny: Callable[..., Path], tmp_path: Path, scratch: Path
) -> None:
    pytest.importorskip("ray", reason="there is no Ray: pip install '.[ray]'")
    config = tiny(train={"steps": STEPS}, supervise={"max_failures": 9})
    out, run = tmp_path / "result.json", tmp_path / "runs/two"
    variables = {
        "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
        "RAY_memory_monitor_refresh_ms": "0", "RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path), "HEADWAY_FAULTS": SLOW,
    }  # fmt: skip
    own = ["name=two", f"launch.ray.storage={tmp_path / 'ray'}", "launch.ray.max_failures=9"]

    def newest_attempt() -> int:
        """The newest attempt that has done a step."""
        records = [record for record in read_json_lines(run / "metrics.jsonl") if "train/loss" in record]
        return max((int(record["attempt"]) for record in records), default=0)

    with machines(3, tmp_path) as (head, *nodes):
        prefix = head.stands.lead.partition(":")[0].rpartition(".")[0]
        # Otherwise some of Ray's actors look for a cluster among all processes of this machine.
        variables["RAY_ADDRESS"] = f"{prefix}.1:{PORT}"

        def start_ray(machine: Machine, *words: str) -> None:
            words += (f"--node-ip-address={prefix}.{machine.number + 1}", f"--temp-dir={scratch}/{machine.number}")
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", *words, "--block"]
            machine.stands.start(command, tmp_path / f"node-{machine.number}.log", variables)

        def join(machine: Machine) -> None:
            start_ray(machine, f"--address={variables['RAY_ADDRESS']}", "--num-cpus=1")

        def said() -> str:
            return "\n".join(path.read_text(errors="replace")[-6000:] for path in sorted(tmp_path.glob("*.log")))

        def wait_for(condition: Callable[[], bool]) -> None:
            assert wait_until(lambda: condition() or head.stands.code is not None, LONG, 0.2), said()
            assert head.stands.code is None, said()

        def killed(what: str, kill: Callable[[], object]) -> None:
            attempt, step, began = newest_attempt(), saved_step(run), time.monotonic()
            kill()
            wait_for(lambda: newest_attempt() > attempt)
            print(f"{what} killed: next step after {time.monotonic() - began:.1f} s")
            wait_for(lambda: saved_step(run) > step)  # so that the next attempt continues from there

        def kill_worker() -> None:
            reading = read_heartbeat(run / f"attempts/{newest_attempt():03d}/heartbeat-1")
            assert reading is not None
            os.kill(reading.pid, signal.SIGKILL)

        def lose_a_node() -> None:
            nodes[1].stands.kill()
            join(nodes[1])

        start_ray(head, "--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false")
        for node in nodes:
            join(node)
        fit = [sys.executable, "-c", _FIT, f"{prefix}.1", str(config), str(out), *own]
        assert wait_until(lambda: "Ray runtime started" in said(), LONG, 0.2), said()
        head.stands.start(fit, tmp_path / "the-driver.log", variables)
        wait_for(lambda: saved_step(run) > 0)
        started = node_process(nodes[1])
        killed("worker of the node process", kill_worker)
        assert node_process(nodes[1]) == started, "the lead starts workers again, not Ray"
        killed("node process", lambda: node_process(nodes[1]).kill())
        killed("Ray worker", lambda: os.kill(node_process(nodes[1]).ppid(), signal.SIGKILL))
        killed("node", lose_a_node)
        assert head.wait() == 0, said()
    found = json.loads(out.read_text())
    assert (found["step"], found["exit_code"]) == (STEPS, 0) and found["loss"] > 0
    assert found["path"] == str(run / f"checkpoints/step-{STEPS:08d}")
    whole = headway("train", config, "name=whole", "--workers", "2")
    assert whole.returncode == 0, whole.stderr
    assert state_hash(run) == state_hash(tmp_path / "runs/whole")
