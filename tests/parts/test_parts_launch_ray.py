"""Ray places a machine of a run, and units of input on several: what is killed is done again, to the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.core.process.waiting import wait_until
from support.parts_table import RAY
from support.prepare import Corpus
from support.runs import headway, saved_step, state_hash, store_contents
from support.waits import LONG

pytestmark = [pytest.mark.parts(RAY), pytest.mark.timeout(1800)]

_FIT = """
import json, os, sys
import ray
import headway
from headway.clouds.launchers.ray import fit

environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
ray.init(  # a cluster of its own, whichever others this machine has
    address="local", num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1",
    runtime_env={"env_vars": environment},
)
result = fit(headway.load_config(sys.argv[1], sys.argv[3:]), run_config=None)
found = {"step": result.metrics["step"], "exit_code": result.metrics["exit_code"], "path": result.checkpoint.path}
json.dump(found, open(sys.argv[2], "w"))
"""
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "OMP_NUM_THREADS": "1",
}  # fmt: skip


def test_a_node_process_that_is_killed_is_started_again_and_the_state_is_equal(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip("ray", reason="there is no Ray: pip install '.[ray]'")
    config, out, attempts = tiny(train={"steps": 120}), tmp_path / "result.json", tmp_path / "runs/placed/attempts"
    own = ["name=placed", f"launch.ray.storage={tmp_path / 'ray'}"]
    command = [sys.executable, "-c", _FIT, str(config), str(out), *own]
    slow = {"HEADWAY_FAULTS": "slow@step=1"}  # so that the first attempt does not end before it is killed
    with (tmp_path / "ray.log").open("wb") as log:
        fitting = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **_ENVIRONMENT, **slow})
    try:
        run = tmp_path / "runs/placed"
        assert wait_until(lambda: saved_step(run) > 0, LONG, 0.2), (tmp_path / "ray.log").read_text()[-3000:]
        os.kill(json.loads((attempts / "001" / "attempt.json").read_text())["pid"], signal.SIGKILL)
        assert fitting.wait(LONG) == 0, (tmp_path / "ray.log").read_text()[-5000:]
    finally:
        fitting.terminate()
        fitting.wait()
    assert len(list(attempts.iterdir())) >= 2
    found = json.loads(out.read_text())
    assert (found["step"], found["exit_code"]) == (120, 0)
    assert found["path"] == str(tmp_path / "runs/placed/checkpoints/step-00000120")
    whole = headway("train", config, "name=whole")
    assert whole.returncode == 0, whole.stderr
    assert state_hash(tmp_path / "runs/placed") == state_hash(tmp_path / "runs/whole")


def test_a_cluster_without_room_is_named_instead_of_waited_for_without_a_word(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip("ray", reason="there is no Ray: pip install 'headway[ray]'")
    config = tiny(train={"device": "auto"}, launch={"ray": {"wait_seconds": 1}})
    command = [sys.executable, "-c", _FIT, str(config), str(tmp_path / "result.json")]
    done = subprocess.run(
        command, env={**os.environ, **_ENVIRONMENT}, capture_output=True, text=True, timeout=LONG, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode != 0 and "train.device=cpu" in said, said
    assert "needs 1 machine with 1 GPU each, and the Ray cluster has 0 GPU on 1 node: waiting 1 s" in said, said
    assert not (tmp_path / "runs").exists()


def test_a_machine_that_is_killed_while_it_prepares_data_changes_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="there is no Ray: pip install '.[ray]'")
    corpus = Corpus(tmp_path)
    corpus.prepare_alone()
    for name, value in {**_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path), "NOTES": f"{tmp_path}/notes",
                        "PAUSE": "0.1", "RAY_memory_monitor_refresh_ms": "0"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
        preparing = corpus.prepare("--on", "ray", pause=0.1, RAY_ADDRESS=cluster.address)
        assert wait_until(lambda: len(corpus.surveyed()) >= 2 or preparing.poll() is not None, LONG, 0.05)
        # The machine whose process has cleaned a document last is at work.
        working = Path(f"/proc/{corpus.workers()[-1]}/stat").read_text().rpartition(")")[2].split()[1]
        at_work = next(n for n in nodes if str(n.all_processes["raylet"][0].process.pid) == working)
        finished = corpus.surveyed()
        cluster.remove_node(at_work, allow_graceful=False)
        assert preparing.wait(LONG) == 0, corpus.log()
    finally:
        cluster.shutdown()
    assert store_contents(tmp_path / "many") == store_contents(tmp_path / "one")
    once = corpus.times("notes-one")
    assert {file: corpus.times()[file] for file in finished} == {file: once[file] for file in finished}
    assert corpus.times() != once, "the machine was not at work"
