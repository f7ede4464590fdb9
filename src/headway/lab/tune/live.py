"""The table of a study: its best trials, those that run, what is done and what is to come."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headway.core.format import counted, format_seconds, format_usd, printable
from headway.lab.tune.journal import Journal, TrialRecord
from headway.lab.tune.study import Study, record_line
from headway.lab.tune.tuner import Progress
from headway.telemetry.record import Run
from headway.telemetry.summary import loss_text

if TYPE_CHECKING:
    from rich.table import Table

_EVERY_SECONDS = 1.0
#: Rows of trials that have ended.
_SHOWN = 10
_COLOURS = {"running": "green", "complete": "blue", "pruned": "yellow", "infeasible": "yellow", "failed": "red"}


def rows_of(study: Study, records: Sequence[TrialRecord], running: dict[int, Any] | None = None) -> list[list[str]]:
    """Return the cells of some trials: number, state, objectives, step, values."""
    found = []
    for record in records:
        history = None if running is None or record.number not in running else running[record.number].history.metrics
        step = "" if history is None else f"{history.last_step:,}"
        values = ", ".join(map(loss_text, record.objectives or ()))
        if history is not None and not values:
            newest = history.last(study.settings.objective[0].metric)
            values = "" if newest is None else loss_text(newest)
        if not values and record.reports:
            values = loss_text(record.reports[max(record.reports)])
        found.append([str(record.number), record.state, values, step, printable(record_line(record))])
    return found


HEADERS = ("TRIAL", "STATE", "VALUE", "STEP", "KEYS")


def summary_line(study: Study, journal: Journal, total: int | None, progress: Progress) -> str:
    """Describe how far a study is: trials by state, time left, and what it has cost."""
    records = journal.records
    states = Counter(one.state for one in records)
    parts = [f"{len(records)} of {counted(total, 'trial')}" if total else counted(len(records), "trial")]
    parts += [f"{count} {state}" for state, count in states.items()]
    seconds = list(progress.seconds.values())
    left = None if total is None else total - sum(one.has_ended for one in records)
    if left and seconds:
        each = sum(seconds) / len(seconds)
        parts.append(f"eta {format_seconds(each * left / study.settings.at_a_time)}")
    spent = progress.spent_usd
    if spent:
        budget = study.settings.budget.usd
        parts.append(f"{format_usd(spent)} spent" + ("" if budget is None else f" of {format_usd(budget)}"))
    return " · ".join(parts)


@contextmanager
def watching(study: Study, journal: Journal, total: int | None) -> Iterator[Callable[[Progress], None]]:
    """Show the table at the bottom of a terminal for the length of a block; elsewhere events alone are printed."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.live import Live

    shown_at = [0.0]
    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:

        def watch(progress: Progress) -> None:
            if time.monotonic() - shown_at[0] >= _EVERY_SECONDS:
                shown_at[0] = time.monotonic()
                live.update(_table(study, journal, total, progress), refresh=True)

        yield watch


def _table(study: Study, journal: Journal, total: int | None, progress: Progress) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    title = summary_line(study, journal, total, progress)
    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", padding=(0, 1, 0, 0))
    for header in HEADERS:
        made.add_column(header, justify="left" if header in ("STATE", "KEYS") else "right", overflow="fold")
    running = [one for one in journal.records if not one.has_ended]
    best = journal.best()[:_SHOWN]
    for cells in rows_of(study, [*running, *best], progress.running):
        made.add_row(
            *(Text(cell, style=_COLOURS.get(cell, "") if place == 1 else "") for place, cell in enumerate(cells))
        )
    return made


def as_json(study: Study, journal: Journal) -> dict[str, Any]:
    """Return a study for programs."""
    return {
        "study": str(study.folder),
        "objective": [one.model_dump(mode="json") for one in study.settings.objective],
        "trials": [_trial_as_json(study, one) for one in journal.records],
        "best": [one.number for one in journal.winners()],
    }


def _trial_as_json(study: Study, record: TrialRecord) -> dict[str, Any]:
    run = Run(study.run_of(record.number))
    return {
        "trial": record.number,
        "state": record.state,
        "values": dict(record.values),
        "objectives": None if record.objectives is None else list(record.objectives),
        "reports": {str(step): value for step, value in record.reports.items()},
        "notes": dict(record.notes),
        "run": str(run.path),
        "step": run.newest_metrics().last_step,
    }
