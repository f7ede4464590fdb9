"""Analysis of the workers' records: the table, and the time that could be saved.

Williams et al. 2009 ("Roofline"): products are bound by arithmetic; clipping, norm and update are bound by memory. The
least time of a part is its work at that ceiling. All other parts (waiting for data, workers or saves, and the host)
have an ideal of zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headway.config import Config
from headway.core.format import format_count
from headway.lab.profiling.advice import advice_for
from headway.lab.profiling.record import BOTH_PASSES, CHECKPOINT, PARTS, Loss, Row, WorkerRecord
from headway.training.save_schedule import ChosenInterval, failure_rate

#: Losses below this share of a step are not reported.
_WORTH = 0.01
#: Parts that are compared with the ceiling of products.
PASSES = ("forward", "backward", BOTH_PASSES)


@dataclass(frozen=True)
class Analysis:
    """The analysis of the workers' records."""

    slowest: WorkerRecord
    rows: list[Row]
    losses: list[Loss]

    @property
    def step_seconds(self) -> float:
        """Step time of the slowest worker, with its share of a save."""
        return sum(row.slowest_seconds for row in self.rows)

    @property
    def reached(self) -> float | None:
        """Model FLOPs per second of the whole step relative to the ceiling."""
        work = self.slowest.work
        if work.forward_flops is None or work.backward_flops is None:
            return None
        rate = (work.forward_flops + work.backward_flops) / self.step_seconds
        return rate / self.slowest.ceilings.flops_per_second


def analyse(config: Config, workers: Sequence[WorkerRecord]) -> Analysis:
    """Compute the table and the losses for the worker that the others wait for.

    Args:
        config: The user's config, with its own interval between saves.
    """
    slowest = slowest_worker(workers)
    between = _steps_between_saves(config, slowest)
    per_step = [(worker.checkpoint_stall_seconds or 0.0) / between for worker in workers]
    rows = list(_rows(workers, slowest, per_step))
    return Analysis(slowest, rows, _losses(config, workers, slowest, rows))


def slowest_worker(workers: Sequence[WorkerRecord]) -> WorkerRecord:
    """Return the worker with the most work of its own.

    On GPUs, where the device does the waiting, it is the worker with the shortest reduction: it arrives last and finds
    all others waiting.
    """
    if workers[0].device == "cuda":
        return min(workers, key=lambda w: w.part_seconds("reduction"))
    return max(workers, key=lambda w: w.step_seconds - w.waiting_seconds)


def _steps_between_saves(config: Config, worker: WorkerRecord) -> float:
    """Return the steps between saves with this config; an interval in time is converted to steps."""
    every = config.checkpoint.every
    if every == "auto":
        chosen = ChosenInterval(failure_rate(config.run_directory, config.checkpoint.failures_per_day))
        return max(1.0, chosen.after_save(worker.checkpoint_stall_seconds or 0.0) / worker.step_seconds)
    unit = {"seconds": worker.step_seconds, "tokens": float(config.train.tokens_per_step), "steps": 1.0}[every.unit]
    return max(1.0, every.amount / unit)


def _rows(workers: Sequence[WorkerRecord], slowest: WorkerRecord, per_step: Sequence[float]) -> Iterator[Row]:
    saving = per_step[list(workers).index(slowest)]
    total = slowest.step_seconds + saving
    there = {part for worker in workers for step in worker.steps for part in step.parts}
    for part in (*PARTS[:1], BOTH_PASSES, *PARTS[1:]):
        if part not in there:
            continue
        seconds = slowest.part_seconds(part)
        ideal, flops, moved = _ideal(part, slowest)
        yield Row(
            part=part,
            mean_seconds=sum(worker.part_seconds(part) for worker in workers) / len(workers),
            slowest_seconds=seconds,
            share=seconds / total,
            waiting_seconds=slowest.part_waiting(part),
            ideal_seconds=ideal,
            flops_per_second=flops / seconds if flops and seconds else None,
            bytes_per_second=moved / seconds if moved and seconds else None,
            reached=ideal / seconds if ideal and seconds else None,
        )
    yield Row(
        part=CHECKPOINT, mean_seconds=sum(per_step) / len(per_step), slowest_seconds=saving, share=saving / total,
        waiting_seconds=0.0, ideal_seconds=0.0, flops_per_second=None, bytes_per_second=None, reached=None,
    )  # fmt: skip


def _ideal(part: str, worker: WorkerRecord) -> tuple[float | None, float | None, float | None]:
    """Return the least seconds of a part, and its FLOPs and bytes; None where unknown."""
    work = worker.work
    ceilings = worker.ceilings
    if part in PASSES:
        both = None if work.forward_flops is None else work.forward_flops + (work.backward_flops or 0.0)
        flops = {"forward": work.forward_flops, "backward": work.backward_flops, BOTH_PASSES: both}[part]
        return (None if flops is None else flops / ceilings.flops_per_second), flops, None
    if part == "optimizer":
        if work.update_bytes is None:
            return None, None, None
        # Muon's products come before its update, so both times are needed.
        products = work.update_flops / ceilings.flops_per_second
        return products + work.update_bytes / ceilings.copy_bytes_per_second, work.update_flops, work.update_bytes
    if part == "reduction":
        if work.norm_bytes is None:
            return None, None, None
        return work.norm_bytes / ceilings.copy_bytes_per_second, None, work.norm_bytes
    return 0.0, None, None


def _losses(config: Config, workers: Sequence[WorkerRecord], slowest: WorkerRecord, rows: Sequence[Row]) -> list[Loss]:
    total = sum(row.slowest_seconds for row in rows)
    found = [
        *_of_passes(slowest, [row for row in rows if row.part in PASSES]),
        *(_of_part(slowest, row, len(workers) == 1) for row in rows if row.part not in PASSES),
    ]
    which = f" on worker {slowest.rank}" if len(workers) > 1 else ""
    return sorted(
        (
            Loss(
                parts=parts,
                seconds=lost,
                what=f"{what}{which}: up to {seconds_text(lost)} of a step of {seconds_text(total)}"
                f" ({lost / total:.0%}) could be saved",
                advice=advice_for(config, parts, slowest, workers),
            )
            for parts, lost, what in found
            if lost > _WORTH * total
        ),
        key=lambda loss: -loss.seconds,
    )


def _of_passes(worker: WorkerRecord, rows: Sequence[Row]) -> Iterator[tuple[list[str], float, str]]:
    """Compute the loss of forward and backward together: what speeds up one also speeds up the other."""
    if not rows or any(row.ideal_seconds is None for row in rows):
        return
    taken = sum(row.slowest_seconds for row in rows)
    ideal = sum(row.ideal_seconds or 0.0 for row in rows)
    yield (
        [row.part for row in rows],
        taken - ideal,
        f"forward and backward run at {ideal / taken:.0%} of the {ceiling_text(worker)}",
    )


def _of_part(worker: WorkerRecord, row: Row, alone: bool) -> tuple[list[str], float, str]:
    lost = row.slowest_seconds - (row.ideal_seconds or 0.0)
    if row.part == "optimizer" and row.reached is not None:
        gb = worker.ceilings.copy_bytes_per_second / 1e9
        what = f"the update takes {1 / row.reached:.1f} times what its reads and writes need at {gb:.0f} GB/s"
        if worker.work.update_flops:
            what = f"the update takes {1 / row.reached:.1f} times what its products and its reads and writes need"
    else:
        what = {
            "data": "training waits for data",
            "reduction": "the norm of the gradients takes long"
            if alone
            else "the sum of gradients over workers, and their norm, continue after the backward pass",
            "optimizer": "the update of the weights takes long",
            CHECKPOINT: "training waits for saves",
            "host": "the host is busy between steps",
        }[row.part]
    return [row.part], lost, what


def ceiling_text(worker: WorkerRecord) -> str:
    """Describe the ceiling of products."""
    ceilings = worker.ceilings
    if ceilings.peak_flops_per_second is not None:
        return f"{flops_text(ceilings.peak_flops_per_second)} of an {worker.device_name}"
    return f"{flops_text(ceilings.products_flops_per_second)} that {ceilings.products} reach here"


def flops_text(rate: float | None) -> str:
    """Format FLOP/s: 155e9 -> "155 GFLOP/s"."""
    if rate is None:
        return "n/a"
    for limit, unit in ((1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s")):
        if rate >= limit:
            scaled = rate / limit
            return f"{scaled:.0f} {unit}" if scaled >= 100 else f"{scaled:.3g} {unit}"
    return f"{format_count(rate)} FLOP/s"


def seconds_text(seconds: float) -> str:
    """Format seconds, including short times: 0.0123 -> "12.3 ms"."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"
