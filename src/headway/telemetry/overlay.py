"""The chart of a comparison: the losses of several runs over one axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from headway.config import Batches
from headway.telemetry.charts import (
    SERIES,
    SERIES_COLOURS,
    Chart,
    Entry,
    Kind,
    as_svg,
    drawing,
    half_window,
    loss_label,
    number_ticks,
    smooth,
    thin,
    token_scale,
)
from headway.telemetry.record import Run

#: Runs beyond the number of colours reuse them with another dash.
_DASHES: tuple[Kind, ...] = ("solid", "dashed", "dotted")


def overlay_chart(runs: Mapping[str, Run], by: Literal["step", "tokens"]) -> Chart | None:
    """Draw smoothed training losses of several runs over one axis; validation losses are dots.

    If a run's loss is not finite up to its end, its curve ends with a cross, and the axis extends to its last step.
    """
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
            half = half_window(len(losses))
            at, mean = thin(steps, smooth(losses, half))
            axes.plot(place(at), mean, color=colour, linewidth=1.8, linestyle=dash)
            since = run.metrics.not_finite_since("train/loss")
            if since is not None:
                axes.plot(place(at[-1:]), mean[-1:], color=colour, marker="x", markersize=9, markeredgewidth=2)
                axes.update_datalim([(float(place(run.metrics.last_step)), float(mean[-1]))])
            evaluated, validation = run.metrics.finite("evaluation/loss")
            axes.plot(place(evaluated), validation, color=colour, linestyle="none", marker="o", markersize=4.5)
            legend.append(Entry(_legend_label(name, half, since), index % SERIES_COLOURS, dash))
        axes.set_ylabel(loss_label(all(run.is_language_model for run in runs.values())))
        axes.set_xlabel(by)
        axes.xaxis.set_major_formatter(number_ticks())
        axes.margins(x=0.01)
        title = f"Training loss by {by}, validation loss as dots"
        return Chart(title, as_svg(figure, title), tuple(legend), wide=True) if legend else None


def _legend_label(name: str, half: int, not_finite_since: int | None) -> str:
    """Return a run's legend label: its name, the smoothing, and where the curve ends early."""
    over = f", mean over {2 * half + 1:,} steps" if half else ""
    return name + over + ("" if not_finite_since is None else f", not finite since step {not_finite_since:,}")
