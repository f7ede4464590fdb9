"""Asking the operating system, which may not answer."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from headway.core.machine import system as module
from headway.core.machine.system import Machine, cpu_list, run_command


def test_commands_that_work_fail_hang_or_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_command((sys.executable, "-c", "import os; print(os.environ['LC_ALL'])")).text == "C\n"
    failed = run_command((sys.executable, "-c", "import sys; print('said'); sys.exit('complained')"))
    assert failed.state == "failed" and failed.text == "said\ncomplained"
    assert run_command(("no-such-program",)).state == "missing"
    monkeypatch.setattr(module, "_COMMAND_SECONDS", 0.2)
    assert run_command((sys.executable, "-c", "import time; time.sleep(60)")).state == "silent"


def test_files_below_the_root(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    (tmp_path / "sys" / "speed").write_text("-1\n")
    (tmp_path / "sys" / "state").write_text("up\n")
    machine = Machine(tmp_path)
    assert machine.number("/sys/speed") == -1
    assert machine.text("/sys/state") == "up"
    assert machine.number("/sys/state") is None
    assert machine.number("/sys/gone") is None and machine.text("/sys") is None
    assert machine.names("/sys") == ["speed", "state"] and machine.names("/gone") == []
    assert machine.exists("/sys/state") and not machine.exists("/gone")


def test_this_machine(tmp_path: Path) -> None:
    space = Machine().space(tmp_path)
    assert 0 <= space.free_bytes <= space.total_bytes
    assert Machine().environment == dict(os.environ)


def test_lists_of_processors() -> None:
    assert cpu_list("0-2,8,10-11") == [0, 1, 2, 8, 10, 11]
    assert cpu_list("") == [] and cpu_list(None) == []
