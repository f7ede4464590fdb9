"""Splits running steps into their parts, with one time stamp per beat.

On a GPU a stamp is an event in the stream of the training. A part is then as long as the device worked on it; the host
runs ahead and counts only while the device waits for it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from headway.core.coordination.heartbeat import Phase
from headway.lab.profiling.record import BOTH_PASSES, StepTimes

_PARTS = {
    Phase.DATA: "data",
    Phase.COMPUTE: "forward",
    Phase.BACKWARD: "backward",
    Phase.REDUCE: "reduction",
    Phase.UPDATE: "optimizer",
}


def part_of(phase: Phase, pipeline: bool) -> str:
    """Return the part of a step that a phase belongs to."""
    return BOTH_PASSES if pipeline and phase == Phase.COMPUTE else _PARTS.get(phase, "host")


@dataclass
class _Step:
    marks: list[tuple[str, Any]] = field(default_factory=list)
    """Part and time stamp of its beginning; the last one ends the step."""
    host_marks: list[tuple[str, float]] = field(default_factory=list)
    waiting: dict[str, float] = field(default_factory=dict)


class StepRecorder:
    """Records the time stamps of steps.

    Args:
        device: Device that computes the steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._steps: list[_Step] = []
        self._open: _Step | None = None
        self._waits_since = 0.0

    def begin(self) -> None:
        """Begin a step, which first waits for data."""
        self._open = _Step()
        self.mark("data")

    def mark(self, part: str) -> None:
        """Begin a part."""
        if self._open is not None:
            self._open.marks.append((part, self._stamp()))
            self._open.host_marks.append((part, time.perf_counter()))

    def end(self) -> None:
        """End the step."""
        if self._open is not None:
            self.mark("end")
            self._steps.append(self._open)
            self._open = None

    def waits(self) -> None:
        """Begin to wait for other workers."""
        self._waits_since = time.perf_counter()

    def goes_on(self) -> None:
        """Stop waiting for other workers."""
        if self._open is not None:
            part = self._open.marks[-1][0]
            waited = time.perf_counter() - self._waits_since
            self._open.waiting[part] = self._open.waiting.get(part, 0.0) + waited

    def times(self) -> list[StepTimes]:
        """Return the times of all steps; waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        return [self._times(step) for step in self._steps]

    def host_parts(self, index: int) -> list[tuple[str, float, float]]:
        """Return name, begin and end of a step's parts on the clock of `time.perf_counter`."""
        return [(part, start, end) for (part, start), (_, end) in pairwise(self._steps[index].host_marks)]

    def _stamp(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _times(self, step: _Step) -> StepTimes:
        parts: dict[str, float] = {}
        for (part, start), (_, end) in pairwise(step.marks):
            seconds = start.elapsed_time(end) / 1000 if self._cuda else end - start
            parts[part] = parts.get(part, 0.0) + seconds
        return StepTimes(seconds=sum(parts.values()), parts=parts, waiting=step.waiting)
