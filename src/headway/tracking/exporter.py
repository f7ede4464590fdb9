"""Metrics of all runs of a folder in the format of Prometheus, as a server or as a file for the node exporter.

Names, units and help come from the catalogue. Labels are `run`, `machine` for readings of a machine, and the label of a
family (`gpu`, `source`); there is no series per rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.core.errors import needing
from headway.core.files.atomic import atomic_write
from headway.core.version import __version__
from headway.telemetry.catalogue import CATALOGUE, SYSTEM, Metric, metric
from headway.tracking.live_run import Snapshot
from headway.tracking.runs_folder import RunsFolder

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    Family = CounterMetricFamily | GaugeMetricFamily

#: Name of the file for the node exporter's textfile collector, which takes `*.prom`.
TEXTFILE = "headway.prom"
#: Metrics that a user's own code records, by their recorded names.
OWN = "headway_own_metric"


def check_library() -> None:
    """Check that prometheus-client is installed.

    Raises:
        ConfigError: it is not.
    """
    with needing("prometheus-client", "prometheus", "exporting metrics"):
        import prometheus_client  # noqa: F401


class RunsCollector:
    """A collector of prometheus-client that reads the runs at every scrape."""

    def __init__(self, folder: RunsFolder) -> None:
        self._folder = folder

    def describe(self) -> list[Any]:
        """Return nothing, so that registering the collector reads no runs."""
        return []

    def collect(self) -> Iterator[Family]:
        """Yield one family for each metric that some run has."""
        yield from families(self._folder.refresh())


def registry_of(folder: RunsFolder) -> CollectorRegistry:
    """Return a registry of its own: metrics of this process are not exported."""
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    registry.register(RunsCollector(folder))
    return registry


def families(snapshots: Iterable[Snapshot]) -> Iterator[Family]:
    """Yield the metrics of runs by family, as prometheus-client takes them."""
    from prometheus_client.core import GaugeMetricFamily

    found: dict[str, Family] = {}
    info = GaugeMetricFamily("headway_run_info", "Facts of a run as labels; 1", labels=["run", "job", "machine"])
    own = GaugeMetricFamily(OWN, "Metric that the user's own code records", labels=["run", "name"])
    for snapshot in snapshots:
        run = _label(snapshot.name)
        info.add_metric([run, _label(snapshot.job or ""), _label(snapshot.machine or "")], 1.0)
        for name, value in snapshot.values.items():
            entry = metric(name)
            if entry is None:
                own.add_metric([run, _label(name)], value)
            elif entry.source != SYSTEM:
                _add(found, entry, [run], name, value)
        for machine, readings in snapshot.machines.items():
            for name, value in readings.items():
                entry = metric(name)
                if entry is not None and entry.source == SYSTEM:
                    _add(found, entry, [run, _label(machine)], name, value)
    build = GaugeMetricFamily("headway_build_info", "Version of Headway that exports; 1", labels=["version"])
    build.add_metric([__version__], 1.0)
    yield from (build, info)
    yield from (found[entry.name] for entry in CATALOGUE.values() if entry.name in found)
    if own.samples:
        yield own


def _add(found: dict[str, Family], entry: Metric, labels: list[str], name: str, value: float) -> None:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    family = found.get(entry.name)
    if family is None:
        make = CounterMetricFamily if entry.is_total else GaugeMetricFamily
        names = ["run", "machine"][: len(labels)] + ([entry.label] if entry.label else [])
        family = found[entry.name] = make(entry.prometheus_name, entry.help, labels=names)
    label = entry.label_value(name)
    family.add_metric(labels if label is None else [*labels, _label(label)], value * entry.unit.factor)


def _label(text: str) -> str:
    """Return a text that UTF-8 can encode: one folder with an odd name must not end the metrics of all runs."""
    return text.encode(errors="replace").decode()


def exposition(folder: RunsFolder) -> bytes:
    """Return the metrics of all runs as text."""
    from prometheus_client import generate_latest

    return bytes(generate_latest(registry_of(folder)))


def write_textfile(folder: RunsFolder, directory: Path) -> Path:
    """Write the metrics for the node exporter; a reader sees the old file or the whole new one.

    Raises:
        OSError: it cannot be written.
    """
    path = directory / TEXTFILE
    with atomic_write(path) as file:
        file.write(exposition(folder))
    path.chmod(0o644)  # the node exporter runs as another user
    return path
