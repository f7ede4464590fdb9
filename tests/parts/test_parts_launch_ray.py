"""Ray Train places a machine of a run: its node process is killed, and the run ends with the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.core.waiting import wait_until
from parts_table import RAY
from support import headway, state_hash
from waits import LONG

pytestmark = [pytest.mark.parts(RAY), pytest.mark.timeout(1800)]

_FIT = """
import json, os, sys
import ray
import headway
from headway.launchers.ray import fit

environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", runtime_env={"env_vars": environment})
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
    pytest.importorskip("ray", reason="there is no Ray: pip install 'headway[ray]'")
    config, out, attempts = tiny(train={"steps": 120}), tmp_path / "result.json", tmp_path / "runs/placed/attempts"
    own = ["name=placed", f"launch.ray.storage={tmp_path / 'ray'}"]
    command = [sys.executable, "-c", _FIT, str(config), str(out), *own]
    with (tmp_path / "ray.log").open("wb") as log:
        fitting = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **_ENVIRONMENT})
    try:
        saved = tmp_path / "runs/placed/checkpoints/step-00000004"
        assert wait_until(saved.exists, LONG, 0.2) or saved.parent.exists(), (tmp_path / "ray.log").read_text()[-3000:]
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
