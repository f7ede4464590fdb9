"""What a store's counts mean together: which part was removed, by which step, and for which reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

# For each count of the duplicates, the count that it is a part of.
_PART_OF = {"removed": "documents", "removed_bytes": "bytes", "paragraphs_removed": "paragraphs"}


class Removed(NamedTuple):
    """Documents that were read and are not in the store."""

    read: int
    by_cleaning: int
    as_duplicates: int

    @property
    def parts(self) -> list[tuple[int, float | None]]:
        """Both with their shares of the documents that were read; None where none were."""
        return [(count, count / self.read if self.read else None) for count in (self.by_cleaning, self.as_duplicates)]


def removed_of(sources: Iterable[Mapping[str, Any]], duplicates: Mapping[str, Any] | None) -> Removed | None:
    """Return what was removed from sources, as `describe_store` returns them; None if it is unknown what was read."""
    read = cleaned = equal = 0
    for source in sources:
        if "read" not in source:
            return None
        found = (duplicates or {}).get("sources", {}).get(source["name"], {}).get("removed", 0)
        read = read + source["read"]
        equal = equal + found
        cleaned += source["read"] - source["documents"] - found - source.get("unencodable", 0)
    return Removed(read, cleaned, equal)


def removed_share(counts: Mapping[str, Any], key: str) -> float | None:
    """Return the share of a count in the report on duplicates that counts removals; None for other counts."""
    whole = counts.get(_PART_OF.get(key, ""))
    return counts[key] / whole if whole and key in counts else None


def split_rows(splits: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return headers and rows of a table of the splits, as `describe_store` returns them."""
    percentiles = splits[0]["length_percentiles"] if splits else ()
    rows = []
    for part in splits:
        counts = (part["shards"], part["documents"], part["tokens"], *part["length_percentiles"].values())
        rows.append([part["split"], part["source"], *(f"{count:,}" for count in counts)])
    return ["Split", "Source", "Shards", "Documents", "Tokens", *(f"P{percentile}" for percentile in percentiles)], rows


def reasons_text(step: Mapping[str, Any], most: int) -> str:
    """Describe a cleaning step's most frequent reasons.

    For decontamination list all, since a set that is not named would look clean.
    """
    reasons = dict(step["reasons"])
    if step["name"].partition("-")[0] == "decontaminate":
        # The total of its sets is shown elsewhere.
        if reasons.get("removed") == step["documents_in"] - step["documents_out"]:
            del reasons["removed"]
        most = len(reasons)
    return ", ".join(f"{reason} {count:,}" for reason, count in list(reasons.items())[:most])
