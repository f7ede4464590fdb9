"""The most that tensors take at a time in main memory, where PyTorch keeps no count of its own.

What is there between two steps is summed over all tensors; what a step adds to it follows from the profiler's memory
events. What a process takes besides, for its code, for the buffers of gloo, and because freed memory is kept, is in its
resident memory and not in here.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

#: The profiler sees what the training thread frees. gloo's threads hold what they were given a little longer than a
#: collective takes, and what they free last would count as there for ever.
_PATIENCE_SECONDS = 0.02


class Allocations:
    """Watches one step."""

    def start(self) -> None:
        """Between two steps."""
        gc.collect()
        self._there = live_bytes()
        self._wait = dist.Work.wait
        wait = self._wait

        def patient(work: dist.Work, *arguments: Any) -> Any:
            result = wait(work, *arguments)
            time.sleep(_PATIENCE_SECONDS)
            return result

        dist.Work.wait = patient  # type: ignore[method-assign, assignment]
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profiler.start()

    def stop(self) -> int:
        """After the step; returns the peak in bytes."""
        self._profiler.stop()
        dist.Work.wait = self._wait  # type: ignore[method-assign]
        inner: Any = self._profiler.profiler
        events = [event for event in inner.kineto_results.events() if event.name() == "[memory]"]
        return self._there + highest([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])


def highest(changes: list[int]) -> int:
    """The most that a sum reaches, from nothing on."""
    total = peak = 0
    for change in changes:
        total += change
        peak = max(peak, total)
    return peak


def live_bytes() -> int:
    """Of the memory behind all tensors on the CPU, each piece once."""
    pieces: dict[int, int] = {}
    for found in gc.get_objects():
        # Some objects answer any question about their type with an error of their own.
        if issubclass(type(found), torch.Tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(found):
            try:
                storage = found.untyped_storage()
                if storage.device.type == "cpu":
                    pieces[storage.data_ptr()] = storage.nbytes()
            except (RuntimeError, NotImplementedError):  # a wrapper, whose parts are tensors of their own
                continue
    return sum(pieces.values())
