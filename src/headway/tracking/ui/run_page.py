"""The page of one run: what its report says, its curves by group, system readings, and its log. All text is escaped."""

from __future__ import annotations

import time
from html import escape
from pathlib import Path
from urllib.parse import urlencode

from headway.config import load_resolved
from headway.core.credentials.secrets import redact
from headway.core.errors import ConfigError
from headway.core.files.foreign import read_end
from headway.core.format import format_bytes
from headway.telemetry import html, report
from headway.telemetry.record import Run
from headway.telemetry.summary import time_text
from headway.telemetry.tags import read_tags

#: Bytes at the end of a log that a page shows, and that a link gives.
_SHOWN_BYTES = 12_000
_LOG_BYTES = 2 * 2**20
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="page.css">
<link rel="stylesheet" href="uplot/uPlot.min.css">
<link rel="stylesheet" href="style.css">
<script src="uplot/uPlot.iife.min.js" defer></script>
<script src="run.js" type="module"></script>
</head>
<body class="run" data-run="{name}">
<header>
  <a href="/">All runs</a>
  <span id="connection" class="muted" role="status"></span>
  <button id="theme" type="button" title="Change between the system's colours, light and dark"></button>
</header>
<main>
"""
_CURVES = """<section aria-label="Curves">
<div class="tools">
  <h2>Curves</h2>
  <input id="filter" type="search" placeholder="Filter: part of a metric's name" aria-label="Filter">
  <label>Axis <select id="axis"><option value="step">steps</option><option value="tokens">tokens</option>
    <option value="time">time</option></select></label>
  <label>Smoothing <input id="smoothing" type="range" min="0" max="0.99" step="0.01">
    <output id="smoothing-value" for="smoothing"></output></label>
  <button id="unzoom" type="button" hidden>Reset zoom</button>
</div>
<div id="groups"></div>
</section>
"""


def run_page(run: Run, name: str) -> str:
    """Return the page of a run, which the folder knows by this name."""
    record = report.record(run)  # first: it reads the history, which the others need too
    head = _HEAD.format(title=escape(f"{run.name} · Headway"), name=escape(name))
    parts = [
        f'<div id="now">{report.head(run)}{_tags(run)}{_links(run, name)}</div>',
        html.section("Config", _config(run)),
        _CURVES,
        f'<div id="rest">{record}{html.section("Log", _log(run))}</div>',
    ]
    return redact(head + "\n".join(parts) + "\n</main>\n</body>\n</html>\n")


def _tags(run: Run) -> str:
    found = read_tags(run.path)
    words = "".join(f'<span class="tag">{escape(word)}</span>' for word in found.tags)
    note = f'<p class="note">{escape(found.note)}</p>' if found.note else ""
    return f"<p>{words}</p>{note}" if words or note else ""


def _links(run: Run, name: str) -> str:
    links = [f'<a href="/report?{urlencode({"run": name})}">Report</a>']
    links += [
        f'<a href="/log?{urlencode({"run": name, "log": _name_of(run, path)})}">{escape(_name_of(run, path))}</a>'
        for path in logs_of(run)[:8]
    ]
    return f'<p class="links">{" · ".join(links)}</p>'


def _config(run: Run) -> str:
    """Show what differs from the defaults, then all of it."""
    try:
        different = str(load_resolved(run.path / "config.yaml").model_copy(update={"segments": []}))
    except ConfigError:  # of another version
        different = ""
    return (html.preformatted(different) if different else "") + report.config(run)


def _log(run: Run) -> str:
    newest = next(iter(logs_of(run)), None)
    if newest is None:
        return ""
    text, size = _end_of(newest, _SHOWN_BYTES)
    words = f"{_name_of(run, newest)}, {format_bytes(size)}, {time_text(_changed(newest))}"
    return f'<p class="muted">{escape(words)}</p>{html.preformatted(text)}'


def logs_of(run: Run) -> list[Path]:
    """Return the logs of a run's attempts: those of the newest one first, and of the first worker first."""
    found = [path for path in (run.path / "attempts").glob("*/*.log") if path.parent.name.isdecimal()]
    return sorted(found, key=lambda path: (-int(path.parent.name), len(path.name), path.name))


def _name_of(run: Run, path: Path) -> str:
    return path.relative_to(run.path / "attempts").as_posix()


def log_of(run: Run, name: str) -> str | None:
    """Return the end of a log by its name in `attempts`; None if there is no such log, or it cannot be read."""
    for path in logs_of(run):
        if _name_of(run, path) == name:
            return redact(_end_of(path, _LOG_BYTES)[0])
    return None


def _end_of(path: Path, most: int) -> tuple[str, int]:
    """Return the last whole lines of a log, and its size; nothing of one that cannot be read."""
    try:
        end, size = read_end(path, most)
    except OSError:
        return "", 0
    return end.decode("utf-8", "replace"), size


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return time.time()
