"""The batch script of Slurm: its options, and what it does after the run, with programs that stand for Slurm's."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from headway.api.clusters.slurm_array import SlurmPool
from headway.clouds.launchers.launcher import Handle
from headway.clouds.launchers.slurm import CANCELLED, CODE, CONFIG, LAUNCHER, PREPARE, SCRIPT
from headway.core.errors import ConfigError
from support.launchers import Programs, job

SLURM = (
    "launch.slurm={account: lab, partition: gpu, qos: long, time: '24:00:00', setup: [module load cuda],"
    " patch: {exclusive: true, mem: 64G, gres: null}}"
)


def test_the_script_has_the_options_of_the_config() -> None:
    script = LAUNCHER.files(job(SLURM))[SCRIPT]
    options = re.findall(r"^#SBATCH --(\S+)$", script, re.MULTILINE)
    assert {"account=lab", "partition=gpu", "qos=long", "time=24:00:00", "nodes=2", "ntasks-per-node=1"} <= {*options}
    assert {"requeue", "exclusive", "mem=64G", "open-mode=append", "signal=USR1@150"} <= {*options}
    assert not [option for option in options if option.startswith("gres")]
    assert (
        "gres=gpu:8" in LAUNCHER.files(job())[SCRIPT]
        and "nodes=2-4" in LAUNCHER.files(job(machines=4, min_machines=2))[SCRIPT]
    )
    assert script.index("module load cuda") < script.index("srun ")


def test_a_machine_without_gpus_has_a_processor_for_every_thread() -> None:
    """Slurm gives a task one processor unless it asks for more, and a step what the step asks for, not the job."""
    files = LAUNCHER.files(job("train.device=cpu", "parallel.threads=2", "data.workers=4"))
    assert "#SBATCH --cpus-per-task=16\n" in files[SCRIPT] and "#SBATCH --cpus-per-task=4\n" in files[PREPARE]
    assert "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK" in files[SCRIPT]
    own = LAUNCHER.files(job("train.device=cpu", "launch.slurm.patch={cpus-per-task: 96}"))
    assert all("#SBATCH --cpus-per-task=96\n" in own[name] for name in (SCRIPT, PREPARE))
    assert "#SBATCH --cpus-per-task" not in LAUNCHER.files(job())[SCRIPT]


def test_slurm_replaces_nothing_in_the_name_of_a_folder(tmp_path: Path) -> None:
    script = LAUNCHER.files(job(out=tmp_path / "100%j"))[SCRIPT]
    assert f"#SBATCH --output={tmp_path}/100%%j/slurm-%j.log" in script
    config = job(f"data.store={tmp_path}/100%a/store").config
    described = SlurmPool(config, tasks=1, workers=1).describe(1)
    assert f"#SBATCH --output={tmp_path}/100%%a/.store.preparing/.work/arrays/1/%a.log" in described


def test_machines_are_told_where_to_meet_only_if_there_are_several() -> None:
    assert "HEADWAY_MACHINES=2" in LAUNCHER.files(job())[SCRIPT]
    assert "HEADWAY_" not in LAUNCHER.files(job(machines=1))[SCRIPT]


def test_data_that_are_there_are_not_prepared(tmp_path: Path) -> None:
    assert PREPARE in LAUNCHER.files(job(f"data.store={tmp_path}"))
    (tmp_path / "manifest.json").touch()
    assert LAUNCHER.files(job(f"data.store={tmp_path}")).keys() == {CONFIG, SCRIPT}


RUNNING, ENDING = "JobState=RUNNING PreemptTime=None", "JobState=COMPLETING PreemptTime=None"
PREEMPTED = "PreemptTime=2026-11-26T13:23:47"


@pytest.mark.parametrize(
    ("code", "said", "again"),
    [
        (75, RUNNING, True),
        (75, ENDING, False),  # after scancel
        (75, f"JobState=COMPLETING {PREEMPTED}", True),
        (143, f"JobState=RUNNING {PREEMPTED}", True),
        (143, RUNNING, False),
        (143, ENDING, False),
        (0, RUNNING, False),
        (5, f"JobState=RUNNING {PREEMPTED}", False),
    ],
)
def test_a_job_is_queued_again_when_it_asks_for_it_or_was_preempted_and_never_after_scancel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, said: str, again: bool
) -> None:
    """What Slurm says in each case was seen in one (`parts/test_parts_launch_slurm.py`)."""
    programs = Programs(tmp_path, monkeypatch, "srun", "scontrol", "squeue", "sacct")
    programs.answer("srun", code=code)
    programs.answer("show", stdout=said)
    assert run_script(tmp_path) == code
    assert (["scontrol", "requeue", "7"] in programs.calls) is again


def test_a_cancelled_job_is_not_queued_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = Programs(tmp_path, monkeypatch, "srun", "scontrol", "squeue", "sacct")
    programs.answer("srun", code=75)
    programs.answer("show", stdout=RUNNING)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / CANCELLED).touch()
    assert run_script(tmp_path) == 7
    assert ["scontrol", "requeue", "7"] not in programs.calls


@pytest.mark.parametrize(
    "line", ["set -e", "kill() { return 1; }"], ids=["stops at errors", "the step is gone at once"]
)
def test_the_exit_code_of_the_step_is_that_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    programs = Programs(tmp_path, monkeypatch, "srun", "scontrol", "squeue", "sacct")
    programs.answer("srun", code=75)
    programs.answer("show", stdout=RUNNING)
    assert run_script(tmp_path, f"launch.slurm.setup=['{line}']") == 75
    assert ["scontrol", "requeue", "7"] in programs.calls


@pytest.mark.parametrize(
    ("lead", "step", "code", "again"),
    [
        ("75", 137, 75, True),  # a machine was killed, and the lead asks for all of them
        ("0", 137, 0, False),  # the run has finished without it
        ("2", 75, 2, False),  # the others have waited in vain for a lead that refused its config
        (None, 75, 75, True),
        (None, 137, 137, False),
        ("", 75, 75, True),
    ],
)
def test_of_several_machines_the_code_of_the_lead_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lead: str | None, step: int, code: int, again: bool
) -> None:
    programs = Programs(tmp_path, monkeypatch, "scontrol", "squeue", "sacct")
    programs.answer("show", stdout=RUNNING)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / CODE).write_text("0\n")  # of an earlier start of the job
    leaves = "" if lead is None else f"printf '{lead}\\n' > $HEADWAY_CODE_FILE"
    (tmp_path / "programs" / "srun").write_text(f"#!/bin/bash\n{leaves}\nexit {step}\n")
    (tmp_path / "programs" / "srun").chmod(0o755)
    assert run_script(tmp_path, "launch.slurm.setup=['set -e']", machines=2) == code
    assert (["scontrol", "requeue", "7"] in programs.calls) is again


def run_script(tmp_path: Path, *overrides: str, machines: int = 1) -> int:
    script = LAUNCHER.files(job(*overrides, machines=machines, out=tmp_path / "out"))[SCRIPT]
    environment = {"PATH": f"{tmp_path / 'programs'}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    return subprocess.run(["bash", "-c", script], env=environment, check=False, timeout=60).returncode


def test_an_unknown_partition_and_a_refused_job_start_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = Programs(tmp_path, monkeypatch, "sinfo", "sbatch")
    programs.answer("sinfo", stdout="gpu*\ncpu\n")
    LAUNCHER.check(job("launch.slurm.partition=gpu"))
    with pytest.raises(ConfigError, match="no partition 'gqu'") as found:
        LAUNCHER.check(job("launch.slurm.partition=gqu"))
    assert found.value.fix == "one of: cpu, gpu"
    programs.answer("--test-only", code=1, stderr="sbatch: error: Requested node configuration is not available")
    with pytest.raises(ConfigError, match="node configuration is not available"):
        LAUNCHER.check(job(machines=64))
    assert all("--test-only" in words for words in programs.calls if words[0] == "sbatch")


def test_a_time_limit_that_leaves_no_time_to_save_is_refused() -> None:
    for limit in ("'10:00'", "'0'"):  # Slurm takes 0 for no limit
        assert not list(LAUNCHER.problems(job(f"launch.slurm.time={limit}")))
    for limit in ("'2:00'", "'1'", "'0:01:30'"):
        (problem,) = LAUNCHER.problems(job(f"launch.slurm.time={limit}"))
        assert "no longer than" in problem.what


def test_the_run_is_queued_behind_the_preparation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = Programs(tmp_path, monkeypatch, "sbatch", "squeue", "scancel")
    programs.answer("--parsable", stdout="12;cluster\n")
    for name, text in LAUNCHER.files(job()).items():
        (tmp_path / name).write_text(text)
    handle = LAUNCHER.submit(job(), tmp_path)
    assert handle.id == "12" and handle.details["prepare"] == "12"
    assert "--dependency=afterok:12" in programs.calls[1]
    programs.answer("squeue", stdout="PENDING|2|Priority\n")
    assert LAUNCHER.status(handle).state == "waiting"
    LAUNCHER.cancel(handle)
    assert (tmp_path / CANCELLED).exists() and ["scancel", "--quiet", "12"] in programs.calls


def test_a_job_that_slurm_has_forgotten_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = Programs(tmp_path, monkeypatch, "squeue", "sacct")
    handle = Handle("slurm", "12", "2", 60, {"folder": str(tmp_path)})
    assert LAUNCHER.status(handle).state == "gone"
    programs.answer("sacct", stdout="CANCELLED by 0\n")
    assert LAUNCHER.status(handle).state == "cancelled"
    programs.answer("sacct", stdout=" COMPLETED\n FAILED\n")  # parts of an array
    assert LAUNCHER.status(handle).state == "failed"
    programs.answer("squeue", stderr="slurm_load_jobs error: Invalid job id specified\n", code=1)
    assert LAUNCHER.status(handle).state == "failed"
    programs.answer("squeue", stderr="slurm_load_jobs error: Unable to contact slurm controller\n", code=1)
    assert LAUNCHER.status(handle).state == "unknown", "a second job might run beside it"
    programs.answer("squeue", stdout="RUNNING|2|None\n")
    assert (LAUNCHER.status(handle).state, LAUNCHER.status(handle).machines) == ("running", 2)
