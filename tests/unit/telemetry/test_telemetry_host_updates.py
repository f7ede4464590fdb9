"""The bandwidth of updates in host memory: measured once, kept for the processor and cores that it holds for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.core.machine.cores import usable_cores
from headway.core.machine.processor import cpu_name
from headway.lab.plan.accelerators import this_machine
from headway.telemetry.host_updates import kept_host_updates, measure_host_updates


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "headway").mkdir()
    return tmp_path / "headway" / "host-updates.json"


def test_what_was_kept_holds_for_the_same_processor_and_cores(file: Path) -> None:
    kept = {"processor": cpu_name(), "cores": usable_cores(), "bytes_per_second": 2.5e10}
    assert kept_host_updates() is None
    file.write_text(json.dumps(kept))
    assert kept_host_updates() == 2.5e10
    for change in ({"cores": usable_cores() + 1}, {"processor": "another"}, {"bytes_per_second": "fast"}):
        file.write_text(json.dumps({**kept, **change}))
        assert kept_host_updates() is None
    for text in ("", "[]", '{"bytes_per_second": -1}', "{" * 500):
        file.write_text(text)
        assert kept_host_updates() is None


def test_a_plan_for_this_machine_has_its_memory_and_bandwidth(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(json.dumps({"processor": cpu_name(), "cores": usable_cores(), "bytes_per_second": 2.5e10}))
    monkeypatch.setattr("headway.lab.plan.accelerators.local_accelerators", lambda: [("NVIDIA L4", 22.5)])
    machines = this_machine(1)
    assert machines.host_bytes_per_second == 2.5e10
    assert machines.host_gib is not None and machines.host_gib > 0
    assert this_machine(1, host_gib=64.0).host_gib == 64.0


@pytest.mark.slow
def test_updates_are_measured_and_kept(file: Path) -> None:
    rate = measure_host_updates()
    assert rate is not None and 1e9 < rate < 1e13 and kept_host_updates() == rate
