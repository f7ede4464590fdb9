"""`headway launch --on slurm` on a real Slurm of two nodes on this host: preempted, queued again, cancelled."""

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

import pytest

from headway.core.waiting import wait_until
from headway.launchers.launcher import Handle
from headway.launchers.record import audited, read_handle
from headway.launchers.slurm import LAUNCHER
from parts_table import SLURM, program
from ports import free_ports
from support import headway, state_hash
from waits import LONG

pytestmark = [pytest.mark.parts(SLURM), pytest.mark.timeout(1800)]

#: Stands for the node process of a run on several machines: it asks to be started again when it is stopped.
_STAND_IN = """#!/bin/bash
echo "start $SLURM_PROCID of $HEADWAY_MACHINES, restart ${SLURM_RESTART_COUNT:-0}, lead $HEADWAY_LEAD"
trap 'sleep 1; exit 75' TERM USR1
for second in $(seq 600); do
    [ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] || [ $second -lt 10 ] || exit 0
    sleep 0.2
done
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cluster with two nodes, whose partition `high` takes them from jobs of `low`."""
    if not all(map(program, ("slurmctld", "slurmd", "sbatch", "srun"))):
        pytest.skip("there is no Slurm: apt-get install slurmctld slurmd slurm-client")
    folder = tmp_path_factory.mktemp("slurm")
    (controller, *nodes), name, user = free_ports(3), socket.gethostname().split(".")[0], getpass.getuser()
    where = f"NodeHostname={name} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN"
    lines = [
        "ClusterName=launch", f"SlurmctldHost={name}(127.0.0.1)", f"SlurmUser={user}", f"SlurmdUser={user}",
        f"SlurmctldPort={controller}", f"StateSaveLocation={folder}/state", f"SlurmdSpoolDir={folder}/spool-%n",
        f"SlurmctldPidFile={folder}/controller.pid", f"SlurmdPidFile={folder}/%n.pid",
        f"SlurmctldLogFile={folder}/controller.log", f"SlurmdLogFile={folder}/%n.log",
        "AuthType=auth/none", "CredType=cred/none", "AuthInfo=cred_expire=2", "ReturnToService=2",
        "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "MpiDefault=none", "KillWait=60",
        "PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE",
        *(f"NodeName=n{number} Port={port} {where}" for number, port in enumerate(nodes, 1)),
        "PartitionName=low Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=30",
        "PartitionName=high Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10",
    ]  # fmt: skip
    (folder / "slurm.conf").write_text("".join(f"{line}\n" for line in lines))
    (folder / "state").mkdir()
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    with ExitStack() as stack:
        for words in (["slurmctld", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]):
            with (folder / f"{words[-1]}.out").open("wb") as log:
                process = subprocess.Popen([str(program(words[0])), *words[1:]], stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        assert wait_until(lambda: ask("sinfo", "--noheader", "--format=%D %t").strip() == "2 idle", LONG, 0.2)
        yield folder
    os.environ.pop("SLURM_CONF") if before is None else os.environ.update(SLURM_CONF=before)


def ask(*words: str) -> str:
    return subprocess.run([str(program(words[0])), *words[1:]], capture_output=True, text=True, check=False).stdout


def facts(handle: Handle) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S*)", ask("scontrol", "show", "job", handle.id)))


def launched(config: Path, *words: str) -> Handle:
    done = headway("launch", config, "--on", "slurm", "-y", "launch.grace_seconds=20", *words, fresh=True)
    assert done.returncode == 0, done.stderr
    run = next(word.removeprefix("name=") for word in words if word.startswith("name="))
    handle = read_handle(config.parent / "runs" / run)
    assert handle is not None
    return handle


def log_of(handle: Handle) -> str:
    return (Path(handle.details["folder"]) / f"slurm-{handle.id}.log").read_text(errors="replace")


def path_with(folder: Path) -> str:
    """What sets the path of a job, so that it finds this environment, or a stand-in before it."""
    return f"launch.environment={{PATH: '{folder}:{Path(sys.executable).parent}:/usr/bin:/bin'}}"


def take_the_machines() -> None:
    ask("sbatch", "--partition=high", "--nodes=2", "--output=/dev/null", "--wrap=sleep 2")


def again_at_once(handle: Handle) -> None:
    """A job that was queued again waits two minutes; this one does not."""
    assert wait_until(lambda: facts(handle).get("JobState") == "PENDING", LONG, 0.2), log_of(handle)
    ask("scontrol", "update", f"JobId={handle.id}", "StartTime=now")


def test_a_run_that_is_preempted_is_queued_again_and_ends_with_the_same_bits(
    slurm: Path, tiny: Callable[..., Path]
) -> None:
    config = tiny(train={"steps": 400}, checkpoint={"every": "1 h"})
    handle = launched(config, "name=taken", "launch.slurm.partition=low", path_with(slurm))
    metrics = config.parent / "runs" / "taken" / "metrics.jsonl"
    assert wait_until(lambda: metrics.exists() and metrics.stat().st_size > 5000, LONG, 0.2), log_of(handle)
    take_the_machines()
    again_at_once(handle)
    assert wait_until(lambda: LAUNCHER.status(handle).state in ("finished", "failed"), LONG, 1.0)
    assert LAUNCHER.status(handle).state == "finished" and facts(handle)["Restarts"] == "1", log_of(handle)
    whole = headway("train", config, "name=whole")
    assert whole.returncode == 0, whole.stderr
    assert state_hash(config.parent / "runs/taken") == state_hash(config.parent / "runs/whole")


def test_two_machines_are_started_preempted_and_queued_again_together(slurm: Path, tiny: Callable[..., Path]) -> None:
    config, bin_folder = tiny(determinism="elastic"), stand_in(slurm)
    words = ("--machines", "2", "name=pair", "launch.slurm.partition=low", path_with(bin_folder))
    handle = launched(config, *words)
    assert wait_until(lambda: log_of(handle).count("start") == 2, LONG, 0.2)
    assert LAUNCHER.status(handle).machines == 2
    take_the_machines()
    again_at_once(handle)
    assert wait_until(lambda: LAUNCHER.status(handle).state == "finished", LONG, 0.5), log_of(handle)
    starts = sorted(re.findall(r"start (\d) of 2, restart (\d), lead n1:29400", log_of(handle)))
    assert starts == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]


@pytest.mark.parametrize("by", ["scancel", "headway"])
def test_a_cancelled_run_has_stopped_and_is_not_queued_again(slurm: Path, tiny: Callable[..., Path], by: str) -> None:
    config, bin_folder = tiny(determinism="elastic"), stand_in(slurm)
    words = ("--machines", "2", f"name={by}", "launch.slurm.partition=low", path_with(bin_folder))
    handle = launched(config, *words)
    run = config.parent / "runs" / by
    assert wait_until(lambda: log_of(handle).count("start") == 2, LONG, 0.2)
    if by == "scancel":
        ask("scancel", handle.id)
    else:
        done = headway("launch", "cancel", run, "-y", fresh=True)
        assert done.returncode == 0, done.stderr
        assert [line["action"] for line in audited(run)] == ["launch", "cancel"]
    assert wait_until(lambda: LAUNCHER.status(handle).state in ("cancelled", "failed"), LONG, 0.5), log_of(handle)
    assert facts(handle)["Restarts"] == "0"
    if by == "headway":
        assert facts(handle)["ExitCode"] == "7:0"


def stand_in(folder: Path) -> Path:
    path = folder / "bin" / "headway"
    path.parent.mkdir(exist_ok=True)
    path.write_text(_STAND_IN)
    path.chmod(0o755)
    return path.parent
