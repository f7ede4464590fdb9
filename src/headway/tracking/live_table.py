"""The table of `headway top`."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from headway.core.console import notice
from headway.core.coordination.outcomes import BUDGET_REACHED, CANCELLED, FAILED, FINISHED, PREEMPTED
from headway.core.format import counted, format_count, format_seconds, printable
from headway.telemetry.record import DIED, RUNNING
from headway.telemetry.summary import loss_text, share_text, usd_text
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
#: The columns by their cells, in their order, with their heads.
_COLUMNS: Mapping[str, str] = {
    "run": "RUN",
    "state": "STATE",
    "step": "STEP",
    "loss": "LOSS",
    "recent_loss": "RECENT LOSS",
    "speed": "SPEED",
    "mfu": "MFU",
    "last_step": "LAST STEP",
    "time": "TIME",
    "eta": "ETA",
    "spent": "SPENT",
    "saved": "SAVED",
    "alerts": "ALERTS",
}
_TEXTS = ("run", "state", "recent_loss", "alerts")
#: Columns in the order in which a narrow terminal leaves them out.
_LEFT_OUT = ("recent_loss", "mfu", "saved", "time", "spent", "last_step", "eta", "speed", "alerts", "loss")
#: Width to which alerts may be cut, and from which on a name continues on the next line rather than cost a column.
_ALERTS_WIDTH = 14
_NAME_WIDTH = 20
#: Most of a processor that watching takes.
_CORE_SHARE = 0.02
#: Lines of the table that are no runs: title, headers, a rule and the space around them.
_FRAME_LINES = 5
#: Width of the table where there is no terminal: nothing is cut or left out.
_UNBOUNDED = 1000


def sparkline(values: Sequence[float], width: int = _SPARK_WIDTH) -> str:
    """Draw values as a line of bars from their least to their greatest; one that is not finite is an `x`."""
    size = max(1, math.ceil(len(values) / width))
    groups = (values[start : start + size] for start in range(0, len(values), size))
    means = [sum(group) / len(group) for group in groups]
    finite = [value for value in means if math.isfinite(value)]
    if not finite:
        return "x" * len(means)
    low = min(finite)
    span = max(finite) - low or 1.0
    top = len(_BARS) - 1
    return "".join(_BARS[round((value - low) / span * top)] if math.isfinite(value) else "x" for value in means)


def row(snapshot: Snapshot, now: float) -> dict[str, str]:
    """Return the cells of one run as plain text, by column; `headway ui` shows the same. Unknown ones are empty."""
    values = snapshot.values
    unit = "tok/s" if snapshot.is_language_model else "samples/s"
    speed = snapshot.items_per_second
    spent = values.get("cost/spent_usd")
    budget = values.get("run/budget_usd")
    cost = "" if spent is None else usd_text(spent) + ("" if budget is None else f" of {usd_text(budget)}")
    eta = values.get("run/eta_seconds")
    running = values.get("run/running_seconds")
    return {
        "run": printable(snapshot.name),
        "state": snapshot.state,
        "step": _step_text(values.get("step"), values.get("run/total_steps")),
        "loss": _loss_text(values.get("train/loss")),
        "recent_loss": sparkline(snapshot.losses) if snapshot.losses else "",
        "speed": f"{format_count(speed)} {unit}" if speed else "",
        "mfu": "" if snapshot.mfu is None else share_text(snapshot.mfu),
        "last_step": _ago(values.get("run/last_step_timestamp_seconds"), now),
        "time": "" if running is None else format_seconds(running),
        "eta": "" if eta is None else format_seconds(eta),
        "spent": cost,
        "saved": _ago(values.get("run/last_saved_timestamp_seconds"), now),
        "alerts": ", ".join(alert.short for alert in firing(snapshot, now)),
    }


def _loss_text(loss: float | None) -> str:
    if loss is None:
        return ""
    return loss_text(loss) if math.isfinite(loss) else "not finite"


def _ago(moment: float | None, now: float) -> str:
    return "" if moment is None else f"{_age(now - moment)} ago"


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
    return sorted(snapshots, key=lambda item: (item.state != RUNNING, -(item.updated or 0.0), item.name))


def table(snapshots: Sequence[Snapshot], now: float, width: int, height: int | None = None) -> Table:
    """Build the table for a terminal of a size; columns and runs that do not fit are left out."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    ordered = by_liveness(snapshots)
    room = math.inf if height is None else height - _FRAME_LINES
    shown = ordered if height is None else ordered[: max(1, height - _FRAME_LINES)]
    states = Counter(one.state for one in ordered)
    title = f"{counted(len(ordered), 'run')}: " + ", ".join(f"{count} {state}" for state, count in states.items())
    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=(0, 1, 0, 0), title_style="bold")
    rows = [row(snapshot, now) for snapshot in shown]
    widths = _fitting(rows, width)
    fitting = _that_fit(rows, widths["run"], room)
    if fitting < len(ordered):
        made.title = f"{made.title} ({len(ordered) - fitting} below)"
    for name, size in widths.items():
        is_name = name == "run"
        made.add_column(
            _COLUMNS[name],
            justify="left" if name in _TEXTS else "right",
            no_wrap=not is_name,
            overflow="fold" if is_name else "ellipsis",
            width=size,
        )
    for snapshot, cells in zip(shown[:fitting], rows, strict=False):
        styles = {"state": _COLOURS.get(snapshot.state, ""), "alerts": "bold red"}
        made.add_row(*(Text(cells[name], style=styles.get(name, "")) for name in widths))
    return made


def _that_fit(rows: Sequence[Mapping[str, str]], name_width: int, room: float) -> int:
    """Return how many rows fit into so many lines, at least one: a long name takes more than one."""
    lines = accumulate(math.ceil(len(cells["run"]) / name_width) for cells in rows)
    return max(1, sum(end <= room for end in lines))


def _fitting(rows: Sequence[Mapping[str, str]], width: int) -> dict[str, int]:
    """Return the columns that fit into a width, each with its own.

    Only alerts are cut: a number without its last digits is another number, and so is a name another name.
    """
    columns = {name: max(len(head), *(len(cells[name]) for cells in rows), 0) for name, head in _COLUMNS.items()}
    for name in (*_LEFT_OUT, None):
        room = width - 1 - 2 * len(columns) - sum(size for at, size in columns.items() if at not in ("run", "alerts"))
        alerts = columns.get("alerts", 0)
        least = min(columns["run"], _NAME_WIDTH)
        if name is None or room >= least + min(alerts, _ALERTS_WIDTH):
            break
        del columns[name]
    columns["run"] = max(1, min(columns["run"], max(least, room - alerts), room))
    if "alerts" in columns:
        columns["alerts"] = min(columns["alerts"], room - columns["run"])
    return columns


def print_once(runs: RunsFolder) -> None:
    """Print the table once: as wide as the terminal, or as wide as it must be where there is none."""
    snapshots = runs.refresh()
    if not snapshots:
        notice(f"no runs in {runs.path} in the last day (--all shows older ones)")
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _UNBOUNDED
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
            started = time.process_time()
            size = console.size
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
