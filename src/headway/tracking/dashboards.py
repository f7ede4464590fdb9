"""Grafana dashboards, made from the catalogue.

A panel is the name of a metric, which gives title, unit and expression, or a `Panel` of its own. Expressions name
metrics as the catalogue does. `tests/parts/test_parts_prometheus.py` runs every expression on a Prometheus that scrapes
runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.core.errors import needing
from headway.core.files.atomic import write_text
from headway.telemetry.catalogue import CATALOGUE, SYSTEM, Unit, metric

if TYPE_CHECKING:
    from grafana_foundation_sdk.builders.dashboard import Dashboard
    from grafana_foundation_sdk.builders.timeseries import Panel as TimeSeries

#: Units as Grafana calls them.
_UNITS = {
    Unit.NUMBER: "short",
    Unit.STEPS: "short",
    Unit.RATE: "short",
    Unit.SECONDS: "s",
    Unit.TIMESTAMP: "dateTimeFromNow",
    Unit.RATIO: "percentunit",
    Unit.GIB: "bytes",
    Unit.GIB_PER_SECOND: "binBps",
    Unit.USD: "currencyUSD",
    Unit.USD_PER_HOUR: "currencyUSD",
    Unit.CELSIUS: "celsius",
    Unit.WATTS: "watt",
    Unit.MEGAHERTZ: "hertz",
}
_NAME = re.compile(r"\{([a-z_]+(?:/[\w/<>-]+)?)\}")
#: In the 24 columns of a dashboard.
_SPAN = 12
_HEIGHT = 8


@dataclass(frozen=True)
class Panel:
    """A chart of one or more expressions."""

    title: str
    expressions: Mapping[str, str]
    """Expression by legend, with names of the catalogue in braces and Grafana's variables."""
    unit: str = "short"
    text: str = ""


def panel_of(name: str) -> Panel:
    """Return the chart of one metric: its value, or the rate of a counter."""
    entry = CATALOGUE[name]
    labels = ["run", *(["machine"] if entry.source == SYSTEM else []), *([entry.label] if entry.label else [])]
    legend = " ".join(f"{{{{{label}}}}}" for label in labels)
    if not entry.is_total:
        return Panel(entry.help, {legend: f"{{{name}}}"}, _UNITS[entry.unit], entry.name)
    unit = {"bytes": "binBps", "s": "percentunit"}.get(_UNITS[entry.unit], _UNITS[entry.unit])
    return Panel(f"{entry.help}, per second", {legend: f"rate({{{name}}}[$__rate_interval])"}, unit, entry.name)


#: Dashboards by name, with their panels.
BOARDS: Mapping[str, Sequence[str | Panel]] = {
    "training": (
        Panel("Loss", {"{{run}} training": "{train/loss}", "{{run}} validation": "{evaluation/loss}"}),
        "train/grad_norm",
        "train/learning_rate",
        Panel(
            "Progress", {"{{run}}": "{step} / {run/total_steps}"}, "percentunit", "Finished steps of those of the run"
        ),
        "health/loss_deviations",
        "train/skipped_steps",
        "data/share/<source>",
        "data/epochs/<source>",
    ),
    "throughput": (
        "speed/tokens_per_second",
        "speed/mfu",
        "speed/step_seconds",
        "speed/data_wait_share",
        "host_to_device/rate_gib_per_second",
        "host_to_device/seconds",
        "run/goodput_ratio",
        "run/eta_seconds",
        "train/items",
        "memory/peak_gib",
    ),
    "gpus": tuple(name for name in CATALOGUE if name.startswith("gpu/")),
    "system": (
        "system/cpu_share",
        Panel(
            "Main memory",
            {
                "{{run}} {{machine}} used": "{system/memory_used_gib}",
                "{{run}} {{machine}} allowed": "{system/memory_allowed_gib}",
            },
            "bytes",
        ),
        Panel(
            "Free disk",
            {"{{run}} {{machine}}": "{system/disk_free_gib} / {system/disk_total_gib}"},
            "percentunit",
            "Share of the run directory's file system that is free",
        ),
        "system/disk_read_gib",
        "system/disk_written_gib",
        "health/memory_available_gib",
    ),
    "communication": (
        "system/network_sent_gib",
        "system/network_received_gib",
        Panel(
            "Sent per step",
            {
                "{{run}}": "sum by (run) (rate({system/network_sent_gib}[$__rate_interval]))"
                " / on (run) (rate({run/steps}[$__rate_interval]) > 0)"
            },
            "bytes",
            "By all machines of a run, over Ethernet; InfiniBand and NVLink are counted by DCGM's exporter",
        ),
        "communication/exposed_share",
        "communication/rate_gib_per_second",
        "communication/seconds",
        "speed/step_seconds",
    ),
    "checkpoints": (
        Panel(
            "Age of the newest checkpoint",
            {"{{run}}": "time() - {run/last_saved_timestamp_seconds}"},
            "s",
            "Work of this long is lost with the machine",
        ),
        "checkpoint/stall_seconds",
        "checkpoint/write_seconds",
        "checkpoint/load_seconds",
        "checkpoint/upload_seconds",
        Panel(
            "Failures",
            {"{{run}} saves": "{run/save_failures}", "{{run}} uploads": "{run/upload_failures}"},
            "short",
            "Saves and uploads that failed since the run began",
        ),
        "health/checkpoints_that_fit",
        "health/disk_free_gib",
    ),
    "cost": (
        Panel("Spent", {"{{run}}": "{cost/spent_usd}", "{{run}} budget": "{run/budget_usd}"}, "currencyUSD"),
        "cost/usd_per_hour",
        Panel(
            "Not for training",
            {"{{run}} idle": "{cost/idle_usd}", "{{run}} storage": "{cost/storage_usd}"},
            "currencyUSD",
            "Machines held between attempts, and keeping checkpoints",
        ),
        Panel(
            "Cost of a million items",
            {"{{run}}": "{cost/spent_usd} / {train/items} * 1e6"},
            "currencyUSD",
            "Tokens, or samples of other modules",
        ),
        "goodput/lost_seconds/<cause>",
    ),
    "fleet": (
        Panel("Runs by state", {"{{state}}": "sum by (state) ({run/state/<state>})"}),
        Panel("Items per second, all runs", {"all": "sum({speed/tokens_per_second} and on (run) $live)"}),
        Panel("Time left", {"{{run}}": "{run/eta_seconds}"}, "s"),
        Panel("Progress", {"{{run}}": "{step} / {run/total_steps}"}, "percentunit"),
        Panel("Goodput", {"{{run}}": "{run/goodput_ratio}"}, "percentunit"),
        Panel(
            "Failures in the window",
            {"{{run}}": "{run/recent_failures}", "{{run}} allowed": "{run/allowed_failures}"},
        ),
        Panel("Spent, all runs", {"all": "sum({cost/spent_usd})"}, "currencyUSD"),
        Panel("Since the last step", {"{{run}}": "time() - {run/last_step_timestamp_seconds} and on (run) $live"}, "s"),
    ),
}


def promql(expression: str) -> str:
    """Write an expression with Prometheus's names, each for the chosen runs."""
    states = CATALOGUE["run/state/<state>"].prometheus_name
    live = f'({states}{{run=~"$run", state="running"}} == 1)'

    def named(found: re.Match[str]) -> str:
        entry = metric(found[1])
        assert entry is not None, f"{found[1]} is not in the catalogue"
        return f'{entry.prometheus_name}{{run=~"$run"}}'

    return _NAME.sub(named, expression).replace("$live", live)


def panels(board: str) -> Iterator[Panel]:
    """Yield the panels of a dashboard."""
    for entry in BOARDS[board]:
        yield panel_of(entry) if isinstance(entry, str) else entry


def check_library() -> None:
    """Check that grafana-foundation-sdk is installed.

    Raises:
        ConfigError: it is not.
    """
    with needing("grafana-foundation-sdk", "dashboards", "making dashboards"):
        import grafana_foundation_sdk  # noqa: F401


def dashboard(board: str) -> dict[str, Any]:
    """Build one dashboard as Grafana imports it."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder

    text = JSONEncoder(sort_keys=True, indent=2).encode(_builder(board).build())
    return dict(json.loads(text))


def dashboard_text(board: str) -> str:
    """Return one dashboard as the text of a file."""
    return json.dumps(dashboard(board), indent=2, sort_keys=True) + "\n"


def _builder(board: str) -> Dashboard:
    from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, QueryVariable
    from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

    source = DataSourceRef(type_val="prometheus", uid="${datasource}")
    runs = (
        QueryVariable("run")
        .label("Run")
        .datasource(source)
        .query("label_values(headway_run_info, run)")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )
    made = (
        Dashboard(f"Headway {board}")
        .uid(f"headway-{board}")
        .tags(["headway"])
        .refresh("30s")
        .time("now-6h", "now")
        .with_variable(DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(runs)
    )
    for panel in panels(board):
        made = made.with_panel(_chart(panel, source))
    return made


def _chart(panel: Panel, source: Any) -> TimeSeries:
    from grafana_foundation_sdk.builders.common import VizLegendOptions, VizTooltipOptions
    from grafana_foundation_sdk.builders.prometheus import Dataquery
    from grafana_foundation_sdk.builders.timeseries import Panel as TimeSeries
    from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, TooltipDisplayMode

    chart = TimeSeries().title(panel.title).unit(panel.unit).datasource(source).span(_SPAN).height(_HEIGHT)
    legends = VizLegendOptions().show_legend(True)
    legends = legends.display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    chart = chart.legend(legends).tooltip(VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    if panel.text:
        chart = chart.description(panel.text)
    for number, (legend, expression) in enumerate(panel.expressions.items()):
        query = Dataquery().expr(promql(expression)).legend_format(legend).ref_id(chr(ord("A") + number))
        chart = chart.with_target(query.datasource(source))
    return chart


def export_dashboards(folder: Path) -> list[Path]:
    """Write every dashboard as `headway-<name>.json`.

    Raises:
        ConfigError: the library is not installed.
        OSError: they cannot be written.
    """
    check_library()
    written = []
    for board in BOARDS:
        path = folder / f"headway-{board}.json"
        write_text(path, dashboard_text(board))
        written.append(path)
    return written
