"""The chart of a comparison: the losses of several runs over one axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from headway.config import Batches
from headway.telemetry.charts import SERIES_COLOURS, Chart, Entry, Line, dashed, loss_label, plot_of
from headway.telemetry.curves import half_window, smooth, thin, token_scale
from headway.telemetry.record import Run


def overlay_chart(runs: Mapping[str, Run], by: Literal["step", "tokens"]) -> Chart | None:
    """Return smoothed training losses of several runs over one axis; validation losses are dots.

    If a run's loss is not finite up to its end, its curve ends with a cross, and the axis extends to its last step.
    """
    legend: list[Entry] = []
    lines: list[Line] = []
    reach = 0.0
    for index, (name, run) in enumerate(runs.items()):
        batches = Batches(((0, 1),)) if by == "step" else run.batches
        steps, losses = run.metrics.finite("train/loss")
        if not len(steps) or batches is None:
            continue
        place, _ = token_scale(batches)
        series = index % SERIES_COLOURS
        half = half_window(len(losses))
        at, mean = thin(steps, smooth(losses, half))
        lines.append(Line(place(at), mean, series, dashed(index), name))
        since = run.metrics.not_finite_since("train/loss")
        if since is not None:
            lines.append(Line(place(at[-1:]), mean[-1:], series, "cross"))
        reach = max(reach, float(place(run.metrics.last_step)))
        evaluated, validation = run.metrics.finite("evaluation/loss")
        lines.append(Line(place(evaluated), validation, series, "dots"))
        legend.append(Entry(_legend_label(name, half, since), series, dashed(index)))
    title = f"Training loss by {by}, validation loss as dots"
    if not legend:
        return None
    label = loss_label(all(run.is_language_model for run in runs.values()))
    return Chart(title, legend=tuple(legend), wide=True, plot=plot_of(lines, x=by, y=label, reach=reach))


def _legend_label(name: str, half: int, not_finite_since: int | None) -> str:
    """Return a run's legend label: its name, the smoothing, and where the curve ends early."""
    over = f", mean over {2 * half + 1:,} steps" if half else ""
    return name + over + ("" if not_finite_since is None else f", not finite since step {not_finite_since:,}")
