"""Steps under PyTorch's profiler: the trace, the operators, the device's idle time, memory over time."""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from headway.core.statistics import covered
from headway.lab.profiling.record import Memory, Operator, Product
from headway.training.recording.communication import device_kernels, is_on

#: Prefix of the marks of parts in the trace.
PREFIX = "headway."
_OPERATORS = 25
#: Points to keep of a curve; each is the highest of its stretch.
_POINTS = 1500
_SAMPLE_SECONDS = 0.004

_PASS_MARKS = (f"{PREFIX}forward", f"{PREFIX}backward")
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
        self._resident = _Resident(device)

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

    def operators(self, steps: int) -> list[Operator]:
        """Return the operators with the most time of their own, per step."""
        cuda = self._device.type == "cuda"
        found = [
            Operator(
                name=event.key,
                calls=event.count / steps,
                host_seconds=event.self_cpu_time_total / 1e6 / steps,
                device_seconds=event.self_device_time_total / 1e6 / steps if cuda else None,
                flops=event.flops / steps or None,
            )
            for event in self._profiler.key_averages()
            if not event.key.startswith((PREFIX, "[memory]", "ProfilerStep"))
        ]
        return sorted(found, key=lambda o: o.device_seconds if cuda and o.device_seconds else o.host_seconds)[::-1][
            :_OPERATORS
        ]

    def products(self, steps: int) -> list[Product]:
        """Return the matrix products by shape, in decreasing order of time."""
        events = self._profiler.profiler.kineto_results.events()
        types = {(e.name(), str(e.shapes())): e.dtypes() for e in events if e.name() in _PRODUCTS}
        found = []
        for event in self._profiler.key_averages(group_by_input_shape=True):
            if event.key not in _PRODUCTS:
                continue
            a, b = _operands(event.key, event.input_shapes)
            dtype = types.get((event.key, str(event.input_shapes)), [])
            size = next((_ELEMENT_BYTES[name] for name in dtype if name in _ELEMENT_BYTES), None)
            seconds = event.device_time_total if self._device.type == "cuda" else event.cpu_time_total
            if size is not None and seconds:
                found.append(_product(a, b, element_bytes=size, calls=event.count, seconds=seconds / 1e6, steps=steps))
        return sorted(found, key=lambda product: -product.seconds * product.calls)[:_OPERATORS]

    def forward_share(self) -> float:
        """Return the forward pass's share of the FLOPs of matrix products; a third if no products were traced.

        It is larger for a loss that never holds all logits and therefore computes their gradients in the forward pass.
        """
        events = self._profiler.profiler.kineto_results.events()
        # The host's marks also appear on the device, at other times than the calls of the products.
        marks = [
            (e.start_ns(), e.end_ns(), e.name().removeprefix(PREFIX))
            for e in events
            if e.name() in _PASS_MARKS and is_on(e, "CPU")
        ]
        flops = dict.fromkeys(("forward", "backward"), 0.0)
        marks.sort()
        starts = [start for start, _, _ in marks]
        for e in events:
            at = bisect_right(starts, e.start_ns()) - 1
            if e.name() in _PRODUCTS and at >= 0 and e.start_ns() < marks[at][1]:
                flops[marks[at][2]] += _flops(*_operands(e.name(), e.shapes()))
        total = sum(flops.values())
        return flops["forward"] / total if min(flops.values()) > 0 else 1 / 3

    def idle_share(self) -> float | None:
        """Return the share of the traced time without a kernel or a copy on the device."""
        if self._device.type != "cuda":
            return None
        events = self._profiler.profiler.kineto_results.events()
        steps = [e for e in events if e.name().startswith(PREFIX) and is_on(e, "CPU")]
        if not steps:
            return None
        first = min(e.start_ns() for e in steps)
        last = max(e.end_ns() for e in steps)
        kernels = [(e.start_ns(), e.end_ns()) for e in device_kernels(events)]
        return 1 - covered(kernels, first, last) / int(last - first)

    def memory(self, base_bytes: int, host_parts: Sequence[tuple[str, float, float]]) -> Memory:
        """Return the memory over the last traced step.

        Args:
            base_bytes: Memory in use when the trace began.
            host_parts: Parts of that step, on the clock of `time.perf_counter`.
        """
        events = self._profiler.profiler.kineto_results.events()
        marks = sorted(
            (e.start_ns(), e.end_ns(), e.name().removeprefix(PREFIX))
            for e in events
            if e.name().startswith(PREFIX) and is_on(e, "CPU")
        )
        first = max((start for start, _, part in marks if part == "data"), default=0)
        parts = [(part, (start - first) / 1e9, (end - first) / 1e9) for start, end, part in marks if start >= first]
        kind = "CUDA" if self._device.type == "cuda" else "CPU"
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]" and is_on(e, kind))
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
            kind="cuda" if self._device.type == "cuda" else "cpu",
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
    (m, k), n, batch = a[-2:], b[-1], math.prod(a[:-2])
    several = f"{batch:,} times " if batch > 1 else ""
    return Product(
        shape=f"{several}{m:,} x {k:,} x {n:,}",
        calls=calls / steps,
        seconds=seconds / calls,
        flops=_flops(a, b),
        bytes=float(element_bytes * batch * (m * k + k * n + m * n)),
    )


@dataclass
class _Resident:
    """Samples the resident memory of the process, or the memory reserved on its GPU, on a thread."""

    device: torch.device

    def __post_init__(self) -> None:
        self.samples: list[tuple[float, int]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="headway-memory", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        import psutil

        process = psutil.Process()
        while not self._over.wait(_SAMPLE_SECONDS):
            cuda = self.device.type == "cuda"
            size = torch.cuda.memory_reserved(self.device) if cuda else process.memory_info().rss
            self.samples.append((time.perf_counter(), size))


def running_total(changes: Sequence[tuple[float, int]], base: int) -> list[tuple[float, int]]:
    """Return the size after each change."""
    curve = []
    for at, change in changes:
        base += change
        curve.append((at, base))
    return curve


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
