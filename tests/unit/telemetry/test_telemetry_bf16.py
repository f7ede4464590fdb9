"""Which CPUs multiply bf16 faster than fp32."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headway.cli.quickstart import _next_commands
from headway.config import load_config
from headway.telemetry import hardware


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    hardware.cpu_bf16_speed.cache_clear()
    yield
    hardware.cpu_bf16_speed.cache_clear()


@pytest.mark.parametrize("flags", [{"flags": "fma avx2 avx512f"}, {"Features": "asimd"}])
def test_without_instructions_it_is_emulated(monkeypatch: pytest.MonkeyPatch, flags: dict[str, str]) -> None:
    monkeypatch.setattr(hardware, "_cpuinfo", lambda: flags)
    assert hardware.cpu_bf16_speed() == 0.0
    assert not hardware.cpu_multiplies_bf16()


@pytest.mark.parametrize("flags", [{"flags": "avx2 avx512_bf16"}, {"flags": "amx_tile amx_bf16"}, {}])
@pytest.mark.parametrize("seconds", [(1.0, 2.0), (2.0, 1.0)])
def test_with_instructions_a_try_decides(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, str], seconds: tuple[float, float]
) -> None:
    """There are CPUs whose bf16 instructions have half the speed of fp32."""
    clock, threads = 0.0, torch.get_num_threads()

    def now() -> float:
        nonlocal clock
        clock += steps.pop(0)
        return clock

    steps = [0.0, seconds[0], 0.0, seconds[1]] * 8
    monkeypatch.setattr(hardware, "_cpuinfo", lambda: flags)
    monkeypatch.setattr(hardware.time, "perf_counter", now)
    assert hardware.cpu_bf16_speed() == seconds[0] / seconds[1]
    assert hardware.cpu_multiplies_bf16() is (seconds[0] > seconds[1])
    assert torch.get_num_threads() == threads


def test_trying_leaves_no_threads() -> None:
    """The process that tries is copied for its workers, and other threads are missing in a copy."""
    script = (
        "import os, torch; from headway.telemetry import hardware; hardware._cpuinfo = lambda: {};"
        "count = lambda: len(os.listdir('/proc/self/task')); before = count();"
        "assert hardware.cpu_bf16_speed() > 0; print(count() - before)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "0"


def test_what_the_quickstart_suggests_trains_as_it_did(tmp_path: Path) -> None:
    """On a CPU without bf16 the preset alone would take a hundred times as long."""
    overrides = ["train.precision=fp32", "optimizer.name=adamw", f"runs={tmp_path}/my runs"]
    config = load_config("quickstart", [*overrides, f"data.store={tmp_path}/my data"])
    typed = [shlex.split(command) for command in _next_commands(config, overrides)]
    assert ["headway", "eval", f"{tmp_path}/my runs/quickstart"] in typed
    trainings = {words[1]: load_config(words[2], words[3:]) for words in typed if words[1] in ("train", "verify")}
    assert {training.train.precision for training in trainings.values()} == {"fp32"}
    assert trainings["train"].data.store == config.data.store
    assert trainings["train"].name == "longer"
