"""The chart of a comparison: the losses of several runs over one axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from headway.config import Batches
from headway.core.arrays import Floats
from headway.telemetry.charts import SERIES_COLOURS, Chart, Entry, Line, dashed, loss_label, plot_of
from headway.telemetry.curves import POINTS, half_window, smooth, thin, token_scale
from headway.telemetry.record import Run

Axis = Literal["step", "tokens", "time"]

#: Units of time, each with the seconds from which on a chart uses it.
_UNITS = (("h", 3600, 7200.0), ("min", 60, 120.0), ("s", 1, 0.0))


def overlay_chart(runs: Mapping[str, Run | Sequence[Run]], by: Axis) -> Chart | None:
    """Return smoothed training losses of several runs over one axis; validation losses are dots.

    Of several runs under one name, such as seeds of one config, it shows the mean, and a band from the lowest to the
    highest. If a run's loss is not finite up to its end, its curve ends with a cross, and the axis extends to its last
    step.
    """
    legend: list[Entry] = []
    lines: list[Line] = []
    reach = 0.0
    everyone: list[Run] = []
    unit, seconds = _unit_of_time(runs)
    for index, (name, found) in enumerate(runs.items()):
        members = [found] if isinstance(found, Run) else list(found)
        members = [run for run in members if len(run.metrics.finite("train/loss")[0])]
        scales = [_scale(run, by, seconds) for run in members]
        known = [(run, scale) for run, scale in zip(members, scales, strict=True) if scale is not None]
        if not known:
            continue
        everyone += [run for run, _ in known]
        reach = max(reach, *(float(scale(run.metrics.last_step)) for run, scale in known))
        if len(known) == 1:
            drawn, label = _lines_of_run(*known[0], name, index)
        else:
            drawn, label = _lines_of_group(known, name, index)
        lines += drawn
        legend.append(Entry(label, index % SERIES_COLOURS, dashed(index)))
    title = f"Training loss by {by}, validation loss as dots"
    if not legend:
        return None
    label = loss_label(all(run.is_language_model for run in everyone))
    x = f"time ({unit})" if by == "time" else by
    return Chart(title, legend=tuple(legend), wide=True, plot=plot_of(lines, x=x, y=label, reach=reach))


def _unit_of_time(runs: Mapping[str, Run | Sequence[Run]]) -> tuple[str, int]:
    """Return the unit in which the longest run is a number of a few digits, and its seconds."""
    members = [run for found in runs.values() for run in ([found] if isinstance(found, Run) else found)]
    times = [run.metrics.finite("time")[1] for run in members]
    longest = max((float(of.max() - of[0]) for of in times if len(of)), default=0.0)
    return next((name, seconds) for name, seconds, least in _UNITS if longest >= least)


def _scale(run: Run, by: Axis, unit_seconds: int) -> Callable[[Any], Any] | None:
    """Return the function from steps to positions on an axis; None if the run does not tell them."""
    if by == "time":
        steps, times = run.metrics.finite("time")
        if not len(steps):
            return None
        since = (np.maximum.accumulate(times) - times[0]) / unit_seconds  # a clock may be set back
        return lambda at: np.interp(at, steps, since)
    batches = Batches(((0, 1),)) if by == "step" else run.batches
    return None if batches is None else token_scale(batches)[0]


def _lines_of_run(run: Run, scale: Callable[[Any], Any], name: str, index: int) -> tuple[list[Line], str]:
    """Return the lines of one run, and what the legend says of it."""
    series = index % SERIES_COLOURS
    steps, losses = run.metrics.finite("train/loss")
    half = half_window(len(losses))
    at, mean = thin(steps, smooth(losses, half))
    lines = [Line(scale(at), mean, series, dashed(index), name)]
    since = run.metrics.not_finite_since("train/loss")
    if since is not None:
        lines.append(Line(scale(at[-1:]), mean[-1:], series, "cross"))
    evaluated, validation = run.metrics.finite("evaluation/loss")
    lines.append(Line(scale(evaluated), validation, series, "dots"))
    return lines, _legend_label(name, half, since)


def _lines_of_group(runs: Sequence[tuple[Run, Callable[[Any], Any]]], name: str, index: int) -> tuple[list[Line], str]:
    """Return the lines of several runs under one name, and what the legend says of them."""
    series = index % SERIES_COLOURS
    longest = max(len(run.metrics.finite("train/loss")[0]) for run, _ in runs)
    half = half_window(longest)
    at, losses = _on_one_axis(runs, "train/loss", half, min(POINTS, longest))
    bounds = [Line(at, losses.max(axis=0), series, "band"), Line(at, losses.min(axis=0), series, "band")]
    lines = [*bounds, Line(at, losses.mean(axis=0), series, dashed(index), name)]
    evaluated = [run.metrics.finite("evaluation/loss")[0] for run, _ in runs]
    if all(map(len, evaluated)):
        places, validation = _on_one_axis(runs, "evaluation/loss", 0, min(map(len, evaluated)))
        lines.append(Line(places, validation.mean(axis=0), series, "dots"))
    since = [found for run, _ in runs if (found := run.metrics.not_finite_since("train/loss")) is not None]
    return lines, _legend_label(f"{name}: mean of {len(runs)} runs, lowest to highest", half, min(since, default=None))


def _on_one_axis(
    runs: Sequence[tuple[Run, Callable[[Any], Any]]], metric: str, half: int, points: int
) -> tuple[Floats, Floats]:
    """Return positions that all runs have reached, (points,), and their values there, (runs, points)."""
    series = []
    for run, scale in runs:
        steps, values = run.metrics.finite(metric)
        series.append((np.asarray(scale(steps), dtype=np.float64), smooth(values, half)))
    first = max(at[0] for at, _ in series)
    last = max(first, min(at[-1] for at, _ in series))
    places = np.unique(np.linspace(first, last, points))
    return places, np.stack([np.interp(places, at, values) for at, values in series])


def _legend_label(name: str, half: int, not_finite_since: int | None) -> str:
    """Return a run's legend label: its name, the smoothing, and where the curve ends early."""
    over = f", mean over {2 * half + 1:,} steps" if half else ""
    return name + over + ("" if not_finite_since is None else f", not finite since step {not_finite_since:,}")
