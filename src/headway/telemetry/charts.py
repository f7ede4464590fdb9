"""Charts as inline SVG that takes its colours and letters from the page around it, so it follows light and dark.

A chart is drawn by matplotlib in placeholder colours, which become CSS variables (`html.STYLE` defines them), and its
letters stay text, which the browser sets in the page's own font.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
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
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]

#: Series with a colour of their own.
SERIES_COLOURS = 8

INK, MUTED, _RULE, GROUND = "#000001", "#000002", "#000003", "#000004"
SERIES = tuple(f"#0000{number:02x}" for number in range(0x10, 0x10 + SERIES_COLOURS))
_VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    _RULE: "var(--rule)",
    GROUND: "var(--ground)",
    **{colour: f"var(--series-{index})" for index, colour in enumerate(SERIES)},
}
Kind = Literal["solid", "dashed", "dotted", "faint", "dots", "band"]

#: Points across a chart. A screen cannot show more.
_POINTS = 1200

#: Attempts of a run beyond which their marks have no numbers.
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
    "text.color": INK,
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
    series: int | Literal["ink", "muted"]
    """Number of its colour, or what is none of the series' colours."""
    kind: Kind = "solid"

    @property
    def variable(self) -> str:
        """Return the page's name of the colour."""
        return f"--series-{self.series}" if isinstance(self.series, int) else f"--{self.series}"


@dataclass(frozen=True)
class Chart:
    """An SVG element and what its colours mean."""

    title: str
    svg: str
    legend: tuple[Entry, ...] = ()
    wide: bool = False
    """Takes the whole width of the page."""


def smooth(values: Floats, half_window: int) -> Floats:
    """Return the centred moving average over up to `2 * half_window + 1` points, fewer at the ends. Shapes
    `(points,)`."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - half_window, 0), np.minimum(index + half_window + 1, len(values))
    means: Floats = (sums[high] - sums[low]) / (high - low)
    return means


def envelope(steps: Steps, values: Floats, buckets: int) -> tuple[Steps, Floats, Floats]:
    """Return the lowest and highest value in each of `buckets` groups of neighbouring points, so that no spike is lost.

    Needs at least one point per bucket. Returns the groups' middle steps, lows and highs, all of shape `(buckets,)`.
    """
    edges = np.linspace(0, len(values), buckets + 1).astype(np.int64)
    middles = steps[(edges[:-1] + edges[1:]) // 2]
    return middles, np.minimum.reduceat(values, edges[:-1]), np.maximum.reduceat(values, edges[:-1])


def thin(steps: Steps, values: Floats) -> tuple[Steps, Floats]:
    """Return at most `_POINTS` of a smooth curve's points, including both ends."""
    if len(steps) <= _POINTS:
        return steps, values
    chosen = np.linspace(0, len(steps) - 1, _POINTS).astype(np.int64)
    return steps[chosen], values[chosen]


def half_window(points: int) -> int:
    """Return half of the smoothing window: one percent of the curve in total, zero for short curves."""
    return points // 200 if points >= 100 else (2 if points >= 40 else 0)


def loss_label(language_model: bool) -> str:
    """Return the label of an axis of losses."""
    return "loss (nats per token)" if language_model else "loss"


def loss_chart(run: Run) -> Chart | None:
    """Draw training and validation loss by step; None if no finite loss was recorded."""
    steps, losses = run.metrics.finite("train/loss")
    evaluated, validation = run.metrics.finite("evaluation/loss")
    if not len(steps) and not len(evaluated):
        return None
    with drawing(1040, 380) as (figure, axes):
        legend = _curve(axes, steps, losses, "training loss")
        if len(evaluated):
            axes.plot(evaluated, validation, color=SERIES[1], linewidth=1.2, marker="o", markersize=4.5, zorder=4)
            legend.append(Entry("validation loss", 1, "dots"))
        replayed, replay = run.metrics.finite("evaluation/replay_loss")
        if len(replayed):
            axes.plot(replayed, replay, color=SERIES[2], linewidth=1.2, marker="o", markersize=4.5, zorder=4)
            legend.append(Entry("validation loss of replayed sources", 2, "dots"))
        legend += _shade_not_finite(axes, run, "train/loss")
        _mark_attempts(axes, run, numbered=True)
        _mark_segments(axes, run, labelled=True)
        _uniform_guess(axes, run.vocab_size if run.is_language_model else None, losses)
        axes.set_ylabel(loss_label(run.is_language_model))
        _step_axis(axes, run.batches if run.is_language_model else None)
        return Chart("Loss", as_svg(figure, "Loss by step"), tuple(legend), wide=True)


def metric_chart(
    run: Run, name: str, title: str, unit: str = "", *, from_zero: bool = False, may_be_log: bool = False
) -> Chart | None:
    """Draw a small chart of one metric by step; None if it was never recorded.

    Args:
        run: The run with the metric.
        name: Name of the metric.
        title: Title of the chart.
        unit: Unit on the vertical axis.
        from_zero: Start the vertical axis at zero, for amounts that are compared by height.
        may_be_log: Use a logarithmic axis when the values span more than a factor of 30.
    """
    steps, values = run.metrics.finite(name)
    if not len(steps):
        return None
    with drawing(340, 240) as (figure, axes):
        _curve(axes, steps, values, title)
        axes.yaxis.set_major_formatter(number_ticks())
        if may_be_log and values.min() > 0 and values.max() > 30 * values.min():
            axes.set_yscale("log")
            log_ticks(axes.yaxis, float(values.min()), float(values.max()))
        elif from_zero:
            axes.set_ylim(bottom=0, top=values.max() * 1.08 or 1)
        legend = tuple(_shade_not_finite(axes, run, name))
        _mark_attempts(axes, run, numbered=False)
        _mark_segments(axes, run, labelled=False)
        axes.set_ylabel(unit)
        _step_axis(axes, None)
        return Chart(title, as_svg(figure, f"{title} by step"), legend)


def short_number(value: float) -> str:
    """Format a single number: 20000 -> "20k", 1.5e9 -> "1.5B", 0.00025 -> "2.5e-4"."""
    for limit, scale, suffix in ((1e12, 1e12, "T"), (1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / scale:g}{suffix}"
    if 0 < abs(value) < 1e-3:
        return _with_exponent(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def _with_exponent(value: float) -> str:
    exponent = math.floor(math.log10(abs(value)) + 1e-9)
    return f"{value / 10**exponent:.3g}e{exponent}"


def axis_labels(values: Sequence[float]) -> list[str]:
    """Format the labels of one axis consistently: "8k" next to "10k", "1e-3" next to "5e-4".

    All use the unit of the largest one, unless the axis spans so much that each needs its own.
    """
    largest = max(map(abs, values), default=0.0)
    # At zero, a locator may put a rounding error.
    clean = [value if abs(value) > 1e-12 * largest else 0.0 for value in values]
    smallest = min((abs(value) for value in clean if value), default=0.0)
    if 0 < smallest < 1e-3:
        return [_with_exponent(value) if 0 < abs(value) < 1 else short_number(value) for value in clean]
    if largest < 1e4:
        return [short_number(value) for value in clean]
    units = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
    scale, suffix = next(unit for unit in units if largest >= unit[0])
    if smallest >= max(1e3, 0.1 * scale):
        return [f"{value / scale:g}{suffix}" if value else "0" for value in clean]
    return [f"{value / 1e3:g}k" if 1e3 <= abs(value) < 1e4 else short_number(value) for value in clean]


@contextmanager
def drawing(width: int, height: int) -> Iterator[tuple[Figure, Axes]]:
    """Make a figure of `width` x `height` CSS pixels with one pair of axes; the block draws in the page's style."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("matplotlib", "report", "Drawing charts") from error
    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")
        yield figure, figure.add_subplot()


def _curve(axes: Axes, steps: Steps, values: Floats, label: str) -> list[Entry]:
    """Draw every value faintly, and a smoothed line over it; draw short series once, with their points."""
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


def _shade_not_finite(axes: Axes, run: Run, name: str) -> list[Entry]:
    """Shade the steps at which a metric was NaN or infinite, which also keeps them on the axis."""
    steps, values = run.metrics.series(name)
    bad = np.flatnonzero(~np.isfinite(values))
    if not len(bad):
        return []
    # Merge ranges that a screen could not show separately.
    near = (steps[-1] - steps[0]) / _POINTS
    cuts = np.flatnonzero((np.diff(bad) > 1) & (np.diff(steps[bad]) > near))
    for first, last in zip(bad[[0, *(cuts + 1)]], bad[[*cuts, -1]], strict=True):
        # The outline keeps a single step visible.
        axes.axvspan(steps[first] - 0.5, steps[last] + 0.5, color=SERIES[7], alpha=0.25, linewidth=1)
    return [Entry("not finite", 7, "band")]


def _uniform_guess(axes: Axes, vocab_size: int | None, losses: Floats) -> None:
    """Draw ln(vocabulary), the loss of a uniform guess; omit it where it would squash the curve."""
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
    """Draw a vertical line where each attempt but the first resumed."""
    first, *later = sorted(run.metrics.spans) or [0]
    for number in later:
        step = run.metrics.spans[number].first_step - 1
        axes.axvline(step, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
        if numbered and number - first < _NUMBERED_ATTEMPTS:
            axes.annotate(
                f"attempt {number}", (step, 1), xycoords=("data", "axes fraction"), xytext=(4, -20),
                textcoords="offset points", color=MUTED, fontsize=10, rotation=90, va="top",
            )  # fmt: skip


def _mark_segments(axes: Axes, run: Run, *, labelled: bool) -> None:
    """Draw a vertical line where the run was changed."""
    for segment in run.segments[1:]:
        axes.axvline(segment.first_step, color=MUTED, linewidth=1.1)
        if labelled:
            axes.annotate(
                "changed", (segment.first_step, 0), xycoords=("data", "axes fraction"), xytext=(4, 6),
                textcoords="offset points", color=MUTED, fontsize=10, rotation=90, va="bottom",
            )  # fmt: skip


def token_scale(batches: Batches) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return functions from steps to tokens and from tokens to steps.

    Both accept any numbers, in between and beyond the ends too, since axes have margins.
    """
    parts = batches.token_parts()
    steps = np.array([first for first, _ in parts], dtype=np.float64)
    tokens = np.array([batches.tokens_before(first) for first, _ in parts], dtype=np.float64)
    slopes = np.array([per_step for _, per_step in parts], dtype=np.float64)

    def line(x: Any, knots: Floats, values: Floats, slope: Floats) -> Any:
        part = np.maximum(np.searchsorted(knots, x, side="right") - 1, 0)
        return values[part] + (np.asarray(x) - knots[part]) * slope[part]

    return lambda x: line(x, steps, tokens, slopes), lambda x: line(x, tokens, steps, 1 / slopes)


def _step_axis(axes: Axes, batches: Batches | None) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("step")
    axes.margins(x=0.01)
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto" if batches else 4, integer=True))
    axes.xaxis.set_major_formatter(number_ticks())
    if batches:
        top = axes.secondary_xaxis("top", functions=token_scale(batches))
        top.xaxis.set_major_formatter(number_ticks())
        top.set_xlabel("tokens")
        top.spines["top"].set_visible(False)
        top.tick_params(length=0)


def ticks(label: Callable[[float], str]) -> Any:
    """Label every tick by itself."""
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: label(value))


def number_ticks() -> Any:
    """Label the ticks of an axis consistently, as `axis_labels` does."""
    from matplotlib.ticker import Formatter

    class Numbers(Formatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return short_number(x)

        def format_ticks(self, values: Sequence[float]) -> list[str]:
            # A locator also yields ticks beyond the ends, which are not drawn and must not determine the unit.
            low, high = sorted(self.axis.get_view_interval()) if self.axis else (-math.inf, math.inf)
            shown = [value for value in values if low <= value <= high]
            labels = iter(axis_labels(shown))
            return [next(labels) if low <= value <= high else "" for value in values]

    return Numbers()


def log_ticks(axis: Axis, low: float, high: float) -> None:
    """Set ticks of a logarithmic axis.

    These are powers of ten, with 2 and 5 in between if there are few, or round numbers within a single decade.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    if high < 10 * low:
        axis.set_major_locator(MaxNLocator(nbins=4))
    else:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1e3 * low else (1,)))
    # Otherwise matplotlib labels the lines in between, in its own style.
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(number_ticks())


def as_svg(figure: Figure, label: str) -> str:
    """Return the figure as one SVG element without fixed size, in the page's colours."""
    import matplotlib

    buffer = io.StringIO()
    # The salt makes ids equal for equal charts, and different for charts of one page.
    with matplotlib.rc_context({**_RC, "svg.hashsalt": label}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    # Inside a page a <style> would apply to the whole page, ids of groups would repeat for each chart, and links need
    # no namespace.
    svg = re.sub(r"<(metadata|style)[ >].*?</\1>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg).replace("xlink:href", "href")
    svg = re.sub(r'^<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg \1 role="img" aria-label="{label}">', svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg.strip()
