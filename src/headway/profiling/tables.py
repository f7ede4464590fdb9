"""The tables of a profile as rows of text, the same on the terminal and on the page."""

from __future__ import annotations

from headway.core.format import UNKNOWN, counted, format_bytes, format_count
from headway.profiling.record import Profile, Row
from headway.profiling.roofline import flops_text, seconds_text

OPERATOR_HEADERS = ["OPERATOR", "CALLS", "SELF TIME", "SHARE", "RATE"]


def summary_line(found: Profile) -> str:
    """The step in one line."""
    workers = len(found.workers)
    device = found.workers[found.slowest].device_name
    reached = UNKNOWN if found.reached is None else f"{found.reached:.1%}"
    kind = f"MFU {reached}" if found.mfu is not None else f"{reached} of the products' ceiling"
    compiled = ", compiled" if found.compiled else ""
    return (
        f"{found.name}: {workers} worker{'s' if workers > 1 else ''} on {device}, {found.precision}{compiled}:"
        f" {seconds_text(found.step_seconds)} per step, {format_count(found.tokens_per_second)} tokens/s, {kind}"
    )


def spread_text(found: Profile) -> str:
    """How much the timed steps differ, of the slowest worker."""
    spread = found.spread
    return f"{seconds_text(spread.shortest)} to {seconds_text(spread.longest)}, median {seconds_text(spread.median)}"


def warnings(found: Profile) -> list[str]:
    """What makes the numbers doubtful: means of few steps follow a single one that was held up."""
    spread, steps = found.spread, len(found.workers[found.slowest].steps)
    if not spread.outliers:
        return []
    return [
        f"{spread.outliers} of {counted(steps, 'step')} took more than twice the median of"
        f" {seconds_text(spread.median)}, the longest {seconds_text(spread.longest)}: all times here are means, which"
        f" follow it. More steps tell whether it belongs to the training: --steps {max(30, 3 * steps)}"
    ]


def bytes_text(rate: float) -> str:
    """Bytes per second; slow ones too: 30e6 -> "30.0 MB/s"."""
    return f"{rate / 1e9:.1f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.1f} MB/s"


def profiler_text(found: Profile) -> str:
    """What the profiler adds to a step; less than nothing is what steps differ by anyway."""
    cost = found.profiler_cost
    return f"makes a step {cost:.0%} longer" if cost >= 0.005 else "makes no step longer that one could tell"


def part_headers(found: Profile) -> list[str]:
    """With several workers, the mean and the slowest one."""
    times = ["MEAN", f"WORKER {found.slowest}", "WAITING"] if len(found.workers) > 1 else ["TIME"]
    return ["PART", *times, "SHARE", "AT BEST", "REACHED", "RATE"]


def part_rows(found: Profile) -> list[list[str]]:
    """One row per part, and the whole step."""
    several = len(found.workers) > 1
    rows = [_part_row(row, several) for row in found.rows]
    mean, slowest = sum(r.mean_seconds for r in found.rows), sum(r.slowest_seconds for r in found.rows)
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
    """The operators of the slowest worker, by their own time per traced step."""
    worker = found.workers[found.slowest]
    step = sum(s.seconds for s in worker.traced_steps) / len(worker.traced_steps)
    rows = []
    for operator in worker.operators:
        seconds = operator.host_seconds if operator.device_seconds is None else operator.device_seconds
        rate = flops_text(operator.flops / seconds) if operator.flops and seconds else ""
        rows.append([operator.name, f"{operator.calls:g}", seconds_text(seconds), f"{seconds / step:.1%}", rate])
    return rows


def memory_rows(found: Profile) -> list[list[str]]:
    """The peak of tensors by part, of the slowest worker."""
    memory = found.workers[found.slowest].memory
    return [
        [part, format_bytes(size), format_bytes(size - memory.base_bytes)] for part, size in memory.peak_bytes.items()
    ]


def product_rows(found: Profile) -> list[list[str]]:
    """The points of the roofline, of the slowest worker."""
    return [
        [p.shape, f"{p.calls:g}", seconds_text(p.seconds), f"{p.intensity:.0f}", flops_text(p.flops / p.seconds)]
        for p in found.workers[found.slowest].products
    ]
