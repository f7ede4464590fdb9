"""Observes the training loop of one worker: warm-up, timed steps, traced steps, and one that ends in a save."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from headway.core.coordination.heartbeat import Phase, observe
from headway.core.startup.dtensors import is_dtensor
from headway.lab.profiling.ceilings import measure_ceilings, raised_by
from headway.lab.profiling.plan import Plan
from headway.lab.profiling.record import BOTH_PASSES, StepTimes, Work, WorkerRecord
from headway.lab.profiling.tracing import Tracing
from headway.parallel.blocks import local_part
from headway.parallel.strategy import Engine
from headway.telemetry.hardware import device_name
from headway.training.job import Callback, Job
from headway.training.optimizer import Combined, scales_while_updating
from headway.training.optimizer.muon import ProjectionMuon

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


class Profiler(Callback):
    """Times and traces steps by the beats of the loop, stops the run, and measures the ceilings.

    The run stops through the signal that stops any run.

    Args:
        plan: Numbers of steps.
        folder: Folder for traces and snapshots.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan = plan
        self._folder = folder
        self._finished = 0
        self._stall: float | None = None
        self._items: list[float] = []
        self._metered: list[float] = []
        self._on: list[StepRecorder] = []
        self.record: WorkerRecord | None = None
        """The result; set after all steps."""

    # Hooks of the loop ------------------------------------------------------------------------------------------------

    def on_start(self, job: Job) -> None:
        """Start to observe the beats of the loop."""
        self._job = job
        self._timed = StepRecorder(job.world.device)
        self._traced = StepRecorder(job.world.device)
        self._tracing: Tracing | None = None
        self._work: Work | None = None
        self._kept_bytes = 0
        observe(self)

    def on_step(self, job: Job, step: int, metrics: dict[str, float]) -> None:
        """Record the loop's own metrics of a timed step."""
        if self._on and self._on[0] is self._timed:
            self._items.append(metrics["train/items"])
            self._metered.append(metrics["speed/step_seconds"])

    def on_checkpoint(self, job: Job, step: int, stall_seconds: float) -> None:
        """Record the stall of the last save; a save before the first step does not count."""
        if step:
            self._stall = stall_seconds

    def on_end(self, job: Job) -> None:
        """Measure the ceilings and assemble the record, unless an error ended the attempt early."""
        observe(None)
        if self._finished >= self._plan.steps - 1:
            self.record = self._make_record(job)

    # Beats ------------------------------------------------------------------------------------------------------------

    def phase(self, phase: Phase) -> None:
        """Handle a beat of the loop."""
        if phase == Phase.DATA:
            self._between_steps()
            return
        part = part_of(phase, self._job.assembled.pipeline is not None)
        for recorder in self._on:
            recorder.mark(part)
        if self._tracing is not None and self._on:
            self._tracing.mark(part)

    def waits(self, exchange: str) -> None:
        """Report to the active recorders that this worker waits for others."""
        for recorder in self._on:
            recorder.waits()

    def goes_on(self) -> None:
        """Report to the active recorders that waiting has ended."""
        for recorder in self._on:
            recorder.goes_on()

    def _between_steps(self) -> None:
        """Finish a step and start the next; the time that this takes belongs to no step."""
        for recorder in self._on:
            recorder.end()
        self._finished += 1
        plan = self._plan
        done = self._finished
        timed_end = plan.warmup + plan.timed
        traced_end = plan.warmup + plan.timed + plan.traced
        if done == plan.warmup:
            self._on = [self._timed]
        elif done == timed_end:
            self._work = _work(self._job)
            self._kept_bytes = _kept_bytes(self._job)
            self._tracing = Tracing(self._job.world.device, plan.snapshot)
            self._tracing.start()
            self._on = [self._traced]
        elif done == traced_end:
            assert self._tracing is not None
            self._tracing.stop()
            self._on = []
            os.kill(os.getpid(), signal.SIGTERM)  # the loop saves and stops after the next step
        for recorder in self._on:
            recorder.begin()
        if self._tracing is not None and self._on:
            self._tracing.mark("data")

    # The result ------------------------------------------------------------------------------------------------------

    def _make_record(self, job: Job) -> WorkerRecord:
        world = job.world
        tracing = self._tracing
        assert tracing is not None and self._work is not None
        tracing.save_trace(self._folder / f"trace-{world.rank}.json.gz")
        if self._plan.snapshot:
            tracing.save_snapshot(self._folder / f"memory-{world.rank}.pickle")
        traced = self._traced.times()
        parts = self._traced.host_parts(len(traced) - 1)
        reduced = sum(_bytes(p) for p in job.state.model.parameters() if p.requires_grad)
        memory = tracing.memory(self._kept_bytes, parts)
        products = tracing.products(len(traced))
        items = sum(self._items) / len(self._items)
        return WorkerRecord(
            rank=world.rank,
            device=world.device.type,
            device_name=device_name(world.device),
            threads=torch.get_num_threads(),
            compiled=bool(job.checkpoint_context["compiled"]),
            steps=self._timed.times(),
            traced_steps=traced,
            metered_seconds=sum(self._metered) / len(self._metered),
            items_per_step=items,
            feed_seconds=_feed_seconds(job),
            checkpoint_stall_seconds=self._stall,
            checkpoint_bytes=_state_bytes(job),
            work=_with_flops(self._work, job, items, tracing.forward_share()),
            ceilings=raised_by(products, measure_ceilings(world, job.config.train.precision, reduced)),
            operators=tracing.operators(len(traced)),
            products=products,
            memory=memory,
            device_idle_share=tracing.idle_share(),
        )


def _feed_seconds(job: Job) -> float:
    """Measure the time to read one step's batches on this thread alone."""
    lanes = job.assembled.lanes
    start = time.perf_counter()
    for lane in lanes:
        job.task.feed.batch(job.state.cursor.step - 1, lane)
    return time.perf_counter() - start


def _with_flops(work: Work, job: Job, items: float, forward_share: float) -> Work:
    per_item = job.task.flops_per_item
    if per_item is None:
        return work
    mine = per_item * items / job.world.size
    return work.model_copy(update={"forward_flops": mine * forward_share, "backward_flops": mine * (1 - forward_share)})


def _state_bytes(job: Job) -> int:
    """Return the bytes of this worker's weights and moments."""
    return sum(block.local.nbytes for block in job.state.blocks().values())


def _kept_bytes(job: Job) -> int:
    """Return the bytes between two steps: weights, moments, and the gradients that the reduction leaves here."""
    return _state_bytes(job) + sum(_bytes(p.grad) for p in job.state.model.parameters() if p.grad is not None)


def _work(job: Job) -> Work:
    """Compute the traffic of clipping and update from the gradients in place after a step."""
    unknown = Work(forward_flops=None, backward_flops=None, update_flops=0.0, update_bytes=None, norm_bytes=None)
    if isinstance(job.assembled.strategy, Engine) or job.config.optimizer.offload:
        return unknown
    groups = job.state.optimizer.param_groups
    parameters = [p for group in groups for p in group["params"] if p.grad is not None]
    weights = sum(_bytes(p) for p in parameters)
    gradients = sum(_bytes(p.grad) for p in parameters)
    blocks = job.state.blocks().items()
    moments = sum(block.local.nbytes for name, block in blocks if name.startswith("optimizer."))
    clips = scales_while_updating(job.state.optimizer)
    return unknown.model_copy(
        update={
            "update_flops": _newton_schulz_flops(job.state.optimizer),
            # All are read and written; if clipping is a separate pass, the update reads gradients again.
            "update_bytes": float((2 if clips else 3) * gradients + 2 * weights + 2 * moments),
            "norm_bytes": float(gradients),
        }
    )


def _newton_schulz_flops(optimizer: Optimizer) -> float:
    """Count the FLOPs of Muon's iterations, for matrices m x n with m <= n (Jordan et al. 2024).

    Each iteration multiplies m x n by n x m, m x m by m x m, and m x m by m x n. One of the workers that share a matrix
    orthogonalises it.
    """
    parts = optimizer.parts if isinstance(optimizer, Combined) else [optimizer]
    return sum(
        _iterations_flops(group["ns_steps"], m, n) / _sharers(p)
        for part in parts
        if isinstance(part, ProjectionMuon)
        for group in part.param_groups
        for p in group["params"]
        if p.grad is not None
        for m, n in map(sorted, part.projection_shapes(p))
    )


def _iterations_flops(iterations: int, m: int, n: int) -> float:
    return float(iterations * (4 * m * m * n + 2 * m**3))


def _sharers(p: Any) -> int:
    return p.device_mesh.size() if is_dtensor(p) and p.device_mesh.ndim == 1 else 1


def _bytes(tensor: Any) -> int:
    return int(local_part(tensor).nbytes)
