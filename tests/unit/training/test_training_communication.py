"""The communication of a step, read from a profile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from headway.training.recording.communication import Communication, CommunicationMeter, read_communication

MAIN, OTHER = 1, 2


@dataclass
class Event:
    """As PyTorch's profiler has them; times in milliseconds."""

    text: str
    begin: int
    end: int
    thread: int = MAIN
    kind: str = "CPU"
    sizes: list[list[int]] = field(default_factory=list)
    types: list[str] = field(default_factory=list)

    def name(self) -> str:
        return self.text

    def start_ns(self) -> int:
        return self.begin * 10**6

    def end_ns(self) -> int:
        return self.end * 10**6

    def start_thread_id(self) -> int:
        return self.thread

    def device_type(self) -> str:
        return f"DeviceType.{self.kind}"

    def shapes(self) -> list[list[int]]:
        return self.sizes

    def dtypes(self) -> list[str]:
        return self.types


def on_host() -> list[Any]:
    """100 ms: products to 40, sums from 20 to 60 (waited for from 40), and one beside a product from 70 to 80."""
    return [
        Event("headway.step", 0, 100),
        Event("aten::mm", 0, 40, sizes=[[8, 8], [8, 8]], types=["float", "float"]),
        Event("c10d::allreduce_", 20, 21),
        Event("gloo:all_reduce", 20, 60, OTHER, sizes=[[1024]], types=["float"]),
        Event("aten::copy_", 30, 60, OTHER),  # gloo's own
        Event("_c10d_functional::wait_tensor", 40, 60),
        Event("autograd::engine::evaluate_function: MmBackward0", 0, 100),
        Event("aten::mm", 65, 85),
        Event("gloo:reduce_scatter", 70, 80, OTHER, sizes=[[512, 2]], types=["c10::BFloat16"]),
        Event("gloo:barrier", 80, 80, OTHER),
        Event("[memory]", 0, 0),
    ]


def on_device() -> list[Any]:
    return [
        Event("headway.step", 0, 100),
        Event("headway.step", 0, 100, kind="CUDA"),
        Event("nccl:all_reduce", 5, 6, sizes=[[1024]], types=["float"]),
        Event("nccl:all_reduce", 10, 90, kind="CUDA"),
        Event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 20, 60, kind="CUDA"),
        Event("ampere_sgemm_128x64", 0, 40, kind="CUDA"),
        Event("aten::mm", 0, 100),  # the host's time says nothing
    ]


def test_exposed_is_what_nothing_was_computed_beside() -> None:
    found = read_communication(on_host(), "cpu")
    assert found == Communication(seconds=0.05, exposed_seconds=0.02, step_seconds=0.1, bytes=4096 + 2048)
    assert found.metrics() == {
        "communication/seconds": 0.05,
        "communication/exposed_share": pytest.approx(0.2),
        "communication/sent_gib": 6144 / 2**30,
        "communication/rate_gib_per_second": 6144 / 2**30 / 0.05,
    }


def test_on_a_gpu_kernels_count() -> None:
    found = read_communication(on_device(), "cuda")
    assert found == Communication(seconds=0.04, exposed_seconds=0.02, step_seconds=0.1, bytes=4096)


def test_a_size_that_is_not_told_is_left_out() -> None:
    events = [*on_host(), Event("gloo:send", 90, 95, OTHER)]
    found = read_communication(events, "cpu")
    assert found is not None and found.bytes is None
    assert found.metrics().keys() == {"communication/seconds", "communication/exposed_share"}


def test_a_step_without_collectives_has_no_such_metrics() -> None:
    assert read_communication([event for event in on_host() if ":" not in event.text], "cpu") is None


def test_what_the_profiler_has_not_seen_is_not_zero() -> None:
    unseen = [event for event in on_device() if event.kind == "CPU"]
    assert read_communication(unseen, "cuda") is None
    assert read_communication([], "cpu") is None, "another profiler has taken the events"


@pytest.fixture
def meter() -> Iterator[CommunicationMeter]:
    meter = CommunicationMeter(2)
    yield meter
    meter.on_end(job())
    assert not torch._C._autograd._profiler_enabled()


def job(evaluation: int | None = None) -> Any:
    return SimpleNamespace(
        total_steps=8,
        world=SimpleNamespace(device=torch.device("cpu")),
        config=SimpleNamespace(evaluation=SimpleNamespace(every=evaluation)),
        due=lambda interval: interval is not None,
    )


def test_one_step_in_so_many_is_profiled(meter: CommunicationMeter) -> None:
    profiled = []
    for step in range(1, 9):
        meter.on_step(job(), step, {})
        profiled.append(torch._C._autograd._profiler_enabled())
    assert profiled == [True, False] * 4


@pytest.mark.parametrize("happens", ["before_save", "on_decision", "on_end"])
def test_a_step_that_more_than_training_precedes_is_not_measured(meter: CommunicationMeter, happens: str) -> None:
    meter.on_step(job(), 1, {})
    assert torch._C._autograd._profiler_enabled()
    getattr(meter, happens)(job(), *([None] if happens == "on_decision" else []))
    assert not torch._C._autograd._profiler_enabled()
    metrics: dict[str, float] = {}
    meter.on_step(job(), 2, metrics)
    assert not metrics


def test_no_evaluation_is_profiled(meter: CommunicationMeter) -> None:
    meter.on_step(job(evaluation=1), 1, {})
    assert not torch._C._autograd._profiler_enabled()


def test_the_profiler_of_a_callback_is_left_alone(meter: CommunicationMeter) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as other:
        meter.on_step(job(), 1, {})
        torch.ones(2) + 1
        meter.on_step(job(), 2, {})
    assert len(other.events()) > 0
    meter.on_step(job(), 3, {})
    with profile(activities=[ProfilerActivity.CPU]):
        pass
    meter.on_step(job(), 4, {})


def test_a_failed_device_does_not_hide_what_ended_the_attempt(
    meter: CommunicationMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter.on_step(job(), 1, {})
    stop = profile.stop

    def fails(profiler: Any) -> None:
        stop(profiler)
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(profile, "stop", fails)
    meter.on_end(job())
