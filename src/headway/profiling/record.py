"""What a profile holds, as `profile.json` has it. Times are in seconds, sizes in bytes; what is unknown is null."""

from __future__ import annotations

import statistics
from typing import Literal

from pydantic import BaseModel, ConfigDict

#: The parts of a step, in their order. Every moment from the beginning of a step to that of the next belongs to one.
PARTS = ("data", "forward", "backward", "reduction", "optimizer", "host")
#: What stages of a pipeline do in place of `forward` and `backward`.
BOTH_PASSES = "forward and backward"
CHECKPOINT = "checkpoint"

#: A timed step that takes more than so many medians is worth a warning: it pulls the means of few steps up.
OUTLIER = 2.0

#: What a part is, in words.
MEANINGS = {
    "data": "waiting for the batch",
    "forward": "copies to the device, forward pass, loss",
    "backward": "backward pass, and what of the reduction goes on beside it",
    BOTH_PASSES: "forward and backward passes of the pipeline's stages",
    "reduction": "sums of gradients between workers, their norm, agreement on the step",
    "optimizer": "clipping and update of the weights",
    "host": "metrics, log, callbacks, all else between two steps",
    CHECKPOINT: "training waits for a save, shared out over the steps between two saves",
}


class Record(BaseModel):
    """Plain values that do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StepTimes(Record):
    """One step of one worker."""

    seconds: float
    parts: dict[str, float]
    """Seconds by part; they add up to the step."""
    waiting: dict[str, float]
    """Of them, those in which it waited for other workers. On a GPU only what the host waited is seen."""


class AllReduce(Record):
    """One sum over all workers, measured after the steps."""

    bytes: int
    seconds: float


class Ceilings(Record):
    """What this worker's device does at best, measured while all other workers measure too."""

    products_flops_per_second: float
    products: str
    """Which products: "fp32 products of 2,048 x 2,048"."""
    peak_flops_per_second: float | None
    """Of the accelerator, as its vendor says; None on a CPU, or if it is not known."""
    copy_bytes_per_second: float
    """Read and written by a copy in the device's memory."""
    all_reduce: AllReduce | None
    """None with one worker."""

    @property
    def flops_per_second(self) -> float:
        """The vendor's figure where it is known, else the measured one."""
        return self.peak_flops_per_second or self.products_flops_per_second


class Work(Record):
    """What a step has to do, of one worker, whatever the time it takes."""

    forward_flops: float | None
    """Model FLOPs (Chowdhery et al. 2022, appendix B) of all workers, divided by their number. They are shared out
    between the passes as the FLOPs of products in the trace are."""
    backward_flops: float | None
    update_flops: float
    """Muon's matrix products; 0 for other optimizers."""
    update_bytes: float | None
    """Read and written by clipping and update at least; None where a library of its own does both."""
    norm_bytes: float | None
    """Read by the norm of the gradients."""


class Operator(Record):
    """An operator in the traced steps, per step."""

    name: str
    calls: float
    host_seconds: float
    """Without the operators that it calls."""
    device_seconds: float | None
    """None on a CPU."""
    flops: float | None
    """As the profiler counts them for some products; None where it does not."""


class Product(Record):
    """A matrix product of one shape in the traced steps: a point of the roofline."""

    shape: str
    """As "1,024 x 256 x 8,192": rows, inner size, columns; with how many of them at once where these are several."""
    calls: float
    """Per step."""
    seconds: float
    """Of one call."""
    flops: float
    bytes: float
    """Of operands and result, each moved once."""

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes


class Memory(Record):
    """Through the last traced step; times are seconds since it began."""

    base_bytes: int
    """What this worker has between two steps: weights, moments, and the gradients that the reduction has left to it."""
    kind: Literal["cpu", "cuda"]
    times: list[float]
    tensor_bytes: list[int]
    """Base, and tensors that came and went since the trace began."""
    resident_times: list[float]
    resident_bytes: list[int]
    """On a CPU the process's resident memory; on a GPU what PyTorch has reserved."""
    parts: list[tuple[str, float, float]]
    """Part, begin and end."""
    peak_bytes: dict[str, int]
    """Largest `tensor_bytes` by part."""


class Spread(Record):
    """How much the timed steps of one worker differ, in seconds, without a save's share."""

    shortest: float
    median: float
    longest: float
    outliers: int
    """Steps that took more than `OUTLIER` times the median."""


class WorkerRecord(Record):
    """What one worker found."""

    rank: int
    device: str
    device_name: str
    threads: int
    compiled: bool
    steps: list[StepTimes]
    """Timed without the profiler."""
    traced_steps: list[StepTimes]
    """With it."""
    metered_seconds: float
    """Mean of what the training loop itself calls `speed/step_seconds`: a step without `host`."""
    items_per_step: float
    """Tokens that count in the loss, over all workers."""
    feed_seconds: float
    """What the feed takes for one step's batches, when nothing else goes on."""
    checkpoint_stall_seconds: float | None
    checkpoint_bytes: int
    work: Work
    ceilings: Ceilings
    operators: list[Operator]
    products: list[Product]
    memory: Memory
    device_idle_share: float | None
    """Of the traced steps' time, without any kernel on the device; None on a CPU."""

    @property
    def step_seconds(self) -> float:
        """Mean of the timed steps."""
        return sum(step.seconds for step in self.steps) / len(self.steps)

    @property
    def waiting_seconds(self) -> float:
        """For other workers, per step."""
        return sum(sum(step.waiting.values()) for step in self.steps) / len(self.steps)

    @property
    def spread(self) -> Spread:
        """Of the timed steps."""
        seconds = [step.seconds for step in self.steps]
        median = statistics.median(seconds)
        outliers = sum(value > OUTLIER * median for value in seconds)
        return Spread(shortest=min(seconds), median=median, longest=max(seconds), outliers=outliers)

    def part_seconds(self, part: str) -> float:
        """Mean over the timed steps; 0 of a part that there is not."""
        return sum(step.parts.get(part, 0.0) for step in self.steps) / len(self.steps)

    def part_waiting(self, part: str) -> float:
        """Of `part_seconds`, waiting for other workers."""
        return sum(step.waiting.get(part, 0.0) for step in self.steps) / len(self.steps)


class Row(Record):
    """One part of the step in the table."""

    part: str
    mean_seconds: float
    """Over workers."""
    slowest_seconds: float
    """Of the slowest worker."""
    share: float
    """Of the slowest worker's step; shares add up to 1."""
    waiting_seconds: float
    """Of `slowest_seconds`, waiting for other workers."""
    ideal_seconds: float | None
    """What its work would take at the ceiling; None where that is unknown."""
    flops_per_second: float | None
    bytes_per_second: float | None
    reached: float | None
    """`ideal_seconds / slowest_seconds`. More than 1 of what is bound by memory: it fits into caches."""


class Loss(Record):
    """Time that a step would save if some of it went as fast as the machine can."""

    parts: list[str]
    seconds: float
    what: str
    """In plain words."""
    advice: list[str]
    """What to try: overrides that this config accepts, or a sentence."""


class Profile(Record):
    """All of it."""

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
    """Of the slowest worker, with its share of a save."""
    tokens_per_second: float
    mfu: float | None
    """Against the vendor's peak; None where that is not known."""
    reached: float | None
    """Model FLOPs per second against the ceiling: the vendor's peak, or the products measured here."""
    profiler_cost: float
    """By how much longer a traced step takes: 0.2 is a fifth."""
    rows: list[Row]
    losses: list[Loss]
    """Largest first."""
    notes: list[str]

    @property
    def spread(self) -> Spread:
        """Of the slowest worker's timed steps."""
        return self.workers[self.slowest].spread

    @property
    def verdict(self) -> str:
        """The largest loss, and what to try."""
        if not self.losses:
            return "nothing of the step takes noticeably longer than it must"
        first = self.losses[0]
        advice = f"; try {' or '.join(first.advice)}" if first.advice else ""
        return f"{first.what}{advice}"
