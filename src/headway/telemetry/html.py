"""The few pieces of HTML that pages consist of. All text is escaped here, so that no caller has to do it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from typing import NamedTuple

from headway.core.coordination.outcomes import BUDGET_REACHED, CANCELLED, FINISHED, PREEMPTED
from headway.core.credentials.secrets import redact
from headway.core.format import UNKNOWN
from headway.telemetry.charts import Chart
from headway.telemetry.record import NOT_ENDED, NOT_STARTED, RUNNING

#: Colours are the Okabe-Ito palette, which colour-blind readers can tell apart, darkened or lightened for the ground.
STYLE = """
:root {
  color-scheme: light dark;
  --ground: #ffffff; --panel: #f6f7f9; --ink: #1b1f24; --muted: #5d6673; --rule: #dfe3e8; --link: #0b63b5;
  --good: #0a7d4f; --busy: #0b63b5; --bad: #c0341d; --warn: #9a6200;
  --series-0: #0b63b5; --series-1: #d1530f; --series-2: #0a8a63; --series-3: #a8478a;
  --series-4: #a87800; --series-5: #2a9fd0; --series-6: #6b5bd2; --series-7: #555d68;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #14171b; --panel: #1c2026; --ink: #e7eaee; --muted: #99a3b0; --rule: #2e343c; --link: #6cb2f2;
    --good: #3fc48d; --busy: #6cb2f2; --bad: #ff7a63; --warn: #e5a83b;
    --series-0: #5aa9f0; --series-1: #ff8a4c; --series-2: #34c795; --series-3: #dd83c0;
    --series-4: #e0b341; --series-5: #6fd0f5; --series-6: #a79bf5; --series-7: #a5adb8;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 40px 24px 64px; max-width: 1120px; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
h1 { margin: 0; font-size: 30px; line-height: 1.2; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { margin: 48px 0 14px; font-size: 19px; letter-spacing: -0.005em; }
h3 { margin: 0 0 6px; font-size: 14px; font-weight: 600; }
p { margin: 8px 0; }
.muted, caption, dt { color: var(--muted); }
.head { display: flex; align-items: center; gap: 14px; flex-wrap: wrap; }
.state { padding: 2px 11px; border: 1px solid currentColor; border-radius: 99px; font-size: 13px; font-weight: 600; }
.good { color: var(--good); } .busy { color: var(--busy); } .bad { color: var(--bad); } .warn { color: var(--warn); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 12px; margin: 26px 0 0; }
.tile { padding: 13px 16px 12px; background: var(--panel); border-radius: 10px; }
.tile dt { font-size: 13px; }
.tile dd { margin: 1px 0 0; font-size: 23px; font-weight: 600; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile dd small { display: block; font-size: 12.5px; font-weight: 400; color: var(--muted); }
figure { margin: 0; overflow-x: auto; }
figure svg { display: block; width: 100%; height: auto; overflow: visible; }
.wide svg { min-width: 700px; }
.small svg { max-width: 460px; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figure svg text { font-family: inherit !important; }
.charts {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 30px 26px; margin-top: 34px;
}
.legend { display: flex; flex-wrap: wrap; gap: 2px 20px; margin: 0 0 8px; font-size: 13px; color: var(--muted); }
.legend i { display: inline-block; width: 20px; margin-right: 7px; vertical-align: 3px; border-top: 2.5px solid; }
.legend .faint { opacity: 0.35; } .legend .dashed { border-top-style: dashed; }
.legend .dotted { border-top-style: dotted; }
.legend .band { border-top-width: 10px; vertical-align: -1px; opacity: 0.35; }
.legend .dots { width: 8px; height: 8px; border: 4px solid; border-radius: 50%; vertical-align: 0; }
.plot { min-height: 240px; }
.wide .plot { min-height: 380px; }
.plot .u-select { background: color-mix(in srgb, var(--link) 18%, transparent); }
.plot .u-hz .u-cursor-x { border-color: var(--muted); }
.at { margin: 2px 0 0; min-height: 1.5em; font-size: 13px; color: var(--muted); font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
.facts + .scroll, .scroll + .facts, .facts + details { margin-top: 16px; }
table { width: 100%; border-collapse: separate; border-spacing: 0; font-size: 14px; }
th { padding: 6px 18px 6px 0; text-align: left; vertical-align: bottom; font-weight: 600; font-size: 13px; }
th { color: var(--muted); }
td { padding: 6px 18px 6px 0; vertical-align: top; overflow-wrap: break-word; }
td.text { min-width: 24ch; }
.many :is(th, td):first-child { position: sticky; left: 0; z-index: 1; max-width: 26ch; background: var(--ground); }
tr > * { border-bottom: 1px solid var(--rule); }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: 4px 22px; margin: 0; font-size: 14px; }
.facts dd { margin: 0; overflow-wrap: anywhere; }
pre {
  margin: 0; padding: 14px 16px; overflow-x: auto; background: var(--panel); border-radius: 10px;
  font: 12.5px/1.55 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre-wrap;
}
details summary { cursor: pointer; color: var(--link); margin: 6px 0; }
@media (max-width: 560px) { .facts { grid-template-columns: 1fr; } .facts dd { margin-bottom: 8px; } }
@media (max-width: 560px) { .many :is(th, td):first-child { max-width: 16ch; } }
@media print { body { padding: 0; } h2 { break-after: avoid; } figure, .tile, tr { break-inside: avoid; } }
"""

#: By this a page with charts is known.
_PLOT = '<div class="plot"'
#: Number of columns from which the first one stays in view when the table is scrolled sideways.
_MANY_COLUMNS = 7
#: Length of a cell from which its column is a text column with a minimum width, even among numbers.
_TEXT_CHARACTERS = 24

#: Colours of a run's states.
_TONES = {
    FINISHED: "good",
    RUNNING: "busy",
    PREEMPTED: "warn",
    BUDGET_REACHED: "warn",
    CANCELLED: "warn",
    NOT_ENDED: "warn",
    NOT_STARTED: "warn",
}


def page(title: str, body: Iterable[str]) -> str:
    """Return a whole document that loads nothing from elsewhere and contains no credentials."""
    content = redact("\n".join(part for part in body if part))
    style = ""
    script = ""
    if _PLOT in content:
        style = static("uplot/uPlot.min.css")
        script = _figures_script()
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{redact(escape(title))}</title>\n<style>{STYLE}{style}</style>\n</head>\n<body>\n"
        f"{content}{script}\n</body>\n</html>\n"
    )


def static(name: str) -> str:
    """Return a file that pages share: uPlot, and the scripts around it."""
    return resources.files(__package__).joinpath("static", name).read_text(encoding="utf-8")


def _figures_script() -> str:
    """Return what draws the charts of a page, in the page itself: modules cannot be loaded from a file."""
    modules = "\n".join(static(name) for name in ("format.js", "scales.js", "figures.js"))
    plain = re.sub(r"^import .*?;\n|^export ", "", modules, flags=re.MULTILINE)
    words = "Charts are drawn by a script of this page, which is not allowed to run here."
    return (
        f"<noscript><p>{words}</p></noscript>\n<script>{static('uplot/uPlot.iife.min.js')}</script>\n"
        f"<script>(() => {{\n{plain}}})();</script>"
    )


def heading(title: str, state: str | None, note: str, tone: str | None = None) -> str:
    """Return the page's title, with the outcome next to it and one sentence below.

    Args:
        tone: The outcome's colour, if it differs from that of the state.
    """
    tag = f'<span class="state {tone or _TONES.get(state, "bad")}">{escape(state)}</span>' if state else ""
    return (
        f'<header><div class="head"><h1>{escape(title)}</h1>{tag}</div>\n<p class="muted">{escape(note)}</p></header>'
    )


def section(title: str, *parts: str) -> str:
    """Return a heading and its content; empty without content."""
    content = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>" if content else ""


def tiles(items: Iterable[tuple[str, str, str]]) -> str:
    """Return headline numbers: (label, value, note)."""
    cells = []
    for label, value, note in items:
        small = f"<small>{escape(note)}</small>" if note else ""
        cells.append(f'<div class="tile"><dt>{escape(label)}</dt><dd>{escape(value)}{small}</dd></div>')
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def facts(items: Iterable[tuple[str, str]]) -> str:
    """Return names and values, one pair a line."""
    pairs = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in items)
    return f'<dl class="facts">{pairs}</dl>' if pairs else ""


def paragraphs(texts: Iterable[str]) -> str:
    """Return a paragraph for each text; texts that begin with a dash become items of a list."""
    parts: list[str] = []
    for text in texts:
        if text.startswith("- "):
            item = f"<li>{escape(text[2:])}</li>"
            if parts and parts[-1].endswith("</ul>"):
                parts[-1] = f"{parts[-1][:-5]}{item}</ul>"
            else:
                parts.append(f"<ul>{item}</ul>")
        else:
            parts.append(f"<p>{escape(text)}</p>")
    return "\n".join(parts)


def table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], numeric: Iterable[int] = (), *, drop_unknown: bool = False
) -> str:
    """Return a table; empty without rows.

    Args:
        headers: Names of the columns.
        rows: Cells of each row.
        numeric: Columns that are aligned right.
        drop_unknown: Omit columns, except the first, whose cells are all unknown or empty.
    """
    if not rows:
        return ""
    right = set(numeric)
    columns = [
        _Column(index, index in right, any(len(row[index]) > _TEXT_CHARACTERS for row in rows))
        for index in range(len(headers))
        if not (drop_unknown and index and all(row[index] in (UNKNOWN, "") for row in rows))
    ]
    body = "\n".join(f"<tr>{_cells('td', row, columns)}</tr>" for row in rows)
    head = f"<thead><tr>{_cells('th', headers, columns)}</tr></thead>"
    kind = ' class="many"' if len(columns) >= _MANY_COLUMNS else ""
    return f'<div class="scroll"><table{kind}>\n{head}\n<tbody>\n{body}\n</tbody></table></div>'


class _Column(NamedTuple):
    place: int
    is_numeric: bool
    is_text: bool

    @property
    def kind(self) -> str:
        """The attribute for the style."""
        return ' class="number"' if self.is_numeric else ' class="text"' if self.is_text else ""


def _cells(tag: str, values: Sequence[str], columns: Iterable[_Column]) -> str:
    return "".join(f"<{tag}{column.kind}>{escape(values[column.place])}</{tag}>" for column in columns)


def figure(chart: Chart) -> str:
    """Return a chart with its title and legend."""
    entries = "".join(
        f'<span><i class="{entry.kind}" style="border-color: var({entry.variable})"></i>{escape(entry.label)}</span>'
        for entry in chart.legend
    )
    legend = f'<div class="legend">{entries}</div>' if entries else ""
    size = "wide" if chart.wide else "small"
    title = f"<h3>{escape(chart.title)}</h3>\n" if chart.title else ""
    drawn = chart.svg
    if chart.plot is not None:
        values = json.dumps(chart.plot, separators=(",", ":")).replace("<", "\\u003c")
        label = escape(chart.title or str(chart.plot["y"]))
        drawn = (
            f'<div class="plot" role="img" aria-label="{label}"></div><script type="application/json">{values}</script>'
        )
    return f'<figure class="{size}">\n{title}{legend}\n{drawn}\n</figure>'


def preformatted(text: str, summary: str | None = None) -> str:
    """Return text unchanged, folded under a summary line if one is given."""
    block = f"<pre>{escape(text)}</pre>"
    return f"<details><summary>{escape(summary)}</summary>{block}</details>" if summary else block
