"""The part of a data report about duplicates, made from the plain results of the search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headway.core.format import UNKNOWN, format_bytes
from headway.telemetry import html
from headway.telemetry.summary import share_text
from headway.text.report.counts import removed_share

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
