"""What a supervisor loads for the next attempt while this one is well."""

from __future__ import annotations

import subprocess
import sys

import pytest


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
