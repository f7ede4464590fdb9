"""Charts as inline SVG that takes its colours and letters from the page around it, so it follows light and dark.

A chart is drawn by matplotlib in placeholder colours, which become CSS variables (`html.STYLE` defines them), and its
letters stay text, which the browser sets in the page's own font.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from headway.config import Batches
from headway.core.errors import missing_extra
from headway.telemetry.record import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]

#: Series in a comparison that get a colour of their own; further ones start over with another dash.
SERIES_COLOURS = 8

_INK, MUTED, _RULE, GROUND = "#000001", "#000002", "#000003", "#000004"
SERIES = tuple(f"#0000{number:02x}" for number in range(0x10, 0x10 + SERIES_COLOURS))
_VARIABLES = {
    _INK: "var(--ink)",
    MUTED: "var(--muted)",
    _RULE: "var(--rule)",
    GROUND: "var(--ground)",
    **{colour: f"var(--series-{index})" for index, colour in enumerate(SERIES)},
}
_Kind = Literal["solid", "dashed", "dotted", "faint", "dots"]
_DASHES: tuple[_Kind, ...] = ("solid", "dashed", "dotted")

#: Points across a chart. More cannot be told apart on a screen.
_POINTS = 1200

#: A run with more attempts than this gets their marks without numbers.
_NUMBERED_ATTEMPTS = 12

_RC = {
    "svg.fonttype": "none",
    "font.size": 12,
    "axes.edgecolor": _RULE,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _RULE,
    "grid.linewidth": 0.6,
    "text.color": _INK,
    "xtick.color": _RULE,
    "ytick.color": _RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
}


@dataclass(frozen=True)
class Entry:
    """One line of a chart's legend; the page draws it, since it can escape and wrap names."""

    label: str
    series: int
    kind: _Kind = "solid"


@dataclass(frozen=True)
class Chart:
    """An SVG element and what its colours mean."""

    title: str
    svg: str
    legend: tuple[Entry, ...] = ()
    wide: bool = False
    """Takes the whole width of the page."""


def smooth(values: Floats, half_window: int) -> Floats:
    """Centred moving average over up to `2 * half_window + 1` points, fewer at the ends. Shapes `(points,)`."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - half_window, 0), np.minimum(index + half_window + 1, len(values))
    means: Floats = (sums[high] - sums[low]) / (high - low)
    return means


def envelope(steps: Steps, values: Floats, buckets: int) -> tuple[Steps, Floats, Floats]:
    """Lowest and highest value in each of `buckets` stretches of neighbouring points: no spike is lost.

    Needs at least one point per bucket. Returns the stretches' middle steps, lows and highs, all of shape `(buckets,)`.
    """
    edges = np.linspace(0, len(values), buckets + 1).astype(np.int64)
    middles = steps[(edges[:-1] + edges[1:]) // 2]
    return middles, np.minimum.reduceat(values, edges[:-1]), np.maximum.reduceat(values, edges[:-1])


def thin(steps: Steps, values: Floats) -> tuple[Steps, Floats]:
    """At most `_POINTS` of a smooth curve's points, both ends among them."""
    if len(steps) <= _POINTS:
        return steps, values
    chosen = np.linspace(0, len(steps) - 1, _POINTS).astype(np.int64)
    return steps[chosen], values[chosen]


def half_window(points: int) -> int:
    """Half of the smoothing window: one percent of the curve in all, nothing for short ones."""
    return points // 200 if points >= 100 else (2 if points >= 40 else 0)


def loss_chart(run: Run) -> Chart | None:
    """Training and validation loss by step; None when no loss was recorded."""
    steps, losses = run.metrics.finite("train/loss")
    evaluated, validation = run.metrics.finite("evaluation/loss")
    if not len(steps) and not len(evaluated):
        return None
    with drawing(1040, 380) as (figure, axes):
        legend = _curve(axes, steps, losses, "training loss")
        if len(evaluated):
            axes.plot(evaluated, validation, color=SERIES[1], linewidth=1.2, marker="o", markersize=4.5, zorder=4)
            legend.append(Entry("validation loss", 1, "dots"))
        _mark_attempts(axes, run, numbered=True)
        _uniform_guess(axes, run.vocab_size, losses)
        axes.set_ylabel("loss (nats per token)")
        _step_axis(axes, run.batches)
        return Chart("Loss", as_svg(figure, "Loss by step"), tuple(legend), wide=True)


def metric_chart(
    run: Run, name: str, title: str, unit: str = "", *, from_zero: bool = False, may_be_log: bool = False
) -> Chart | None:
    """One metric by step, small; None when it was never recorded.

    Args:
        run: Whose metric.
        name: Of the metric.
        title: Of the chart.
        unit: On the vertical axis.
        from_zero: Start the vertical axis at zero, for amounts that are compared by height.
        may_be_log: Use a logarithmic axis when the values span more than a factor of 30.
    """
    steps, values = run.metrics.finite(name)
    if not len(steps):
        return None
    with drawing(340, 240) as (figure, axes):
        _curve(axes, steps, values, title)
        if may_be_log and values.min() > 0 and values.max() > 30 * values.min():
            axes.set_yscale("log")
        elif from_zero:
            axes.set_ylim(bottom=0, top=values.max() * 1.08 or 1)
        _mark_attempts(axes, run, numbered=False)
        axes.set_ylabel(unit)
        axes.yaxis.set_major_formatter(ticks(short_number))
        _step_axis(axes, None)
        return Chart(title, as_svg(figure, f"{title} by step"))


def overlay_chart(runs: Mapping[str, Run], by: Literal["step", "tokens"]) -> Chart | None:
    """Smoothed training losses of several runs, by name, over one axis; their validation losses are dots."""
    legend: list[Entry] = []
    with drawing(1040, 380) as (figure, axes):
        for index, (name, run) in enumerate(runs.items()):
            batches = Batches(((0, 1),)) if by == "step" else run.batches
            steps, losses = run.metrics.finite("train/loss")
            if not len(steps) or batches is None:
                continue
            place, _ = token_scale(batches)
            dash = _DASHES[index // SERIES_COLOURS % len(_DASHES)]
            colour = SERIES[index % SERIES_COLOURS]
            at, mean = thin(steps, smooth(losses, half_window(len(losses))))
            axes.plot(place(at), mean, color=colour, linewidth=1.8, linestyle=dash)
            evaluated, validation = run.metrics.finite("evaluation/loss")
            axes.plot(place(evaluated), validation, color=colour, linestyle="none", marker="o", markersize=4.5)
            legend.append(Entry(name, index % SERIES_COLOURS, dash))
        axes.set_ylabel("loss (nats per token)")
        axes.set_xlabel(by)
        axes.xaxis.set_major_formatter(ticks(short_number))
        axes.margins(x=0.01)
        title = f"Training loss by {by}, validation loss as dots"
        return Chart(title, as_svg(figure, title), tuple(legend), wide=True) if legend else None


def short_number(value: float) -> str:
    """A tick's label: 20000 -> "20k", 1.5e9 -> "1.5B", 0.00025 -> "2.5e-4"."""
    for limit, scale, suffix in ((1e12, 1e12, "T"), (1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / scale:g}{suffix}"
    if 0 < abs(value) < 1e-3:
        exponent = math.floor(math.log10(abs(value)) + 1e-9)
        return f"{value / 10**exponent:.3g}e{exponent}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


@contextmanager
def drawing(width: int, height: int) -> Iterator[tuple[Figure, Axes]]:
    """A figure of `width` x `height` CSS pixels with one pair of axes; the block draws in the page's style."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("matplotlib", "report", "Drawing charts") from error
    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")
        yield figure, figure.add_subplot()


def _curve(axes: Axes, steps: Steps, values: Floats, label: str) -> list[Entry]:
    """Every value, faint, and a smoothed line over it; short series are drawn once, with their points."""
    if not len(steps):
        return []
    half = half_window(len(values))
    if half == 0:
        axes.plot(
            steps,
            values,
            color=SERIES[0],
            linewidth=1.8,
            marker="o" if len(values) < 40 else "",
            markersize=3.5,
        )
        return [Entry(label, 0)]
    if len(values) > 2 * _POINTS:
        middles, low, high = envelope(steps, values, _POINTS)
        # The outline keeps a spike visible where the band is thinner than a pixel.
        axes.fill_between(middles, low, high, color=SERIES[0], alpha=0.22, linewidth=0.7)
        behind = "lowest to highest"
    else:
        axes.plot(steps, values, color=SERIES[0], alpha=0.3, linewidth=0.8)
        behind = "every step"
    axes.plot(*thin(steps, smooth(values, half)), color=SERIES[0], linewidth=1.8)
    return [Entry(f"{label}, mean over {2 * half + 1:,} steps", 0), Entry(behind, 0, "faint")]


def _uniform_guess(axes: Axes, vocab_size: int | None, losses: Floats) -> None:
    """ln(vocabulary), the loss of a model that knows nothing; left out where it would squash the curve."""
    if vocab_size is None or vocab_size < 2 or not len(losses) or losses.max() < 0.6 * math.log(vocab_size):
        return
    level = math.log(vocab_size)
    axes.axhline(level, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        f"uniform guess: ln {vocab_size:,} = {level:.2f}",
        (1, level), xycoords=("axes fraction", "data"), xytext=(0, 4), textcoords="offset points",
        ha="right", color=MUTED, fontsize=11,
    )  # fmt: skip


def _mark_attempts(axes: Axes, run: Run, *, numbered: bool) -> None:
    """A vertical line where each attempt but the first went on from."""
    first, *later = sorted(run.metrics.spans) or [0]
    for number in later:
        step = run.metrics.spans[number].first_step - 1
        axes.axvline(step, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
        if numbered and number - first < _NUMBERED_ATTEMPTS:
            axes.annotate(
                f"attempt {number}", (step, 1), xycoords=("data", "axes fraction"), xytext=(4, -20),
                textcoords="offset points", color=MUTED, fontsize=10, rotation=90, va="top",
            )  # fmt: skip


def token_scale(batches: Batches) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Tokens trained on after so many steps, and the steps after so many tokens; both of any numbers, in between and
    beyond the ends too, since axes have margins."""
    steps = np.array([first for first, _ in batches.parts], dtype=np.float64)
    tokens = np.array([batches.tokens_before(first) for first, _ in batches.parts], dtype=np.float64)
    slopes = np.array([rows * batches.sequence_length for _, rows in batches.parts], dtype=np.float64)

    def line(x: Any, knots: Floats, values: Floats, slope: Floats) -> Any:
        part = np.maximum(np.searchsorted(knots, x, side="right") - 1, 0)
        return values[part] + (np.asarray(x) - knots[part]) * slope[part]

    return lambda x: line(x, steps, tokens, slopes), lambda x: line(x, tokens, steps, 1 / slopes)


def _step_axis(axes: Axes, batches: Batches | None) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("step")
    axes.margins(x=0.01)
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto" if batches else 4, integer=True))
    axes.xaxis.set_major_formatter(ticks(short_number))
    if batches:
        top = axes.secondary_xaxis("top", functions=token_scale(batches))
        top.xaxis.set_major_formatter(ticks(short_number))
        top.set_xlabel("tokens")
        top.spines["top"].set_visible(False)
        top.tick_params(length=0)


def ticks(label: Callable[[float], str]) -> Any:
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: label(value))


def as_svg(figure: Figure, label: str) -> str:
    """The figure as one SVG element without fixed size, in the page's colours."""
    import matplotlib

    buffer = io.StringIO()
    # The salt makes ids that are equal for equal charts and differ between the charts of a page.
    with matplotlib.rc_context({**_RC, "svg.hashsalt": label}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    # Inside a page a <style> would hold for all of it, the names of groups would be there once per chart, and links
    # need no namespace.
    svg = re.sub(r"<(metadata|style)[ >].*?</\1>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg).replace("xlink:href", "href")
    svg = re.sub(r'^<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg \1 role="img" aria-label="{label}">', svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg.strip()
