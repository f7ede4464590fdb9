"""A benchmark's report: `metrics.csv`, `report.md` with its plots, and `report.html`, which needs no other file."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from headway.core.errors import DataError
from headway.core.files.atomic import write_text
from headway.core.format import UNKNOWN, counted, format_bytes, format_count
from headway.lab.bench.analysis import (
    MEMORY,
    METRICS,
    RESIDENT,
    SPEED,
    Metric,
    base_of,
    by_setting,
    efficiency,
    label,
    mean,
    setting_in_words,
)
from headway.lab.bench.charts import KINDS, Named, setting_charts, standalone
from headway.lab.bench.comparison import HEADERS as _CHANGES
from headway.lab.bench.comparison import changes, other_conditions, summary
from headway.lab.bench.findings import findings
from headway.lab.bench.fitting import HEADERS as _MODELS
from headway.lab.bench.fitting import table as models_that_fit
from headway.lab.bench.metrics_file import render_csv
from headway.lab.bench.results import CellResult, merge_results, read_results, strategy_place
from headway.lab.bench.wording import failure_in_words, one_line
from headway.telemetry import html
from headway.telemetry.markdown import in_markdown, markdown_table, markdown_texts

PLOTS = "plots"
#: Characters of a reason in the table; the findings have all of it.
_SHORT = 80
_NUMBER = re.compile(r"(\d[\d,]*(?:\.\d+)?)(.*)$")
NOTES = (
    "±: half of the 95 % confidence interval over repeats (Student's t); differences are reported where Welch's test at"
    " 95 % can, one comparison at a time.",
    "Peak memory: what tensors take, of the worker that has most; on GPUs PyTorch's own count, on the CPU the most"
    " within one step. Resident: by how much the process grew in main memory since before the model was built, with"
    " libraries loaded since then, buffers of communication, and what is freed and kept.",
    "Of ideal: tokens/s per worker as a share of the same strategy's with the fewest workers.",
    "Communication: share of the profiled steps, which are not among the timed ones, in which a collective was under"
    " way, waiting for the slowest worker included; exposed: and nothing was computed meanwhile.",
    "GPU: share of the time of the measured steps in which a kernel ran, over the samples of all GPUs; n/a where the"
    " driver does not say, and without a GPU.",
    "MFU and HFU: n/a where the device's peak is not known, as of CPUs. Of products, there: the model's FLOP/s as a"
    " share of what all workers together reach in products of matrices. Energy: n/a where no counter can be read.",
)


@dataclass(frozen=True)
class Report:
    """The contents of a folder of results."""

    title: str
    results: list[CellResult]
    findings: list[str]
    before: list[CellResult] | None = None
    """Earlier results to compare with."""
    before_name: str = ""

    @property
    def note(self) -> str:
        """The purpose of the suite, and how many cells succeeded."""
        asked = dict.fromkeys(str(result.settings.get("description", "")) for result in self.results)
        succeeded = sum(result.status == "ok" for result in self.results)
        told = one_line("; ".join(filter(None, asked)))
        cells = f"{succeeded} of {counted(len(self.results), 'cell')} succeeded."
        end = "" if told.endswith((".", "?", "!")) else "."
        return f"{told[:1].upper()}{told[1:]}{end} {cells}" if told else cells

    @property
    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headers, and a line per cell, without columns that are unknown for all cells."""
        known = [name for name, _ in _FIGURES if name not in self.unknown]
        return ["Cell", "Result", *known, "Repeats"], self.rows(known)

    def rows(self, figures: Sequence[str]) -> list[list[str]]:
        """Return a line per cell: its name, its status, these figures, its repeats."""
        texts = dict(_FIGURES)
        return [_row(result, self.results, [texts[name] for name in figures]) for result in self.results]

    @cached_property
    def unknown(self) -> list[str]:
        """Headers of the omitted columns."""
        succeeded = [result for result in self.results if result.status == "ok"]
        return [
            name
            for name, text in _FIGURES
            if name not in _ALWAYS and all(text(r, self.results) == UNKNOWN for r in succeeded)
        ]

    @property
    def notes(self) -> Sequence[str]:
        """Notes on the table."""
        return (*NOTES, f"Not known of any cell, and left out: {', '.join(self.unknown)}.") if self.unknown else NOTES

    @property
    def models(self) -> list[list[str]]:
        """The largest model that fits, a line per strategy and number of workers; none if no model was too large."""
        return models_that_fit(self.results)

    @property
    def summary(self) -> str | None:
        """The comparison in one sentence; None without one."""
        return None if self.before is None else summary(self.before, self.results)

    @property
    def changes(self) -> list[list[str]]:
        """The comparison, a line per cell."""
        return [] if self.before is None else changes(self.before, self.results)

    @property
    def other_conditions(self) -> str | None:
        """What else differs between the two sets of the comparison; None if nothing does, or there is none."""
        return None if self.before is None else other_conditions(self.before, self.results)


def load_report(folder: Path, compare: Path | None = None) -> Report:
    """Read a folder of results, and one to compare with if given.

    Raises:
        DataError: there are no results, or one cannot be read.
    """
    results = _results(folder)
    before = None if compare is None else _results(compare)
    suites = list(dict.fromkeys(result.suite for result in results))
    return Report(", ".join(suites), results, findings(results), before, "" if compare is None else str(compare))


def _results(folder: Path) -> list[CellResult]:
    results = merge_results(read_results(folder))
    if not results:
        raise DataError(
            "there are no benchmark results", where=str(folder), fix="headway bench strategies, or another folder"
        )
    return results


def write_report(folder: Path, compare: Path | None = None) -> list[Path]:
    """Write all files of the report into the folder of results; return their paths.

    Raises:
        ConfigError: matplotlib is not installed; `metrics.csv`, which does not need it, has been written then.
        DataError: as `load_report`.
    """
    report = load_report(folder, compare)
    _write(folder, {"metrics.csv": render_csv(report.results)})
    charts = _charts(report)
    files = {
        "report.md": render_markdown(report, charts),
        "report.html": render_html(report, charts),
        **{f"{PLOTS}/{named.name}.svg": standalone(named.chart) for named in charts},
    }
    _write(folder, files)
    # Remove plots of an earlier report, which would be taken for this one's.
    for path in (folder / PLOTS).glob("*.svg"):
        if f"{PLOTS}/{path.name}" not in files and path.stem.endswith(KINDS):
            path.unlink()
    return [folder / name for name in ("metrics.csv", *files)]


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        write_text(folder / name, text)


def _charts(report: Report) -> list[Named]:
    groups = by_setting(report.results)
    strategies = {result.cell.strategy for result in report.results}
    styles = {name: index for index, name in enumerate(sorted(strategies, key=strategy_place))}
    if len(groups) == 1:
        return setting_charts(report.results, styles)
    found = []
    for setting, group in groups.items():
        name = f"{setting.model}-{setting.precision}-b{setting.micro_batch}-t{setting.sequence_length}"
        prefix = f"{name}-{setting.scaling}-{setting.conditions}-"
        found += setting_charts(group, styles, prefix, setting_in_words(setting, groups))
    return found


# The table ------------------------------------------------------------------------------------------------------------


def _row(result: CellResult, results: Sequence[CellResult], figures: Sequence[_Figure]) -> list[str]:
    name = label(result, results)
    if result.status != "ok":
        return [name, failure_in_words(result, _SHORT), *[UNKNOWN] * len(figures), _repeats(result)]
    return [name, _status_text(result), *(text(result, results) for text in figures), _repeats(result)]


def _status_text(result: CellResult) -> str:
    """Return the status of a cell that has figures."""
    ok = "ok" if result.last_failure is None else f"ok in part; {failure_in_words(result, _SHORT)}"
    return "; ".join(filter(None, [ok, one_line("; ".join(result.odd_endings)), result.doubt]))


def _repeats(result: CellResult) -> str:
    return f"{len(result.measured)} of {result.repeats_asked}"


#: A column of the table: the text of one cell, which may depend on the others.
_Figure = Callable[[CellResult, Sequence[CellResult]], str]


def _mean(metric: Metric, text: Callable[[float], str], *, spread: bool = True) -> _Figure:
    """Return the column of a metric's mean, with half of its interval, as far as it is wanted and known."""

    def shown(result: CellResult, _: Sequence[CellResult]) -> str:
        found = mean(result, metric)
        if found is None:
            return UNKNOWN
        # A mean of zero width has no informative width.
        width = f" ± {_width(found.value, found.half_width, text)}" if spread and found.half_width else ""
        return text(found.value) + width

    return shown


def _named(name: str, form: str) -> _Figure:
    return _mean(next(metric for metric in METRICS if metric.name == name), form.format, spread=False)


def _of_ideal(result: CellResult, results: Sequence[CellResult]) -> str:
    if base_of(result, results) is result:
        return "base"
    share = efficiency(result, results)
    return UNKNOWN if share is None else f"{share:.0%}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms" if seconds >= 0.0995 else f"{seconds * 1000:.2g} ms"


def _width(value: float, half: float, text: Callable[[float], str]) -> str:
    """Format half an interval with the unit and the decimals of its mean, or one significant digit."""
    shown = _NUMBER.match(text(value))
    number = float(shown[1].replace(",", "")) if shown else 0.0
    if shown is None or number == 0:
        return text(half)
    scaled = half * number / value
    decimals = len(shown[1].partition(".")[2])
    digits = f"{scaled:,.{decimals}f}"
    return f"{digits if float(digits.replace(',', '')) else f'{scaled:.1g}'}{shown[2]}"


#: Columns that are shown even if they are unknown for all cells: whether GPUs are busy is asked first.
_ALWAYS = ("GPU mean", "GPU p95")
_FIGURES: tuple[tuple[str, _Figure], ...] = (
    ("Tokens/s", _mean(SPEED, format_count)),
    ("Per worker", _mean(METRICS[1], format_count)),
    ("Step mean", _mean(METRICS[2], _milliseconds)),
    ("Step p50", _mean(METRICS[3], _milliseconds)),
    ("Step p95", _mean(METRICS[4], _milliseconds)),
    ("Peak memory", _mean(MEMORY, format_bytes)),
    ("Resident", _mean(RESIDENT, format_bytes)),
    ("Of ideal", _of_ideal),
    ("Communication", _named("communication_total_share", "{:.0%}")),
    ("Exposed", _named("communication_exposed_share", "{:.0%}")),
    ("GPU mean", _named("gpu_utilization_mean", "{:.0%}")),
    ("GPU p95", _named("gpu_utilization_p95", "{:.0%}")),
    ("Host to device", _named("host_to_device_gb_per_second", "{:.1f} GB/s")),
    ("Loss", _named("mean_loss", "{:.4f}")),
    ("MFU", _named("mfu", "{:.1%}")),
    ("HFU", _named("hfu", "{:.1%}")),
    ("Of products", _named("share_of_measured_products", "{:.1%}")),
    ("Energy", _named("energy_joules_per_token", "{:.3g} J/token")),
)


# The files ------------------------------------------------------------------------------------------------------------


def render_markdown(report: Report, charts: Sequence[Named]) -> str:
    """Return the report for a repository or a ticket; plots are separate files."""
    lines = [f"# Benchmark {in_markdown(report.title)}", "", in_markdown(report.note)]
    lines += ["", "## Findings", "", *markdown_texts(report.findings)] if report.findings else []
    lines += ["", "## How large a model fits", "", *markdown_table(_MODELS, report.models)] if report.models else []
    lines += ["", "## Cells", "", *markdown_table(*report.table), ""]
    lines += [f"- {note}" for note in report.notes]
    lines += _markdown_comparison(report)
    lines += ["", "## Plots", ""] if charts else [""]
    for named in charts:
        title = in_markdown(named.title)
        lines.append(f"### {title}\n\n![{title}]({PLOTS}/{named.name}.svg)\n")
    facts = (f"- {in_markdown(name)}: {in_markdown(value)}" for name, value in _environment(report.results))
    return "\n".join([*lines, "## Measured on", "", *facts, ""])


def _markdown_comparison(report: Report) -> list[str]:
    if report.before is None:
        return []
    lines = ["", f"## Compared with {in_markdown(report.before_name)}", "", in_markdown(report.summary or ""), ""]
    lines += markdown_table(_CHANGES, report.changes)
    return [*lines, "", in_markdown(report.other_conditions)] if report.other_conditions else lines


def render_html(report: Report, charts: Sequence[Named]) -> str:
    """Return one page that contains everything."""
    failed = [r for r in report.results if r.last_failure is not None and r.last_failure.log_tail]
    cells = report.table
    return html.page(
        f"Benchmark {report.title}",
        [
            html.heading(f"Benchmark {report.title}", None, f"{report.note}"),
            html.section("Findings", html.paragraphs(report.findings)),
            html.section("How large a model fits", html.table(_MODELS, report.models, (1,))),
            html.section(
                f"Compared with {report.before_name}",
                html.paragraphs([report.summary] if report.summary else []),
                html.table(_CHANGES, report.changes, (1, 2, 3, 4)),
                html.paragraphs([report.other_conditions] if report.other_conditions else []),
            )
            if report.before is not None
            else "",
            "\n".join(html.section(named.title, html.figure(replace(named.chart, title=""))) for named in charts),
            html.section("Cells", html.table(*cells, range(2, len(cells[0]))), html.paragraphs(report.notes)),
            html.section("Last log lines of failed cells", *(_log(result) for result in failed)),
            html.section("Measured on", html.facts(_environment(report.results))),
        ],
    )


def _log(result: CellResult) -> str:
    failure = result.last_failure
    assert failure is not None
    return html.preformatted("\n".join(failure.log_tail), f"{result.cell.name}: {failure_in_words(result)}")


def _environment(results: Sequence[CellResult]) -> list[tuple[str, str]]:
    """Describe every environment that results come from, and every way in which they were measured."""
    facts = []
    for name, environment in {r.environment_id: r.environment for r in results}.items():
        hardware = environment.get("hardware") or {}
        packages = environment.get("packages") or {}
        accelerators = [str(device.get("name")) for device in hardware.get("accelerators") or []]
        shown = ", ".join(f"{accelerators.count(n)} × {n}" for n in dict.fromkeys(accelerators)) or "no accelerator"
        memory = f"{hardware.get('memory_gib', UNKNOWN)} GiB"
        versions = ", ".join(f"{package} {version}" for package, version in packages.items())
        cpu = f"{hardware.get('cpu', UNKNOWN)}, {hardware.get('cores_usable', UNKNOWN)} usable cores, {memory}"
        facts.append((f"Environment {name}", f"{cpu}; {shown}; Python {environment.get('python')}; {versions}"))
    for conditions, result in {r.conditions: r for r in results}.items():
        # Faults apply to one cell.
        values = {key: value for key, value in result.settings.items() if value and key != "faults"}
        shown = ", ".join(f"{key} {value}" for key, value in values.items())
        facts.append(
            (f"Conditions {conditions}", f"suite {result.suite}, environment {result.environment_id}; {shown}")
        )
    started = [repeat.started for result in results for repeat in result.repeats]
    facts.append(("Measured", f"{_moment(min(started))} to {_moment(max(started))}"))
    return facts


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
