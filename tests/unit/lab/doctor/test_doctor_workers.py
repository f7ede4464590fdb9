"""What the communication benchmark says when its workers fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from headway.cli.application import application
from headway.core.errors import ConfigError
from headway.core.files.atomic import write_json
from headway.lab.doctor import communication
from headway.lab.doctor.communication import CommunicationFailed, Plan, measure_communication
from headway.lab.doctor.workers import _death_error, _recorded_error, run_communication
from headway.run.supervisor.local_workers import WorkerEnd, WorkersFailed, WorkersStopped


def failures(**codes: int) -> WorkersFailed:
    return WorkersFailed([WorkerEnd(int(name[1:]), code) for name, code in codes.items()], [])


def test_a_worker_s_own_reason_goes_before_the_echoes(tmp_path: Path) -> None:
    assert _recorded_error(tmp_path) is None
    echo = {"rank": 0, "exit_code": 1, "what": "worker 0 lost the others: closed", "where": None, "fix": None}
    write_json(tmp_path / "error-0.json", echo)
    assert _recorded_error(tmp_path) is None
    own = {"rank": 1, "exit_code": 2, "what": "no such fault", "where": "HEADWAY_FAULTS", "fix": "kill"}
    write_json(tmp_path / "error-1.json", own)
    error = _recorded_error(tmp_path)
    assert error is not None and (error.exit_code, error.what, error.where) == (2, "no such fault", "HEADWAY_FAULTS")


def test_the_killed_worker_is_named_rather_than_those_that_missed_it(tmp_path: Path) -> None:
    (tmp_path / "worker-2.log").write_text("begin\nout of memory\n")
    error = _death_error(tmp_path, failures(r0=1, r2=-9))
    assert error.what == "worker 2 died (signal 9) while it was measuring: out of memory"
    assert _death_error(tmp_path, failures(r1=7)).what == "worker 1 died (exit code 7) while it was measuring"


def test_what_pytorch_says_becomes_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("[/src/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:3490. Good luck!\nC++ stack")

    monkeypatch.setattr(communication, "open_world", fail)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(CommunicationFailed) as failed:
        measure_communication(Plan("cpu", (4,)))
    assert failed.value.what == "worker 3 lost the others: Connection closed by peer [127.0.0.1]:3490"


@pytest.mark.parametrize("determinism", [None, "off"])
def test_what_is_measured_is_what_runs_do(
    determinism: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing promised, switches may add."""
    asked: list[tuple[object, ...]] = []

    def apply(*arguments: object) -> None:
        asked.append(arguments)
        raise ConfigError("enough")

    monkeypatch.setattr(communication, "apply_nccl_profile", apply)
    monkeypatch.setattr("headway.lab.doctor.workers.world_size_from_environment", lambda: 2)
    config = tmp_path / "run.yaml"
    config.write_text(f"name: x\ndata: {{store: /data/s}}\ndeterminism: {determinism}\n")
    arguments = ["doctor", *([str(config)] if determinism else []), "--communication", "--device", "cpu"]
    assert isinstance(CliRunner().invoke(application(), arguments).exception, ConfigError)
    assert asked == [("auto", "cpu", determinism or "run")]


@pytest.mark.parametrize("operation", ["all-reduce", "all-gather", "reduce-scatter"])
def test_a_wrong_result_is_no_result(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[list[float]] = []

    def gather(values: list[float]) -> list[list[float]]:
        said.append(values)
        return [[1.0], values]

    world: Any = SimpleNamespace(rank=1, size=2, device=torch.device("cpu"), gather=gather)
    # The second of two workers, whose numbers are 2 where the first one's are 1.
    monkeypatch.setattr(communication.dist, "all_reduce", lambda whole: whole.fill_(3.0))
    monkeypatch.setattr(
        communication, "all_gather", lambda whole, part: whole.copy_(torch.tensor([1.0, 1.0, 2.0, 2.0]))
    )
    monkeypatch.setattr(communication, "reduce_scatter", lambda part, whole: part.fill_(3.0))
    communication._check(world, operation, 2)
    assert said == [[1.0]]
    for name in ("all_gather", "reduce_scatter"):
        monkeypatch.setattr(communication, name, lambda out, given: None)
    monkeypatch.setattr(communication.dist, "all_reduce", lambda whole: None)
    with pytest.raises(CommunicationFailed, match=f"{operation} of 16 bytes gave a wrong result on worker 1"):
        communication._check(world, operation, 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said_in_terms_of_the_option() -> None:
    with pytest.raises(ConfigError, match="has no cuda device") as refused:
        run_communication(2, "cuda", None, "auto")
    assert refused.value.where == "--device"


@pytest.mark.parametrize(("number", "kind"), [("SIGINT", KeyboardInterrupt), ("SIGTERM", CommunicationFailed)])
def test_ctrl_c_is_no_failure(monkeypatch: pytest.MonkeyPatch, number: str, kind: type[BaseException]) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise WorkersStopped(signal.Signals[number])

    monkeypatch.setattr("headway.lab.doctor.workers.start_workers", stopped)
    with pytest.raises(kind):
        run_communication(2, "cpu", None, "auto")


def test_a_worker_prints_no_result(tmp_path: Path) -> None:
    """Nor do the libraries that it loads: the command's result may be JSON."""
    script = (
        "import sys\n"
        "from headway.lab.doctor import communication, communication_worker\n"
        "communication.measure_communication = lambda plan: print('noise') or plan\n"
        "communication_worker.main()\n"
    )
    write_json(tmp_path / "plan.json", asdict(Plan("cpu", (4,))))
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, env={**os.environ, "RANK": "0"}
    )
    assert done.returncode == 0 and (tmp_path / "result.json").exists(), done.stderr
    assert done.stdout == "" and "noise" in done.stderr


def test_torchrun_has_the_last_word_on_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="torchrun has started 2 workers, not 4"):
        run_communication(4, "cpu", None, "auto")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="cannot communicate"):
        run_communication(None, "cpu", None, "auto")
