"""Lineage of checkpoints: each records which attempt made it, and from which checkpoint that attempt continued."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from headway.checkpoint.format.manifest import Manifest

PARENT = "parent"
"""Key of a checkpoint's context: `{"step": ..., "state_sha256": ...}`, or null for step 0."""


class Origin(NamedTuple):
    """Origin of a checkpoint."""

    attempt: int | None
    """Number of the attempt that made it; None if unknown."""
    start: int | None
    """Step that this attempt started from, or rolled back to; None if unknown."""


UNKNOWN = Origin(None, None)


def origin_of(context: Mapping[str, Any]) -> Origin:
    """Return the origin that a checkpoint's context records."""
    attempt = context.get("attempt")
    parent = context.get(PARENT)
    start = None if PARENT not in context else 0
    if isinstance(parent, dict):
        start = _whole(parent.get("step"))
    return Origin(_whole(attempt), start)


def parent_record(manifest: Manifest) -> dict[str, Any]:
    """Return the record of this checkpoint as the parent of later ones, for their context."""
    return {"step": manifest.step, "state_sha256": manifest.state_sha256}


def ancestors(origins: Mapping[int, Origin]) -> set[int]:
    """Return the steps of the newest checkpoint and its ancestors, as far as their origins are known.

    A checkpoint that an attempt passed over because it was damaged is no ancestor: its steps were trained again.

    Args:
        origins: Origins of all checkpoints, by step.
    """
    line: set[int] = set()
    last: Origin | None = None
    for step in sorted(origins, reverse=True):
        if last is None or last.start is None or step <= last.start or origins[step] == last:
            last = origins[step]
            line.add(step)
    return line


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None
