"""A Slurm cluster for tests, all of whose nodes are this machine."""

from __future__ import annotations

import getpass
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from headway.core.process.waiting import wait_until
from support.parts_table import program
from support.ports import free_ports
from support.waits import LONG


class Slurm:
    """A running cluster, which the environment of this process names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run one of its commands."""
        command = [str(program(str(words[0]))), *map(str, words[1:])]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONG)

    def ask(self, *words: str | Path) -> str:
        """What one of its commands prints."""
        return self.run(*words).stdout

    def job(self, number: str) -> dict[str, str]:
        """Facts about a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.ask("scontrol", "show", "job", number)))

    def log(self) -> str:
        """What its daemons have written."""
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(self.folder.glob("*.log")))

    def start(self, daemon: str, *options: str) -> None:
        """Start its controller, or the daemon of a node."""
        name = "-".join((daemon, *options[1:]))
        with (self.folder / f"{name}.out").open("ab") as log:
            command = [str(program(daemon)), "-D", *options]
            self._daemons[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def stop(self, daemon: str, *options: str) -> None:
        """Kill the daemon of a node."""
        process = self._daemons["-".join((daemon, *options[1:]))]
        process.kill()
        process.wait()

    def end(self) -> None:
        """Leave nothing behind."""
        for process in self._daemons.values():
            process.terminate()
            process.wait()


@contextmanager
def slurm_cluster(folder: Path, nodes: list[str], *partitions: str, cpus: int = 2) -> Iterator[Slurm]:
    """Have a cluster for the length of a block.

    Args:
        folder: For its files.
        nodes: Names of the nodes.
        partitions: Their lines in the configuration, without the word.
        cpus: Processors that each node says to have.
    """
    if not all(map(program, ("slurmctld", "slurmd", "sbatch", "srun"))):
        pytest.skip("there is no Slurm: apt-get install slurmctld slurmd slurm-client")
    (controller, *ports), name, user = free_ports(1 + len(nodes)), socket.gethostname().split(".")[0], getpass.getuser()
    where = f"NodeHostname={name} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN"
    lines = [
        "ClusterName=parts", f"SlurmctldHost={name}(127.0.0.1)", f"SlurmUser={user}", f"SlurmdUser={user}",
        f"SlurmctldPort={controller}", f"StateSaveLocation={folder}/state", f"SlurmdSpoolDir={folder}/spool-%n",
        f"SlurmctldPidFile={folder}/controller.pid", f"SlurmdPidFile={folder}/%n.pid",
        f"SlurmctldLogFile={folder}/controller.log", f"SlurmdLogFile={folder}/%n.log",
        "AuthType=auth/none", "CredType=cred/none", "AuthInfo=cred_expire=2", "ReturnToService=2",
        "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "MpiDefault=none", "KillWait=60",
        "PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE",
        *(f"NodeName={node} Port={port} {where}" for node, port in zip(nodes, ports, strict=True)),
        *(f"PartitionName={partition}" for partition in partitions),
    ]  # fmt: skip
    (folder / "slurm.conf").write_text("".join(f"{line}\n" for line in lines))
    (folder / "state").mkdir()
    cluster = Slurm(folder)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setitem(os.environ, "SLURM_CONF", str(folder / "slurm.conf"))
        stack.callback(cluster.end)
        cluster.start("slurmctld")
        for node in nodes:
            cluster.start("slurmd", "-N", node)
        idle = f"{len(nodes)} idle"
        is_up = wait_until(lambda: cluster.ask("sinfo", "--noheader", "--format=%D %t").strip() == idle, LONG, 0.2)
        assert is_up, cluster.log()
        yield cluster
