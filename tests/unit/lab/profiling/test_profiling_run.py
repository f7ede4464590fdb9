"""A profile's own folder, workers and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.config import load_config
from headway.core.errors import ConfigError
from headway.lab.profiling.plan import Plan
from headway.lab.profiling.run import ProfileFailed, _files_of_workers, _work, check
from headway.run.supervisor.local_workers import WorkersStopped


def test_only_what_profiles_leave_is_taken_for_theirs(tmp_path: Path) -> None:
    mine = ["trace-0.json.gz", "trace-12.json.gz", "memory-3.pickle"]
    others = [
        "trace-before.json.gz",
        "memory-of-monday.pickle",
        "trace-0.json.gz.bak",
        "trace-.json.gz",
        "a-trace-1.json.gz",
    ]
    for name in (*mine, *others):
        (tmp_path / name).touch()
    (tmp_path / "trace-1.json.gz").mkdir()
    assert sorted(path.name for path in _files_of_workers(tmp_path)) == sorted(mine)


@pytest.mark.parametrize(("number", "kind"), [("SIGINT", KeyboardInterrupt), ("SIGTERM", ProfileFailed)])
def test_ctrl_c_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str, kind: type[BaseException]
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise WorkersStopped(signal.Signals[number])

    monkeypatch.setattr("headway.lab.profiling.run.start_workers", stopped)
    with pytest.raises(kind):
        _work(1, tmp_path)


def test_a_process_that_is_a_worker_of_somebody_elses_is_refused(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="profile starts its workers itself"):
        check(load_config(tiny()), Plan(1, 2, 2))


def test_a_worker_prints_no_result(tmp_path: Path) -> None:
    """Nor do the libraries that it loads: the command's result may be JSON."""
    script = (
        "from headway.lab.profiling import worker\n"
        "worker._profile = lambda folder, rank: print('noise')\n"
        "worker.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, env={**os.environ, "RANK": "0"}
    )
    assert done.returncode == 0 and done.stdout == "" and "noise" in done.stderr
