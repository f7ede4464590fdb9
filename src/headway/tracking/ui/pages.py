"""What the page asks for, as values for JSON; nothing here knows of HTTP.

Names of runs and metrics are foreign. They are made printable here, and the page puts them in as text.
"""

from __future__ import annotations

import csv
import io
import math
import threading
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast, get_args

from headway.core.format import printable
from headway.telemetry.catalogue import CATALOGUE
from headway.telemetry.metrics import NO_VALUES
from headway.telemetry.record import Run, dig
from headway.telemetry.report import render_report
from headway.telemetry.runs import differences
from headway.tracking.alert_rules import firing
from headway.tracking.live_run import Snapshot
from headway.tracking.live_table import by_liveness, row
from headway.tracking.runs_folder import RunsFolder
from headway.tracking.ui.curves import Axis, curve_of
from headway.tracking.ui.histories import Histories
from headway.tracking.ui.run_page import log_of, run_page

#: Most runs in the list.
MOST_RUNS = 2000
#: Most curves in one answer, and most points of each.
MOST_CURVES = 20
MOST_POINTS = 4000
#: Most keys of the config in the list, and most characters of a value.
_MOST_COLUMNS = 12
_CELL_CHARACTERS = 60
#: Keys that each run has its own value of.
_OF_EACH = ("name", "runs", "data.store")
#: Strongest smoothing.
_MOST_SMOOTHING = 0.999
#: Runs are not read again within this time, however many pages ask.
_FRESH_SECONDS = 1.0

Query = Mapping[str, Sequence[str]]


class BadQuery(ValueError):
    """A question that cannot be answered; its text says why."""


class NotFound(LookupError):
    """A question about runs that are not in the folder."""


class Pages:
    """Answers about the runs of a folder."""

    def __init__(self, folder: RunsFolder) -> None:
        self._folder = folder
        self._histories = Histories()
        self._lock = threading.Lock()
        self._read_at = -math.inf
        self._snapshots: dict[str, Snapshot] = {}
        self._compared: list[Mapping[str, Any]] = []
        self._different: list[str] = []

    def runs(self, query: Query = MappingProxyType({})) -> dict[str, Any]:
        """Return the list of runs, live ones first, and the keys in which their configs differ.

        Args:
            query: Each `column` is a key of the config that is listed too.
        """
        found = by_liveness(list(self._refresh().values()))
        shown = found[:MOST_RUNS]
        different = self._differences()
        columns = [key for key in query.get("column", ())[:_MOST_COLUMNS] if key in different]
        now = time.time()
        return {
            "folder": printable(str(self._folder.path)),
            "runs": [
                {**_listed(one, now), "config": {key: _cell(dig(one.config, *key.split("."))) for key in columns}}
                for one in shown
            ],
            "left_out": max(0, len(found) - MOST_RUNS),
            "keys": [printable(key) for key in different],
        }

    def run(self, query: Query) -> str:
        """Return the page of one run, by its name `run`.

        Raises:
            NotFound: there is none of that name.
        """
        name = _one(query, "run")
        return run_page(self._find(name), name)

    def report(self, query: Query) -> str:
        """Return the report of one run as it stands.

        Raises:
            NotFound: there is none of that name.
        """
        return render_report(self._find(_one(query, "run")))

    def log(self, query: Query) -> str:
        """Return the end of a log of one run, by its name `log` within the folder of attempts.

        Raises:
            NotFound: there is no such run, or it has no such log.
        """
        found = log_of(self._find(_one(query, "run")), _one(query, "log"))
        if found is None:
            raise NotFound("there is no such log")
        return found

    def table(self, query: Query) -> str:
        """Return every recorded value of a metric as CSV, in rows of run, step and value.

        Args:
            query: `metric`, and one or more `run`.

        Raises:
            NotFound: there is none of the runs.
        """
        metric = _one(query, "metric")
        text = io.StringIO()
        rows = csv.writer(text)
        rows.writerow(["run", "step", metric])
        for name in query.get("run", ())[:MOST_CURVES]:
            with self._histories.read(self._find(name).path) as metrics:
                steps, values = metrics.series(metric)
            rows.writerows((name, step, value) for step, value in zip(steps.tolist(), values.tolist(), strict=True))
        return text.getvalue()

    def _find(self, name: str) -> Run:
        found = self._refresh().get(name)
        if found is None:
            raise NotFound("there is no such run")
        return Run(found.path)

    def _differences(self) -> list[str]:
        """Return the keys in which configs differ; they are compared again when one changes."""
        configs = [run.config for run in self._refresh().values()]
        if list(map(id, configs)) != list(map(id, self._compared)):
            self._different = [key for key in differences(configs) if key not in _OF_EACH]
            self._compared = configs
        return self._different

    def catalogue(self) -> dict[str, Any]:
        """Return unit and meaning of the metrics of Headway; a name that ends with `<...>` is a family."""
        return {name: {"unit": entry.unit.words, "help": entry.help} for name, entry in CATALOGUE.items()}

    def curves(self, query: Query) -> dict[str, Any]:
        """Return one metric of some runs, with the names of their metrics; runs that are not there are left out.

        Args:
            query: `metric`, one or more `run`, and optionally `axis`, `smoothing`, `points`, and `from` with `to`.

        Raises:
            BadQuery: a value is not allowed.
            NotFound: there is none of the runs.
        """
        metric = _one(query, "metric")
        axis = _one(query, "axis", "step")
        if axis not in get_args(Axis):
            raise BadQuery(f"axis is one of {', '.join(get_args(Axis))}")
        smoothing = _number(query, "smoothing", 0.0, least=0.0, most=_MOST_SMOOTHING)
        points = int(_number(query, "points", 1000.0, least=10.0, most=MOST_POINTS))
        between = None
        if "from" in query or "to" in query:
            between = (_number(query, "from"), _number(query, "to"))
        names = query.get("run", ())
        if not 1 <= len(names) <= MOST_CURVES:
            raise BadQuery(f"ask for 1 to {MOST_CURVES} runs")
        snapshots = self._refresh()
        found = {}
        for name in names:
            if name not in snapshots:
                continue
            with self._histories.read(snapshots[name].path) as metrics:
                curve = curve_of(
                    metrics, metric, axis=cast(Axis, axis), smoothing=smoothing, between=between, limit=points
                )
                recorded = [printable(one) for one in metrics.names if one not in NO_VALUES]
            found[name] = {
                "x": curve.x.tolist(),
                "step": curve.steps.tolist(),
                "value": curve.values.tolist(),
                "smooth": curve.smooth.tolist(),
                "points": curve.points,
                "not_finite": curve.not_finite,
                "metrics": recorded,
            }
        if not found:
            raise NotFound("there is no such run")
        return {"metric": metric, "axis": axis, "smoothing": smoothing, "runs": found}

    def _refresh(self) -> dict[str, Snapshot]:
        with self._lock:
            now = time.monotonic()
            if now >= self._read_at + _FRESH_SECONDS:
                self._snapshots = {printable(one.name): one for one in self._folder.refresh()}
                self._read_at = time.monotonic()
            return self._snapshots


def _listed(snapshot: Snapshot, now: float) -> dict[str, Any]:
    """Return a run of the list: its cells as `headway top` shows them, and numbers to sort by; None is unknown."""
    values = snapshot.values
    loss = values.get("train/loss")
    return {
        "name": printable(snapshot.name),
        "texts": row(snapshot, now),
        "state": snapshot.state,
        "outcome": printable(snapshot.outcome),
        "live": snapshot.is_live,
        "step": _finite(values.get("step")),
        "total_steps": _finite(values.get("run/total_steps")),
        "loss": loss if loss is None or math.isfinite(loss) else "not finite",
        "losses": [_finite(loss) for loss in snapshot.losses],
        "items_per_second": _finite(snapshot.items_per_second),
        "mfu": _finite(snapshot.mfu),
        "last_step": _finite(values.get("run/last_step_timestamp_seconds")),
        "running_seconds": _finite(values.get("run/running_seconds")),
        "eta_seconds": _finite(values.get("run/eta_seconds")),
        "spent_usd": _finite(values.get("cost/spent_usd")),
        "saved": _finite(values.get("run/last_saved_timestamp_seconds")),
        "updated": _finite(snapshot.updated),
        "started": _finite(values.get("run/started_timestamp_seconds")),
        "tags": list(snapshot.tags.tags),
        "note": snapshot.tags.note,
        "machine": None if snapshot.machine is None else printable(snapshot.machine),
        "job": None if snapshot.job is None else printable(snapshot.job),
        "alerts": [
            {"short": alert.short, "severity": alert.severity, "text": alert.text, "fix": alert.fix}
            for alert in firing(snapshot, now)
        ],
    }


def _cell(value: Any) -> str:
    text = "" if value is None else printable(str(value))
    return text if len(text) <= _CELL_CHARACTERS else f"{text[: _CELL_CHARACTERS - 1]}…"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _one(query: Query, name: str, default: str | None = None) -> str:
    values = query.get(name, ())
    if not values and default is not None:
        return default
    if len(values) != 1:
        raise BadQuery(f"give {name} once")
    return values[0]


def _number(
    query: Query, name: str, default: float | None = None, *, least: float = -math.inf, most: float = math.inf
) -> float:
    text = _one(query, name, None if default is None else str(default))
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and least <= value <= most):
        raise BadQuery(f"{name} is no number that can be taken")
    return value
