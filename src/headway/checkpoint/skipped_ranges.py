"""Checkpoints that a rollback has made wrong: those that were made with rows which are left out since.

Every checkpoint says which steps' rows were left out of it; a run knows which are to be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headway.checkpoint.format.manifest import Manifest

LEFT_OUT = "left_out"
"""Key of a checkpoint's context: `[[first step, step after the last], ...]`."""

Ranges = tuple[tuple[int, int], ...]


def ranges_of(context: Mapping[str, Any]) -> Ranges:
    """The steps that were left out of a checkpoint, as its context has them."""
    return tuple((int(first), int(last)) for first, last in context.get(LEFT_OUT, ()))


def is_outdated(manifest: Manifest, skipped_ranges: Sequence[tuple[int, int]]) -> bool:
    """Whether a checkpoint was made with rows which are left out by now, wherever it lies."""
    step = manifest.step
    # Of a range that a change of the run has cut off later, what counts is the part before the checkpoint.
    known = {(first, min(last, step)) for first, last in ranges_of(manifest.context)}
    return any(first < step and (first, min(last, step)) not in known for first, last in skipped_ranges)
