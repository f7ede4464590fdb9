"""A cell's figures, put together from what its workers have found, against numbers worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.config import Config, resolve
from headway.lab.bench.measure import _measurement
from headway.lab.bench.meter import Meter
from headway.lab.bench.results import Measurement

ITEM_FLOPS, PEAK = 6e9, 1e13


def worker(number: int, **more: Any) -> dict[str, Any]:
    """What the first or the second of two workers tells the others, no two figures alike."""
    own = {
        "allocated": 70 + number,
        "reserved": 90 + number,
        "resident": 5000 - 500 * number,
        "resident_before": 1000 * number,
        "tensors": 30 + number,
        "communication": (0.1 * number, 0.2),
        "joules": 40.0 * number,
        "gpu_utilization": [1.0 - 0.1 * number, 0.5],
        "host_to_device": 10.0 * number,
        "products": None,
    }
    return {**own, **more}


def put_together(*workers: dict[str, Any], **of_config: Any) -> Measurement:
    """What four steps come to, one of which made no update."""
    meter = Meter(warmup_steps=1, steps=4, profiled_steps=2)
    meter.step_seconds, meter.seconds, meter.items = [1.0, 5.0, 2.0, 2.0], 10.0, 8000
    meter.loss_sum, meter.skipped_steps, meter.energy_source = 24_000.0, 1, "the driver of the GPUs (NVML)"
    values = {"model": {"preset": "1m"}, "train": {"steps": 1, **of_config}}
    spec: Any = SimpleNamespace(config=resolve(Config.model_validate(values)), profiled_steps=2)
    task: Any = SimpleNamespace(flops_per_item=ITEM_FLOPS)
    return _measurement(spec, task, meter, torch.device("cpu"), threads=3, parameters=123, workers=workers)


def test_every_figure_is_made_of_those_of_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.lab.bench.measure.device_name", lambda device: "a device")
    monkeypatch.setattr("headway.lab.bench.measure.peak_flops", lambda *asked: {("a device", "bf16"): PEAK}[asked])
    found = put_together(worker(1), worker(2), precision="bf16")
    # 8,000 tokens in 10 s: 4.8e12 FLOP/s of the 2e13 that two devices have.
    assert found.model_dump() == {
        "device": "a device",
        "device_type": "cpu",
        "threads": 3,
        "parameters": 123,
        "items": 8000,
        "step_seconds": [1.0, 5.0, 2.0, 2.0],
        "tokens_per_second": 800.0,
        "tokens_per_second_per_device": 400.0,
        "mean_step_seconds": 2.5,
        "p50_step_seconds": 2.0,
        "p95_step_seconds": pytest.approx(4.55),
        "mean_loss": 3.0,
        "skipped_steps": 1,
        "peak_memory_bytes": 72,
        "peak_memory_bytes_by_worker": [71, 72],
        "peak_reserved_bytes": 92,
        "peak_resident_bytes": 4500,
        "resident_growth_bytes": 3500,
        "host_to_device_gb_per_second": 15.0,
        "flops_per_token": ITEM_FLOPS,
        "model_flops_per_second": 4.8e12,
        "mfu": pytest.approx(0.24),
        "hfu": pytest.approx(0.24),
        "measured_product_flops_per_second": None,
        "share_of_measured_products": None,
        "communication": {
            "steps": 2,
            "total_share": pytest.approx(0.35),
            "exposed_share": pytest.approx(0.15),
            "overlapped_share": pytest.approx(0.2),
        },
        "energy": {"joules": 120.0, "source": "the driver of the GPUs (NVML)"},
        "gpu_utilization_mean": pytest.approx(0.675),
        "gpu_utilization_p95": pytest.approx(0.885),
    }


def test_processors_are_held_against_their_products_and_tensors_counted_by_the_profiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headway.lab.bench.measure.peak_flops", lambda *arguments: None)
    unknown = {"allocated": None, "reserved": None, "resident": None}
    own = {**unknown, "host_to_device": None, "communication": None, "gpu_utilization": None}
    found = put_together(worker(1, products=6e12, **own), worker(2, products=10e12, **own))
    assert found.measured_product_flops_per_second == 16e12
    assert found.share_of_measured_products == pytest.approx(0.3)
    assert found.peak_memory_bytes_by_worker == [31, 32] and found.peak_memory_bytes == 32
    nothing = (found.mfu, found.hfu, found.peak_reserved_bytes, found.resident_growth_bytes, found.communication)
    assert (found.gpu_utilization_mean, found.gpu_utilization_p95) == (None, None)
    assert nothing == (None,) * 5 and found.host_to_device_gb_per_second is None
    one_silent = put_together(worker(1, products=6e12), worker(2, gpu_utilization=None))
    both = (one_silent.measured_product_flops_per_second, one_silent.gpu_utilization_mean)
    assert both == (None, None), "of one worker it says nothing about all"
