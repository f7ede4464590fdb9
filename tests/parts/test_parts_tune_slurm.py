"""`headway tune --on slurm` on a real Slurm: trials are jobs, and a search that is killed loses and doubles none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.core.process.waiting import wait_until
from headway.telemetry.record import Run
from support.parts_table import SLURM
from support.runs import headway, skip_without
from support.slurm import Slurm, slurm_cluster
from support.tune import SPACE, outcome, steps_done, write_study
from support.waits import LONG

skip_without("optuna")
pytestmark = [pytest.mark.parts(SLURM), pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A cluster with two nodes."""
    partition = "all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP GraceTime=60"
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), ["n1", "n2"], partition) as cluster:
        yield cluster


def started(folder: Path) -> subprocess.Popen[bytes]:
    words = ["toy.yaml", "space.yaml", "--on", "slurm", "--at-a-time", "2", "launch.grace_seconds=20"]
    with (folder / "tune.log").open("ab") as log:
        command = [sys.executable, "-m", "headway", "tune", *words]
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)


def test_a_study_whose_trials_are_jobs(slurm: Slurm, tmp_path: Path) -> None:
    write_study(tmp_path, {**SPACE, "sampler": "random", "trials": 3}, train={"steps": 60})
    study = tmp_path / "studies" / "toy"
    process = started(tmp_path)
    wait_until(lambda: process.poll() is not None or steps_done(study) >= 4, LONG)
    assert process.poll() is None, (tmp_path / "tune.log").read_text()[-3000:]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process = started(tmp_path)
    assert process.wait(LONG) == 0, (tmp_path / "tune.log").read_text()[-3000:]
    found = outcome(study)["trials"]
    assert [trial[0] for trial in found] == [0, 1, 2]
    assert {trial[1] for trial in found} <= {"complete", "pruned"}
    for trial in found:
        run = Run(study / "runs" / f"{trial[0]:04d}")
        assert run.state in ("finished", "cancelled")
        assert len(run.attempts) == 1, "it was not started again"
    assert not slurm.ask("squeue", "-h").strip()


def test_a_stopped_study_leaves_no_job(slurm: Slurm, tmp_path: Path) -> None:
    write_study(tmp_path, {**SPACE, "stopping": "none", "trials": 1}, train={"steps": 2000})
    study = tmp_path / "studies" / "toy"
    process = started(tmp_path)
    wait_until(lambda: process.poll() is not None or steps_done(study) >= 4, LONG)
    assert headway("tune", "stop", study).returncode == 0
    assert process.wait(LONG) == 75, (tmp_path / "tune.log").read_text()[-3000:]
    run = Run(study / "runs" / "0000")
    assert run.checkpoints, "its state is saved"
    assert outcome(study)["trials"][0][1] == "running"
    assert not slurm.ask("squeue", "-h").strip()
