"""The data report: one page about one token store, from the plain facts of `headway.text.inspect`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from headway.core.files.atomic import atomic_write
from headway.core.format import UNKNOWN, format_bytes, format_count
from headway.telemetry import html
from headway.telemetry.charts import Chart, Entry, Line, plot_of
from headway.telemetry.summary import share_text
from headway.text.report.counts import reasons_text, removed_of, removed_share, split_rows

#: Examples shown per step; the store's `inputs.json` has the rest.
_EXAMPLES = 3
_REASONS = 6
#: Width of the picture of shares, of its names, and of what follows a bar; height of a source.
_WIDTH = 920
_NAMES = 220
_AFTER = 60
_ROW = 34
#: Characters of a name.
_NAME_CHARACTERS = 30
_COUNTS = {
    "documents": "Documents",
    "bytes": "Size",
    "exact": "Equal to another",
    "near": "Nearly equal",
    "emptied": "No paragraph left",
    "removed": "Documents removed",
    "removed_bytes": "Removed",
    "paragraphs": "Paragraphs",
    "paragraphs_removed": "Paragraphs removed",
}
_SETTINGS = {
    "documents": "Equal documents are left out",
    "paragraphs": "Repeated paragraphs are left out",
    "paragraph_bytes": "Shortest paragraph that is looked at",
    "near": "Nearly equal documents are left out",
    "similarity": "Nearly equal from a Jaccard similarity of",
    "found_at_similarity": "Chance to find two that are so similar",
    "ngram": "Words in an n-gram",
    "bands": "MinHash bands",
    "rows": "MinHash values in a band",
    "max_cluster": "Largest share that one cluster may have",
    "max_removed": "Largest share that may be removed",
    "max_removed_per_source": "Largest share that may be removed of one source",
}
#: Settings that have no effect while another one is off.
_ONLY_WITH = {
    "paragraph_bytes": "paragraphs",
    **dict.fromkeys(("similarity", "found_at_similarity", "ngram", "bands", "rows"), "near"),
}


def write_data_report(facts: Mapping[str, Any], output: Path) -> Path:
    """Write the page.

    Args:
        facts: What `describe_store` gives, and, when they are known, per source `fertility` (tokens per word) and
            `asked_share` (of the training rows, from the mixture).
        output: Where to.
    """
    text = render_data_report(facts)
    with atomic_write(output, "w") as file:
        file.write(text)
    return output


def render_data_report(facts: Mapping[str, Any]) -> str:
    """Return the page as text."""
    name = Path(facts["store"]).name
    return html.page(
        f"{name} · Headway data",
        [
            html.heading(name, None, f"Token store {facts['store']}, fingerprint {facts['fingerprint'][:16]}."),
            html.tiles(_tiles(facts)),
            html.section("Sources", _sources(facts), _shares(facts)),
            html.section("Document length", *_lengths(facts["splits"])),
            html.section("Cleaning", *(_cleaning(source) for source in facts["sources"])),
            html.section("Duplicates", duplicates(facts.get("duplicates"))),
            html.section("Splits", _splits(facts["splits"])),
            html.section("Tokenizer", html.facts(_tokenizer(facts))),
        ],
    )


def _tiles(facts: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    sources = facts["sources"]
    splits = facts["splits"]
    tokens, documents, read = (sum(s.get(key, 0) for s in sources) for key in ("tokens", "documents", "read"))
    text_bytes = sum(source.get("text_bytes", 0) for source in sources)
    held_out = sum(part["tokens"] for part in splits if part["split"] == "validation")
    removed = removed_of(sources, facts.get("duplicates"))
    parts = [(f"{count:,} documents", share) for count, share in removed.parts] if removed else [("", None)] * 2
    bad = sum(source.get("skipped", 0) for source in sources)
    return [
        ("Tokens", format_count(tokens), f"{format_bytes(tokens * (2 if facts['dtype'] == 'uint16' else 4))} on disk"),
        ("Documents", format_count(documents), f"of {read:,} read" if read else ""),
        ("Text", format_bytes(text_bytes) if text_bytes else UNKNOWN, "UTF-8"),
        ("Bytes per token", f"{text_bytes / tokens:.2f}" if tokens and text_bytes else UNKNOWN, ""),
        ("Removed by cleaning", share_text(parts[0][1]), parts[0][0]),
        ("Removed as duplicates", share_text(parts[1][1]), parts[1][0]),
        ("Malformed", f"{bad:,}", "documents that could not be read"),
        ("Held out", share_text(held_out / tokens if tokens else None), f"{format_count(held_out)} tokens"),
    ]


def _sources(facts: Mapping[str, Any]) -> str:
    counts = ["Files", "Input", "Read", "Removed by cleaning", "Removed as duplicates", "Kept", "Tokens"]
    headers = ["Source", *counts, "Bytes/token", "Tokens/word", "Malformed", "Empty"]
    rows = [
        [
            source["name"],
            _count(source.get("files")),
            format_bytes(source["input_bytes"]) if "input_bytes" in source else UNKNOWN,
            _count(source.get("read")),
            *_removed(source, facts.get("duplicates")),
            _count(source.get("documents")),
            _count(source.get("tokens")),
            _ratio(source.get("bytes_per_token")),
            _ratio(source.get("fertility")),
            _count(source.get("skipped")),
            _count(source.get("empty")),
        ]
        for source in facts["sources"]
    ]
    return html.table(headers, rows, numeric=range(1, len(headers)), drop_unknown=True)


def _removed(source: Mapping[str, Any], found: Mapping[str, Any] | None) -> list[str]:
    """Show the documents of a source that cleaning and deduplication removed, each with its share."""
    removed = removed_of([source], found)
    if removed is None:
        return [UNKNOWN, UNKNOWN]
    return [f"{count:,} ({share_text(share)})" for count, share in removed.parts]


def _shares(facts: Mapping[str, Any]) -> str:
    """Show each source's share of the train split next to the share of training that the config wants."""
    train = {part["source"]: part["tokens"] for part in facts["splits"] if part["split"] == "train"}
    total = sum(train.values())
    if len(train) < 2 or not total:
        return ""
    asked = {source["name"]: source.get("asked_share") for source in facts["sources"]}
    names = list(train)
    have = [train[name] / total for name in names]
    want = [asked.get(name) for name in names]
    return f'<div class="charts">{html.figure(share_chart(names, have, want))}</div>'


def _lengths(splits: Sequence[Mapping[str, Any]]) -> list[str]:
    train = [part for part in splits if part["split"] == "train" and part["documents"]]
    charts = "".join(html.figure(length_chart(part["source"], part["length_histogram"])) for part in train)
    return [f'<div class="charts">{charts}</div>' if charts else ""]


def _splits(splits: Sequence[Mapping[str, Any]]) -> str:
    if not splits:
        return ""
    headers, rows = split_rows(splits)
    return '<p class="muted">Tokens per document at percentiles.</p>' + html.table(
        headers, rows, range(2, len(headers))
    )


def _cleaning(source: Mapping[str, Any]) -> str:
    """Show what each step dropped or changed of a source, with examples."""
    steps = (source.get("clean") or {}).get("steps", [])
    if not steps:
        return ""
    headers = ["Step", "Documents in", "Out", "Dropped", "Changed", "Bytes in", "Out", "Reasons"]
    rows = []
    for step in steps:
        dropped = step["documents_in"] - step["documents_out"]
        share = f"{dropped:,} ({share_text(dropped / step['documents_in'])})" if step["documents_in"] else "0"
        counts = [f"{step['documents_in']:,}", f"{step['documents_out']:,}", share, f"{step['changed']:,}"]
        sizes = [format_bytes(step["bytes_in"]), format_bytes(step["bytes_out"])]
        rows.append([step["name"], *counts, *sizes, reasons_text(step, _REASONS)])
    examples = "".join(_examples(step) for step in steps)
    title = f"<h3>{escape(source['name'])}</h3>"
    return title + html.table(headers, rows, numeric=range(1, 7)) + examples


def _examples(step: Mapping[str, Any]) -> str:
    lines = []
    for kind in ("dropped", "changed", "found"):
        chosen = [example for example in step["examples"] if example["kind"] == kind][:_EXAMPLES]
        lines += [f"[{kind}: {example['reason']}]\n{example['text']}\n" for example in chosen]
    return html.preformatted("\n".join(lines), f"Examples: {step['name']}") if lines else ""


def _tokenizer(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    tokenizer = facts["tokenizer"]
    return [
        ("Vocabulary", f"{tokenizer['vocab_size']:,} token ids, stored as {facts['dtype']}"),
        ("Documents begin with", _begin(tokenizer)),
        ("Documents end with", f"{tokenizer['end_of_text']} ({tokenizer['end_of_text_id']})"),
        ("Encoded by", facts.get("encoder") or UNKNOWN),
        ("Fingerprint", tokenizer["fingerprint"]),
    ]


def _begin(tokenizer: Mapping[str, Any]) -> str:
    ids = tokenizer.get("begin_of_text_ids", [])
    return ", ".join(f"{t} ({n})" for t, n in zip(tokenizer.get("begin_of_text", []), ids, strict=True)) or "no token"


def _count(value: Any) -> str:
    return UNKNOWN if value is None else f"{value:,}"


def _ratio(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}"


def length_chart(source: str, histogram: Sequence[Sequence[int]]) -> Chart:
    """Return documents by length in tokens, on a logarithmic axis.

    Args:
        source: Name of the source.
        histogram: Rows of lower end, upper end (exclusive) and documents.
    """
    starts = np.array([max(row[0], 0.7) for row in histogram] + [row[1] for row in histogram[-1:]])
    counts = np.array([float(row[2]) for row in [*histogram, *histogram[-1:]]])
    line = Line(starts, counts, 0, "bars", "documents")
    return Chart(source, plot=plot_of([line], x="tokens per document", y="documents", log_x=True, from_zero=True))


def share_chart(names: Sequence[str], have: Sequence[float], asked: Sequence[float | None]) -> Chart:
    """Draw each source's share of the train split's tokens, next to the share of training rows that the config
    wants."""
    compare = any(share is not None for share in asked)
    thickness = 12 if compare else 22
    parts = []
    for number, name in enumerate(names):
        top = number * _ROW + 4
        shown = name if len(name) <= _NAME_CHARACTERS else f"{name[: _NAME_CHARACTERS - 1]}…"
        parts.append(f'<text x="{_NAMES - 10}" y="{top + 17}" text-anchor="end">{escape(shown)}</text>')
        for series, share in enumerate((have[number], asked[number]) if compare else (have[number],)):
            width = (share or 0.0) * (_WIDTH - _NAMES - _AFTER)
            y = top + series * (thickness + 1)
            size = f'width="{width:.1f}" height="{thickness}"'
            parts.append(
                f'<rect x="{_NAMES}" y="{y}" {size} style="fill: var(--series-{series})"/>'
                f'<text x="{_NAMES + width + 6:.1f}" y="{y + thickness - 2}">{100 * (share or 0.0):.1f} %</text>'
            )
    svg = (
        f'<svg viewBox="0 0 {_WIDTH} {_ROW * len(names)}" role="img" aria-label="Share of each source" font-size="12"'
        f' style="fill: var(--muted)">{"".join(parts)}</svg>'
    )
    legend = [Entry("share of the train split's tokens", 0)]
    if compare:
        legend.append(Entry("share of training rows that the config asks for", 1))
    return Chart("Sources", svg, tuple(legend), wide=True)


def duplicates(report: Mapping[str, Any] | None) -> str:
    """Show the findings by source, the largest clusters, and the settings; nothing if no search was made."""
    if not report:
        return ""
    sources = report.get("sources") or {}
    settings = report.get("settings") or {}
    total = {"all sources": report["total"]} if report.get("total") and len(sources) != 1 else {}
    keys = [key for key in _COUNTS if any(key in counts for counts in (*sources.values(), *total.values()))]
    rows = [[name, *(_count_text(key, counts) for key in keys)] for name, counts in {**sources, **total}.items()]
    headers = ["Source", *(_COUNTS[key] for key in keys)]
    return html.table(headers, rows, numeric=range(1, len(headers))) + html.facts(
        [*_clusters(report.get("clusters") or {}), *_settings(settings)]
    )


def _clusters(clusters: Mapping[str, Any]) -> list[tuple[str, str]]:
    if "count" not in clusters:
        return []
    largest: Sequence[Mapping[str, Any]] = clusters.get("largest") or ()
    sizes = ", ".join(f"{cluster['documents']:,} documents ({share_text(cluster['share'])})" for cluster in largest)
    found = [("Clusters of duplicates", f"{clusters['count']:,}")]
    return [*found, ("Largest clusters", sizes)] if sizes else found


def _settings(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (words, _value_text(key, settings[key]))
        for key, words in _SETTINGS.items()
        if key in settings and settings.get(_ONLY_WITH.get(key, key)) is not False
    ]


def _count_text(key: str, counts: Mapping[str, Any]) -> str:
    """Format a count; for removals add the share."""
    text = _value_text(key, counts.get(key))
    share = removed_share(counts, key)
    return text if share is None else f"{text} ({share_text(share)})"


def _value_text(key: str, value: Any) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key.endswith("bytes"):
        return format_bytes(value)
    if key == "similarity":
        return f"{value:g}"
    return share_text(value) if isinstance(value, float) else f"{value:,}"
