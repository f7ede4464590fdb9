"""Ranges of steps whose rows a rollback skips, and the checkpoints that they make outdated.

Every checkpoint records the ranges that were skipped in its training. It is outdated if the run has skipped more since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headway.checkpoint.format.manifest import Manifest

LEFT_OUT = "left_out"
"""Key of a checkpoint's context: `[[first step, step after the last], ...]`."""

Ranges = tuple[tuple[int, int], ...]


def ranges_of(context: Mapping[str, Any]) -> Ranges:
    """Return the skipped ranges that a checkpoint's context records."""
    return tuple((int(first), int(last)) for first, last in context.get(LEFT_OUT, ()))


def is_outdated(manifest: Manifest, skipped_ranges: Sequence[tuple[int, int]]) -> bool:
    """Return whether a checkpoint, in any tier, was trained on rows that the run skips now."""
    step = manifest.step
    # A later change of the run may have cut a range short; only its part before the checkpoint counts.
    known = {(first, min(last, step)) for first, last in ranges_of(manifest.context)}
    return any(first < step and (first, min(last, step)) not in known for first, last in skipped_ranges)
