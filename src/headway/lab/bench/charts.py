"""The charts of a benchmark's report: a strategy has one colour in all of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.core.format import counted, format_count
from headway.core.statistics import quantile
from headway.lab.bench.analysis import (
    COMMUNICATION,
    MEMORY,
    SPEED,
    Metric,
    efficiency,
    good,
    ideal_efficiency,
    mean,
)
from headway.lab.bench.results import CellResult
from headway.lab.bench.statistics import Mean
from headway.lab.bench.wording import status_in_words
from headway.telemetry.charts import Chart
from headway.telemetry.curves import short_number
from headway.telemetry.drawing import MUTED, SERIES, as_svg, drawing, ticks
from headway.telemetry.html import STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Endings of chart names.
KINDS = ("throughput", "efficiency", "memory", "step-times", "communication")
_GIB = 2**30
_MIB = 2**20
_WIDTH = 1040


@dataclass(frozen=True)
class Named:
    """A chart and the name of its file."""

    name: str
    chart: Chart
    setting: str = ""
    """The setting of its cells, if the report has several."""

    @property
    def title(self) -> str:
        """The chart's title with the setting."""
        return f"{self.chart.title} ({self.setting})" if self.setting else self.chart.title


def setting_charts(
    results: Sequence[CellResult], styles: Mapping[str, int], prefix: str = "", setting: str = ""
) -> list[Named]:
    """Draw the charts of cells that differ only by strategy and number of workers; none without results.

    Args:
        styles: Index of each strategy among those of the whole report, which determines its colour.
        prefix: Prefix of the names of files.
        setting: The common setting of the cells, if the report has others.
    """
    shown = good(results)
    if not shown:
        return []
    there = {r.cell.strategy for r in results}
    names = {name: place for name, place in styles.items() if name in there}
    drawn = (
        _side_by_side(results, names, SPEED, title="Throughput", unit="tokens/s", scale=1.0),
        _efficiency(results, names),
        _memory(results, names),
        _step_times(results, names),
        _communication(results, names),
    )
    return [Named(f"{prefix}{kind}", chart, setting) for kind, chart in zip(KINDS, drawn, strict=True) if chart]


def standalone(chart: Chart) -> str:
    """Return a chart as a file of its own, in the page's light colours on white."""
    colours = dict(re.findall(r"--([\w-]+): (#\w+)", STYLE.split("@media")[0]))
    svg = re.sub(r"var\(--([\w-]+)\)", lambda match: colours[match[1]], chart.svg)
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert box is not None, "matplotlib writes it"
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="{box[1]}"'
    svg = svg.replace("<svg ", f'{opening} height="{box[2]}" font-family="sans-serif" ', 1)
    svg = svg.replace(" href=", " xlink:href=")
    ground = f'<rect width="100%" height="100%" fill="{colours["ground"]}"/>'
    return svg.replace(">", f">{ground}", 1) + "\n"


def _side_by_side(
    results: Sequence[CellResult], names: Mapping[str, int], metric: Metric, *, title: str, unit: str, scale: float
) -> Chart | None:
    """Draw a metric by number of workers, strategies side by side, with the confidence intervals of the repeats.

    Bars start at zero; if the values span more than a factor of ten, draw dots on a logarithmic axis.
    """
    workers = sorted({r.cell.workers for r in results})
    known = {(r.cell.strategy, r.cell.workers): m for r in good(results) if (m := mean(r, metric)) is not None}
    if not known:
        return None
    asked = {(r.cell.strategy, r.cell.workers): r for r in results}
    low, high = (pick(m.value for m in known.values()) / scale for pick in (min, max))
    log = low > 0 and high > 10 * low
    column = 0.93 * _WIDTH / len(workers) * 0.84 / len(names)
    with drawing(_WIDTH, 380) as (figure, axes):
        thickness = 0.84 / len(names)
        for index, name in enumerate(names):
            style = _SeriesStyle(names[name], name, column, None if log else thickness * 0.9)
            style.in_legend(axes)
            for place, count in enumerate(workers):
                at = place + (index - (len(names) - 1) / 2) * thickness
                if (name, count) in known:
                    _one(axes, at, known[name, count], scale, style)
                else:
                    axes.annotate(_missing(asked.get((name, count))), (at, 0.01), xycoords=("data", "axes fraction"),
                                  ha="center", va="bottom", color=MUTED, fontsize=style.font, rotation=90)  # fmt: skip
        axes.set_xticks(range(len(workers)), [_size(count, results) for count in workers])
        axes.set_xlim(-0.5, len(workers) - 0.5)
        axes.grid(visible=False, axis="x")
        if log:
            axes.set_yscale("log")
            axes.set_ylim(low / 1.6, high * 2.2)
            axes.yaxis.set_minor_formatter(ticks(_two_and_five))
        else:
            axes.set_ylim(0, high * 1.3)  # room for the numbers; wider intervals are clipped
        axes.set_ylabel(unit)
        axes.yaxis.set_major_formatter(ticks(short_number))
        _legend(figure, axes)
        return Chart(title, as_svg(figure, title), wide=True)


@dataclass(frozen=True)
class _SeriesStyle:
    """The style of one strategy next to others."""

    place: int
    name: str
    column: float
    """Pixels available for each number of workers."""
    width: float | None
    """Width of its bars; None if it is drawn as dots."""

    @property
    def font(self) -> float:
        """A size at which a number stays within its column."""
        return max(6.0, min(9.0, self.column - 5))

    @property
    def dot(self) -> float:
        """A size at which a dot does not cover the number next to it."""
        return max(4.0, min(8.0, self.column * 0.42))

    def in_legend(self, axes: Axes) -> None:
        """Add the strategy to the legend, even if none of its cells succeeded."""
        marker = _marker(self.place) if self.width is None else "s"
        alpha = 0.5 if self.width is not None and _starts_over(self.place) else 1.0
        axes.plot([], [], marker, markersize=9, color=_colour(self.place), alpha=alpha, label=self.name)


def _one(axes: Axes, at: float, found: Mean, scale: float, style: _SeriesStyle) -> None:
    """Draw a bar, or without a width a dot, with its interval and its number."""
    value = found.value / scale
    colour = _colour(style.place)
    if style.width is None:
        axes.plot([at], [value], _marker(style.place), markersize=style.dot, color=colour)
    else:
        axes.bar(at, value, style.width, color=colour, alpha=0.5 if _starts_over(style.place) else 1.0)
    if found.half_width:
        half = found.half_width / scale
        axes.errorbar([at], [value], [[min(half, value * 0.999)], [half]], fmt="none", ecolor=MUTED, elinewidth=1.2,
                      capsize=2.5)  # fmt: skip
    # Next to the interval, which would run through it.
    aside, side = (-2 if style.font == 9 else -1, "right") if found.half_width else (0, "center")
    axes.annotate(format_count(value), (at, value), xytext=(aside, 5 if style.width else 9), textcoords="offset points",
                  ha=side, va="bottom", fontsize=style.font, color=MUTED, rotation=90)  # fmt: skip


def _missing(result: CellResult | None) -> str:
    """Describe why a place in a chart is empty."""
    if result is None:
        return "not asked"
    if result.status != "ok":
        return status_in_words(result.status)
    return "not compared" if result.doubt is not None else "n/a"


def _memory(results: Sequence[CellResult], names: Mapping[str, int]) -> Chart | None:
    highest = max((m.value for r in good(results) if (m := mean(r, MEMORY)) is not None), default=0)
    unit, scale = ("GiB", _GIB) if highest >= 8 * _GIB else ("MiB", _MIB)
    return _side_by_side(results, names, MEMORY, title="Peak memory of a worker (tensors)", unit=unit, scale=scale)


def _efficiency(results: Sequence[CellResult], names: Mapping[str, int]) -> Chart | None:
    """Draw tokens/s per worker as a share of that with the fewest workers, next to what is possible."""
    shown = good(results)
    shares = {(r.cell.strategy, r.cell.workers): share for r in shown if (share := efficiency(r, shown)) is not None}
    if not shares:
        return None
    with drawing(_WIDTH, 340) as (figure, axes):
        counts = sorted({r.cell.workers for r in results})
        axes.axhline(100, color=MUTED, linewidth=1.2, linestyle=(0, (5, 3)), label="ideal")
        _possible(axes, shown)
        fewest = min(r.cell.workers for r in shown)
        for name, place in names.items():
            mine = sorted(r.cell.workers for r in shown if r.cell.strategy == name)
            ys = [100 * shares.get((name, count), 1.0) for count in mine]  # the first is the base
            if not mine:
                label = f"{name} (none succeeded)"
            elif mine[0] == fewest:
                label = name
            else:
                label = f"{name}, from {_size(mine[0], results)}"
            axes.plot(mine, ys, "--" if _starts_over(place) else "-", color=_colour(place), linewidth=2,
                      marker=_marker(place), markersize=5, label=label)  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [_size(count, results) for count in counts])
        axes.set_xlim(counts[0] / 1.1, counts[-1] * 1.1)
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_ylabel("percent of ideal")
        _legend(figure, axes)
        title = "Scaling efficiency"
        return Chart(title, as_svg(figure, title), wide=True)


def _possible(axes: Axes, shown: Sequence[CellResult]) -> None:
    """Draw what the cores allow, relative to the fewest workers of all.

    Strategies with another base have a higher line of their own, which is not drawn.
    """
    base = min(shown, key=lambda r: r.cell.workers)
    one_of = {r.cell.workers: r for r in sorted(shown, key=lambda r: r.cell.workers)}
    possible = [100 * ideal_efficiency(r, base) for r in one_of.values()]
    if min(possible) < 100:
        axes.plot(list(one_of), possible, color=MUTED, linewidth=1.2, linestyle=(0, (1, 2)),
                  label="as many cores as there are")  # fmt: skip


def _step_times(results: Sequence[CellResult], names: Mapping[str, int]) -> Chart:
    """Draw every measured step as a dot, with the median and the range from the 5th to the 95th percentile."""
    workers = sorted({r.cell.workers for r in results})
    rows = [(count, name) for count in workers for name in names]
    asked = {(r.cell.workers, r.cell.strategy): r for r in results}
    shown = {(r.cell.workers, r.cell.strategy): r for r in good(results)}
    with drawing(_WIDTH, 80 + 20 * len(rows)) as (figure, axes):
        for place, key in enumerate(rows):
            if (result := shown.get(key)) is not None:
                _steps(axes, place, result, names[key[1]])
            else:
                _leave_empty(axes, place, asked.get(key))
        _name_rows(axes, rows, results)
        for line in range(len(names), len(rows), len(names)):
            axes.axhline(line - 0.5, color=MUTED, linewidth=0.5)
        _spread(axes)
        axes.set_xlabel("milliseconds per step")
        title = "Step times"
        return Chart(f"{title}: every step, median, 5th to 95th percentile", as_svg(figure, title), wide=True)


def _steps(axes: Axes, place: int, result: CellResult, style: int) -> None:
    steps = [1000 * seconds for found in result.measured for seconds in found.step_seconds]
    colour = _colour(style)
    axes.plot(steps, [place] * len(steps), linestyle="none", marker=_marker(style), markersize=3.5, color=colour,
              alpha=0.4)  # fmt: skip
    axes.plot([quantile(steps, 0.05), quantile(steps, 0.95)], [place, place], color=colour, linewidth=2)
    axes.plot([quantile(steps, 0.5)], [place], marker="|", markersize=13, markeredgewidth=3, color=colour)


def _spread(axes: Axes) -> None:
    """Use a logarithmic axis if the values span more than a factor of 30."""
    low = axes.dataLim.x0
    high = axes.dataLim.x1
    if low > 0 and high > 30 * low:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(ticks(_two_and_five))
    else:
        axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(ticks(short_number))


def _two_and_five(value: float) -> str:
    """Label positions between powers of ten, if there is room."""
    return short_number(value) if f"{value:e}"[0] in "25" else ""


def _communication(results: Sequence[CellResult], names: Mapping[str, int]) -> Chart | None:
    """Draw exposed and hidden communication as shares of a step, for cells with several workers."""
    several = [r for r in results if r.cell.workers > 1]
    ordered = sorted(several, key=lambda r: (r.cell.workers, names[r.cell.strategy]))
    shown = good(ordered)
    found = [(mean(r, COMMUNICATION[1]), mean(r, COMMUNICATION[2])) for r in ordered]
    known = {
        place: (100 * exposed.value, 100 * hidden.value)
        for place, (exposed, hidden) in enumerate(found)
        if exposed is not None and hidden is not None and ordered[place] in shown
    }
    if not known:
        return None
    with drawing(_WIDTH, 90 + 22 * len(ordered)) as (figure, axes):
        exposed, hidden = zip(*known.values(), strict=True)
        axes.barh(list(known), exposed, 0.7, color=SERIES[1], label="exposed: nothing is computed meanwhile")
        axes.barh(list(known), hidden, 0.7, left=exposed, color=SERIES[5], label="overlapped with computation")
        for place, result in enumerate(ordered):
            if place not in known:
                _leave_empty(axes, place, result)
        _name_rows(axes, [(r.cell.workers, r.cell.strategy) for r in ordered], results)
        axes.set_xlim(0, 100)
        axes.set_xlabel("percent of the time of profiled steps")
        _legend(figure, axes)
        title = "Communication"
        return Chart(f"{title}, waiting for the slowest worker included", as_svg(figure, title), wide=True)


def _leave_empty(axes: Axes, place: int, result: CellResult | None) -> None:
    """Write in a row why nothing is drawn there."""
    axes.annotate(_missing(result), (0.006, place), xycoords=("axes fraction", "data"), va="center", color=MUTED,
                  fontsize=10)  # fmt: skip


def _name_rows(axes: Axes, rows: Sequence[tuple[int, str]], results: Sequence[CellResult]) -> None:
    """Name a row for each number of workers, or machines, and strategy, from the top."""
    axes.set_yticks(range(len(rows)), [f"{name}, {_size(count, results)}" for count, name in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")


def _legend(figure: Figure, axes: Axes) -> None:
    """Draw every label once, above the axes."""
    entries: dict[str, Any] = {}
    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
        entries.setdefault(label, handle)
    figure.legend(
        list(entries.values()), list(entries), loc="outside upper left", ncols=4, frameon=False, fontsize=11,
        labelcolor=MUTED,
    )  # fmt: skip


def _colour(place: int) -> str:
    return SERIES[place % len(SERIES)]


def _starts_over(place: int) -> bool:
    """Return whether an earlier series has the colour; then dashes, squares and paler bars tell them apart."""
    return place >= len(SERIES)


def _marker(place: int) -> str:
    return "s" if _starts_over(place) else "o"


def _size(workers: int, results: Sequence[CellResult]) -> str:
    """Return a number of workers, or that of their machines where numbers of machines are compared."""
    each = results[0].workers_per_machine
    return counted(workers, "worker") if each is None else counted(workers // each, "machine")
