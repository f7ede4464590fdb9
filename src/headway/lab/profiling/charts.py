"""The charts of a profile, in the style of the run's report."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from headway.lab.profiling.record import CHECKPOINT, Memory, Profile, WorkerRecord
from headway.lab.profiling.roofline import flops_text
from headway.telemetry.charts import Chart, Entry
from headway.telemetry.curves import short_number
from headway.telemetry.drawing import GROUND, INK, MUTED, SERIES, as_svg, drawing, number_ticks, ticks

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
