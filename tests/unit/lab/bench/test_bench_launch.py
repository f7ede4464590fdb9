"""A suite as a job of a cluster: what travels, the parts of an array, and the command of every target."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headway.api.clusters.bench_job import bench_job
from headway.clouds.launchers.launcher import find_launcher
from headway.core.errors import ConfigError
from headway.lab.bench.runner import open_matrix, parse_part
from headway.lab.bench.suite import load_suite
from support.launchers import Programs, documents
from support.launchers import job as job_of_a_training
from support.runs import headway_in_copy

CPU = ("train.device=cpu", "repeats=2", "exclude=[{strategy: ddp, workers: 2, reason: known}]")
WHERE = ("launch.slurm.partition=gpu", "launch.image=registry/headway:1", "config.runs=/runs")
COMMAND = "headway bench run {config} --output {runs}/bench-smoke/results --print-results"


def test_the_suite_travels_as_it_was_chosen_and_where_it_runs_is_no_part_of_it(tmp_path: Path) -> None:
    job = bench_job("smoke", [*CPU, *WHERE])
    assert job.suite is not None and job.config_text() == job.suite
    (tmp_path / "config.yaml").write_text(job.suite)
    there, here = load_suite(str(tmp_path / "config.yaml")), load_suite("smoke", CPU)
    assert there == here and "launch" not in there.config
    assert (job.name, job.config.launch.slurm.partition, job.config.parallel.workers) == ("bench-smoke", "gpu", 2)
    assert (job.gpus, bench_job("smoke", WHERE).gpus) == (0, 2)


@pytest.mark.parametrize("target", ["slurm", "kubernetes", "jobset", "trainjob", "pytorchjob", "rayjob", "ray", "sky"])
def test_every_target_that_starts_a_command_measures(target: str, tmp_path: Path) -> None:
    job, launcher = bench_job("smoke", [*WHERE, "workers=8"], out=tmp_path), find_launcher(target)
    assert not list(launcher.problems(job))  # what it finds out is in the log, so no volume is asked for
    files = launcher.files(job)
    configs = {
        "slurm": tmp_path / "config.yaml", "ray": "config.yaml", "sky": "~/headway/config.yaml"
    }  # fmt: skip
    command = COMMAND.format(config=configs.get(target, "/etc/headway/config.yaml"), runs="/runs")
    manifests = documents(files)
    texts = [
        files.get("job.sh", ""),
        *map(json.dumps, manifests),
        " ".join(json.loads(files.get("entrypoint.json", "[]"))),
    ]
    words = json.dumps(command.split())[1:-1]
    assert any(command in text or words in text for text in texts)
    assert not any("headway train" in text or '"headway", "train"' in text for text in texts)
    if target == "kubernetes":  # a bench of which nothing came out is not measured again
        rules = manifests[-1]["spec"]["podFailurePolicy"]["rules"]
        assert rules[0]["onExitCodes"]["values"] == [1, 2, 3, 4, 5, 6, 7]
    if target == "rayjob":
        assert manifests[-1]["spec"]["entrypointNumGpus"] == 8


@pytest.mark.parametrize("target", ["kubernetes", "jobset", "trainjob", "pytorchjob", "rayjob", "ray", "sky"])
def test_every_machine_of_a_target_runs_the_suite_and_the_first_one_leads(target: str, tmp_path: Path) -> None:
    job, launcher = bench_job("scaling", [*WHERE, "machines=1,2,4", "workers=8"], out=tmp_path), find_launcher(target)
    assert (job.machines, job.gpus) == (4, 8) and not list(launcher.problems(job)), "a suite asks for no volume"
    files = launcher.files(job)
    manifests = documents(files)
    texts = [files.get("entrypoint.json", ""), files.get("task.yaml", ""), *map(json.dumps, manifests)]
    assert any("--launcher machines" in re.sub(r"[\s\",]+", " ", text) for text in texts)
    assert not any("prepare" in text for text in texts), "rows are computed, and the suite is no config to prepare"
    if target in ("ray", "rayjob"):  # which give every machine its place, with its GPUs
        (text,) = [text for text in texts if "ray_machines" in text]
        assert "--machines 4 --gpus 8" in re.sub(r"[\s\",]+", " ", text) and "entrypointNumGpus" not in text
    elif target != "sky":
        assert any("HEADWAY_LEAD" in text and "HEADWAY_SECRET" in text for text in texts)
    if target in ("kubernetes", "jobset", "trainjob"):
        assert any('"successPolicy": {"rules": [{"succeededIndexes": "0"}]}' in text for text in texts)


def test_a_training_ends_when_all_machines_have(tmp_path: Path) -> None:
    assert "successPolicy" not in find_launcher("kubernetes").files(job_of_a_training())["30-train.yaml"]


def test_a_folder_of_runs_may_be_named_like_the_config(tmp_path: Path) -> None:
    job = bench_job("smoke", [*WHERE, "config.runs=/runs/config.yaml"], out=tmp_path)
    command = COMMAND.format(config="~/headway/config.yaml", runs="/runs/config.yaml")
    assert command in find_launcher("sky").files(job)["task.yaml"].replace("\n", " ").replace("  ", " ")


def test_a_flow_measures_nothing() -> None:
    assert "measures no suite" in next(iter(find_launcher("metaflow").problems(bench_job("smoke", WHERE)))).what


def test_a_job_of_ray_gets_the_gpus_of_the_largest_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs, launcher = Programs(tmp_path, monkeypatch, "ray"), find_launcher("ray")
    job = bench_job("smoke", WHERE)
    for name, text in launcher.files(job).items():
        (tmp_path / name).write_text(text)
    launcher.submit(job, tmp_path)
    (words,) = programs.calls
    assert words[words.index("--entrypoint-num-gpus") + 1] == "2"


def test_parts_have_every_cell_once_and_a_folder_each(tmp_path: Path) -> None:
    suite = load_suite("smoke", CPU)
    whole = [planned.key for planned in open_matrix(suite, tmp_path).cells]
    parts = [[planned.key for planned in open_matrix(suite, tmp_path, part=(k, 3)).cells] for k in (1, 2, 3)]
    assert sorted(key for part in parts for key in part) == sorted(whole) and max(map(len, parts)) == 2
    with pytest.raises(ConfigError, match="part 5 of 5 has no cell"):
        open_matrix(suite, tmp_path, part=(5, 5))
    assert parse_part("2/3") == (2, 3)
    for text in ("0/3", "4/3", "2", "a/b", "2/"):
        with pytest.raises(ConfigError, match="is no part"):
            parse_part(text)


def test_an_array_of_slurm_shares_the_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs, launcher = Programs(tmp_path, monkeypatch, "sbatch", "squeue", "tail"), find_launcher("slurm")
    programs.answer("--parsable", stdout="31\n")
    job = bench_job("smoke", [*WHERE, *CPU], parts=2, out=tmp_path)
    files = launcher.files(job)
    assert set(files) == {"config.yaml", "job.sh"} and "#SBATCH --array=1-2\n" in files["job.sh"]
    assert '--print-results --part "$SLURM_ARRAY_TASK_ID/2" &' in files["job.sh"]
    handle = launcher.submit(job, tmp_path)
    lines: list[tuple[list[str], str]] = [
        (["COMPLETED", "RUNNING"], "running"), (["FAILED", "PENDING"], "waiting"), (["COMPLETED", "FAILED"], "failed"),
        (["COMPLETED", "COMPLETED"], "finished"),
    ]  # fmt: skip
    for words, state in lines:
        programs.answer("squeue", stdout="".join(f"{word}|1|None\n" for word in words))
        assert launcher.status(handle).state == state
    for number in (31, 32):
        (tmp_path / f"slurm-{number}.log").touch()
    launcher.logs(handle, follow=False)
    assert [Path(word).name for word in programs.calls[-1][-2:]] == ["slurm-31.log", "slurm-32.log"]


def test_the_command_writes_the_files_and_refuses_parts_that_there_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def launch(*words: str) -> tuple[int, str]:
        return headway_in_copy("launch", "bench", "smoke", "--dry-run", *words)

    code, printed = launch("--on", "slurm", "--parts", "2", "--out", "deploy", *CPU)
    assert code == 0 and sorted(path.name for path in (tmp_path / "deploy").iterdir()) == ["config.yaml", "job.sh"]
    refused: list[tuple[tuple[str, ...], str]] = [
        (("--on", "kubernetes", "--parts", "2"), "no arrays of jobs"),
        (("--on", "slurm", "--parts", "9"), "4 cells make no 9 parts"),
        (("--on", "slurm", "workers=none"), "workers"),
    ]
    for words, says in refused:
        code, printed = launch(*words)
        assert code == 2 and says in printed, printed


def test_a_part_measures_into_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, printed = headway_in_copy("bench", "run", "smoke", "--part", "2/4", "--dry-run", "--json", "train.device=cpu")
    found: dict[str, Any] = json.loads(printed[printed.index("{") :])
    assert code == 0 and found["output"] == "bench/smoke/part-2" and len(found["cells"]) == 1
