"""Limits that stop deduplication from destroying a corpus.

A wrong field, a template that yields the same text for every document, or a source that contains another all look like
duplicates. The limits catch such mistakes before anything is removed; the config can raise them on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from headway.config.sections.data import DedupConfig
from headway.core.errors import DataError

#: Up to this many duplicate documents (or paragraphs) are always allowed, since a share of few says little.
FEW = 10
# Documents of the largest cluster shown in the message.
_SHOWN = 2


class TooManyDuplicates(DataError):
    """More would be removed than the config allows; `report` has the findings."""

    report: dict[str, Any] | None = None


def check_limits(report: dict[str, Any], config: DedupConfig, describe: Callable[[int, int], str] | None) -> None:
    """Check that deduplication does not remove too much.

    Args:
        report: As in `Duplicates.report`.
        config: The limits.
        describe: Returns a text for a unit and a document's number in it.

    Raises:
        TooManyDuplicates: a limit is exceeded. The message has the figures, documents of the largest cluster, and the
            values that would allow the removal.
    """
    total = report["total"]
    largest = report["clusters"]["largest"]
    passed: list[tuple[str, str, float]] = []

    def check(key: str, limit: float, part: int, whole: int, what: str) -> None:
        # Compare the share, not percent: 0.29 * 100 is below 29, and the limit named in the message must suffice.
        if part > FEW and part / whole > limit:
            share = f"{part:,} of {whole:,} {what} ({part / whole:.1%}; the limit is {limit:.1%})"
            passed.append((f"data.dedup.{key}", share, part / whole))

    if largest:
        of = "documents are in one cluster of duplicates"
        check("max_cluster", config.max_cluster, largest[0]["documents"], total["documents"], of)
    parts = (("removed", "documents", "documents"), ("paragraphs_removed", "paragraphs", "paragraphs"))
    for part, whole, what in parts:
        check("max_removed", config.max_removed, total[part], total[whole], f"{what} would be removed")
    for name, counts in report["sources"].items():
        for part, whole, what in parts:
            of = f"{what} of source '{name}' would be removed"
            check("max_removed_per_source", config.max_removed_per_source, counts[part], counts[whole], of)
    if not passed:
        return
    # Round up, so that the suggested value allows the findings.
    needed: dict[str, float] = {}
    for key, _, share in passed:
        needed[key] = max(needed.get(key, 0.0), min(1.0, math.ceil(share * 1000) / 1000))
    raised = " ".join(f"{key}={value:g}" for key, value in needed.items())
    error = TooManyDuplicates(
        "deduplication would remove too much: " + "; ".join(share for _, share, _ in passed),
        where=_places(largest, describe),
        fix=f"check whether the right field is read and what these documents share; to accept it: {raised}",
    )
    error.report = report
    raise error


def _places(largest: list[dict[str, Any]], describe: Callable[[int, int], str] | None) -> str | None:
    """Describe the first documents of the largest cluster."""
    if not largest:
        return None
    say = describe or (lambda unit, document: f"unit {unit}, document {document}")
    documents = [largest[0]["kept"], *(each["document"] for each in largest[0]["removed"])][:_SHOWN]
    return f"the largest cluster ({largest[0]['documents']:,} documents), " + " and ".join(
        say(unit, document) for unit, document in documents
    )
