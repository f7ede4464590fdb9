"""Jobs of a real Slurm: its time limit and its signals save and stop a run, and the job, queued again, ends it."""

from __future__ import annotations

import getpass
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from headway.core.process.waiting import wait_until
from support.parts_table import SLURM, program
from support.ports import free_ports
from support.runs import headway, state_hash
from support.waits import LONG

pytestmark = [pytest.mark.parts(SLURM), pytest.mark.timeout(1800)]

#: As in docs/preemption.md; the second time it does some steps more, and nobody stops it.
SCRIPT = """#!/bin/bash
#SBATCH --requeue --time=3 --output={folder}/job.log --open-mode=append
cd {folder}
if [ -n "$SLURM_RESTART_COUNT" ]; then
    last=$(ls runs/taken/checkpoints | tail -1)
    echo $((10#${{last#step-}} + 10)) > steps
    more="preemption.watch=none train.steps=$(cat steps) --accept-changes"
fi
srun {python} -m headway train config.yaml name=taken $more
code=$?
[ $code -ne 75 ] || scontrol requeue $SLURM_JOB_ID
exit $code
"""


class Slurm:
    """A cluster of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def ask(self, name: str, *words: str | Path) -> str:
        """What one of its commands prints."""
        command = [str(program(name)), *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment, check=False, timeout=LONG)
        assert done.returncode == 0, f"{done.stderr}\n{self.log()}"
        return done.stdout

    def log(self) -> str:
        """What its daemons have written."""
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(self._folder.glob("*.log")))

    def job(self, number: str) -> dict[str, str]:
        """Facts about a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.ask("scontrol", "show", "job", number)))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if not all(map(program, ("slurmctld", "slurmd", "sbatch", "srun"))):
        pytest.skip("there is no Slurm: apt-get install slurmctld slurmd slurm-client")
    folder = tmp_path_factory.mktemp("slurm")
    (controller, node), name, user = free_ports(2), socket.gethostname().split(".")[0], getpass.getuser()
    lines = {
        "ClusterName": "parts", "SlurmctldHost": f"{name}(127.0.0.1)", "SlurmUser": user, "SlurmdUser": user,
        "SlurmctldPort": controller, "SlurmdPort": node,
        "StateSaveLocation": folder / "state", "SlurmdSpoolDir": folder / "spool",
        "SlurmctldPidFile": folder / "controller.pid", "SlurmdPidFile": folder / "node.pid",
        "SlurmctldLogFile": folder / "controller.log", "SlurmdLogFile": folder / "node.log",
        "AuthType": "auth/none", "CredType": "cred/none", "AuthInfo": "cred_expire=2", "ReturnToService": 2,
        "ProctrackType": "proctrack/linuxproc", "TaskPlugin": "task/none", "MpiDefault": "none", "KillWait": 60,
        "NodeName": f"{name} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN",
        "PartitionName": "all Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
    }  # fmt: skip
    (folder / "slurm.conf").write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    cluster = Slurm(folder)
    with ExitStack() as stack:
        for daemon in ("slurmctld", "slurmd"):
            command = [str(program(daemon)), "-D", "-f", str(folder / "slurm.conf")]
            with (folder / f"{daemon}.log").open("wb") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log, env=cluster.environment)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        is_up = wait_until(lambda: "idle" in _state(cluster), LONG, 0.2)
        assert is_up, cluster.log()
        yield cluster


def _state(cluster: Slurm) -> str:
    command = [str(program("sinfo")), "--noheader", "--format", "%t"]
    return subprocess.run(command, capture_output=True, text=True, env=cluster.environment, check=False).stdout


@pytest.mark.parametrize("by", ["time limit", "signal"])
def test_a_job_that_is_stopped_is_queued_again_and_ends_with_the_same_bits(
    slurm: Slurm, tiny: Callable[..., Path], tmp_path: Path, by: str
) -> None:
    sections: dict[str, Any] = {
        # Of three minutes the run may have all but some seconds for a save: it is told at once.
        "preemption": {"watch": ["slurm"] if by == "time limit" else "none", "grace_seconds": 170},
        "train": {"steps": 10**6},
        "checkpoint": {"every": "1 h"},
        "schedule": {"name": "constant", "warmup": "5 steps"},
    }
    config = tiny(**sections)
    script = tmp_path / "job.sh"
    script.write_text(SCRIPT.format(folder=tmp_path, python=sys.executable))
    number = slurm.ask("sbatch", "--parsable", script).strip()
    metrics = tmp_path / "runs/taken/metrics.jsonl"
    if by == "signal":
        assert wait_until(metrics.exists, LONG, 0.2), (tmp_path / "job.log").read_text()
        slurm.ask("scancel", "--signal=USR1", number)
    is_over = wait_until(lambda: slurm.job(number)["JobState"] in ("COMPLETED", "FAILED", "TIMEOUT"), 900, 1.0)
    facts, said = slurm.job(number), (tmp_path / "job.log").read_text()
    assert is_over and facts["JobState"] == "COMPLETED" and facts["Restarts"] == "1", (facts, said, slurm.log())
    stopped = f"stopped by slurm: time limit of job {number}" if by == "time limit" else "stopped by SIGUSR1"
    assert stopped in said
    steps = (tmp_path / "steps").read_text().strip()
    whole = headway("train", config, "name=whole", "preemption.watch=none", f"train.steps={steps}")
    assert whole.returncode == 0, whole.stderr
    assert state_hash(tmp_path / "runs/taken") == state_hash(tmp_path / "runs/whole")
