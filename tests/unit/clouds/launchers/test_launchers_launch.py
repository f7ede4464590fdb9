"""`headway launch`: what it writes and refuses, the handle and the audit log; Ray's jobs and SkyPilot's tasks."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from headway.clouds.launchers import ray
from headway.clouds.launchers.job import Job, parse_machines
from headway.clouds.launchers.launcher import Handle, find_launcher
from headway.clouds.launchers.patches import merge
from headway.clouds.launchers.record import audited, progress_of, read_handle, request_save_and_stop, write_handle
from headway.config import load_config
from headway.core.coordination.launched import machines_from_environment
from headway.core.coordination.preemption_board import Board
from headway.core.errors import Cancelled, ConfigError
from headway.run.directory.cancel import check_not_cancelled
from headway.run.directory.run_directory import RunDirectory
from support.launchers import Programs, job
from support.runs import headway_in_copy

Launch = Callable[..., tuple[int, str]]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """The command with the rest of a command line, in a folder of its own with a store."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "manifest.json").touch()
    own = ("name=own", "data.store=store", "train.device=cpu")

    def run(*words: str, overrides: bool = True) -> tuple[int, str]:
        return headway_in_copy("launch", *words, *(own if overrides else ()))

    return run


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    programs = Programs(tmp_path, monkeypatch, "sinfo", "sbatch", "squeue", "scancel", "sacct")
    programs.answer("sinfo", stdout="all\n")
    programs.answer("--parsable", stdout="31\n")
    return programs


def test_a_dry_run_writes_the_files_and_calls_no_program(launch: Launch, slurm: Programs, tmp_path: Path) -> None:
    code, printed = launch("quickstart", "--on", "slurm", "--machines", "2", "--dry-run", "--out", "deploy")
    assert code == 0, printed
    assert sorted(path.name for path in (tmp_path / "deploy").iterdir()) == ["config.yaml", "job.sh"]
    code, printed = launch("quickstart", "--on", "slurm", "--dry-run")
    assert code == 0 and "#SBATCH --nodes=1" in printed
    assert not slurm.calls and not (tmp_path / "runs").exists()


def test_a_launch_leaves_its_handle_and_says_who_did_it(launch: Launch, slurm: Programs, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "own"
    code, printed = launch("quickstart", "--on", "slurm")
    assert code == 2 and "add -y" in printed and not run.exists()
    code, printed = launch("quickstart", "--on", "slurm", "--machines", "2", "-y")
    assert code == 0 and "machines" in printed and "launched 31" in printed, printed
    handle = read_handle(run)
    assert handle is not None and (handle.id, handle.target, handle.machines) == ("31", "slurm", "2")
    slurm.answer("squeue", stdout="RUNNING|2|None\n")
    code, printed = launch("quickstart", "--on", "slurm", "-y")
    assert code == 2 and "launched already" in printed
    code, printed = launch("status", str(run), "--json", overrides=False)
    assert code == 0 and json.loads(printed)["engine"]["state"] == "running"
    slurm.answer("squeue", stdout="CANCELLED|2|None\n")
    code, printed = launch("cancel", str(run), "-y", overrides=False)
    assert code == 0, printed
    launched, cancelled = audited(run)
    assert (launched["action"], cancelled["action"]) == ("launch", "cancel")
    assert launched["user"] and launched["host"] and launched["command"].startswith("headway launch quickstart")
    # The run itself accepts the folder that the launch has made.
    RunDirectory(run).claim().release()


def test_a_launch_waits_for_the_end_of_its_job(launch: Launch, slurm: Programs, tmp_path: Path) -> None:
    """One whose engine does not answer may still run, so there is no second one."""
    code, printed = launch("quickstart", "--on", "slurm", "--wait", "--dry-run")
    assert code == 0 and "#SBATCH" in printed and "waiting" not in printed
    slurm.answer("sacct", stdout="COMPLETED\n")
    code, printed = launch("quickstart", "--on", "slurm", "-y", "--wait")
    assert code == 0 and "31 on slurm is over: COMPLETED; exit code 0" in printed, printed
    for state, wanted in (("CANCELLED by 0", 7), ("FAILED", 1)):
        slurm.answer("sacct", stdout=f"{state}\n")
        code, printed = launch("wait", str(tmp_path / "runs" / "own"), overrides=False)
        assert code == wanted and f"31 on slurm is over: {state}; exit code {code}" in printed, printed
    slurm.answer("squeue", stderr="Unable to contact slurm controller\n", code=1)
    code, printed = launch("quickstart", "--on", "slurm", "-y")
    assert code == 2 and "launched already" in printed and "if that cluster is gone, remove" in printed, printed


def test_a_run_that_was_not_launched_and_a_missing_program_are_explained(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, printed = launch("status", str(tmp_path), overrides=False)
    assert code == 2 and "no launch.json" in printed
    monkeypatch.setenv("PATH", str(tmp_path))
    code, printed = launch("quickstart", "--on", "slurm", "-y")
    assert code == 2 and "no program 'sinfo'" in printed and "--dry-run" in printed


def test_a_mesh_is_checked_over_all_machines(launch: Launch) -> None:
    words = ("quickstart", "--on", "slurm", "--dry-run", "parallel.pipeline=2", "train.micro_batch=1")
    code, printed = launch(*words, "--machines", "2")
    assert code == 0 and "workers: 1" in printed and "pipeline: 2" in printed, printed
    code, printed = launch(*words, "--machines", "3")
    assert code == 2 and "3 workers cannot be arranged as pipeline 2" in printed, printed


def test_a_folder_of_something_else_is_no_run_directory(tmp_path: Path) -> None:
    (tmp_path / "launch.json").touch()
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(Exception, match="not a run directory"):
        RunDirectory(tmp_path).check_usable()


def test_machines_are_a_number_or_a_range() -> None:
    assert (parse_machines("2"), parse_machines("2:4")) == ((None, 2), (2, 4))
    for text in ("0", "4:2", "two", "1:", "-1"):
        with pytest.raises(ConfigError, match="no number of machines"):
            parse_machines(text)


def test_a_run_on_this_machine_is_asked_to_save_before_its_job_goes(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    assert not request_save_and_stop(run.path, "cancelled by me", 0.1)
    attempt = run.begin_attempt("headway train")
    (run.path / "config.yaml").write_text("train: {steps: 100}\n")
    assert not request_save_and_stop(run.path, "cancelled by me", 0.1)  # it does not answer in this test
    (notice,) = Board(attempt.directory).notices()
    assert (notice.source, notice.wish, notice.key) == ("cancel", "stop", "cancel")
    with pytest.raises(Cancelled):  # the request also holds between two attempts
        check_not_cancelled(run.path)
    attempt.finish("preempted", 75)
    assert not request_save_and_stop(run.path, "cancelled by me", 0.1)  # nothing runs any more


def test_progress_is_read_from_the_run_directory(tmp_path: Path) -> None:
    assert progress_of(tmp_path).step is None
    run = RunDirectory(tmp_path / "run")
    attempt = run.begin_attempt("headway train")
    run.config_path.write_text("train: {steps: 100}\n")
    line = {"step": 40, "attempt": 1, "time": time.time(), "train/loss": 2.5, "speed/step_seconds": 3.0}
    run.metrics_path.write_text(json.dumps({**line, "cost/spent_usd": 1.5}) + "\n")
    saved = run.checkpoints / "step-00000040"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text(json.dumps({"step": 40, "context": {"time": time.time() - 60}}))
    found = progress_of(run.path)
    assert (found.attempt, found.step, found.total_steps, found.loss) == (1, 40, 100, 2.5)
    assert found.eta_seconds == 180.0 and found.spent_usd == 1.5
    assert found.saved_seconds_ago is not None and 59 < found.saved_seconds_ago < 90
    attempt.finish("finished", 0)


def test_a_handle_survives_the_disk_and_a_damaged_one_is_explained(tmp_path: Path) -> None:
    handle = Handle("slurm", "7", "2:4", 120, {"folder": "/x"}, 3.0)
    write_handle(tmp_path, handle)
    assert read_handle(tmp_path) == handle
    (tmp_path / "launch.json").write_text('{"id": 1}')
    with pytest.raises(ConfigError, match="cannot be read"):
        read_handle(tmp_path)


@pytest.mark.parametrize(
    ("value", "patch", "merged"),
    [
        ({"a": 1, "b": {"c": 2}}, {"b": {"d": 3}}, {"a": 1, "b": {"c": 2, "d": 3}}),
        ({"a": 1, "b": 2}, {"a": None}, {"b": 2}),
        ({"a": [{"name": "x", "v": 1}]}, {"a": [{"name": "x", "w": 2}, {"name": "y"}]},
         {"a": [{"name": "x", "v": 1, "w": 2}, {"name": "y"}]}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"a": {"b": 1}}, {"a": 5}, {"a": 5}),
        ({}, {"a": {"b": {"c": 1, "d": None}}}, {"a": {"b": {"c": 1}}}),
    ],
)  # fmt: skip
def test_patches_merge_keys_and_named_items(value: object, patch: object, merged: object) -> None:
    assert merge(value, patch) == merged


# Ray and SkyPilot -----------------------------------------------------------------------------------------------------


def test_a_ray_job_is_submitted_with_its_folder_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs, launcher = Programs(tmp_path, monkeypatch, "ray"), find_launcher("ray")
    given = job("launch.ray={address: 'http://head:8265', packages: [headway], storage: /runs}", "runs=/runs")
    assert not list(launcher.problems(given))
    (problem,) = launcher.problems(job("runs=runs"))
    assert "no shared volume" in problem.what
    folder = tmp_path / "out"
    folder.mkdir()
    for name, text in launcher.files(given).items():
        (folder / name).write_text(text)
    handle = launcher.submit(given, folder)
    (submitted,) = programs.calls
    assert submitted[:5] == ["ray", "job", "submit", "--address", "http://head:8265"]
    assert submitted[submitted.index("--") + 1 :][:5] == [
        "python",
        "-m",
        "headway.clouds.launchers.ray",
        "config.yaml",
        "--machines",
    ]
    assert json.loads(submitted[submitted.index("--runtime-env-json") + 1])["pip"] == ["headway"]
    programs.answer("status", stdout=f"Status for job '{handle.id}': RUNNING\nrunning")
    assert launcher.status(handle).state == "running"
    programs.answer("status", stdout=f"Job '{handle.id}' was stopped\n")
    launcher.cancel(handle)
    assert launcher.status(handle).state == "cancelled"
    assert [words for words in programs.calls if words[:3] == ["ray", "job", "stop"]]


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ("Status for job '{id}': PENDING\nStatus message: Job has not started yet. It may be waiting.", "waiting"),
        ("Status for job '{id}': RUNNING\nStatus message: Job is currently running.", "running"),
        ("-----\nJob '{id}' succeeded\n-----", "finished"),
        ("Job '{id}' failed\nStatus message: exit code 2, last available logs:\nrunning: 3 pending", "failed"),
        ("RuntimeError: Request failed with status code 404: Job {id} does not exist.", "gone"),
        ("ConnectionError: Failed to connect to Ray at address: http://head:8265.", "unknown"),
    ],
)
def test_the_state_of_a_ray_job_is_read_from_its_own_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, state: str
) -> None:
    programs = Programs(tmp_path, monkeypatch, "ray")
    handle = Handle("ray", "pending-20261129-120000", "2", 120, {"address": None}, time.time())
    programs.answer("status", stdout=said.format(id=handle.id))
    assert find_launcher("ray").status(handle).state == state


def test_the_command_of_a_ray_job_takes_the_words_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []

    def fit(config: object, *, machines: str) -> object:
        given.extend((config, machines))
        raise ConfigError("no cluster", where="here", fix="none")

    monkeypatch.setattr(ray, "open_streams", lambda: None)
    monkeypatch.setattr(ray, "fit", fit)
    monkeypatch.setattr(ray, "load_config", lambda config, overrides: config)
    *_, module, config, option, machines = words = json.loads(find_launcher("ray").files(job())["entrypoint.json"])
    assert (module, option) == ("headway.clouds.launchers.ray", "--machines")
    assert ray.main(words[3:]) == 2 and given == [config, machines]


@pytest.mark.parametrize(
    ("overrides", "reserved"),
    [
        (["parallel.workers=8"], {"GPU": 8}),
        (["parallel.workers=4", "launch.gpus_per_machine=8"], {"GPU": 8}),
        (["parallel.workers=2", "train.device=cpu"], {"CPU": 1}),
        # Workers may compute on processors although `train.device` does not say so; 0 is a number, too.
        (["parallel.workers=2", "launch.gpus_per_machine=0"], {"CPU": 1}),
        # What the section says counts, as it does on every other target.
        (["parallel.workers=2", "train.device=cpu", "launch.gpus_per_machine=2"], {"GPU": 2}),
    ],
)
def test_ray_reserves_the_gpus_that_every_launcher_counts(
    overrides: list[str], reserved: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    class Asked(Exception):
        pass

    def scale(**settings: Any) -> None:
        asked.update(settings)
        raise Asked

    ray_train = SimpleNamespace(FailureConfig=dict, RunConfig=dict, CheckpointConfig=dict, ScalingConfig=scale)
    monkeypatch.setattr(ray, "_ray", lambda: (ray_train, None))
    nodes = [{"Alive": True, "Resources": {"CPU": 1.0, "GPU": 8.0}}]
    cluster = SimpleNamespace(is_initialized=lambda: True, nodes=lambda: nodes)
    monkeypatch.setitem(sys.modules, "ray", cluster)  # type: ignore[arg-type]
    config = load_config("quickstart", overrides)
    with pytest.raises(Asked):
        ray.fit(config)
    assert asked["resources_per_worker"] == reserved
    assert asked["use_gpu"] is ("GPU" in reserved) and reserved.get("GPU", 0) == Job(config).gpus


def test_the_node_process_of_ray_inherits_no_place_of_another_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a step of Slurm it would otherwise wait for machines that nobody starts."""
    monkeypatch.setattr(os, "environ", {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "RANK": "0", "HOME": "/"})
    one = ray.machine_variables("1", 1, 0, {})
    assert one == {"SLURM_STEP_NUM_TASKS": "2", "HOME": "/"} and machines_from_environment(one) is None
    two = ray.machine_variables("2:4", 3, 1, {"lead": "h:1", "secret": "s"})
    assert (two["HEADWAY_MACHINES"], two["HEADWAY_NODE"]) == ("2:3", "1") and "RANK" not in two


def test_a_task_of_skypilot_recovers_on_75_and_keeps_its_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = find_launcher("sky")
    remote = ("checkpoint.remote.url=s3://bucket/runs", "data.remote=s3://bucket/store", "launch.accelerator=H100")
    given = job(*remote, "launch.sky.patch={resources: {disk_size: 500}}")
    assert not list(launcher.problems(given))
    assert {"no remote tier", "cannot see"} <= {
        word
        for problem in launcher.problems(job())
        for word in ("no remote tier", "cannot see")
        if word in problem.what
    }
    task = yaml.safe_load(launcher.files(given)["task.yaml"])
    assert task["resources"]["job_recovery"] == {"max_restarts_on_errors": 3, "recover_on_exit_codes": [75]}
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "H100:8")
    assert task["resources"]["disk_size"] == 500 and task["secrets"] == {"HEADWAY_SECRET": None}
    programs = Programs(tmp_path, monkeypatch, "sky")
    programs.answer("launch", stdout="Job submitted, ID: 5\n")
    handle = launcher.submit(given, tmp_path)
    assert handle.id == "5" and "--secret-file" in programs.calls[0]
    programs.answer("queue", stdout=json.dumps([{"job_id": 5, "status": "RECOVERING"}]))
    assert launcher.status(handle).state == "waiting"
