"""The copies of batches to the GPU: their time, by events in the stream, and their bytes.

The host only queues a copy, so its own clock would not see it. Two events around each copy cost microseconds; they are
made at the interval of `telemetry.log_every`, and read when the losses of the step have been read, so nothing waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from headway.training.task import to_device


class CopyMeter:
    """Moves batches to the device, and measures that in one step of `every`.

    Args:
        every: Steps between those that are measured.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._is_due = False
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._bytes = 0

    def begin(self, step: int) -> None:
        """Begin a computation of a step, counted from 0."""
        self._is_due = (step + 1) % self._every == 0
        self._events = []
        self._bytes = 0

    def to_device(self, batch: Any, device: torch.device) -> Any:
        """Move a batch as `task.to_device`."""
        size = sum(tensor.nbytes for tensor in _on_host(batch)) if self._is_due and device.type == "cuda" else 0
        if not size:
            return to_device(batch, device)
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        moved = to_device(batch, device)
        ended.record()
        self._events.append((begun, ended))
        self._bytes += size
        return moved

    def metrics(self) -> dict[str, float]:
        """Return what the step copied; empty if it was not measured, or if its copies have not ended."""
        if not self._events or not all(ended.query() for _, ended in self._events):
            return {}
        seconds = sum(begun.elapsed_time(ended) for begun, ended in self._events) / 1e3
        found = {"host_to_device/seconds": seconds, "host_to_device/copied_gib": self._bytes / 2**30}
        if seconds > 0:
            found["host_to_device/rate_gib_per_second"] = self._bytes / 2**30 / seconds
        return found


def _on_host(batch: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a nested batch that are in main memory."""
    if isinstance(batch, torch.Tensor):
        if batch.device.type == "cpu":
            yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _on_host(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _on_host(value)
