"""The rate at which batches reach the device: by events that are made up, and on a device."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

from headway.training.recording import copies
from headway.training.recording.copies import CopyMeter
from support.gpu import needs_gpu

Pair = namedtuple("Pair", "ids mask")
CUDA = torch.device("cuda", 0)


class FakeEvent:
    """An event of a stream in which every record takes 2 ms; the last ones may not have ended."""

    clock = 0.0
    has_ended = True

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self) -> None:
        FakeEvent.clock += 2.0
        self.at = FakeEvent.clock

    def query(self) -> bool:
        return self.has_ended

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at - self.at


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The batches that were moved to a device that is not there."""
    found: list[Any] = []

    def move(batch: Any, device: torch.device) -> Any:
        found.append(batch)
        return batch

    monkeypatch.setattr(copies, "to_device", move)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    return found


def batch() -> dict[str, Any]:
    """48 + 6 + 6 bytes in main memory."""
    ids = torch.zeros(2, 3, dtype=torch.int64)
    return {"ids": ids, "more": [Pair(torch.zeros(6, dtype=torch.uint8), torch.zeros(3, dtype=torch.bfloat16)), "text"]}


def test_time_bytes_and_rate_of_the_copies_of_a_step(moved: list[Any]) -> None:
    meter = CopyMeter(10)
    meter.begin(9)
    for _ in range(3):
        meter.to_device(batch(), CUDA)
    found = meter.metrics()
    assert found["host_to_device/seconds"] == pytest.approx(0.006)
    assert found["host_to_device/copied_gib"] == 3 * 60 / 2**30
    assert found["host_to_device/rate_gib_per_second"] == pytest.approx(180 / 2**30 / 0.006)
    assert len(moved) == 3


def test_only_steps_at_the_interval_are_measured(moved: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    meter, measured = CopyMeter(4), []
    for step in range(9):
        meter.begin(step)
        meter.to_device(batch(), CUDA)
        measured += [step] if meter.metrics() else []
    assert measured == [3, 7]
    monkeypatch.setattr(torch.cuda, "Event", None)  # a step that is not due makes none
    meter.begin(8)
    meter.to_device(batch(), CUDA)


def test_copies_that_have_not_ended_are_not_waited_for(moved: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    meter = CopyMeter(1)
    meter.begin(0)
    meter.to_device(batch(), CUDA)
    monkeypatch.setattr(FakeEvent, "has_ended", False)
    assert meter.metrics() == {}


def test_nothing_is_measured_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", None)
    meter = CopyMeter(1)
    meter.begin(0)
    there = meter.to_device(batch(), torch.device("cpu"))
    assert torch.equal(there["ids"], batch()["ids"]) and meter.metrics() == {}


@needs_gpu
def test_copies_to_a_device() -> None:
    meter = CopyMeter(1)
    meter.begin(0)
    there = meter.to_device({"ids": torch.arange(1 << 20)}, CUDA)
    torch.cuda.synchronize()
    found = meter.metrics()
    assert there["ids"].device.type == "cuda" and torch.equal(there["ids"].cpu(), torch.arange(1 << 20))
    assert found["host_to_device/copied_gib"] == 2**23 / 2**30 and 0 < found["host_to_device/seconds"] < 60
    meter.to_device(there, CUDA)  # it is there already
    assert meter.metrics()["host_to_device/copied_gib"] == 2**23 / 2**30
