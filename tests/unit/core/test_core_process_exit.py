"""Whatever trains on GPUs and meets an error ends without the others, where the process is Headway's own."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import pytest

from headway.cli import main as command
from headway.core.errors import DataError, HeadwayError
from headway.core.process import exit as process_exit
from headway.lab.bench import measure as bench_measure
from headway.lab.bench import worker as bench
from headway.lab.doctor import communication
from headway.lab.doctor import communication_worker as doctor
from support.object_storage import free_ports
from support.waits import LONG


class AtOnce(BaseException):
    """The end of a process by `os._exit`."""


@pytest.fixture(autouse=True)
def _this_process_ends_as_it_would(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A command that a test runs here may be all clear; the process that tests is not."""
    monkeypatch.setattr(process_exit, "_all_clear", False)
    monkeypatch.setattr(process_exit, "_threads_stay", False)
    monkeypatch.setattr(process_exit, "_code", None)
    yield
    atexit.unregister(process_exit.end)


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Groups of NCCL are left, and an end at once can be caught."""

    def end(code: int) -> NoReturn:
        raise AtOnce(code)

    monkeypatch.setattr(process_exit, "has_gpu_groups", lambda: True)
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return monkeypatch


def failing(error: Exception) -> Callable[..., NoReturn]:
    def fail(*_: Any) -> NoReturn:
        raise error

    return fail


@pytest.mark.parametrize(("error", "code"), [(DataError("a row is missing"), 3), (RuntimeError("a bug"), 1)])
def test_a_worker_of_the_benchmark(on_gpus: pytest.MonkeyPatch, error: Exception, code: int) -> None:
    on_gpus.setattr(bench.Spec, "read", lambda path: None)
    on_gpus.setattr(bench_measure, "measure", failing(error))
    with pytest.raises(AtOnce, match=str(code)):
        bench.run_worker(Path("spec.json"))


def test_a_worker_that_measures_communication(on_gpus: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = communication.Plan(device="cpu", sizes_bytes=(1,))
    (tmp_path / "plan.json").write_text(json.dumps(asdict(plan)))
    on_gpus.setattr(doctor, "begin_process", lambda: None)
    on_gpus.setattr(os, "dup2", lambda *_: None)
    on_gpus.setenv("RANK", "0")
    on_gpus.setattr("sys.argv", ["worker", str(tmp_path)])
    on_gpus.setattr(communication, "measure_communication", failing(HeadwayError("worker 0 lost the others: timeout")))
    with pytest.raises(AtOnce, match="1"):
        doctor.main()
    assert (tmp_path / "error-0.json").exists()


def test_a_command_that_torchrun_has_started(on_gpus: pytest.MonkeyPatch) -> None:
    on_gpus.setattr(command, "open_streams", lambda: None)
    on_gpus.setattr(command, "_run", lambda: 3)
    with pytest.raises(AtOnce, match="3"):
        command.main()


def test_without_such_groups_python_ends_the_process(on_gpus: pytest.MonkeyPatch) -> None:
    on_gpus.setattr(process_exit, "has_gpu_groups", lambda: False)
    with pytest.raises(SystemExit, match="4"):
        process_exit.exit_process(4)


@pytest.mark.parametrize("reason", ["allow_fast_exit", "keep_gloo_threads", None])
def test_all_that_is_registered_is_done_before_a_process_ends_without_being_taken_apart(reason: str | None) -> None:
    program = (
        "import atexit, os, threading, time\n"
        "from headway.core.process import exit as process_exit\n"
        "class Told:\n"
        "    def __del__(self): os.write(1, b'taken apart ')\n"
        "told = Told()\n"
        "atexit.register(process_exit.end)\n"
        "atexit.register(lambda: print('registered', end=' '))\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread', end=' '))).start()\n"
        f"{f'process_exit.{reason}()' if reason else 'pass'}\n"
        "process_exit.exit_process(7)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 7, result.stderr
    said = result.stdout.split()
    assert said[:2] == ["thread", "registered"] if reason else "apart" in said
    assert ("apart" in said) is (reason is None)


WORKER = """
import os
class Told:
    def __del__(self, write=os.write): write(1, b"taken apart ")
told = Told()
from headway.parallel import world
{main}
"""
MAINS = {
    "training": (
        "from headway.run.session import session; from headway.run.supervisor import worker\n"
        "session.run_in_this_process = lambda *_, **__: joined()\n"
        "from headway.config import Config\n"
        "session.load_config = lambda path: Config()\n"
        "worker.report_to = lambda *_: None\n"
        "worker.main()"
    ),
    "benchmark": (
        "from headway.lab.bench import measure, worker\n"
        "worker.Spec.read = lambda path: None\n"
        "measure.measure = lambda spec: joined()\n"
        "worker.main()"
    ),
    "profile": ("from headway.lab.profiling import worker\nworker._profile = lambda *_: joined()\nworker.main()"),
}


@pytest.mark.parametrize("main", MAINS)
def test_workers_that_have_met_over_gloo_end_without_being_taken_apart(main: str, tmp_path: Path) -> None:
    """Threads of gloo stay, and PyTorch aborts a process in which one gives back a tensor while that is done."""
    # The first holds the store in which the other one still reads while they meet.
    joined = (
        "def joined():\n    with world.open_world('cpu', 60) as met: met.barrier()\n    print('joined', flush=True)\n"
    )
    program = WORKER.format(main=joined + MAINS[main])
    (port,) = free_ports(1)
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    (tmp_path / "attempts" / "001").mkdir(parents=True)
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), "1"],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "HEADWAY_ATTEMPT": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [worker.communicate(timeout=LONG)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], said
    assert not any("apart" in words for words in said), said
