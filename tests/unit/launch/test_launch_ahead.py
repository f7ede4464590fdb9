"""What a supervisor loads for the next attempt while this one is well."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headway.config import Config
from headway.launch import watched
from headway.launch.attempt import Wishes
from headway.launch.watched import WatchedAttempt
from headway.supervise.crew import Crew


def loaded(*settings: str) -> list[str]:
    """Of a few modules, those that a process has after it loaded ahead; it must have one thread, to be copied."""
    script = (
        "import sys\n"
        "from headway.config import Config\n"
        "from headway.launch.leader_process import load_ahead\n"
        "from headway.supervise.processes import has_one_thread\n"
        f"load_ahead(Config.model_validate({{'train': {{'steps': 1}}, {', '.join(settings)}}}))\n"
        "assert has_one_thread()\n"
        "wanted = ('headway.launch.session', 'torch.distributed.launcher.api', 'fsspec', 's3fs')\n"
        "print(*(name for name in wanted if name in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_what_one_worker_needs_and_no_more() -> None:
    assert loaded() == ["headway.launch.session"]


def test_what_several_workers_and_a_remote_tier_need() -> None:
    pytest.importorskip("s3fs")
    several, remote = "'parallel': {'workers': 2}", "'checkpoint': {'remote': {'url': 's3://bucket/runs'}}"
    assert loaded(several, remote) == [
        "headway.launch.session",
        "torch.distributed.launcher.api",
        "fsspec",
        "s3fs",
    ]


def test_what_is_not_installed_is_no_end() -> None:
    assert loaded("'checkpoint': {'remote': {'url': 'nosuch://bucket/runs'}}")[0] == "headway.launch.session"


def test_what_cannot_be_loaded_ahead_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may be short while workers train; the next attempt loads it itself."""
    config = Config.model_validate({"train": {"steps": 1}})
    said: list[str] = []

    def fail(config: Config) -> None:
        said.append("tried")
        raise MemoryError("no room")

    monkeypatch.setattr(watched, "load_ahead", fail)
    monkeypatch.delitem(sys.modules, "headway.launch.session", raising=False)
    attempt = WatchedAttempt(config, Wishes(), Crew(config, None), [], own_process=True)
    monkeypatch.setattr(WatchedAttempt, "_at_steps", True)
    monkeypatch.setattr(attempt, "_say", said.append)
    for seconds in (100.0, 131.0, 132.0, 1000.0):
        attempt._load_ahead(seconds)
    assert said == ["tried", "warning: what workers need cannot be loaded ahead: MemoryError: no room"]
