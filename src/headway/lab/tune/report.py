"""The page of a study: its best trials, which keys matter, how each key relates to the objective, curves and cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headway.core.console import notice
from headway.core.errors import ConfigError
from headway.core.files.atomic import write_text
from headway.core.format import UNKNOWN, counted, format_seconds
from headway.cost.spending import RunCost
from headway.lab.tune.journal import REASON, Journal, TrialRecord
from headway.lab.tune.space import Range
from headway.lab.tune.study import REPORT_FILE, Study, record_line, short_text
from headway.run.directory.account import account_of
from headway.telemetry import html
from headway.telemetry.charts import SERIES_COLOURS, Chart, Entry, Line, dashed, plot_of
from headway.telemetry.drawing import MUTED, SERIES, as_svg, drawing
from headway.telemetry.record import Run, is_run
from headway.telemetry.summary import loss_text, usd_text

#: Curves in one chart, and rows of the table.
_CURVES = 16
_ROWS = 1000


@dataclass(frozen=True)
class _Recorded:
    """The run of a trial, with what is read of it once."""

    run: Run
    last_step: int
    cost: RunCost

    @property
    def known_usd(self) -> float | None:
        """What it has cost; None if no price is known."""
        return self.cost.total_usd if self.cost.is_known else None


def write_report(study: Study, journal: Journal) -> Path:
    """Write `report.html` into a study's folder, and return its path."""
    records = journal.records
    best = journal.best()
    objective = study.settings.objective[0]
    states = Counter(one.state for one in records)
    found = {one.number: Run(study.run_of(one.number)) for one in records if is_run(study.run_of(one.number))}
    runs = {number: _Recorded(run, run.newest_metrics().last_step, account_of(run)) for number, run in found.items()}
    note = f"{counted(len(records), 'trial')}: " + ", ".join(f"{count} {state}" for state, count in states.items())
    body = [
        html.heading(f"Study {study.folder.name}", None, f"{objective.direction} {objective.metric}. {note}"),
        html.tiles(_tiles(study, best, runs)),
        _figures([_history(records, objective.direction), _curves(study, best, runs)]),
        html.section("Which keys matter", _importances(journal)),
        html.section("Keys and objective", _figures(_drawings(study, best))),
        html.section("Trials", _table(study, records, runs)),
    ]
    path = study.folder / REPORT_FILE
    write_text(path, html.page(f"Study {study.folder.name} · Headway", body))
    return path


def _figures(charts: Sequence[Chart | None]) -> str:
    drawn = "".join(html.figure(chart) for chart in charts if chart is not None)
    return f'<div class="charts">{drawn}</div>' if drawn else ""


def _tiles(study: Study, best: Sequence[TrialRecord], runs: dict[int, _Recorded]) -> list[tuple[str, str, str]]:
    steps = sum(one.last_step for one in runs.values())
    seconds = sum(one.run.seconds or 0.0 for one in runs.values())
    costs = [one.cost for one in runs.values()]
    spent = sum(cost.total_usd for cost in costs) if any(cost.is_known for cost in costs) else None
    found = [("steps of all trials", f"{steps:,}", ""), ("time of all trials", format_seconds(seconds), "")]
    if spent is not None:
        budget = study.settings.budget.usd
        found.append(("cost", usd_text(spent), "" if budget is None else f"of {usd_text(budget)}"))
    if best and best[0].objectives:
        value = ", ".join(map(loss_text, best[0].objectives))
        found.insert(0, ("best", value, f"trial {best[0].number}: {record_line(best[0])}"))
    return found


def _history(records: Sequence[TrialRecord], direction: str) -> Chart | None:
    """Return the value of each trial, and the best one so far."""
    done = [one for one in records if one.state == "complete" and _is_finite(one)]
    if not done:
        return None
    numbers = np.array([one.number for one in done], dtype=np.float64)
    values = np.array([_first(one) for one in done])
    so_far = np.minimum.accumulate(values) if direction == "minimize" else np.maximum.accumulate(values)
    lines = [Line(numbers, values, 0, "dots", "trial"), Line(numbers, so_far, 1, name="best so far")]
    legend = (Entry("complete trial", 0, "dots"), Entry("best so far", 1))
    return Chart("Objective by trial", legend=legend, wide=True, plot=plot_of(lines, x="trial", y="objective"))


def _curves(study: Study, best: Sequence[TrialRecord], runs: dict[int, _Recorded]) -> Chart | None:
    metric = study.settings.objective[0].metric
    lines = []
    legend = []
    for place, record in enumerate(best[:_CURVES]):
        recorded = runs.get(record.number)
        if recorded is None:
            continue
        steps, values = recorded.run.metrics.finite(metric)
        if len(steps):
            series = place % SERIES_COLOURS
            name = f"trial {record.number}"
            lines.append(Line(steps, values, series, dashed(place), name))
            legend.append(Entry(name, series, dashed(place)))
    if not lines:
        return None
    title = f"{metric} of the best trials"
    return Chart(title, legend=tuple(legend), wide=True, plot=plot_of(lines, y=metric))


def _importances(journal: Journal) -> str:
    found = journal.importances()
    rows = [[key, f"{100 * value:.0f} %"] for key, value in found.items()]
    if not rows:
        return '<p class="muted">Too few trials are complete to tell.</p>'
    words = '<p class="muted">Share of the variance among good trials that each key explains (PED-ANOVA).</p>'
    return words + html.table(["Key", "Importance"], rows, (1,))


def _drawings(study: Study, best: Sequence[TrialRecord]) -> list[Chart | None]:
    """Return parallel coordinates, and a slice for each key; none if too little is known or matplotlib is missing."""
    done = [one for one in best if _is_finite(one)]
    if len(done) < 2:
        return []
    try:
        return [_parallel(study, done), *(_slice(one, done) for one in study.space.ranges)]
    except ConfigError as error:
        notice(f"no drawings in the report: {error.what} ({error.fix})")
        return []


def _parallel(study: Study, done: Sequence[TrialRecord]) -> Chart:
    """Return a line for each trial through its values, one axis for each key; the best tenth is coloured."""
    ranges = study.space.ranges
    few = max(1, len(done) // 10)
    with drawing(1040, 380) as (figure, axes):
        for place, record in reversed(list(enumerate(done))):
            points = [(x, _position(one, record)) for x, one in enumerate(ranges)]
            known = [(x, y) for x, y in points if y is not None]
            colour, width = (SERIES[0], 2.0) if place < few else (MUTED, 0.6)
            axes.plot([x for x, _ in known], [y for _, y in known], color=colour, linewidth=width)
        axes.set_xticks(range(len(ranges)), [one.key for one in ranges])
        axes.set_ylim(-0.05, 1.05)
        axes.set_yticks([0, 1], ["lowest", "highest"])
        svg = as_svg(figure, "parallel coordinates")
    return Chart("Parallel coordinates: the best tenth coloured", svg, wide=True)


def _slice(one: Range, done: Sequence[TrialRecord]) -> Chart | None:
    """Return the objective by the value of one key."""
    shown = [record for record in done if one.key in record.values]
    if not shown:
        return None
    with drawing(460, 300) as (figure, axes):
        if one.kind == "choice":
            at = [one.choices.index(record.values[one.key]) for record in shown]
            axes.set_xticks(range(len(one.choices)), [str(value) for value in one.choices])
        else:
            at = [record.values[one.key] for record in shown]
            if one.kind in ("log", "log_int"):
                axes.set_xscale("log")
        axes.scatter(at, [_first(record) for record in shown], s=14, color=SERIES[0])
        svg = as_svg(figure, f"slice {one.key}")
    return Chart(one.key, svg)


def _position(one: Range, record: TrialRecord) -> float | None:
    """Return where a trial's value lies between the ends of a range, from 0 to 1; None for a key it leaves alone."""
    value = record.values.get(one.key)
    if value is None:
        return None
    if one.kind == "choice":
        return one.choices.index(value) / max(1, len(one.choices) - 1)
    scale = math.log if one.kind in ("log", "log_int") else float
    return (scale(value) - scale(one.low)) / (scale(one.high) - scale(one.low))


def _table(study: Study, records: Sequence[TrialRecord], runs: dict[int, _Recorded]) -> str:
    keys = [one.key for one in study.space.ranges]
    names = [one.metric for one in study.settings.objective]
    rows = []
    for record in records[-_ROWS:]:
        recorded = runs.get(record.number)
        step = UNKNOWN if recorded is None else f"{recorded.last_step:,}"
        values = [loss_text(value) for value in record.objectives or ()] or [UNKNOWN] * len(names)
        known = None if recorded is None else recorded.known_usd
        why = str(record.notes.get(REASON, ""))
        cells = ["" if value is None else short_text(value) for value in map(record.values.get, keys)]
        rows.append([str(record.number), record.state, *values, step, usd_text(known), *cells, why])
    headers = ["Trial", "State", *names, "Steps", "Cost", *keys, "Why"]
    return html.table(headers, rows, (0, *range(2, 4 + len(names))), drop_unknown=True)


def _first(record: TrialRecord) -> float:
    return record.objectives[0] if record.objectives else math.nan


def _is_finite(record: TrialRecord) -> bool:
    return math.isfinite(_first(record))
