"""Steps under PyTorch's profiler: the trace, the operators, the device's idle time, memory over time."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from headway.core.machine.sampler import Sampler
from headway.core.statistics import covered
from headway.lab.profiling.record import Memory, Operator, Product
from headway.training.recording.communication import device_kernels, is_on

#: Prefix of the marks of parts in the trace.
PREFIX = "headway."
_OPERATORS = 25
#: Points to keep of a curve; each is the highest of its stretch.
_POINTS = 1500
_SAMPLE_SECONDS = 0.004

_PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm")
_ELEMENT_BYTES = {"float": 4, "c10::BFloat16": 2, "c10::Half": 2, "double": 8}


class Tracing:
    """A profiler that marks the parts of a step.

    Args:
        device: Device that computes the steps.
        snapshot: On a GPU, also record every allocation, for `save_snapshot`.
    """

    def __init__(self, device: torch.device, snapshot: bool) -> None:
        self._device = device
        self._snapshot = snapshot
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profiler: Any = profile(activities=activities, record_shapes=True, profile_memory=True, with_flops=True)
        self._part: Any = None
        self._cuda = device.type == "cuda"
        self._resident = Sampler(lambda: (time.perf_counter(), _reserved(device)), _SAMPLE_SECONDS, "headway-memory")

    def start(self) -> None:
        """Start to trace with the next step."""
        if self._snapshot:
            torch.cuda.memory._record_memory_history(max_entries=200_000)
        self._profiler.start()
        self._resident.start()

    def mark(self, part: str | None) -> None:
        """End the current part and begin another; None begins none."""
        if self._part is not None:
            self._part.__exit__(None, None, None)
            self._part = None
        if part is not None:
            self._part = record_function(PREFIX + part)
            self._part.__enter__()

    def stop(self) -> None:
        """Stop after the last traced step."""
        self.mark(None)
        self._resident.stop()
        self._profiler.stop()

    def save_trace(self, path: Path) -> None:
        """Write gzipped JSON for chrome://tracing or ui.perfetto.dev."""
        self._profiler.export_chrome_trace(str(path))

    def save_snapshot(self, path: Path) -> None:
        """Write a snapshot for pytorch.org/memory_viz: a pickle, which Headway never reads."""
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)

    @property
    def _events(self) -> Any:
        return self._profiler.profiler.kineto_results.events()

    def _marks(self, *parts: str) -> list[tuple[int, int, str]]:
        """Return begin, end and name of these parts, or all, as the host has marked them, by time.

        The marks also appear on the device, at other times than the calls.
        """
        return sorted(
            (event.start_ns(), event.end_ns(), part)
            for event in self._events
            if event.name().startswith(PREFIX) and is_on(event, "CPU")
            if (part := event.name().removeprefix(PREFIX)) in parts or not parts
        )

    def operators(self, steps: int) -> list[Operator]:
        """Return the operators with the most time of their own, per step."""
        found = [
            Operator(
                name=event.key,
                calls=event.count / steps,
                host_seconds=event.self_cpu_time_total / 1e6 / steps,
                device_seconds=event.self_device_time_total / 1e6 / steps if self._cuda else None,
                flops=event.flops / steps or None,
            )
            for event in self._profiler.key_averages()
            if not event.key.startswith((PREFIX, "[memory]", "ProfilerStep"))
        ]
        return sorted(found, key=lambda one: one.device_seconds or one.host_seconds)[::-1][:_OPERATORS]

    def products(self, steps: int) -> list[Product]:
        """Return the matrix products by shape, in decreasing order of time."""
        types = {(e.name(), str(e.shapes())): e.dtypes() for e in self._events if e.name() in _PRODUCTS}
        found = []
        for event in self._profiler.key_averages(group_by_input_shape=True):
            if event.key not in _PRODUCTS:
                continue
            a, b = _operands(event.key, event.input_shapes)
            dtype = types.get((event.key, str(event.input_shapes)), [])
            size = next((_ELEMENT_BYTES[name] for name in dtype if name in _ELEMENT_BYTES), None)
            seconds = event.device_time_total if self._cuda else event.cpu_time_total
            if size is not None and seconds:
                found.append(_product(a, b, element_bytes=size, calls=event.count, seconds=seconds / 1e6, steps=steps))
        return sorted(found, key=lambda product: -product.seconds * product.calls)[:_OPERATORS]

    def forward_share(self) -> float:
        """Return the forward pass's share of the FLOPs of matrix products; a third if no products were traced.

        It is larger for a loss that never holds all logits and therefore computes their gradients in the forward pass.
        """
        flops = dict.fromkeys(("forward", "backward"), 0.0)
        marks = self._marks(*flops)
        starts = [start for start, _, _ in marks]
        for e in self._events:
            at = bisect_right(starts, e.start_ns()) - 1
            if e.name() in _PRODUCTS and at >= 0 and e.start_ns() < marks[at][1]:
                flops[marks[at][2]] += _flops(*_operands(e.name(), e.shapes()))
        total = sum(flops.values())
        return flops["forward"] / total if min(flops.values()) > 0 else 1 / 3

    def idle_share(self) -> float | None:
        """Return the share of the traced time without a kernel or a copy on the device."""
        marks = self._marks()
        if not self._cuda or not marks:
            return None
        first = marks[0][0]
        last = max(end for _, end, _ in marks)
        kernels = [(e.start_ns(), e.end_ns()) for e in device_kernels(self._events)]
        return 1 - covered(kernels, first, last) / (last - first)

    def memory(self, base_bytes: int, host_parts: Sequence[tuple[str, float, float]]) -> Memory:
        """Return the memory over the last traced step.

        Args:
            base_bytes: Memory in use when the trace began.
            host_parts: Parts of that step, on the clock of `time.perf_counter`.
        """
        marks = self._marks()
        first = max((start for start, _, part in marks if part == "data"), default=0)
        parts = [(part, (start - first) / 1e9, (end - first) / 1e9) for start, end, part in marks if start >= first]
        kind: Literal["cpu", "cuda"] = "cuda" if self._cuda else "cpu"
        events = (e for e in self._events if e.name() == "[memory]" and is_on(e, kind.upper()))
        changes = sorted((e.start_ns(), e.nbytes()) for e in events)
        curve = running_total([((at - first) / 1e9, change) for at, change in changes], base_bytes)
        end = parts[-1][2] if parts else 0.0
        shown = clipped(curve, 0.0, end)
        peaks: dict[str, int] = {}
        for part, start, stop in parts:
            peaks[part] = max(peaks.get(part, 0), *(size for _, size in clipped(curve, start, stop)))
        began = host_parts[0][1] if host_parts else 0.0
        resident = [(at - began, size) for at, size in self._resident.samples if 0 <= at - began <= end]
        kept = thinned(shown, _POINTS)
        sampled = thinned(resident, _POINTS)
        return Memory(
            base_bytes=base_bytes,
            kind=kind,
            times=[at for at, _ in kept],
            tensor_bytes=[size for _, size in kept],
            resident_times=[at for at, _ in sampled],
            resident_bytes=[size for _, size in sampled],
            parts=_joined(parts),
            peak_bytes=peaks,
        )


def _operands(name: str, shapes: Sequence[Sequence[int]]) -> tuple[Sequence[int], Sequence[int]]:
    """Return the shapes of a product's two operands among the shapes of its inputs.

    The tensor that a product is added to comes before them; numbers, and the output that compiled code passes, come
    after.
    """
    first, second = shapes[1:3] if name.startswith(("aten::addmm", "aten::baddbmm")) else shapes[:2]
    return first, second


def _flops(a: Sequence[int], b: Sequence[int]) -> float:
    """Count the FLOPs of `a` (..., m, k) times `b` (..., k, n); PyTorch's profiler lacks them for some products."""
    return 2.0 * math.prod(a) * b[-1]


def _product(
    a: Sequence[int], b: Sequence[int], *, element_bytes: int, calls: int, seconds: float, steps: int
) -> Product:
    """Describe the product of `a` (..., m, k) and `b` (..., k, n)."""
    m, k = a[-2:]
    n = b[-1]
    batch = math.prod(a[:-2])
    several = f"{batch:,} times " if batch > 1 else ""
    return Product(
        shape=f"{several}{m:,} x {k:,} x {n:,}",
        calls=calls / steps,
        seconds=seconds / calls,
        flops=_flops(a, b),
        bytes=float(element_bytes * batch * (m * k + k * n + m * n)),
    )


def _reserved(device: torch.device) -> int:
    """Return the resident memory of the process, or the memory reserved on its GPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else int(psutil.Process().memory_info().rss)


def running_total(changes: Sequence[tuple[float, int]], base: int) -> list[tuple[float, int]]:
    """Return the size after each change."""
    sizes = accumulate((change for _, change in changes), initial=base)
    return list(zip((at for at, _ in changes), islice(sizes, 1, None), strict=True))


def clipped(curve: Sequence[tuple[float, int]], start: float, end: float) -> list[tuple[float, int]]:
    """Cut a step curve to the range between two times, with its values at both ends."""
    before = [size for at, size in curve if at <= start]
    inside = [(at, size) for at, size in curve if start < at < end]
    first = before[-1] if before else (inside[0][1] if inside else 0)
    return [(start, first), *inside, (end, inside[-1][1] if inside else first)]


def thinned(curve: Sequence[tuple[float, int]], points: int) -> list[tuple[float, int]]:
    """Reduce a curve to about `points` points, keeping the highest of each stretch, so that no peak is lost."""
    if len(curve) <= points:
        return list(curve)
    edges = [round(i * len(curve) / points) for i in range(points + 1)]
    return [max(curve[a:b], key=lambda point: point[1]) for a, b in pairwise(edges)]


def _joined(parts: Sequence[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """Merge adjacent parts of the same name."""
    joined: list[tuple[str, float, float]] = []
    for part, start, end in parts:
        if joined and joined[-1][0] == part:
            joined[-1] = (part, joined[-1][1], end)
        else:
            joined.append((part, start, end))
    return joined
