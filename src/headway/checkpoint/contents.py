"""Additional content of a checkpoint: the metrics of its step and, in full ones, config, provenance and evaluation.

It goes into the manifest's context. It is not needed to resume, and not part of the state or its hash.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.core.credentials.secrets import redact_values
from headway.core.files.foreign import LINE_BYTES, as_number, open_regular, parse_json_lines, read_json, read_text

if TYPE_CHECKING:
    from headway.config import Batches, Interval

#: Key of the context: `full` or `light`.
KIND = "kind"
#: Fields of a record of `metrics.jsonl` that are not metrics.
_NOT_METRICS = ("step", "attempt", "time")
#: Present in the first record of a step that a rollback skipped.
_LEFT_OUT = "train/left_out_steps"
_BLOCK_BYTES = 64 * 1024
#: Bytes at the end of the metrics in which to look for a step or an evaluation.
_LOOK_BACK_BYTES = 64 * 2**20


def step_metrics(run: Path, step: int) -> dict[str, float]:
    """Return the metrics of one step from `metrics.jsonl`, as the last attempt recorded them; empty if there are none.

    Values that are not finite are omitted, and so are records from before a rollback that skipped the step.
    """
    found: dict[str, float] = {}
    attempt = None
    for record in _backwards(run / "metrics.jsonl"):
        at = record.get("step")
        if not isinstance(at, int) or at > step:
            continue
        if at < step or attempt not in (None, record.get("attempt")):
            break
        attempt = record.get("attempt")
        numbers = {k: as_number(v) for k, v in record.items() if k not in _NOT_METRICS}
        values = {k: v for k, v in numbers.items() if v is not None}
        found = {**values, **found}
        if _LEFT_OUT in record:
            break  # earlier records date from before the rollback, when the step was computed
    return found


def latest_evaluation(run: Path, step: int) -> dict[str, float] | None:
    """Return the newest evaluation up to a step, with its `step`; None if there is none, or it is too far back."""
    for record in _backwards(run / "metrics.jsonl"):
        at = record.get("step")
        numbers = {k: as_number(v) for k, v in record.items() if k.startswith("evaluation/")}
        values = {k: v for k, v in numbers.items() if v is not None}
        if isinstance(at, int) and at <= step and values:
            return {"step": at, **values}
    return None


def step_context(run: Path, step: int, full: bool) -> dict[str, Any]:
    """Return the additional context of a checkpoint of `step`, without facts that no file of the run has."""
    context: dict[str, Any] = {KIND: "full" if full else "light"}
    metrics = step_metrics(run, step)
    if metrics:
        context["metrics"] = metrics
    if not full:
        return context
    # If a file is cut short or was not written by Headway, the checkpoint does without it.
    with suppress(OSError, ValueError):
        context["config"] = read_text(run / "config.yaml")
    # Manifests are copied to other places, and more people may read them than the run directory.
    with suppress(OSError, ValueError):
        context["run"] = redact_values(read_json(run / "run.json"))
    # A `run.json` of an earlier version may hold a diff, whatever the config says now.
    if "git_diff: full" not in context.get("config", ""):
        record = context.get("run")
        git = record.get("git") if isinstance(record, dict) else None
        if isinstance(git, dict):
            git.pop("diff", None)
    evaluation = latest_evaluation(run, step)
    if evaluation is not None:
        context["evaluation"] = evaluation
    return context


def crossed(interval: Interval, before: tuple[int, float], now: tuple[int, float], batches: Batches | None) -> bool:
    """Return whether a periodic event is due now, given its last occurrence.

    Points in time are (step, Unix seconds). In steps and tokens, the event is due if a multiple of the interval lies
    between the two points, so that checkpoints need not fall on multiples. In seconds, it is due if the interval has
    passed, or the clock went back: the clock had been ahead then, for an unknown time.

    Args:
        interval: The period.
        before: Point of the last occurrence.
        now: The current point.
        batches: Tokens of each step. Without it, an interval in tokens is always due.
    """
    if interval.unit == "seconds":
        return not 0 <= now[1] - before[1] < interval.amount or now[0] < before[0]
    if interval.unit == "steps":
        return now[0] // interval.amount != before[0] // interval.amount
    if batches is None:
        return True
    return batches.tokens_before(now[0]) // interval.amount != batches.tokens_before(before[0]) // interval.amount


class Periodic:
    """What is done at some checkpoints of a run: the first, the last, and one in every interval.

    Args:
        every: The interval; None does it at every checkpoint.
        last_step: The last step of the run.
        batches: Tokens of each step, for an interval in tokens.
    """

    def __init__(self, every: Interval | None, last_step: int | None, batches: Batches | None) -> None:
        self._every = every
        self._last_step = last_step
        self._batches = batches
        self.last: tuple[int, float] | None = None
        """Step and Unix seconds of the last time."""

    def is_due(self, now: tuple[int, float]) -> bool:
        """Return whether it is due at a step and a time, given the last time."""
        if self._every is None or self.last is None or now[0] == self._last_step:
            return True
        return crossed(self._every, self.last, now, self._batches)

    def note_rollback(self, step: int) -> None:
        """Forget the last time if it was after a step to which the run rolled back."""
        if self.last is not None and self.last[0] > step:
            self.last = None


def _backwards(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records from the end of the file backwards: it may be long, and only its end is needed."""
    try:
        with open_regular(path) as file:
            start = size = file.seek(0, os.SEEK_END)
            rest = b""
            while start > 0 and size - start < _LOOK_BACK_BYTES:
                end = start
                start = max(0, start - _BLOCK_BYTES)
                file.seek(start)
                lines = (file.read(end - start) + rest).split(b"\n")
                rest = lines.pop(0)[:LINE_BYTES]  # a line that is too long is truncated, and then skipped
                yield from parse_json_lines(reversed(lines))
            if start == 0:
                yield from parse_json_lines([rest])
    except OSError:
        return
