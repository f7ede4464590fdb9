"""What a store's counts say together: which part was removed, by whom, and for which reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

# Of the duplicates' counts, what each is a part of.
_PART_OF = {"removed": "documents", "removed_bytes": "bytes", "paragraphs_removed": "paragraphs"}


class Removed(NamedTuple):
    """Documents that were read and are not in the store."""

    read: int
    by_cleaning: int
    as_duplicates: int

    @property
    def shares(self) -> tuple[float | None, float | None]:
        """Both as shares of the documents that were read; None where none were."""
        return (self.by_cleaning / self.read, self.as_duplicates / self.read) if self.read else (None, None)


def removed_of(sources: Iterable[Mapping[str, Any]], duplicates: Mapping[str, Any] | None) -> Removed | None:
    """What was removed of some sources, given as `describe_store` gives them; None where nobody knows what was read."""
    read = cleaned = equal = 0
    for source in sources:
        if "read" not in source:
            return None
        found = (duplicates or {}).get("sources", {}).get(source["name"], {}).get("removed", 0)
        read, equal = read + source["read"], equal + found
        cleaned += source["read"] - source["documents"] - found - source.get("unencodable", 0)
    return Removed(read, cleaned, equal)


def removed_share(counts: Mapping[str, Any], key: str) -> float | None:
    """Of a count in the report on duplicates that says what was removed: its share of what was there."""
    whole = counts.get(_PART_OF.get(key, ""))
    return counts[key] / whole if whole and key in counts else None


def reasons_text(step: Mapping[str, Any], most: int) -> str:
    """A cleaning step's most frequent reasons; of decontamination all, for a set that is not named would look clean."""
    reasons = dict(step["reasons"])
    if step["name"].partition("-")[0] == "decontaminate":
        # All that its sets removed together: it stands beside already.
        if reasons.get("removed") == step["documents_in"] - step["documents_out"]:
            del reasons["removed"]
        most = len(reasons)
    return ", ".join(f"{reason} {count:,}" for reason, count in list(reasons.items())[:most])
