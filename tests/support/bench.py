"""Benchmark results with numbers that a test chooses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.lab.bench.results import CellResult, Measurement, Repeat, Status
from headway.lab.bench.suite import Cell

MIB = 2**20


def measurement(tokens_per_second: float, workers: int = 1, memory_mib: float = 100.0, **more: Any) -> Measurement:
    """One whose step takes as long as 1000 tokens do."""
    seconds = 1000 / tokens_per_second
    values = {
        "device": "a processor",
        "device_type": "cpu",
        "threads": 1,
        "parameters": 1000,
        "items": 2000,
        "step_seconds": [seconds, seconds],
        "tokens_per_second": tokens_per_second,
        "tokens_per_second_per_device": tokens_per_second / workers,
        "mean_step_seconds": seconds,
        "p50_step_seconds": seconds,
        "p95_step_seconds": seconds,
        "mean_loss": 3.0,
        "peak_memory_bytes": round(memory_mib * MIB),
        "peak_memory_bytes_by_worker": [round(memory_mib * MIB)] * workers,
        **dict.fromkeys(
            (
                "peak_reserved_bytes", "peak_resident_bytes", "resident_growth_bytes", "host_to_device_gb_per_second",
                "flops_per_token", "model_flops_per_second", "mfu", "hfu", "measured_product_flops_per_second",
                "share_of_measured_products", "communication", "energy",
            )
        ),
        **more,
    }  # fmt: skip
    return Measurement.model_validate(values)


def result(
    strategy: str,
    workers: int,
    speeds: Sequence[float | None] = (),
    *,
    memory_mib: Sequence[float] | float = 100.0,
    failure: tuple[Status, str] | None = None,
    cores: int = 8,
    model: str = "1m",
    **more: Any,
) -> CellResult:
    """A cell with these tokens/s, a repeat for each number that is given, and perhaps one that failed."""
    cell = Cell(strategy=strategy, workers=workers, model=model, precision="fp32", micro_batch=1, sequence_length=64)
    memory = memory_mib if isinstance(memory_mib, Sequence) else [memory_mib] * len(speeds)
    repeats = [
        Repeat(
            number=number,
            status="ok",
            started=1000.0 + number,
            wall_seconds=1.0,
            measured=measurement(speed, workers, mib, **more),
        )
        for number, (speed, mib) in enumerate(zip(speeds, memory, strict=True), 1)
        if speed is not None
    ]
    if failure is not None:
        status, reason = failure
        repeats.append(
            Repeat(number=len(speeds) + 1, status=status, reason=reason, started=2000.0, log_tail=["<last>"])
        )
    return CellResult(
        suite="own",
        cell=cell,
        key=f"{strategy}-{workers}-{model}",
        environment_id="0" * 8,
        environment={"hardware": {"cores_usable": cores}},
        settings={"repeats": len(speeds) or 1},
        repeats=repeats,
    )
