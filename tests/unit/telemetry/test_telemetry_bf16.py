"""Which CPUs multiply bf16."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from headway.cli.quickstart import _next_commands
from headway.config import load_config
from headway.telemetry import hardware


@pytest.mark.parametrize(
    ("flags", "fast"),
    [
        ({"flags": "fma avx2 avx512f"}, False),
        ({"flags": "avx2 avx512_bf16"}, True),
        ({"flags": "amx_tile amx_bf16"}, True),
        ({"Features": "asimd bf16"}, True),
        ({"Features": "asimd"}, False),
        ({}, True),
    ],
)
def test_instructions_decide(monkeypatch: pytest.MonkeyPatch, flags: dict[str, str], fast: bool) -> None:
    monkeypatch.setattr(hardware, "_cpuinfo", lambda: flags)
    assert hardware.cpu_multiplies_bf16() is fast


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
