"""What a supervisor loads for the attempts, whose first processes are its copies."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from headway.config import Config
from headway.core.errors import Preempted
from headway.run.session.attempt import RunOptions, has_data
from headway.run.supervisor import supervisor
from support.waits import LONG


def loaded(*settings: str) -> list[str]:
    """Of a few modules, those that a process has after it loaded ahead; it must have one thread, to be copied."""
    script = (
        "import sys\n"
        "from headway.config import Config\n"
        "from headway.run.supervisor.attempt_client import load_ahead\n"
        "from headway.core.process.tree import has_one_thread\n"
        f"load_ahead(Config.model_validate({{'train': {{'steps': 1}}, {', '.join(settings)}}}))\n"
        "assert has_one_thread()\n"
        "wanted = ('headway.run.session.session', 'torch.distributed.launcher.api', 'fsspec', 's3fs')\n"
        "print(*(name for name in wanted if name in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_what_one_worker_needs_and_no_more() -> None:
    assert loaded() == ["headway.run.session.session"]


def test_what_several_workers_and_a_remote_tier_need() -> None:
    """PyTorch's elastic agent is none of it."""
    pytest.importorskip("s3fs")
    several, remote = "'parallel': {'workers': 2}", "'checkpoint': {'remote': {'url': 's3://bucket/runs'}}"
    assert loaded(several, remote) == ["headway.run.session.session", "fsspec", "s3fs"]


def test_what_is_not_installed_is_no_end() -> None:
    assert loaded("'checkpoint': {'remote': {'url': 'nosuch://bucket/runs'}}")[0] == "headway.run.session.session"


def test_what_is_said_at_once_is_not_loaded_for(tmp_path: Path) -> None:
    store = {"store": tmp_path / "store"}
    assert not has_data(Config.model_validate({"train": {"steps": 1}, "data": store}))
    assert has_data(Config.model_validate({"train": {"steps": 1}, "data": {**store, "remote": "s3://bucket/store"}}))
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "manifest.json").touch()
    assert has_data(Config.model_validate({"train": {"steps": 1}, "data": store}))


@pytest.mark.parametrize("signals", [[], [signal.SIGTERM]])
def test_what_cannot_be_loaded_ahead_ends_no_run(monkeypatch: pytest.MonkeyPatch, signals: list[int]) -> None:
    """Memory may be short, or a package missing; the first attempt loads what it needs itself, or says what is wrong.
    Who was told to stop meanwhile begins none."""
    tried: list[Config] = []

    def fail(config: Config) -> None:
        tried.append(config)
        raise MemoryError("no room")

    monkeypatch.setattr(supervisor, "load_ahead", fail)
    monkeypatch.setattr(supervisor, "has_data", lambda config: True)
    config = Config.model_validate({"train": {"steps": 1}})
    one = supervisor._Supervisor(config, RunOptions(), own_process=True)
    one._stops.signals += signals
    with pytest.raises(Preempted) if signals else nullcontext():
        one._load_ahead()
    assert tried == [config]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody can tell whether a process may be copied")
def test_who_watches_over_the_loading_is_gone_when_it_is_done() -> None:
    """The thread of `faulthandler` is there for a moment after it has told that it ends; no copies are made until then,
    and each worker would load all of it again."""
    script = (
        "import faulthandler, threading, time\n"
        "from headway.config import Config\n"
        "from headway.run.supervisor import supervisor\n"
        "from headway.run.session.attempt import RunOptions\n"
        "from headway.core.process.tree import has_one_thread\n"
        "end = threading.Thread(target=time.sleep, args=(0.1,)).start\n"
        "faulthandler.cancel_dump_traceback_later = end\n"
        "faulthandler.dump_traceback_later = lambda *_, **__: None\n"
        "supervisor.load_ahead, supervisor.has_data = lambda config: None, lambda config: True\n"
        "config = Config.model_validate({'train': {'steps': 1}})\n"
        "supervisor._Supervisor(config, RunOptions(), own_process=True)._load_ahead()\n"
        "assert has_one_thread()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("own_process", "settings"), [(False, {}), (True, {"load_ahead": False})])
def test_only_a_process_of_our_own_is_filled(
    monkeypatch: pytest.MonkeyPatch, own_process: bool, settings: dict[str, bool]
) -> None:
    monkeypatch.setattr(supervisor, "has_data", lambda config: True)
    monkeypatch.setattr(supervisor, "load_ahead", pytest.fail)
    config = Config.model_validate({"train": {"steps": 1}, "supervise": settings})
    supervisor._Supervisor(config, RunOptions(), own_process)._load_ahead()


def test_loading_that_takes_long_is_one_line_and_its_stack_is_in_a_file(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "_LONG_SECONDS", 0.05)
    monkeypatch.setattr(supervisor, "_THREAD_SECONDS", 0.1)  # this process has threads of its own
    monkeypatch.setattr(supervisor, "has_data", lambda config: True)
    monkeypatch.setattr(supervisor, "load_ahead", lambda config: time.sleep(0.3))
    supervisor._Supervisor(Config.model_validate({"train": {"steps": 1}}), RunOptions(), own_process=True)._load_ahead()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("loading PyTorch takes more than 0 s") and "File" not in line
    stack = Path(line.rpartition(": ")[2])
    assert "in _load_ahead" in stack.read_text()
    stack.unlink()
