"""Peak memory of tensors in main memory, which PyTorch does not count itself.

The memory of all tensors between two steps is summed; what a step adds follows from the profiler's memory events. Other
memory of a process (code, buffers of gloo, freed memory that is kept) is part of its resident memory, but not of this
figure.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

#: The profiler sees what the training thread frees. gloo's threads hold tensors a little longer than a collective
#: takes, and their last frees would be missed, so that this memory would count forever.
_PATIENCE_SECONDS = 0.02


class Allocations:
    """Measures the peak of one step."""

    def start(self) -> None:
        """Start measuring, between two steps."""
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
        """Stop measuring after the step; return the peak in bytes."""
        self._profiler.stop()
        dist.Work.wait = self._wait  # type: ignore[method-assign]
        inner: Any = self._profiler.profiler
        events = [event for event in inner.kineto_results.events() if event.name() == "[memory]"]
        return self._there + highest([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])


def highest(changes: list[int]) -> int:
    """Return the largest partial sum, at least 0."""
    total = peak = 0
    for change in changes:
        total += change
        peak = max(peak, total)
    return peak


def live_bytes() -> int:
    """Return the bytes of memory behind all tensors on the CPU; shared memory counts once."""
    pieces: dict[int, int] = {}
    for found in gc.get_objects():
        # Some objects raise an error of their own when asked for their type.
        if issubclass(type(found), torch.Tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(found):
            try:
                storage = found.untyped_storage()
                if storage.device.type == "cpu":
                    pieces[storage.data_ptr()] = storage.nbytes()
            except (RuntimeError, NotImplementedError):  # a wrapper, whose parts are tensors of their own
                continue
    return sum(pieces.values())
