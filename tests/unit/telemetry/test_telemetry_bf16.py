"""Which CPUs multiply bf16."""

from __future__ import annotations

import pytest

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
