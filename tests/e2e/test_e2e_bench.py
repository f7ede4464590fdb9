"""Matrices of real cells, as a user runs them: cells are killed, fail, or do not fit on purpose, one is stopped."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from headway.clouds.launchers.launcher import Handle
from headway.clouds.launchers.record import write_handle
from headway.config import ModelConfig
from headway.core.process.waiting import wait_until
from headway.lab.bench.blocks import block
from headway.lab.bench.results import read_results
from headway.models.facts import count_parameters
from support.bench import result
from support.launchers import Programs
from support.ports import free_ports
from support.runs import headway
from support.waits import LONG

SUITE = """
strategy: [ddp, zero1, zero2, single]
workers: 2
model: 1m
micro_batch: 1
sequence_length: 32
vocab_size: 256
warmup_steps: 1
steps: 2
profiled_steps: 1
repeats: 1
config: {train: {device: cpu}, parallel: {threads: 1}}
faults:
  - {strategy: zero1, order: kill@step=2%1}
  - {strategy: zero2, order: crash@backward=1%0}
"""
#: Of a suite whose cells take seconds.
SMALLEST = """
model: 1m
micro_batch: 1
sequence_length: 32
warmup_steps: 1
steps: 1
profiled_steps: 0
repeats: 1
"""
ON_ONE_CORE = "train: {device: cpu}, parallel: {threads: 1}"
NAMES = {strategy: f"{strategy}-w2-1m-fp32-b1-t32" for strategy in ("ddp", "zero1", "zero2", "single")}


def test_a_matrix_completes_whatever_happens_to_its_cells(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "trial.yaml").write_text(SUITE)
    first = headway("bench", "trial.yaml", "--output", "out", "--timeout", "800", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    cells = {path.name.split("-w2")[0]: json.loads(path.read_bytes()) for path in (tmp_path / "out/cells").iterdir()}
    ends = {name: cell["repeats"][-1] for name, cell in cells.items()}
    assert {name: end["status"] for name, end in ends.items()} == {
        "ddp": "ok",
        "zero1": "killed",
        "zero2": "failed",
        "single": "refused",
    }
    assert ends["zero1"]["reason"] == "worker 1 died (signal 9)"
    assert ends["zero2"]["reason"] == "worker 0: RuntimeError: ordered by HEADWAY_FAULTS at backward=1"
    assert "cannot use 2 data-parallel workers" in ends["single"]["reason"]

    found = ends["ddp"]["measured"]
    assert found["items"] == 2 * 2 * 32 and len(found["step_seconds"]) == 2
    assert found["tokens_per_second"] == pytest.approx(found["items"] / sum(found["step_seconds"]), rel=0.05)
    assert 0 < found["mean_loss"] < 7 and found["mfu"] is None
    # Weights, gradients and AdamW's two moments in fp32, and what a step takes.
    state = 16 * found["parameters"]
    assert state < found["peak_memory_bytes"] < 2 * state
    assert 0 < found["communication"]["total_share"] < 1

    page = (tmp_path / "out/report.md").read_text()
    assert "3 of 4 cells did not succeed:" in page
    assert f"- {NAMES['zero1']}: killed: worker 1 died (signal 9)" in page
    with (tmp_path / "out/metrics.csv").open() as file:
        assert {line["strategy"]: line["status"] for line in csv.DictReader(file)}["zero2"] == "failed"

    # The log of the pod is all that is left; and the same command finds nothing to do.
    prefixed = "".join(f"2026-01-01T00:00:00Z stderr F [rank0]: {line}\n" for line in first.stderr.splitlines())
    collected = headway("bench", "collect", "-", "-o", "again", "--json", cwd=tmp_path, input=prefixed)
    assert len(json.loads(collected.stdout)["cells"]) == 4
    for path in (tmp_path / "out/cells").iterdir():
        assert json.loads(path.read_bytes()) == json.loads((tmp_path / "again/cells" / path.name).read_bytes())
    logs = sorted((tmp_path / "out/logs").iterdir())
    second = headway("bench", "trial.yaml", "--output", "out", cwd=tmp_path)
    assert second.returncode == 0 and "4 of 4 measurements are there already" in second.stderr
    assert sorted((tmp_path / "out/logs").iterdir()) == logs, "nothing was started"

    jsonschema = pytest.importorskip("jsonschema")  # at the end, since nothing before needs it
    schema = json.loads(headway("bench", "schema").stdout)
    for cell in cells.values():
        jsonschema.validate(cell, schema, jsonschema.Draft202012Validator)


@pytest.mark.slow
def test_a_matrix_that_is_told_to_stop_keeps_what_is_measured_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(
        f"strategy: [ddp, zero1]\nvocab_size: 256\n{SMALLEST}config: {{{ON_ONE_CORE}}}\n"
    )
    output = tmp_path / "out"
    command = [sys.executable, "-m", "headway", "bench", "own.yaml", "--output", str(output)]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        begun = wait_until(lambda: process.poll() is not None or list(output.glob("logs/zero1-*.log")), LONG, 0.01)
        assert begun and process.poll() is None
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=LONG)[1]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 75, said
    assert "stopped by SIGTERM; what is measured is kept" in said and "run the same command again" in said
    assert not [p.pid for p in psutil.process_iter(["cmdline"]) if str(output) in " ".join(p.info["cmdline"] or ())]
    assert {path.suffix for path in (output / "logs").iterdir()} == {".log"}, "nothing else is left"
    (first,) = (output / "cells").iterdir()
    measured = first.read_bytes()

    done = headway("bench", "own.yaml", "--output", output, "--json", cwd=tmp_path)
    assert done.returncode == 0 and "1 of 2 measurements are there already" in done.stderr, done.stderr
    assert {cell["cell"]["strategy"]: cell["repeats"][0]["status"] for cell in json.loads(done.stdout)["results"]} == {
        "ddp": "ok",
        "zero1": "ok",
    }
    assert first.name.startswith("ddp-") and first.read_bytes() == measured


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_a_cell_reads_a_token_store_whoever_starts_its_worker(corpus: Path, tmp_path: Path, launcher: str) -> None:
    data = f"data: {{store: {corpus / 'store'}}}"
    (tmp_path / "own.yaml").write_text(f"data: store\n{SMALLEST}config: {{{data}, {ON_ONE_CORE}}}\n")
    done = headway("bench", "own.yaml", "--launcher", launcher, "--output", "out", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (cell,) = json.loads(done.stdout)["results"]
    assert cell["environment"]["launcher"] == launcher and cell["settings"]["data"] == "store"
    (repeat,) = cell["repeats"]
    assert repeat["status"] == "ok" and repeat["reason"] is None
    found = repeat["measured"]
    # The tokenizer's 300 ids in rows of 64: the model is that of the store, not of the suite's `vocab_size`.
    assert found["parameters"] == count_parameters(ModelConfig(preset="1m", vocab_size=320)).total
    assert found["items"] == 32 and 4 < found["mean_loss"] < 7


@pytest.mark.slow
def test_torchruns_workers_are_measured_and_one_that_is_killed_is_named(tmp_path: Path) -> None:
    fault = "faults: [{strategy: zero1, order: kill@step=2%1}]"
    (tmp_path / "own.yaml").write_text(
        f"strategy: [ddp, zero1]\nworkers: 2\nvocab_size: 256\n{SMALLEST}config: {{{ON_ONE_CORE}}}\n{fault}\n"
    )
    done = headway("bench", "own.yaml", "--launcher", "torchrun", "--output", "out", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ends = {cell["cell"]["strategy"]: cell["repeats"][0] for cell in json.loads(done.stdout)["results"]}
    assert (ends["ddp"]["status"], ends["ddp"]["reason"]) == ("ok", None), ends["ddp"]
    assert ends["ddp"]["measured"]["items"] == 2 * 32
    # In torchrun's own words, since nobody prints a result for a process that is gone.
    assert (ends["zero1"]["status"], ends["zero1"]["reason"]) == ("killed", "worker 1 died (signal 9)"), ends["zero1"]
    collected = headway("bench", "collect", "out/logs", "-o", "again", cwd=tmp_path)
    assert collected.returncode == 0, collected.stderr
    for path in (tmp_path / "out/cells").iterdir():
        assert json.loads(path.read_bytes()) == json.loads((tmp_path / "again/cells" / path.name).read_bytes())


@pytest.mark.slow
def test_a_model_that_no_memory_holds_is_out_of_memory_and_not_tried_again(tmp_path: Path) -> None:
    # With 2^40 rows the embedding has more bytes than a process has addresses, however much a machine promises.
    (tmp_path / "own.yaml").write_text(f"vocab_size: {2**40}\n{SMALLEST}config: {{{ON_ONE_CORE}}}\n")
    done = headway("bench", "own.yaml", "--retries", "2", "--output", "out", "--json", cwd=tmp_path)
    assert done.returncode == 1, "no cell came out"
    (cell,) = json.loads(done.stdout)["results"]
    (repeat,) = cell["repeats"]
    assert (repeat["status"], repeat["attempts"]) == ("out_of_memory", 1), repeat
    assert "can't allocate memory" in repeat["reason"]


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a shell script of that name on the path, before everything else."""

    def install(script: str) -> None:
        path = tmp_path / "bin/kubectl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")

    return install


def test_results_are_collected_from_what_kubectl_prints(kubectl: Callable[[str], None], tmp_path: Path) -> None:
    text = block(result("ddp", 2, [100.0]).model_dump(mode="json"))
    (tmp_path / "pod.log").write_text(f"first line\n{text}\nlast line\n")
    kubectl("printf '%s\\n' \"$@\" > arguments; cat pod.log")
    source = "kubectl:-n ml -l 'app in (bench, eval)'"
    done = headway("bench", "collect", source, "--output", "out", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["cells"] == ["ddp-w2-1m-fp32-b1-t64"]
    assert (tmp_path / "arguments").read_text().splitlines() == ["logs", "-n", "ml", "-l", "app in (bench, eval)"]
    (path,) = (tmp_path / "out/cells").iterdir()
    assert json.loads(path.read_bytes())["repeats"][0]["measured"]["tokens_per_second"] == 100


def test_what_kubectl_says_against_it_is_told(kubectl: Callable[[str], None], tmp_path: Path) -> None:
    kubectl("echo 'Error from server (NotFound): pods \"bench\" not found' >&2; exit 1")
    failed = headway("bench", "collect", "kubectl:pod/bench", "--output", "out", cwd=tmp_path)
    assert failed.returncode == 3 and 'pods "bench" not found' in failed.stderr
    unclosed = headway("bench", "collect", "kubectl:-l 'app", "--output", "out", cwd=tmp_path)
    assert unclosed.returncode == 2 and "No closing quotation" in unclosed.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_one_command_on_two_machines_measures_a_suite(tmp_path: Path) -> None:
    """Both machines are this one; what the second one's workers say is in the first one's log."""
    words = ["bench", "smoke", "machines=2", "workers=1", "train.device=cpu", "strategy=ddp,zero3", "--launcher"]
    words += ["machines", "--output", "out", "faults=[{strategy: zero3, order: kill@step=2%1}]"]
    shared = {"HEADWAY_SECRET": "a secret of the tests", "HEADWAY_LEAD": f"127.0.0.1:{free_ports(1)[0]}"}

    def start(number: int) -> subprocess.Popen[bytes]:
        folder = tmp_path / str(number)
        folder.mkdir()
        environment = {**os.environ, **shared, "HEADWAY_NODE": str(number)}
        with (tmp_path / f"{number}.log").open("wb") as log:
            command = [sys.executable, "-m", "headway", *words]
            return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)

    started = [start(number) for number in (1, 0)]
    assert [one.wait(LONG) for one in started] == [0, 0], "".join(log.read_text() for log in tmp_path.glob("*.log"))
    good, killed = read_results(tmp_path / "0/out")
    assert (good.status, good.cell.machines, good.cell.workers) == ("ok", 2, 2)
    assert (killed.status, killed.repeats[0].reason) == ("killed", "worker 1 died (signal 9)")
    assert not (tmp_path / "1/out").exists()


def test_results_are_collected_from_the_jobs_of_other_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = Programs(tmp_path, monkeypatch, "ray", "sacct", "scontrol")
    text, log = block(result("ddp", 2, [100.0]).model_dump(mode="json")), tmp_path / "slurm-7.log"
    log.write_text(text)
    programs.answer("ray", "job", "logs", "bench-1", stdout=f"(machine pid=1) {text}")
    programs.answer("sacct", "7", stdout=f"{log}\n{log}\n")
    programs.answer("sacct", "8", stderr="sacct: error: Invalid field requested: StdOut", code=1)
    programs.answer("scontrol", "8", stdout=f"JobId=8 JobName=bench\n   StdErr=/x\n   StdOut={log}\n")
    programs.answer("sacct", "9", stdout="\n")
    for source in ("ray:bench-1", "slurm:7", "slurm:8"):
        done = headway("bench", "collect", source, "--output", "out", "--json", cwd=tmp_path)
        assert done.returncode == 0 and json.loads(done.stdout)["cells"] == ["ddp-w2-1m-fp32-b1-t64"], done.stderr
    unknown = headway("bench", "collect", "slurm:9", "--output", "out", cwd=tmp_path)
    assert unknown.returncode == 3 and "Slurm does not know the log of this job" in unknown.stderr


def test_a_launched_run_is_collected_from_its_log_and_from_its_files_when_the_job_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, run = Programs(tmp_path, monkeypatch, "ray"), tmp_path / "runs/bench-smoke"
    write_handle(run, Handle("ray", "bench-1", "2", 120))
    programs.answer("logs", stdout=block(result("ddp", 2, [100.0]).model_dump(mode="json")))
    done = headway("bench", "collect", run, "--output", "out", "--json", cwd=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["cells"] == ["ddp-w2-1m-fp32-b1-t64"], done.stderr
    programs.answer("logs", stderr="no such job", code=1)
    (run / "own.log").write_text(block(result("zero1", 2, [100.0]).model_dump(mode="json")))
    done = headway("bench", "collect", run, "--output", "out", "--json", cwd=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["cells"] == ["zero1-w2-1m-fp32-b1-t64"], done.stderr
    assert "only the files of" in done.stderr


def test_a_machine_without_kubectl_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = headway("bench", "collect", "kubectl:pod/bench", "--output", "out", cwd=tmp_path)
    assert done.returncode == 2 and "there is no kubectl here" in done.stderr
