"""The tables of a profile as rows of text, for both the terminal and the page."""

from __future__ import annotations

from headway.core.format import UNKNOWN, counted, format_bytes, format_count
from headway.lab.profiling.record import Profile, Row
from headway.lab.profiling.roofline import flops_text, seconds_text

OPERATOR_HEADERS = ["OPERATOR", "CALLS", "SELF TIME", "SHARE", "RATE"]


def summary_line(found: Profile) -> str:
    """Summarise the step in one line."""
    workers = len(found.workers)
    device = found.slowest_worker.device_name
    reached = UNKNOWN if found.reached is None else f"{found.reached:.1%}"
    kind = f"MFU {reached}" if found.mfu is not None else f"{reached} of the products' ceiling"
    compiled = ", compiled" if found.compiled else ""
    return (
        f"{found.name}: {workers} worker{'s' if workers > 1 else ''} on {device}, {found.precision}{compiled}:"
        f" {seconds_text(found.step_seconds)} per step, {format_count(found.tokens_per_second)} tokens/s, {kind}"
    )


def spread_text(found: Profile) -> str:
    """Format the range of the slowest worker's timed steps."""
    spread = found.spread
    return f"{seconds_text(spread.shortest)} to {seconds_text(spread.longest)}, median {seconds_text(spread.median)}"


def warnings(found: Profile) -> list[str]:
    """Return warnings about unreliable numbers: one delayed step dominates the mean of few steps."""
    spread = found.spread
    steps = len(found.slowest_worker.steps)
    if not spread.outliers:
        return []
    return [
        f"{spread.outliers} of {counted(steps, 'step')} took more than twice the median of"
        f" {seconds_text(spread.median)}, the longest {seconds_text(spread.longest)}: all times here are means, which"
        f" it raises. More steps show whether it is part of training: --steps {max(30, 3 * steps)}"
    ]


def bytes_text(rate: float) -> str:
    """Format bytes per second, including slow rates: 30e6 -> "30.0 MB/s"."""
    return f"{rate / 1e9:.1f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.1f} MB/s"


def profiler_text(found: Profile) -> str:
    """Describe the profiler's overhead; a negative one is noise between steps."""
    cost = found.profiler_cost
    return f"makes a step {cost:.0%} longer" if cost >= 0.005 else "makes steps not measurably longer"


def part_headers(found: Profile) -> list[str]:
    """Return the headers of the table of parts; with several workers it has the mean and the slowest."""
    times = ["MEAN", f"WORKER {found.slowest}", "WAITING"] if len(found.workers) > 1 else ["TIME"]
    return ["PART", *times, "SHARE", "AT BEST", "REACHED", "RATE"]


def part_rows(found: Profile) -> list[list[str]]:
    """Return one row per part and one for the whole step."""
    several = len(found.workers) > 1
    rows = [_part_row(row, several) for row in found.rows]
    mean = sum(r.mean_seconds for r in found.rows)
    slowest = sum(r.slowest_seconds for r in found.rows)
    waiting = sum(r.waiting_seconds for r in found.rows)
    times = [seconds_text(mean), seconds_text(slowest), seconds_text(waiting)] if several else [seconds_text(slowest)]
    return [*rows, ["step", *times, f"{sum(r.share for r in found.rows):.1%}", "", "", ""]]


def _part_row(row: Row, several: bool) -> list[str]:
    times = [seconds_text(row.slowest_seconds)]
    if several:
        times = [seconds_text(row.mean_seconds), *times, seconds_text(row.waiting_seconds)]
    rate = UNKNOWN
    if row.bytes_per_second is not None:
        rate = bytes_text(row.bytes_per_second)
    if row.flops_per_second is not None:
        rate = flops_text(row.flops_per_second)
    return [
        row.part,
        *times,
        f"{row.share:.1%}",
        UNKNOWN if row.ideal_seconds is None else seconds_text(row.ideal_seconds),
        UNKNOWN if row.reached is None else f"{row.reached:.0%}",
        rate,
    ]


def operator_rows(found: Profile) -> list[list[str]]:
    """Return the operators of the slowest worker, by their own time per traced step."""
    worker = found.slowest_worker
    step = sum(s.seconds for s in worker.traced_steps) / len(worker.traced_steps)
    rows = []
    for operator in worker.operators:
        seconds = operator.host_seconds if operator.device_seconds is None else operator.device_seconds
        rate = flops_text(operator.flops / seconds) if operator.flops and seconds else ""
        rows.append([operator.name, f"{operator.calls:g}", seconds_text(seconds), f"{seconds / step:.1%}", rate])
    return rows


def memory_rows(found: Profile) -> list[list[str]]:
    """Return the peak of tensors by part, for the slowest worker."""
    memory = found.slowest_worker.memory
    return [
        [part, format_bytes(size), format_bytes(size - memory.base_bytes)] for part, size in memory.peak_bytes.items()
    ]


def product_rows(found: Profile) -> list[list[str]]:
    """Return the points of the roofline, for the slowest worker."""
    return [
        [p.shape, f"{p.calls:g}", seconds_text(p.seconds), f"{p.intensity:.0f}", flops_text(p.flops / p.seconds)]
        for p in found.slowest_worker.products
    ]
