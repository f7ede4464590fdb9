"""The table of `headway top`."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from headway.core.console import notice
from headway.core.coordination.outcomes import BUDGET_REACHED, CANCELLED, FAILED, FINISHED, PREEMPTED
from headway.core.format import counted, format_count, format_seconds, printable
from headway.telemetry.record import DIED, RUNNING
from headway.tracking.alert_rules import firing
from headway.tracking.live_run import Snapshot
from headway.tracking.runs_folder import RunsFolder

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_BARS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 16
_COLOURS = {
    RUNNING: "green",
    FINISHED: "blue",
    PREEMPTED: "yellow",
    BUDGET_REACHED: "yellow",
    CANCELLED: "yellow",
    FAILED: "red",
    DIED: "red",
}
#: Name, and whether it is right-aligned.
_COLUMNS: Sequence[tuple[str, bool]] = (
    ("RUN", False),
    ("STATE", False),
    ("STEP", True),
    ("LOSS", True),
    ("RECENT LOSS", False),
    ("SPEED", True),
    ("MFU", True),
    ("ETA", True),
    ("SPENT", True),
    ("SAVED", True),
    ("ALERTS", False),
)
_RUN, _STATE, _ALERTS = 0, 1, len(_COLUMNS) - 1
#: Columns in the order in which a narrow terminal leaves them out.
_LEFT_OUT = (4, 6, 9, 8, 7, 5, _ALERTS, 3)
#: Width to which names and alerts may be cut.
_LEAST_WIDTH = 14
#: Most of a processor that watching takes.
_CORE_SHARE = 0.02
#: Lines of the table that are no runs: title, headers, a rule and the space around them.
_FRAME_LINES = 5
#: Live runs come first.
_ORDER = {RUNNING: 0}


def sparkline(values: Sequence[float], width: int = _SPARK_WIDTH) -> str:
    """Draw values as a line of bars from their least to their greatest; one that is not finite is an `x`."""
    size = max(1, math.ceil(len(values) / width))
    means = [_mean(values[start : start + size]) for start in range(0, len(values), size)]
    finite = [value for value in means if math.isfinite(value)]
    if not finite:
        return "x" * len(means)
    low, span = min(finite), max(finite) - min(finite)
    top = len(_BARS) - 1
    return "".join(
        _BARS[round((value - low) / span * top) if span else 0] if math.isfinite(value) else "x" for value in means
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def row(snapshot: Snapshot, now: float) -> list[str]:
    """Return the cells of one run as plain text, in the order of the columns."""
    values = snapshot.values
    unit = "tok/s" if snapshot.is_language_model else "samples/s"
    live = snapshot.is_live
    speed = f"{format_count(snapshot.items_per_second)} {unit}" if live and snapshot.items_per_second else ""
    saved = values.get("run/last_saved_timestamp_seconds")
    spent, budget = values.get("cost/spent_usd"), values.get("run/budget_usd")
    cost = "" if spent is None else f"${spent:,.2f}" + ("" if budget is None else f" of ${budget:,.2f}")
    eta = values.get("run/eta_seconds")
    return [
        printable(snapshot.name),
        snapshot.state,
        _step_text(values.get("step"), values.get("run/total_steps")),
        f"{values['train/loss']:.4f}" if "train/loss" in values else "",
        sparkline(snapshot.losses) if snapshot.losses else "",
        speed,
        f"{snapshot.mfu:.1%}".replace("%", " %") if live and snapshot.mfu is not None else "",
        "" if eta is None else format_seconds(eta),
        cost,
        "" if saved is None else f"{_age(now - saved)} ago",
        ", ".join(alert.short for alert in firing(snapshot, now)),
    ]


def _age(seconds: float) -> str:
    """Return an age in its largest unit: a table has no room for two."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _step_text(step: float | None, total: float | None) -> str:
    done = 0 if step is None else int(step)
    return f"{done:,}" if total is None else f"{done:,}/{int(total):,}"


def by_liveness(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Order runs: live ones first, then the most recently updated."""
    return sorted(snapshots, key=lambda item: (_ORDER.get(item.state, 1), -(item.updated or 0.0), item.name))


def table(snapshots: Sequence[Snapshot], now: float, width: int, height: int | None = None) -> Table:
    """Build the table for a terminal of a size; columns and runs that do not fit are left out."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    ordered = by_liveness(snapshots)
    shown = ordered if height is None else ordered[: max(1, height - _FRAME_LINES)]
    states = Counter(one.state for one in ordered)
    title = f"{counted(len(ordered), 'run')}: " + ", ".join(f"{count} {state}" for state, count in states.items())
    if len(shown) < len(ordered):
        title += f" ({len(ordered) - len(shown)} below)"
    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=(0, 1, 0, 0), title_style="bold")
    rows = [row(snapshot, now) for snapshot in shown]
    widths = _fitting(rows, width)
    for index, size in widths.items():
        name, right = _COLUMNS[index]
        made.add_column(name, justify="right" if right else "left", no_wrap=True, overflow="ellipsis", width=size)
    for snapshot, cells in zip(shown, rows, strict=True):
        styles = {_STATE: _COLOURS.get(snapshot.state, ""), _ALERTS: "bold red"}
        made.add_row(*(Text(cells[index], style=styles.get(index, "")) for index in widths))
    return made


def _fitting(rows: Sequence[Sequence[str]], width: int) -> dict[int, int]:
    """Return the columns that fit into a width, each with its own.

    Only names and alerts are cut: a number without its last digits is another number.
    """
    columns = {
        index: max(len(name), *(len(cells[index]) for cells in rows), 0) for index, (name, _) in enumerate(_COLUMNS)
    }
    for index in (*_LEFT_OUT, None):
        room = width - 1 - 2 * len(columns) - sum(size for at, size in columns.items() if at not in (_RUN, _ALERTS))
        alerts = columns.get(_ALERTS, 0)
        if index is None or room >= min(columns[_RUN], _LEAST_WIDTH) + min(alerts, _LEAST_WIDTH):
            break
        del columns[index]
    columns[_RUN] = max(1, min(columns[_RUN], max(_LEAST_WIDTH, room - alerts)))
    if _ALERTS in columns:
        columns[_ALERTS] = min(alerts, room - columns[_RUN])
    return columns


def print_once(runs: RunsFolder) -> None:
    """Print the table once: as wide as the terminal, or as wide as it must be where there is none."""
    snapshots = runs.refresh()
    if not snapshots:
        notice(f"no runs in {runs.path} in the last day (--all shows older ones)")
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 220
    _console(width).print(table(snapshots, time.time(), width))


def show_live(runs: RunsFolder, every_seconds: float) -> None:
    """Show the table until Ctrl-C.

    The runs are read again every so many seconds, or less often where there are so many that it would take more than
    `_CORE_SHARE` of a processor.
    """
    from rich.live import Live

    console = _console(None)
    with suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            started, size = time.process_time(), console.size
            live.update(table(runs.refresh(), time.time(), size.width, size.height), refresh=True)
            time.sleep(pause_seconds(every_seconds, time.process_time() - started))


def pause_seconds(every_seconds: float, spent_seconds: float) -> float:
    """Return how long to wait after a reading that took so much processor time."""
    return max(every_seconds, spent_seconds / _CORE_SHARE)


def _console(width: int | None) -> Console:
    from rich.console import Console

    return Console(file=sys.stdout, width=width, highlight=False, soft_wrap=False)


def as_json(snapshots: Sequence[Snapshot]) -> list[dict[str, Any]]:
    """Return the runs for programs: the cells as numbers, and all values by the names of the catalogue."""
    now = time.time()
    return [
        {
            "run": one.name,
            "path": str(one.path),
            "state": one.state,
            "outcome": one.outcome,
            "machine": one.machine,
            "job": one.job,
            "updated": one.updated,
            "items_per_second": one.items_per_second,
            "mfu": one.mfu,
            "alerts": [alert.name for alert in firing(one, now)],
            "anomalies": [
                {"kind": anomaly.kind, "cause": anomaly.cause, "text": anomaly.text} for anomaly in one.anomalies
            ],
            "values": dict(one.values),
            "machines": {name: dict(values) for name, values in one.machines.items()},
        }
        for one in by_liveness(snapshots)
    ]
