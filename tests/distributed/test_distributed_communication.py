"""The communication benchmark between processes of this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.runs import headway, torchrun


@pytest.mark.slow
def test_three_workers_measure_every_collective() -> None:
    result = headway("doctor", "--communication", "-w", "3", "--device", "cpu", "--sizes", "1Ki,100000", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["workers"], found["machines"], found["backend"], found["nccl_profile"]) == (3, 1, "gloo", "none")
    measured = [(item["operation"], item["size_bytes"]) for item in found["measurements"]]
    # Whole numbers of fp32 for each of three workers.
    sizes = (1032, 100008)
    assert measured == [(name, size) for name in ("all-reduce", "all-gather", "reduce-scatter") for size in sizes]
    for item in found["measurements"]:
        assert 0 < item["p10_seconds"] <= item["median_seconds"] <= item["p90_seconds"]
        factor = 4 / 3 if item["operation"] == "all-reduce" else 2 / 3
        assert item["algorithm_bytes_per_second"] == item["size_bytes"] / item["median_seconds"]
        assert abs(item["bus_bytes_per_second"] / item["algorithm_bytes_per_second"] - factor) < 1e-9
    assert [clock["worker"] for clock in found["clocks"]] == [0, 1, 2]
    # One machine has one clock: what is measured is how well it can be measured.
    assert all(abs(clock["seconds"]) <= clock["uncertainty_seconds"] + 1e-3 for clock in found["clocks"])


def test_under_torchrun_the_first_worker_prints(tmp_path: Path) -> None:
    command = ["-m", "headway", "doctor", "--communication", "--device", "cpu", "--sizes", "4Ki"]
    result = torchrun(2, *command)
    assert result.stdout.count("2 workers on 1 machine, cpu, gloo") == 1
    assert "reduce-scatter  4.0 KiB" in result.stdout and "clocks: worker" in result.stdout


def test_a_killed_worker_is_named() -> None:
    arguments = ("doctor", "--communication", "-w", "2", "--device", "cpu", "--sizes", "4Ki")
    result = headway(*arguments, faults="kill@communication.worker-1:20")
    assert result.returncode == 1
    assert "error: worker 1 died (signal 9) while it was measuring" in result.stderr
    assert result.stdout == ""
