"""Measurements inside a worker while the usual training loop runs."""

from __future__ import annotations

import gc
import math
import time
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from headway.core.statistics import covered
from headway.lab.bench.energy import open_counter, open_gpu_utilization
from headway.parallel.world import synchronize
from headway.telemetry.metrics import WITHOUT_TARGET
from headway.training.job import Callback, Job

#: As an event of the profiler says it.
_CUDA = torch._C._autograd.DeviceType.CUDA
_Kind = Literal["sent", "computed", "waited"]
#: How an event around a graph begins that torch.compile has made code of: what it has fused leaves none on the CPU.
_COMPILED = "## Call CompiledFxGraph"
_COMPILED_COLLECTIVE = "_c10d_functional::"
_COPIED_BYTES = 256 * 2**20
_PRODUCT_SIDE = 1024
_PRODUCT_SECONDS = 0.25
_PRODUCT_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: The profiler sees what the training thread frees. gloo's threads hold tensors a little longer than a collective
#: takes, and their last frees would be missed, so that this memory would count forever.
_PATIENCE_SECONDS = 0.02


@dataclass
class Meter(Callback):
    """Times steps from the end of one to the end of the next.

    More steps after the measured ones are profiled, and the memory of one is measured.
    """

    warmup_steps: int
    steps: int
    profiled_steps: int
    step_seconds: list[float] = field(default_factory=list)
    seconds: float = 0.0
    """Seconds of all measured steps, including work queued on the device."""
    items: int = 0
    loss_sum: float = 0.0
    skipped_steps: int = 0
    """Measured steps without an update."""
    joules: float | None = None
    energy_source: str | None = None
    gpu_utilization: list[float] | None = None
    """Samples of the share of time in which a kernel ran on this worker's GPU, while steps were measured."""
    communication: tuple[float, float] | None = None
    """Exposed and overlapped share of the profiled steps on this worker."""
    tensor_peak_bytes: int | None = None
    """On the CPU: the peak memory of tensors in the step that was measured for it."""

    def on_start(self, job: Job) -> None:
        """Open the energy counter and the profiler."""
        world = job.world
        self._counter = open_counter(world.device.type, world.device.index or 0, world.local_rank == 0)
        self._gpu_utilization = open_gpu_utilization(world.device.type, world.device.index or 0)
        self._profiler: Any = None
        self._last = time.perf_counter()

    def on_step(self, job: Job, step: int, metrics: dict[str, float]) -> None:
        """Record the time, and what begins or ends with this step."""
        first = self.warmup_steps
        last = self.warmup_steps + self.steps
        device = job.world.device
        if step in (first, last):
            synchronize(device)
        now = time.perf_counter()
        if first < step <= last:
            self.step_seconds.append(now - self._last)
            items = int(metrics["train/items"])  # of a step without any, nor of one that health leaves out, is a loss
            self.skipped_steps += WITHOUT_TARGET in metrics
            self.items += items
            self.loss_sum += metrics.get("train/loss", math.nan if items else 0.0) * items
        if step == first:
            self._start = now
            self._skipped_before = job.state.cursor.skipped_steps
            if self._counter is not None:
                self._counter.joules()
            if self._gpu_utilization is not None:
                self._gpu_utilization.start()
        if step == last:
            self.seconds = now - self._start
            self.skipped_steps += job.state.cursor.skipped_steps - self._skipped_before
            if self._counter is not None:
                self.joules = self._counter.joules()
                self.energy_source = self._counter.source
            if self._gpu_utilization is not None:
                self.gpu_utilization = self._gpu_utilization.stop()
            self.memory = memory_peaks(device)
            if self.profiled_steps and job.world.size > 1:
                kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
                self._profiler = profile(activities=kinds)
                self._profiler.start()
        if step == last + self.profiled_steps:
            if self._profiler is not None:
                synchronize(device)
                self._profiler.stop()
                self.communication = communication_shares(self._profiler.events(), device.type)
            if device.type == "cpu":
                self._allocations = Allocations()
                self._allocations.start()
        elif step > last + self.profiled_steps and device.type == "cpu":
            self.tensor_peak_bytes = self._allocations.stop()
        self._last = now

    @property
    def mean_loss(self) -> float | None:
        """Mean over the items of the measured steps; None if it is not finite."""
        mean = self.loss_sum / self.items if self.items else math.nan
        return mean if math.isfinite(mean) else None


def communication_shares(events: Any, device_type: str) -> tuple[float, float] | None:
    """Return the exposed and the overlapped share of communication between the first and the last event.

    On GPUs kernels of NCCL are communication, and all others computation. On the CPU a collective of gloo lasts from
    its start until all workers have finished it. Operators of PyTorch and compiled code are computation, except for
    what they do about collectives, which is mostly to wait for them.

    Args:
        events: As `torch.profiler.profile.events()` returns them, in microseconds.

    Returns:
        None if there was no collective.
    """
    stretches: dict[_Kind, list[tuple[float, float]]] = {"sent": [], "computed": [], "waited": []}
    kind_of = _kind_on_gpu if device_type == "cuda" else _kind_on_cpu
    for event in events:
        start = event.time_range.start
        end = event.time_range.end
        if end > start and (kind := kind_of(event)) is not None:
            stretches[kind].append((start, end))
    sent, computed, waited = stretches.values()
    if not sent:
        return None
    every = [*sent, *computed, *waited]
    first = min(start for start, _ in every)
    last = max(end for _, end in every)
    total = covered(sent, first, last)
    # Nothing hides what runs while nothing is computed, and while what is computed only waits.
    exposed = covered(every, first, last) - covered([*computed, *waited], first, last)
    exposed += total + covered(waited, first, last) - covered([*sent, *waited], first, last)
    whole = last - first
    return exposed / whole, (total - exposed) / whole


def _kind_on_gpu(event: Any) -> _Kind | None:
    if event.device_type != _CUDA or event.is_user_annotation:
        return None
    return "sent" if "nccl" in event.name.lower() else "computed"


def _kind_on_cpu(event: Any) -> _Kind | None:
    if event.name.startswith("gloo:"):
        return "sent"
    if event.is_async:
        return None
    if event.name.startswith(_COMPILED_COLLECTIVE):
        return "waited"
    return "computed" if event.name.startswith(("aten::", _COMPILED)) else None


# Memory ---------------------------------------------------------------------------------------------------------------


def memory_peaks(device: torch.device) -> dict[str, int | None]:
    """Return the peaks of this process so far, in bytes: allocated and reserved on a GPU, resident; None if unknown."""
    peaks: dict[str, int | None] = {"allocated": None, "reserved": None, "resident": _status_bytes("VmHWM")}
    if device.type == "cuda":
        peaks["allocated"] = torch.cuda.max_memory_allocated(device)
        peaks["reserved"] = torch.cuda.max_memory_reserved(device)
    return peaks


def begin_memory() -> int | None:
    """Reset the peak of resident memory; return the resident memory now, or None if that is impossible."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak, since Linux 4.0
    except OSError:
        return None
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


# What the machine can do ----------------------------------------------------------------------------------------------


def host_to_device(device: torch.device) -> float | None:
    """Measure GB/s from page-locked memory to a GPU; None elsewhere."""
    if device.type != "cuda":
        return None
    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    times = []
    for _ in range(5):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize(device)
        times.append(time.perf_counter() - start)
    return _COPIED_BYTES / min(times) / 1e9


def product_flops(device: torch.device, precision: str) -> float | None:
    """Measure this worker's FLOP/s in products of large matrices on the CPU, concurrently with others; None
    elsewhere."""
    kind = _PRODUCT_TYPES.get(precision)
    if device.type != "cpu" or kind is None:
        return None
    a = torch.ones(_PRODUCT_SIDE, _PRODUCT_SIDE, dtype=kind)
    out = a @ a
    start = time.perf_counter()
    count = 0
    while time.perf_counter() - start < _PRODUCT_SECONDS:
        torch.mm(a, a, out=out)
        count += 1
    return 2 * _PRODUCT_SIDE**3 * count / (time.perf_counter() - start)


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
    return max(accumulate(changes, initial=0))


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
