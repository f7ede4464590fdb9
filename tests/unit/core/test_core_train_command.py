"""Trainings that other verbs start."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.config import load_config
from headway.core.coordination.train_command import failed, place, running
from headway.core.errors import DataError, HeadwayError, Preempted
from headway.core.process.waiting import wait_until
from support.waits import LONG


@pytest.mark.parametrize("name", ["2026", "out #2", "null", "a: b", 'the "last" one', "läuft 🚆", "[1]"])
def test_a_folder_with_any_name_is_that_folder(tiny: Callable[..., Path], name: str) -> None:
    config = load_config(tiny(), place("trial-001", Path(name)))
    assert config.run_directory == Path(name) / "trial-001"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_was_begun_ends_with_a_signal_to_stop(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under `nohup`
    log = tmp_path / "log"
    command = [sys.executable, "-uc", "import os, time; print(os.environ['GIVEN']); time.sleep(60)"]
    try:
        with pytest.raises(KeyboardInterrupt), running(command, log, {"GIVEN": "there"}) as process:
            assert wait_until(lambda: log.read_text() == "there\n", LONG, 0.01)
            signal.raise_signal(number)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert process.returncode == -signal.SIGKILL


def test_a_training_s_exit_code_is_the_error_s(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 5000 + b"the \xff end")
    for code, kind in ((3, DataError), (75, Preempted), (1, HeadwayError), (-9, HeadwayError)):
        error = failed("it failed", code, log)
        assert type(error) is kind and error.what.startswith("it failed:\nxxx") and error.what.endswith(" end")
