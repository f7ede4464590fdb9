"""By which library CPUs multiply fp32, and which of them multiply bf16 faster."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headway.cli.start.quickstart import _next_commands
from headway.config import load_config
from headway.core.machine import processor
from headway.telemetry import arithmetic
from headway.training.setup.determinism import determinism_restored


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    cached = (arithmetic.cpu_bf16_speed, arithmetic.onednn_multiplies_fp32)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def on(monkeypatch: pytest.MonkeyPatch, vendor: str, flags: str) -> None:
    """A processor that says so of itself."""
    monkeypatch.setattr(processor, "_cpuinfo", lambda: {"vendor_id": vendor, "flags": flags})


@pytest.fixture
def before() -> Iterator[None]:
    """Whatever is set in the test is not set after it."""
    with determinism_restored():
        yield


@pytest.mark.parametrize(
    ("vendor", "flags", "by_onednn"),
    [
        ("AuthenticAMD", "avx2 avx512f avx512_bf16", True),
        ("HygonGenuine", "avx2 avx512f", True),
        ("AuthenticAMD", "avx2", False),
        ("AuthenticAMD", "avx2 avx512f amx_tile amx_bf16", False),
        ("GenuineIntel", "avx2 avx512f", False),
        ("", "", False),
    ],
)
def test_fp32_is_multiplied_by_the_library_that_uses_avx512(
    monkeypatch: pytest.MonkeyPatch, before: None, vendor: str, flags: str, by_onednn: bool
) -> None:
    """With instructions for tiles oneDNN would round to bf16."""
    on(monkeypatch, vendor, flags)
    monkeypatch.setattr(arithmetic, "_keeps_fp32", lambda: True)
    arithmetic.set_fp32_products(torch.device("cpu"))
    assert torch.get_float32_matmul_precision() == ("medium" if by_onednn else "highest")
    arithmetic.set_fp32_products(torch.device("cuda"))
    assert torch.get_float32_matmul_precision() == "highest", "where the word means TF32"


def test_a_library_that_rounds_is_not_taken(monkeypatch: pytest.MonkeyPatch, before: None) -> None:
    on(monkeypatch, "AuthenticAMD", "avx2 avx512f")
    multiply = torch.Tensor.__matmul__
    rounds = lambda a, b: multiply(a.bfloat16().float(), b) if precision() == "medium" else multiply(a, b)  # noqa: E731
    precision = torch.get_float32_matmul_precision
    monkeypatch.setattr(torch.Tensor, "__matmul__", rounds)
    assert not arithmetic.onednn_multiplies_fp32()
    assert precision() == "highest", "the try leaves nothing behind"


def test_products_have_all_bits_of_fp32(before: None) -> None:
    """Whatever this machine is: with operands rounded to bf16 the error would be a thousand times larger."""
    arithmetic.set_fp32_products(torch.device("cpu"))
    a, b = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0)).unbind()
    error = (a @ b).double() - a.double() @ b.double()
    assert error.abs().max() < 1e-4


@pytest.mark.parametrize("flags", [{"flags": "fma avx2 avx512f"}, {"Features": "asimd"}])
def test_without_instructions_it_is_emulated(monkeypatch: pytest.MonkeyPatch, flags: dict[str, str]) -> None:
    monkeypatch.setattr(processor, "_cpuinfo", lambda: flags)
    assert arithmetic.cpu_bf16_speed() == 0.0
    assert not arithmetic.cpu_multiplies_bf16()


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
    monkeypatch.setattr(processor, "_cpuinfo", lambda: flags)
    monkeypatch.setattr(arithmetic.time, "perf_counter", now)
    assert arithmetic.cpu_bf16_speed() == seconds[0] / seconds[1]
    assert arithmetic.cpu_multiplies_bf16() is (seconds[0] > seconds[1])
    assert torch.get_num_threads() == threads


@pytest.mark.slow
def test_trying_leaves_no_threads() -> None:
    """The process that tries is copied for its workers, and other threads are missing in a copy."""
    script = (
        "import os, torch; from headway.core.machine import processor; from headway.telemetry import arithmetic;"
        "processor._cpuinfo = lambda: {};"
        "count = lambda: len(os.listdir('/proc/self/task')); before = count();"
        "assert arithmetic.cpu_bf16_speed() > 0; print(count() - before)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "0"


def test_what_the_quickstart_suggests_trains_as_it_did(tmp_path: Path) -> None:
    """On a CPU without bf16 the preset alone would take a hundred times as long."""
    overrides = ["train.precision=fp32", "optimizer.name=adamw", f"runs={tmp_path}/my runs", "train.tokens=100k"]
    config = load_config("quickstart", [*overrides, f"data.store={tmp_path}/my data"])
    typed = [shlex.split(command) for command, _ in _next_commands(config, overrides)]
    assert ["headway", "eval", f"{tmp_path}/my runs/quickstart"] in typed
    trainings = {words[1]: load_config(words[2], words[3:]) for words in typed if words[1] in ("train", "verify")}
    assert {training.train.precision for training in trainings.values()} == {"fp32"}
    assert trainings["train"].data.store == config.data.store
    assert (trainings["train"].name, trainings["train"].train.steps) == ("longer", 4000)
