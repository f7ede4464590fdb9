"""`profile.html`: the profile on one self-contained page."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from headway.core.format import UNKNOWN, counted, format_bytes, format_count
from headway.lab.profiling.record import CHECKPOINT, MEANINGS, Memory, Profile, WorkerRecord
from headway.lab.profiling.roofline import ceiling_text, flops_text, seconds_text
from headway.lab.profiling.tables import (
    OPERATOR_HEADERS,
    memory_rows,
    operator_rows,
    part_headers,
    part_rows,
    product_rows,
    profiler_text,
    spread_text,
    summary_line,
    warnings,
)
from headway.telemetry import html
from headway.telemetry.charts import Chart, Entry
from headway.telemetry.curves import short_number
from headway.telemetry.drawing import GROUND, INK, MUTED, SERIES, as_svg, drawing, number_ticks, ticks
from headway.telemetry.summary import time_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Colours of the parts, the same in all charts.
COLOURS = {
    "data": 4, "forward": 0, "forward and backward": 0, "backward": 5, "reduction": 1, "optimizer": 2, "host": 7,
    CHECKPOINT: 3,
}  # fmt: skip
#: A colour that no part uses.
_TENSORS = 6
#: Resident memory above this multiple of the tensors would flatten their curve on a shared axis.
_APART = 5
_MIB = 2**20


def render_page(found: Profile) -> str:
    """Render the page as HTML.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    headers = part_headers(found)
    worker = found.slowest_worker
    losses = [[loss.what, " or ".join(loss.advice)] for loss in found.losses]
    roofline = roofline_chart(worker)
    return html.page(
        f"{found.name} · Headway profile",
        [
            html.heading(f"{found.name}: where a step goes", None, f"{summary_line(found)}."),
            html.tiles(_tiles(found)),
            *(f'<p class="warn">{escape(warning)}.</p>' for warning in warnings(found)),
            html.section("What to change first", html.table(["Loss", "Try"], losses) or f"<p>{found.verdict}.</p>"),
            html.section(
                "The step",
                html.figure(step_chart(found)),
                html.table(headers, part_rows(found), numeric=range(1, len(headers))),
                html.facts((row.part, MEANINGS[row.part]) for row in found.rows),
            ),
            html.section(
                "Memory",
                html.figure(memory_chart(worker.memory)),
                html.table(["Part", "Peak", "Above weights, gradients and moments"], memory_rows(found), (1, 2)),
            ),
            html.section(
                "Roofline of matrix products",
                html.figure(roofline) if roofline is not None else "",
                html.table(["Rows x inner x columns", "Calls", "Time", "FLOPs per byte", "Rate"], product_rows(found),
                           range(1, 5)),
            ),
            html.section("Operators", html.table([h.capitalize() for h in OPERATOR_HEADERS], operator_rows(found),
                                                 range(1, 5))),
            html.section("How it was measured", html.facts(_facts(found))),
            f'<p class="muted">Written {time_text(found.created)} by Headway {found.headway}.</p>',
        ],
    )  # fmt: skip


def _tiles(found: Profile) -> list[tuple[str, str, str]]:
    worker = found.slowest_worker
    largest = max(found.rows, key=lambda row: row.slowest_seconds)
    peak = max(worker.memory.peak_bytes.values(), default=None)
    reached = UNKNOWN if found.reached is None else f"{found.reached:.1%}"
    return [
        (
            "Step",
            seconds_text(found.step_seconds),
            f"mean of {len(worker.steps)} steps ({spread_text(found)}), and a share of a save",
        ),
        ("Tokens per second", format_count(found.tokens_per_second), "of all workers"),
        ("MFU" if found.mfu is not None else "Of the ceiling", reached, ceiling_text(worker)),
        ("Longest part", largest.part, f"{largest.share:.0%} of the step"),
        ("Peak of tensors", format_bytes(peak), f"{format_bytes(worker.memory.base_bytes)} are always in use"),
        *(
            [("Device idle", f"{worker.device_idle_share:.1%}", "of the traced steps")]
            if worker.device_idle_share is not None
            else []
        ),
    ]


def _facts(found: Profile) -> list[tuple[str, str]]:
    worker = found.slowest_worker
    ceilings = worker.ceilings
    facts = [
        ("workers", f"{len(found.workers)} on {worker.device_name}, {counted(worker.threads, 'thread')} each"),
        ("steps", f"{found.warmup_steps} to warm up, {len(worker.steps)} timed, {len(worker.traced_steps)} traced"),
        ("spread", f"a timed step took {spread_text(found)}"),
        ("profiler", f"{profiler_text(found)}; times in tables of parts are without it"),
        ("ceiling", ceiling_text(worker)),
        ("copies in memory", f"{ceilings.copy_bytes_per_second / 1e9:.1f} GB/s read and written"),
        ("feed by itself", f"{seconds_text(worker.feed_seconds)} for one step's batches"),
        ("a save", f"delays training by {seconds_text(worker.checkpoint_stall_seconds)}"
                   if worker.checkpoint_stall_seconds is not None else UNKNOWN),
        ("PyTorch", found.torch),
    ]  # fmt: skip
    if ceilings.all_reduce is not None:
        reduced = ceilings.all_reduce
        facts.insert(6, ("exchange", f"a sum of {format_bytes(reduced.bytes)} takes {seconds_text(reduced.seconds)}"))
    return [*facts, *(("note", note) for note in found.notes)]


def step_chart(found: Profile) -> Chart:
    """Draw the step as one bar per worker, divided into parts."""
    saving = next(row.slowest_seconds for row in found.rows if row.part == CHECKPOINT)
    scale, unit = (1.0, "seconds") if found.step_seconds >= 1 else (1e3, "milliseconds")
    with drawing(1040, 76 + 46 * len(found.workers)) as (figure, axes):
        for worker in found.workers:
            at = 0.0
            for row in found.rows:
                seconds = saving if row.part == CHECKPOINT else worker.part_seconds(row.part)
                colour = SERIES[COLOURS[row.part]]
                axes.barh(worker.rank, seconds * scale, left=at * scale, height=0.62, color=colour)
                if seconds > 0.06 * found.step_seconds:
                    axes.text(
                        (at + seconds / 2) * scale, worker.rank, f"{seconds / found.step_seconds:.0%}",
                        ha="center", va="center", fontsize=12, fontweight="bold", color=GROUND,
                    )  # fmt: skip
                at += seconds
        axes.set_yticks([w.rank for w in found.workers], [f"worker {w.rank}" for w in found.workers])
        axes.set_ylim(len(found.workers) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(unit)
        axes.margins(x=0.01)
        legend = tuple(Entry(row.part, COLOURS[row.part]) for row in found.rows)
        return Chart("Time by part", as_svg(figure, "A step by part"), legend, wide=True)


def memory_chart(memory: Memory) -> Chart:
    """Draw tensors and resident memory over the last traced step, with its parts along the bottom.

    Colours of parts have no other meaning here. Resident memory gets its own panel if it would flatten the curve of
    tensors.
    """
    scale, unit = (1.0, "seconds") if memory.parts and memory.parts[-1][2] >= 1 else (1e3, "milliseconds")
    base = memory.base_bytes / _MIB
    resident = [size / _MIB for size in memory.resident_bytes]
    highest = max([base, *(size / _MIB for size in memory.tensor_bytes)])
    apart = max(resident, default=0.0) > _APART * highest
    legend = [Entry("tensors", _TENSORS), Entry("always in use: weights, gradients, moments", "muted", "dashed")]
    with drawing(1040, 480 if apart else 340) as (figure, axes):
        foot = axes
        if apart:
            axes.remove()
            axes, foot = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        _tensors(axes, memory, scale)
        if resident:
            foot.plot([time * scale for time in memory.resident_times], resident, color=INK, linewidth=1.4)
            legend.append(
                Entry("the process's resident memory" if memory.kind == "cpu" else "reserved by PyTorch", "ink")
            )
        for panel, top in ((axes, highest), (foot, max([*resident, 0 if apart else highest]))):
            panel.set_ylim(bottom=-0.03 * top, top=1.08 * top)
            panel.yaxis.set_major_formatter(number_ticks())
            panel.margins(x=0.01)
        axes.set_ylabel("tensors, MiB" if apart else "MiB")
        if apart:
            foot.set_ylabel("resident, MiB" if memory.kind == "cpu" else "reserved, MiB")
        foot.set_xlabel(f"{unit} since the step began (under the profiler)")
        legend += [Entry(part, COLOURS.get(part, 7)) for part in dict.fromkeys(part for part, _, _ in memory.parts)]
        return Chart("Memory through one step", as_svg(figure, "Memory through one step"), tuple(legend), wide=True)


def _tensors(axes: Axes, memory: Memory, scale: float) -> None:
    at = [time * scale for time in memory.times]
    sizes = [size / _MIB for size in memory.tensor_bytes]
    axes.fill_between(at, sizes, color=SERIES[_TENSORS], alpha=0.22, linewidth=0, step="post")
    axes.step(at, sizes, color=SERIES[_TENSORS], linewidth=1.6, where="post")
    axes.axhline(memory.base_bytes / _MIB, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    for part, start, end in memory.parts:
        axes.axvspan(start * scale, end * scale, ymax=0.025, color=SERIES[COLOURS.get(part, 7)], linewidth=0)


def roofline_chart(worker: WorkerRecord) -> Chart | None:
    """Draw matrix products by arithmetic intensity below the roofline; None if there are none."""
    products = worker.products
    ceilings = worker.ceilings
    if not products:
        return None
    top = ceilings.flops_per_second
    bandwidth = ceilings.copy_bytes_per_second
    low = min(*(p.intensity for p in products), top / bandwidth) / 3
    high = max(*(p.intensity for p in products), top / bandwidth) * 3
    total = sum(p.calls * p.seconds for p in products)
    with drawing(1040, 380) as (figure, axes):
        from matplotlib.ticker import LogLocator, NullLocator

        ridge = top / bandwidth
        axes.plot([low, ridge, high], [low * bandwidth, top, top], color=SERIES[1], linewidth=1.8)
        for product in products:
            share = product.calls * product.seconds / total
            axes.plot(
                product.intensity, product.flops / product.seconds, "o", color=SERIES[0], alpha=0.75,
                markersize=5 + 22 * math.sqrt(share), markeredgewidth=0,
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(low, high)
        axes.annotate(flops_text(top), (high, top), xytext=(-4, 6), textcoords="offset points", ha="right")
        axes.set_xlabel("FLOPs per byte of operands and result")
        axes.set_ylabel("FLOP/s")
        for axis, label in ((axes.xaxis, short_number), (axes.yaxis, flops_text)):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(ticks(label))
            axis.set_minor_locator(NullLocator())
        legend = (
            Entry("limit of memory and products", 1),
            Entry("a product; larger dots take more of the step", 0, "dots"),
        )
        return Chart("Products against the roof", as_svg(figure, "Roofline"), legend, wide=True)
