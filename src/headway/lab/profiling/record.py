"""The content of a profile, as in `profile.json`. Times are in seconds, sizes in bytes; unknown values are null."""

from __future__ import annotations

import statistics
from typing import Literal

from pydantic import BaseModel, ConfigDict

#: The parts of a step in order. Every moment between the beginnings of two steps belongs to one part.
PARTS = ("data", "forward", "backward", "reduction", "optimizer", "host")
#: Replaces `forward` and `backward` in pipeline stages.
BOTH_PASSES = "forward and backward"
CHECKPOINT = "checkpoint"

#: A timed step longer than this many medians deserves a warning: it raises the mean of few steps.
OUTLIER = 2.0

#: Descriptions of the parts.
MEANINGS = {
    "data": "waiting for the batch",
    "forward": "copies to the device, forward pass, loss",
    "backward": "backward pass, and the part of the reduction that overlaps it",
    BOTH_PASSES: "forward and backward passes of the pipeline's stages",
    "reduction": "sums of gradients between workers, their norm, agreement on the step",
    "optimizer": "clipping and update of the weights",
    "host": "metrics, log, callbacks, and everything else between two steps",
    CHECKPOINT: "waiting for a save, divided by the steps between two saves",
}


class Record(BaseModel):
    """An immutable record of plain values."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StepTimes(Record):
    """The times of one step of one worker."""

    seconds: float
    parts: dict[str, float]
    """Seconds by part; they add up to the step."""
    waiting: dict[str, float]
    """Seconds of each part spent waiting for other workers. On a GPU only the host's waiting is visible."""


class AllReduce(Record):
    """One sum over all workers, measured after the steps."""

    bytes: int
    seconds: float


class Ceilings(Record):
    """The best rates of this worker's device, measured while all other workers measure too."""

    products_flops_per_second: float
    products: str
    """Description of the products, such as "fp32 products of 2,048 x 2,048"."""
    peak_flops_per_second: float | None
    """The vendor's figure for the accelerator; None on a CPU or if unknown."""
    copy_bytes_per_second: float
    """Read and written by a copy in the device's memory."""
    all_reduce: AllReduce | None
    """None with one worker."""

    @property
    def flops_per_second(self) -> float:
        """The vendor's figure if known, else the measured one."""
        return self.peak_flops_per_second or self.products_flops_per_second


class Work(Record):
    """The work of one worker in a step, independent of the time it takes."""

    forward_flops: float | None
    """Model FLOPs (Chowdhery et al. 2022, appendix B) of all workers, divided by their number. The split between the
    passes follows the FLOPs of products in the trace."""
    backward_flops: float | None
    update_flops: float
    """Muon's matrix products; 0 for other optimizers."""
    update_bytes: float | None
    """Least traffic of clipping and update; None if a library does both."""
    norm_bytes: float | None
    """Read by the norm of the gradients."""


class Operator(Record):
    """An operator in the traced steps; values are per step."""

    name: str
    calls: float
    host_seconds: float
    """Time without the operators that it calls."""
    device_seconds: float | None
    """None on a CPU."""
    flops: float | None
    """FLOPs according to the profiler, which counts some products; None otherwise."""


class Product(Record):
    """A matrix product of one shape in the traced steps: a point of the roofline."""

    shape: str
    """Such as "1,024 x 256 x 8,192": rows, inner size, columns; batched products also state their number."""
    calls: float
    """Calls per step."""
    seconds: float
    """Seconds of one call."""
    flops: float
    bytes: float
    """Bytes of operands and result, each moved once."""

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes


class Memory(Record):
    """Memory over the last traced step; times are seconds since it began."""

    base_bytes: int
    """Memory between two steps: weights, moments, and the gradients that the reduction leaves on this worker."""
    kind: Literal["cpu", "cuda"]
    times: list[float]
    tensor_bytes: list[int]
    """Base plus the tensors allocated since the trace began."""
    resident_times: list[float]
    resident_bytes: list[int]
    """On a CPU the process's resident memory; on a GPU the memory reserved by PyTorch."""
    parts: list[tuple[str, float, float]]
    """Part, begin and end."""
    peak_bytes: dict[str, int]
    """Largest `tensor_bytes` by part."""


class Spread(Record):
    """The variation of one worker's timed steps, in seconds, without the share of a save."""

    shortest: float
    median: float
    longest: float
    outliers: int
    """Steps longer than `OUTLIER` times the median."""


class WorkerRecord(Record):
    """The results of one worker."""

    rank: int
    device: str
    device_name: str
    threads: int
    compiled: bool
    steps: list[StepTimes]
    """Timed without the profiler."""
    traced_steps: list[StepTimes]
    """Timed with the profiler."""
    metered_seconds: float
    """Mean of the metric `speed/step_seconds`: a step without `host`."""
    items_per_step: float
    """Tokens that enter the loss, over all workers."""
    feed_seconds: float
    """Time of the feed for one step's batches when nothing else runs."""
    checkpoint_stall_seconds: float | None
    checkpoint_bytes: int
    work: Work
    ceilings: Ceilings
    operators: list[Operator]
    products: list[Product]
    memory: Memory
    device_idle_share: float | None
    """Share of the traced time without any kernel on the device; None on a CPU."""

    @property
    def step_seconds(self) -> float:
        """Mean of the timed steps."""
        return sum(step.seconds for step in self.steps) / len(self.steps)

    @property
    def waiting_seconds(self) -> float:
        """Mean time of a step spent waiting for other workers."""
        return sum(sum(step.waiting.values()) for step in self.steps) / len(self.steps)

    @property
    def spread(self) -> Spread:
        """Spread of the timed steps."""
        seconds = [step.seconds for step in self.steps]
        median = statistics.median(seconds)
        outliers = sum(value > OUTLIER * median for value in seconds)
        return Spread(shortest=min(seconds), median=median, longest=max(seconds), outliers=outliers)

    def part_seconds(self, part: str) -> float:
        """Return the mean over the timed steps; 0 for a part that does not occur."""
        return sum(step.parts.get(part, 0.0) for step in self.steps) / len(self.steps)

    def part_waiting(self, part: str) -> float:
        """Return the share of `part_seconds` spent waiting for other workers, in seconds."""
        return sum(step.waiting.get(part, 0.0) for step in self.steps) / len(self.steps)


class Row(Record):
    """One part of the step in the table."""

    part: str
    mean_seconds: float
    """Mean over workers."""
    slowest_seconds: float
    """Time of the slowest worker."""
    share: float
    """Share of the slowest worker's step; shares add up to 1."""
    waiting_seconds: float
    """The part of `slowest_seconds` spent waiting for other workers."""
    ideal_seconds: float | None
    """Time of its work at the ceiling; None if unknown."""
    flops_per_second: float | None
    bytes_per_second: float | None
    reached: float | None
    """`ideal_seconds / slowest_seconds`. More than 1 for memory-bound work that fits into caches."""


class Loss(Record):
    """The time that a step would save if a part of it ran at the machine's ceiling."""

    parts: list[str]
    seconds: float
    what: str
    """Description of the loss."""
    advice: list[str]
    """Advice: overrides that this config accepts, or a sentence."""


class Profile(Record):
    """A complete profile."""

    schema_name: Literal["headway-profile-1"] = "headway-profile-1"
    name: str
    headway: str
    torch: str
    created: float
    """Unix seconds."""
    precision: str
    compiled: bool
    warmup_steps: int
    workers: list[WorkerRecord]
    slowest: int
    """Rank of the worker that the others wait for."""
    step_seconds: float
    """Step time of the slowest worker, with its share of a save."""
    tokens_per_second: float
    mfu: float | None
    """Relative to the vendor's peak; None if unknown."""
    reached: float | None
    """Model FLOPs per second relative to the ceiling: the vendor's peak, or the measured products."""
    profiler_cost: float
    """Relative slowdown of a traced step: 0.2 is a fifth."""
    rows: list[Row]
    losses: list[Loss]
    """Largest first."""
    notes: list[str]

    @property
    def slowest_worker(self) -> WorkerRecord:
        """The worker that the others wait for."""
        return self.workers[self.slowest]

    @property
    def spread(self) -> Spread:
        """Spread of the slowest worker's timed steps."""
        return self.slowest_worker.spread

    @property
    def verdict(self) -> str:
        """The largest loss and its advice."""
        if not self.losses:
            return "no part of the step takes noticeably longer than necessary"
        first = self.losses[0]
        advice = f"; try {' or '.join(first.advice)}" if first.advice else ""
        return f"{first.what}{advice}"
