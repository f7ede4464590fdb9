"""Checkpoints that a rollback has made wrong: those that were made with rows which are left out since.

Every checkpoint says which steps' rows were left out of it; a run knows which are to be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headway.checkpoint.format import Manifest

LEFT_OUT = "left_out"
"""Key of a checkpoint's context: `[[first step, step after the last], ...]`."""

Ranges = tuple[tuple[int, int], ...]


def ranges_of(context: Mapping[str, Any]) -> Ranges:
    """The steps that were left out of a checkpoint, as its context has them."""
    return tuple((int(first), int(last)) for first, last in context.get(LEFT_OUT, ()))


def is_outdated(manifest: Manifest, left_out: Sequence[tuple[int, int]]) -> bool:
    """Whether a checkpoint was made with rows which are left out by now, wherever it lies."""
    known = ranges_of(manifest.context)
    return any(first < manifest.step and (first, last) not in known for first, last in left_out)
