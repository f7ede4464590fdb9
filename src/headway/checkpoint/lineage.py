"""Which checkpoints grew out of which: each says which attempt made it, and from which one that attempt went on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from headway.checkpoint.format.manifest import Manifest

PARENT = "parent"
"""Key of a checkpoint's context: `{"step": ..., "state_sha256": ...}`, or null for step 0."""


class Origin(NamedTuple):
    """How a checkpoint came about."""

    attempt: int | None
    """Number of the attempt that made it; None when it is not known."""
    start: int | None
    """The step that this attempt started from, or went back to; None when it is not known."""


UNKNOWN = Origin(None, None)


def origin_of(context: Mapping[str, Any]) -> Origin:
    """As a checkpoint's context tells."""
    attempt, parent = context.get("attempt"), context.get(PARENT)
    start = None if PARENT not in context else 0
    if isinstance(parent, dict):
        start = _whole(parent.get("step"))
    return Origin(_whole(attempt), start)


def parent_record(manifest: Manifest) -> dict[str, Any]:
    """What checkpoints that grow out of this one say of it."""
    return {"step": manifest.step, "state_sha256": manifest.state_sha256}


def ancestors(origins: Mapping[int, Origin]) -> set[int]:
    """Of checkpoints by step, the newest and those that it grew out of, as far as they tell.

    One that was passed over when an attempt started or went back, since it was damaged, is none of them: its steps were
    done again.
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
