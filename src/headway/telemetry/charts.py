"""Charts of pages: what is to be drawn, as plain values. The page draws them itself, by uPlot (`static/figures.js`).

Colours and letters are the page's own, so charts follow light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.config import Batches
from headway.core.arrays import Floats
from headway.telemetry.curves import POINTS, Steps, envelope, half_window, smooth, thin
from headway.telemetry.record import Run

#: Series with a colour of their own.
SERIES_COLOURS = 8
Kind = Literal["solid", "dashed", "dotted", "faint", "dots", "band", "cross", "bars"]

#: Attempts of a run beyond which their marks have no numbers.
_NUMBERED_ATTEMPTS = 12


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
    """A chart and what its colours mean."""

    title: str
    svg: str = ""
    """The chart as one SVG element, if it was drawn beforehand (`telemetry.drawing`)."""
    legend: tuple[Entry, ...] = ()
    wide: bool = False
    """Takes the whole width of the page."""
    plot: Mapping[str, Any] | None = None
    """What the page draws: `plot_of`."""


class Line(NamedTuple):
    """One line of a chart."""

    x: NDArray[Any]
    """Rising positions, (points,)."""
    y: Floats
    """Finite values, (points,)."""
    series: int = 0
    """Number of its colour."""
    kind: Kind = "solid"
    name: str = ""
    """What a reader sees next to the value under the cursor; nothing without one."""


def plot_of(lines: Sequence[Line], *, x: str = "step", y: str = "", **more: Any) -> dict[str, Any]:
    """Return what the page draws, as values for JSON.

    Args:
        lines: The lines. Two that follow each other with the kind `band` are the ends of one.
        x: Label of the horizontal axis.
        y: Label of the vertical axis.
        more: `log_x`, `log_y`, `from_zero`: axes. `reach`: a position up to which the horizontal one goes. `marks`:
            vertical lines, each with `x`, `text` and `dotted`. `shades`: pairs of positions. `level`: a horizontal line
            with `y` and `text`. `tokens`: positions of steps and the tokens there, for a second axis.
    """
    at = np.unique(np.concatenate([np.asarray(line.x, dtype=np.float64) for line in lines] or [np.empty(0)]))
    columns = [_column(at, line) for line in lines]
    series = [{"series": line.series, "kind": line.kind, "name": line.name} for line in lines]
    return {"x": x, "y": y, "data": [at.tolist(), *columns], "series": series, **more}


def _column(at: Floats, line: Line) -> list[float | None]:
    values: list[float | None] = [None] * len(at)
    for place, value in zip(np.searchsorted(at, line.x).tolist(), line.y.tolist(), strict=True):
        values[place] = float(f"{value:.6g}")  # more digits than a screen shows
    return values


def loss_label(language_model: bool) -> str:
    """Return the label of an axis of losses."""
    return "loss (nats per token)" if language_model else "loss"


def loss_chart(run: Run) -> Chart | None:
    """Return training and validation loss by step; None if no finite loss was recorded."""
    steps, losses = run.metrics.finite("train/loss")
    lines, legend = curve_of(steps, losses, "training loss")
    dots = {"evaluation/loss": "validation loss", "evaluation/replay_loss": "validation loss of replayed sources"}
    for series, (name, label) in enumerate(dots.items(), 1):
        at, values = run.metrics.finite(name)
        if len(at):
            lines.append(Line(at, values, series, "dots", label))
            legend.append(Entry(label, series, "dots"))
    if not lines:
        return None
    more: dict[str, Any] = {"level": _uniform_guess(run.vocab_size if run.is_language_model else None, losses)}
    if run.is_language_model and run.batches is not None:
        more["tokens"] = _tokens(run.batches, max(float(line.x[-1]) for line in lines))
    recorded, _ = run.metrics.series("train/loss")
    more["reach"] = float(recorded[-1]) if len(recorded) else None
    shades = _not_finite(run, "train/loss")
    legend += [Entry("not finite", 7, "band")] if shades else []
    plot = plot_of(lines, y=loss_label(run.is_language_model), marks=_marks(run), shades=shades, **more)
    return Chart("Loss", legend=tuple(legend), wide=True, plot=plot)


def metric_chart(
    run: Run, name: str, title: str, unit: str = "", *, from_zero: bool = False, may_be_log: bool = False
) -> Chart | None:
    """Return a small chart of one metric by step; None if it was never recorded.

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
    lines, _ = curve_of(steps, values, title)
    is_log = bool(may_be_log and values.min() > 0 and values.max() > 30 * values.min())
    shades = _not_finite(run, name)
    legend = (Entry("not finite", 7, "band"),) if shades else ()
    marks = [{**mark, "text": ""} for mark in _marks(run)]
    reach = float(run.metrics.series(name)[0][-1])
    plot = plot_of(lines, y=unit, marks=marks, shades=shades, log_y=is_log, from_zero=from_zero, reach=reach)
    return Chart(title, legend=legend, plot=plot)


def curve_of(steps: Steps, values: Floats, label: str) -> tuple[list[Line], list[Entry]]:
    """Return every value faintly with a smoothed line over it, and their legend; short series once, with points."""
    if not len(steps):
        return [], []
    half = half_window(len(values))
    if half == 0:
        points = [Line(steps, values, 0, "dots")] if len(values) < 40 else []
        return [*points, Line(steps, values, name=label)], [Entry(label, 0)]
    if len(values) > 2 * POINTS:
        middles, low, high = envelope(steps, values, POINTS)
        behind = [Line(middles, high, 0, "band"), Line(middles, low, 0, "band")]
        words = "lowest to highest"
    else:
        behind = [Line(steps, values, 0, "faint")]
        words = "every step"
    mean = Line(*thin(steps, smooth(values, half)), name=label)
    return [*behind, mean], [Entry(f"{label}, mean over {2 * half + 1:,} steps", 0), Entry(words, 0, "faint")]


def _not_finite(run: Run, name: str) -> list[tuple[float, float]]:
    """Return the ranges of steps at which a metric was NaN or infinite."""
    steps, values = run.metrics.series(name)
    bad = np.flatnonzero(~np.isfinite(values))
    if not len(bad):
        return []
    # Merge ranges that a screen could not show separately.
    near = (steps[-1] - steps[0]) / POINTS
    cuts = np.flatnonzero((np.diff(bad) > 1) & (np.diff(steps[bad]) > near))
    pairs = zip(bad[[0, *(cuts + 1)]], bad[[*cuts, -1]], strict=True)
    return [(float(steps[first]) - 0.5, float(steps[last]) + 0.5) for first, last in pairs]


def _uniform_guess(vocab_size: int | None, losses: Floats) -> dict[str, Any] | None:
    """Return the level of ln(vocabulary), the loss of a uniform guess; None where it would squash the curve."""
    if vocab_size is None or vocab_size < 2 or not len(losses) or losses.max() < 0.6 * math.log(vocab_size):
        return None
    level = math.log(vocab_size)
    return {"y": level, "text": f"uniform guess: ln {vocab_size:,} = {level:.2f}"}


def _marks(run: Run) -> list[dict[str, Any]]:
    """Return a mark where each attempt but the first resumed, and where the run was changed."""
    first, *later = sorted(run.metrics.spans) or [0]
    found = []
    for number in later:
        text = f"attempt {number}" if number - first < _NUMBERED_ATTEMPTS else ""
        found.append({"x": run.metrics.spans[number].first_step - 1, "text": text, "dotted": True})
    return found + [{"x": one.first_step, "text": "changed", "dotted": False} for one in run.segments[1:]]


def _tokens(batches: Batches, last: float) -> list[list[float]]:
    """Return the steps between which tokens rise evenly, and the tokens at them."""
    steps = sorted({0.0, last, *(float(first) for first, _ in batches.token_parts() if first < last)})
    return [steps, [float(batches.tokens_before(int(step))) for step in steps]]


def dashed(index: int) -> Kind:
    """Return the kind of line of a run among many: beyond the number of colours they are dashed, then dotted."""
    kinds: tuple[Kind, ...] = ("solid", "dashed", "dotted")
    return kinds[index // SERIES_COLOURS % len(kinds)]
