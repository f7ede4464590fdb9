"""Limits that stop deduplication from destroying a corpus.

A wrong field, a template that says the same of every document, or one source that holds another: all look like
duplicates. Whoever means it says so in the config; what is not meant is found before anything is thrown away.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from headway.config.data import DedupConfig
from headway.core.errors import DataError

#: A share says little of a few: up to so many documents (or paragraphs) never stop anything.
FEW = 10
# Documents of the largest cluster that are shown.
_SHOWN = 2


class TooManyDuplicates(DataError):
    """More would be removed than the config allows; `report` says what was found."""

    report: dict[str, Any] | None = None


def check_limits(report: dict[str, Any], config: DedupConfig, describe: Callable[[int, int], str] | None) -> None:
    """Stop where too much would go.

    Args:
        report: As in `Duplicates.report`.
        config: The limits.
        describe: Turns a unit and a document's number in it into text.

    Raises:
        TooManyDuplicates: one or more limits are passed. The message has the figures, documents of the largest cluster,
            and the values that would let it pass.
    """
    total, largest = report["total"], report["clusters"]["largest"]
    passed: list[tuple[str, str, float]] = []

    def check(key: str, limit: float, part: int, whole: int, what: str) -> None:
        # The share itself is compared: 0.29 * 100 is less than 29, and a limit that the message names must do.
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
    # Rounded up, so that the value lets through what was found.
    needed: dict[str, float] = {}
    for key, _, share in passed:
        needed[key] = max(needed.get(key, 0.0), min(1.0, math.ceil(share * 1000) / 1000))
    raised = " ".join(f"{key}={value:g}" for key, value in needed.items())
    error = TooManyDuplicates(
        "deduplication would remove too much: " + "; ".join(share for _, share, _ in passed),
        where=_places(largest, describe),
        fix=f"see whether the right field is read and what these documents share; to accept it: {raised}",
    )
    error.report = report
    raise error


def _places(largest: list[dict[str, Any]], describe: Callable[[int, int], str] | None) -> str | None:
    """The first documents of the largest cluster."""
    if not largest:
        return None
    say = describe or (lambda unit, document: f"unit {unit}, document {document}")
    documents = [largest[0]["kept"], *(each["document"] for each in largest[0]["removed"])][:_SHOWN]
    return f"the largest cluster ({largest[0]['documents']:,} documents), " + " and ".join(
        say(unit, document) for unit, document in documents
    )
