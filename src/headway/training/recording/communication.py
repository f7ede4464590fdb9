"""The communication of a step: its time, its rate, and how much of it nothing was computed beside.

Only PyTorch's profiler sees when a collective really runs: on a GPU it is a kernel, with gloo a thread. A profiled step
is slower, so one step in many is measured, and only on the first worker (`telemetry.communication_every`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from headway.core.statistics import covered
from headway.training.job import Callback, Job

if TYPE_CHECKING:
    from headway.training.health.decisions import Decision

_STEP = "headway.step"
#: A collective as the host began it, with the shapes of its tensors; with gloo also when it ran.
_COLLECTIVE = re.compile(r"(gloo|nccl):")
_NCCL_KERNEL = re.compile(r"nccl\w*Kernel")
#: Operators that compute. Those of other namespaces wait (`c10d`), or contain operators and their waits (`autograd`).
_COMPUTES = re.compile(r"(?!c10d|_c10d|autograd)\w+::|.*CompiledFxGraph")
_ELEMENT_BYTES = {
    "double": 8, "long int": 8, "float": 4, "int": 4, "c10::BFloat16": 2, "c10::Half": 2, "signed char": 1,
    "unsigned char": 1, "bool": 1,
}  # fmt: skip
Interval = tuple[int, int]


@dataclass(frozen=True)
class Communication:
    """The collectives of one step of one worker."""

    seconds: float
    """Time in which at least one collective ran."""
    exposed_seconds: float
    """Part of it in which nothing was computed."""
    step_seconds: float
    bytes: int | None
    """What this worker handed over; None if the profiler does not tell for all collectives."""

    @classmethod
    def of(
        cls, collectives: Sequence[Interval], computing: Sequence[Interval], step: Interval, size: int | None
    ) -> Communication:
        """Compute the times from intervals in nanoseconds."""
        first, last = step
        both = covered([*collectives, *computing], first, last)
        return cls(
            seconds=covered(collectives, first, last) / 1e9,
            exposed_seconds=(both - covered(computing, first, last)) / 1e9,
            step_seconds=(last - first) / 1e9,
            bytes=size,
        )

    def metrics(self) -> dict[str, float]:
        """Return what is recorded; what is unknown is left out."""
        found = {
            "communication/seconds": self.seconds,
            "communication/exposed_share": self.exposed_seconds / self.step_seconds,
        }
        if self.bytes is not None:
            found["communication/sent_gib"] = self.bytes / 2**30
            if self.seconds:
                found["communication/rate_gib_per_second"] = self.bytes / 2**30 / self.seconds
        return found


def read_communication(events: Sequence[Any], device: str) -> Communication | None:
    """Read the profiler's events of a step; None if there was no collective in it, or the profiler has not seen it run.

    Args:
        events: `kineto_results.events()` of a profile with shapes, in which the step is marked.
        device: "cpu" or "cuda".
    """
    # Another profiler that was started meanwhile has taken all events.
    mark = next((event for event in events if event.name() == _STEP and is_on(event, "CPU")), None)
    begun = [event for event in events if _COLLECTIVE.match(event.name()) and is_on(event, "CPU")]
    if mark is None or not begun:
        return None
    if device == "cuda":
        kernels = device_kernels(events)
        running = [event for event in kernels if _NCCL_KERNEL.match(event.name())]
        if not running:  # another tool has the device's events
            return None
        computing = [event for event in kernels if not _NCCL_KERNEL.match(event.name())]
    else:
        running = begun
        thread = mark.start_thread_id()
        computing = [e for e in events if e.start_thread_id() == thread and _COMPUTES.match(e.name())]
    sizes = [_bytes(event) for event in begun if not event.name().endswith("barrier")]
    return Communication.of(
        [(event.start_ns(), event.end_ns()) for event in running],
        [(event.start_ns(), event.end_ns()) for event in computing],
        (mark.start_ns(), mark.end_ns()),
        None if None in sizes else sum(size for size in sizes if size is not None),
    )


def device_kernels(events: Iterable[Any]) -> list[Any]:
    """Return the profiler's events of what ran on the GPU: kernels and copies."""
    events = [event for event in events if event.name() != "[memory]"]
    # The host's marks also appear on the device, and span the gaps between kernels.
    marks = {event.name() for event in events if is_on(event, "CPU")}
    return [event for event in events if is_on(event, "CUDA") and event.name() not in marks]


def is_on(event: Any, kind: str) -> bool:
    """Return whether an event of the profiler was on a kind of device: "CPU" or "CUDA"."""
    return kind in str(event.device_type())


def _bytes(event: Any) -> int | None:
    sizes = [
        math.prod(shape) * _ELEMENT_BYTES[kind]
        for shape, kind in zip(event.shapes(), event.dtypes(), strict=False)
        if kind in _ELEMENT_BYTES
    ]
    return sum(sizes) if sizes else None


class CommunicationMeter(Callback):
    """Profiles one step in every `every` on the first worker, and adds what it found to the metrics of that step.

    A step with an evaluation, a save or a rollback before it is not measured: their exchanges are not the step's.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._profiler: Any = None
        self._mark: Any = None

    def on_step(self, job: Job, step: int, metrics: dict[str, float]) -> None:
        """Add the metrics of a profiled step, and begin before the next one that is due."""
        device = job.world.device.type
        if self._profiler is not None and (found := read_communication(self._stop(), device)) is not None:
            metrics.update(found.metrics())
        if (step + 1) % self._every or step == job.total_steps or job.due(job.config.evaluation.every):
            return
        if torch._C._autograd._profiler_enabled():  # a callback's; there can be only one
            return
        cuda = [ProfilerActivity.CUDA] if device == "cuda" else []
        self._profiler = profile(activities=[ProfilerActivity.CPU, *cuda], record_shapes=True)
        self._profiler.start()
        self._mark = record_function(_STEP)
        self._mark.__enter__()

    def on_decision(self, job: Job, decision: Decision) -> None:
        """Give up this measurement: the run may go back."""
        self._give_up()

    def before_save(self, job: Job) -> None:
        """Give up this measurement."""
        self._give_up()

    def on_end(self, job: Job) -> None:
        """Give up what is still being measured."""
        with suppress(RuntimeError):  # a device that has failed; what ended the attempt is reported
            self._give_up()

    def _give_up(self) -> None:
        if self._profiler is not None:
            self._stop()

    def _stop(self) -> list[Any]:
        """End the profile, and return its events."""
        profiler = self._profiler
        mark = self._mark
        self._profiler = self._mark = None
        mark.__exit__(None, None, None)
        profiler.stop()
        return list(profiler.profiler.kineto_results.events())
