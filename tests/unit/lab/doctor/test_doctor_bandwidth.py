"""The formulas of nccl-tests' PERFORMANCE.md."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from pydantic import TypeAdapter

from headway.core.statistics import quantile
from headway.lab.doctor.bandwidth import ClockOffset, Communication, clock_offset, measurement


@pytest.mark.parametrize(
    ("operation", "workers", "bus"),
    [("all-reduce", 2, 1.0), ("all-reduce", 8, 1.75), ("all-gather", 4, 0.75), ("reduce-scatter", 8, 0.875)],
)
def test_bandwidths(operation: str, workers: int, bus: float) -> None:
    item = measurement(operation, 4_000_000_000, workers, [4.0, 2.0, 3.0])
    assert item.median_seconds == 3.0 and item.repeats == 3
    assert item.algorithm_bytes_per_second == pytest.approx(4e9 / 3)
    assert item.bus_bytes_per_second == pytest.approx(bus * 4e9 / 3)


def test_spread() -> None:
    item = measurement("all-reduce", 1, 2, [float(n) for n in range(11)])
    assert (item.p10_seconds, item.median_seconds, item.p90_seconds) == (1.0, 5.0, 9.0)
    assert quantile([1.0, 2.0], 0.25) == 1.25 and quantile([7.0], 0.9) == 7.0


def test_the_fastest_answer_tells_how_clocks_differ() -> None:
    slow, fast = (100.0, 97.9, 100.8), (101.0, 98.1, 101.2)
    offset = clock_offset(3, [slow, fast, slow])
    assert offset.worker == 3
    assert offset.seconds == pytest.approx(3.0) and offset.uncertainty_seconds == pytest.approx(0.1)
    assert offset.is_wrong


def test_a_clock_is_wrong_only_when_it_surely_is() -> None:
    assert ClockOffset(1, -3.0, 0.5).is_wrong
    assert not ClockOffset(1, 1.2, 0.5).is_wrong


def test_the_result_survives_json() -> None:
    item = measurement("all-gather", 8, 2, [1.0])
    result = Communication(2, 1, "cpu", "gloo", "none", (item,), (ClockOffset(0, 0.0, 0.0),))
    assert TypeAdapter(Communication).validate_json(json.dumps(asdict(result))) == result
