"""`headway launch --on slurm` on a real Slurm of two nodes on this host: preempted, queued again, cancelled."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from headway.clouds.launchers.launcher import Handle
from headway.clouds.launchers.record import audited, read_handle
from headway.clouds.launchers.slurm import LAUNCHER
from headway.core.process.waiting import wait_until
from headway.lab.bench.results import read_results
from support.parts_table import SLURM
from support.prepare import Corpus
from support.runs import headway, state_hash, store_contents
from support.slurm import Slurm, slurm_cluster
from support.waits import LONG

pytestmark = [pytest.mark.parts(SLURM), pytest.mark.timeout(1800)]

#: Stands for the node process of a run on several machines: it asks to be started again when it is stopped.
_STAND_IN = """#!/bin/bash
echo "start $SLURM_PROCID of $HEADWAY_MACHINES, restart ${SLURM_RESTART_COUNT:-0}"
trap 'sleep 1; exit 75' TERM USR1
for second in $(seq 600); do
    [ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] || [ $second -lt 10 ] || exit 0
    sleep 0.2
done
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A cluster with two nodes, whose partition `high` takes them from jobs of `low`."""
    low = "low Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60"
    high = "high Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10"
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), ["n1", "n2"], low, high) as cluster:
        yield cluster


def launched(config: Path, *words: str) -> Handle:
    done = headway("launch", config, "--on", "slurm", "-y", "launch.grace_seconds=20", *words, fresh=True)
    assert done.returncode == 0, done.stderr
    run = next(word.removeprefix("name=") for word in words if word.startswith("name="))
    handle = read_handle(config.parent / "runs" / run)
    assert handle is not None
    return handle


def log_of(handle: Handle) -> str:
    """What a job has written; nothing before it began."""
    log = Path(handle.details["folder"]) / f"slurm-{handle.id}.log"
    return log.read_text(errors="replace") if log.exists() else ""


def starts_of(handle: Handle) -> list[tuple[str, str]]:
    """The machines on which the stand-in has begun, each with the number of times that the job was queued again."""
    return sorted(re.findall(r"start (\d) of 2, restart (\d)", log_of(handle)))


def path_with(folder: Path = Path("/usr/bin")) -> str:
    """What sets the path of a job, so that it finds this environment, or a stand-in before it."""
    return f"launch.environment={{PATH: '{folder}:{Path(sys.executable).parent}:/usr/bin:/bin'}}"


def take_the_machines(slurm: Slurm) -> None:
    slurm.ask("sbatch", "--partition=high", "--nodes=2", "--output=/dev/null", "--wrap=sleep 2")


def again_at_once(slurm: Slurm, number: str) -> None:
    """A job that was queued again waits two minutes; this one does not."""
    assert wait_until(lambda: slurm.job(number).get("JobState") == "PENDING", LONG, 0.2), slurm.log()
    # In another second than the end, by whose time Slurm refuses what it has ended.
    slurm.ask("scontrol", "update", f"JobId={number}", "StartTime=now+2")


def test_a_run_that_is_preempted_is_queued_again_and_ends_with_the_same_bits(
    slurm: Slurm, tiny: Callable[..., Path]
) -> None:
    config = tiny(train={"steps": 400}, checkpoint={"every": "1 h"})
    handle = launched(config, "name=taken", "launch.slurm.partition=low", path_with())
    metrics = config.parent / "runs" / "taken" / "metrics.jsonl"
    assert wait_until(lambda: metrics.exists() and metrics.stat().st_size > 5000, LONG, 0.2), log_of(handle)
    take_the_machines(slurm)
    again_at_once(slurm, handle.id)
    assert wait_until(lambda: LAUNCHER.status(handle).state in ("finished", "failed"), LONG, 1.0)
    assert LAUNCHER.status(handle).state == "finished" and slurm.job(handle.id)["Restarts"] == "1", log_of(handle)
    whole = headway("train", config, "name=whole")
    assert whole.returncode == 0, whole.stderr
    assert state_hash(config.parent / "runs/taken") == state_hash(config.parent / "runs/whole")


def test_two_machines_are_started_preempted_and_queued_again_together(slurm: Slurm, tiny: Callable[..., Path]) -> None:
    config, bin_folder = tiny(determinism="elastic"), stand_in(slurm.folder)
    words = ("--machines", "2", "name=pair", "launch.slurm.partition=low", path_with(bin_folder))
    handle = launched(config, *words)
    assert wait_until(lambda: len(starts_of(handle)) == 2, LONG, 0.2)
    assert LAUNCHER.status(handle).machines == 2
    take_the_machines(slurm)
    again_at_once(slurm, handle.id)
    assert wait_until(lambda: LAUNCHER.status(handle).state == "finished", LONG, 0.5), log_of(handle)
    assert starts_of(handle) == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]


def launched_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str, runs: str = "half%j/runs") -> Handle:
    """Launch the smallest suite, from a folder whose name Slurm could take for a pattern, and wait for its end."""
    monkeypatch.chdir(tmp_path)
    suite = ("smoke", "strategy=ddp", "train.device=cpu", f"config.runs={runs}", path_with())
    done = headway("launch", "bench", *suite, "--on", "slurm", "-y", *words, fresh=True)
    assert done.returncode == 0, done.stderr
    handle = read_handle(tmp_path / runs / "bench-smoke")
    assert handle is not None
    assert wait_until(lambda: LAUNCHER.status(handle).state in ("finished", "failed"), LONG, 1.0)
    logs = {path.name: path.read_text(errors="replace") for path in Path(handle.details["folder"]).glob("*.log")}
    assert LAUNCHER.status(handle).state == "finished" and logs, logs
    return handle


def collected(handle: Handle, tmp_path: Path) -> list[tuple[int, int, str]]:
    """Machines, workers and status of the cells that the logs of a launch alone have."""
    found = headway("bench", "collect", handle.details["folder"], "--output", tmp_path / "collected")
    assert found.returncode == 0, found.stderr
    results = read_results(tmp_path / "collected")
    return sorted((one.cell.machines, one.cell.workers, one.status) for one in results)


def test_an_array_measures_a_suite_and_its_results_are_collected(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = launched_bench(tmp_path, monkeypatch, "--parts", "2", "workers=1,2")
    assert len(list(Path(handle.details["folder"]).glob("slurm-*.log"))) == 2, "one log for each job of the array"
    assert collected(handle, tmp_path) == [(1, 1, "ok"), (1, 2, "ok")]


def test_a_cell_on_two_machines_is_a_step_on_both(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = launched_bench(tmp_path, monkeypatch, "machines=1,2", "workers=1", runs="runs")
    assert collected(handle, tmp_path) == [(1, 1, "ok"), (2, 2, "ok")]
    by_number = headway("bench", "collect", f"slurm:{handle.id}", "--output", tmp_path / "by-number")
    assert by_number.returncode == 0 and "2 cells from 1 log" in by_number.stdout, by_number.stderr


@pytest.mark.parametrize("by", ["scancel", "headway"])
def test_a_cancelled_run_has_stopped_and_is_not_queued_again(slurm: Slurm, tiny: Callable[..., Path], by: str) -> None:
    config, bin_folder = tiny(determinism="elastic"), stand_in(slurm.folder)
    words = ("--machines", "2", f"name={by}", "launch.slurm.partition=low", path_with(bin_folder))
    handle = launched(config, *words)
    run = config.parent / "runs" / by
    assert wait_until(lambda: len(starts_of(handle)) == 2, LONG, 0.2)
    if by == "scancel":
        slurm.ask("scancel", handle.id)
    else:
        done = headway("launch", "cancel", run, "-y", fresh=True)
        assert done.returncode == 0, done.stderr
        assert [line["action"] for line in audited(run)] == ["launch", "cancel"]
    assert wait_until(lambda: LAUNCHER.status(handle).state in ("cancelled", "failed"), LONG, 0.5), log_of(handle)
    assert slurm.job(handle.id)["Restarts"] == "0"
    if by == "headway":
        assert slurm.job(handle.id)["ExitCode"] == "7:0"


def wait_for_records(slurm: Slurm, run: Path) -> None:
    """Wait until a run has made some steps."""
    metrics = run / "metrics.jsonl"
    before = metrics.stat().st_size if metrics.exists() else 0
    assert wait_until(lambda: metrics.exists() and metrics.stat().st_size > before + 5000, LONG, 0.2), slurm.log()


def ended(slurm: Slurm, number: str) -> dict[str, str]:
    """Facts about a job that has ended."""
    over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
    assert wait_until(lambda: slurm.job(number)["JobState"] in over, LONG, 0.5), slurm.log()
    return slurm.job(number)


@pytest.fixture(scope="module")
def whole() -> dict[str, str]:
    """The state of an uninterrupted run, once there is one."""
    return {}


@pytest.fixture
def pair(tiny: Callable[..., Path]) -> Path:
    supervise = {"lost_seconds": 10, "rejoin_seconds": 60}
    return tiny(determinism="elastic", train={"steps": 90}, checkpoint={"every": "10 steps"}, supervise=supervise)


def check(config: Path, run: str, whole: dict[str, str]) -> None:
    """The run has ended in the state of one on one machine that nothing has happened to."""
    if not whole:
        done = headway("train", config, "name=whole")
        assert done.returncode == 0, done.stderr
        whole["state"] = state_hash(config.parent / "runs/whole")
    assert state_hash(config.parent / "runs" / run) == whole["state"]


def test_srun_with_two_tasks_trains_one_run_on_two_machines(slurm: Slurm, pair: Path, whole: dict[str, str]) -> None:
    command = [Path(sys.executable).parent / "headway", "train", pair, "name=step"]
    done = slurm.run("srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", *command)
    assert done.returncode == 0, done.stderr
    assert "2 workers on cpu" in done.stderr and "machine 1" in done.stderr
    check(pair, "step", whole)


def test_a_real_run_on_two_machines_is_queued_again_by_itself_and_preempted(
    slurm: Slurm, pair: Path, whole: dict[str, str]
) -> None:
    handle = launched(pair, "--machines", "2", "name=both", "launch.slurm.partition=low", path_with())
    run = pair.parent / "runs/both"
    wait_for_records(slurm, run)
    slurm.ask("scancel", "--signal=USR1", handle.id)
    again_at_once(slurm, handle.id)
    wait_for_records(slurm, run)
    take_the_machines(slurm)
    again_at_once(slurm, handle.id)
    found = ended(slurm, handle.id)
    assert (found["JobState"], found["Restarts"], found["ExitCode"]) == ("COMPLETED", "2", "0:0"), log_of(handle)
    assert "2 workers on cpu" in log_of(handle)
    check(pair, "both", whole)


def node_process(job: str, number: int) -> int:
    """The process of `headway train` on a machine of a job."""
    import psutil

    found: dict[int, int] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            about = process.environ()
            is_there = about.get("SLURM_JOB_ID") == job and about.get("SLURM_PROCID") == str(number)
            if is_there and "SLURM_STEP_ID" in about and "train" in process.cmdline():
                found[process.pid] = process.ppid()
    (first,) = [pid for pid, parent in found.items() if parent not in found]
    return first


def after(slurm: Slurm, handle: Handle) -> str:
    """A job that begins when another one has completed."""
    queued = slurm.ask("sbatch", "--parsable", "--partition=low", f"--dependency=afterok:{handle.id}",
                       "--output=/dev/null", "--wrap=true")  # fmt: skip
    return queued.strip()


@pytest.mark.parametrize("determinism", ["run", "elastic"])
def test_a_machine_that_is_killed_does_not_fail_the_job(
    slurm: Slurm, tiny: Callable[..., Path], determinism: str
) -> None:
    """The lead decides: it asks for all machines again, or finishes without the one that is gone."""
    supervise = {"lost_seconds": 10, "rejoin_seconds": 500}
    config = tiny(determinism=determinism, train={"steps": 90}, checkpoint={"every": "10 steps"}, supervise=supervise)
    name = f"killed-{determinism}"
    handle = launched(config, "--machines", "2", f"name={name}", "launch.slurm.partition=low", path_with())
    follower = after(slurm, handle)
    run = config.parent / "runs" / name
    wait_for_records(slurm, run)
    killed = time.monotonic()
    os.kill(node_process(handle.id, 1), signal.SIGKILL)
    restarts = "0"
    if determinism == "run":
        assert wait_until(lambda: slurm.job(handle.id)["JobState"] == "PENDING", LONG, 0.2), log_of(handle)
        print(f"queued again {time.monotonic() - killed:.0f} s after the kill")
        assert "the command on machine 1" in log_of(handle) and "nothing starts it again" in log_of(handle)
        restarts = "1"
        again_at_once(slurm, handle.id)
    found = ended(slurm, handle.id)
    print(f"{determinism}: over {time.monotonic() - killed:.0f} s after the kill")
    assert (found["JobState"], found["Restarts"], found["ExitCode"]) == ("COMPLETED", restarts, "0:0"), log_of(handle)
    assert ended(slurm, follower)["JobState"] == "COMPLETED"
    whole = ("train", config, "name=whole", f"determinism={determinism}", "--workers", "2")
    assert headway(*whole).returncode == 0
    assert state_hash(run) == state_hash(config.parent / "runs/whole")


def test_a_lead_that_is_killed_fails_the_job_soon(slurm: Slurm, pair: Path) -> None:
    """It leaves no code, so that of the step holds; the other machine does not wait for it."""
    words = ("--machines", "2", "name=headless", "launch.slurm.partition=low", "supervise.rejoin_seconds=500")
    handle = launched(pair, *words, path_with())
    wait_for_records(slurm, pair.parent / "runs/headless")
    os.kill(node_process(handle.id, 0), signal.SIGKILL)
    found = ended(slurm, handle.id)
    assert (found["JobState"], found["Restarts"], found["ExitCode"]) == ("FAILED", "0", "137:0"), log_of(handle)
    assert "the lead's command has ended, and nothing starts it again" in log_of(handle)


def test_a_real_run_whose_node_goes_down_is_queued_again(slurm: Slurm, pair: Path, whole: dict[str, str]) -> None:
    handle = launched(pair, "--machines", "2", "name=down", "launch.slurm.partition=low", path_with())
    wait_for_records(slurm, pair.parent / "runs/down")
    slurm.stop("slurmd", "-N", "n2")
    slurm.ask("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=pulled")
    assert wait_until(lambda: slurm.job(handle.id)["JobState"] != "RUNNING", LONG, 0.2), slurm.log()
    slurm.start("slurmd", "-N", "n2")
    slurm.ask("scontrol", "update", "NodeName=n2", "State=RESUME")
    again_at_once(slurm, handle.id)
    found = ended(slurm, handle.id)
    assert (found["JobState"], found["ExitCode"]) == ("COMPLETED", "0:0"), log_of(handle)
    assert int(found["Restarts"]) >= 1
    check(pair, "down", whole)


def test_a_real_run_that_is_cancelled_has_saved_and_continues_by_hand(
    slurm: Slurm, pair: Path, whole: dict[str, str]
) -> None:
    handle = launched(pair, "--machines", "2", "name=gone", "launch.slurm.partition=low", path_with())
    wait_for_records(slurm, pair.parent / "runs/gone")
    slurm.ask("scancel", handle.id)
    found = ended(slurm, handle.id)
    assert (found["JobState"], found["Restarts"]) == ("CANCELLED", "0"), log_of(handle)
    assert "stopped by SIGTERM" in log_of(handle) and "is saved" in log_of(handle)
    done = headway("train", pair, "name=gone")
    assert done.returncode == 0, done.stderr
    check(pair, "gone", whole)


def test_an_element_that_is_killed_while_it_prepares_data_changes_no_byte(slurm: Slurm, tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    corpus.prepare_alone()
    preparing = corpus.prepare("--on", "slurm", "--tasks", "4", "launch.slurm.partition=low", pause=0.1)
    assert wait_until(lambda: len(corpus.surveyed()) >= 2 or preparing.poll() is not None, LONG, 0.05), corpus.log()
    finished = corpus.surveyed()
    os.kill(corpus.workers()[-1], signal.SIGKILL)
    assert preparing.wait(LONG) == 0, corpus.log()
    assert "another one follows" in corpus.log()
    assert store_contents(tmp_path / "many") == store_contents(tmp_path / "one")
    once = corpus.times("notes-one")
    assert {file: corpus.times()[file] for file in finished} == {file: once[file] for file in finished}
    assert corpus.times() != once, "the element was not at work"


def stand_in(folder: Path) -> Path:
    path = folder / "bin" / "headway"
    path.parent.mkdir(exist_ok=True)
    path.write_text(_STAND_IN)
    path.chmod(0o755)
    return path.parent
