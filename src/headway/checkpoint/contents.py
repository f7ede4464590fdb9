"""What a checkpoint tells besides the state: the metrics of its step, and in full ones config, provenance, evaluation.

None of it is needed to resume, and none of it is part of the state or its name. It goes into the manifest's context.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint.retention import Every
from headway.core.foreign import LINE_BYTES, as_number, open_regular, parse_json_lines, read_json, read_text
from headway.core.secrets import redact_values

if TYPE_CHECKING:
    from headway.config import Batches

#: Key of the context: `full` or `light`.
KIND = "kind"
#: Fields of a record of `metrics.jsonl` that are no metric.
_NOT_METRICS = ("step", "attempt", "time")
#: In the first record of a step that a rollback has left out.
_LEFT_OUT = "train/left_out_steps"
_BLOCK_BYTES = 64 * 1024
#: A step and an evaluation are looked for in so many bytes at the end of the metrics.
_LOOK_BACK_BYTES = 64 * 2**20


def step_metrics(run: Path, step: int) -> dict[str, float]:
    """What `metrics.jsonl` has for one step: of several attempts at it the last one; empty when it has nothing.

    Values that are not finite are left out, as is what an attempt recorded that has been gone back behind since.
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
            break  # what comes before is of when the step was computed
    return found


def latest_evaluation(run: Path, step: int) -> dict[str, float] | None:
    """The newest evaluation up to a step, with its `step`; None when there was none, or it was very long ago."""
    for record in _backwards(run / "metrics.jsonl"):
        at = record.get("step")
        values = {k: v for k, v in record.items() if k.startswith("evaluation/") and isinstance(v, (int, float))}
        if isinstance(at, int) and at <= step and values:
            return {"step": at, **values}
    return None


def step_context(run: Path, step: int, full: bool) -> dict[str, Any]:
    """What goes into the context of a checkpoint of `step`; what a file of the run does not tell is left out."""
    context: dict[str, Any] = {KIND: "full" if full else "light"}
    metrics = step_metrics(run, step)
    if metrics:
        context["metrics"] = metrics
    if not full:
        return context
    # Cut off by whatever, or not what Headway has written: the checkpoint does without.
    with suppress(OSError, ValueError):
        context["config"] = read_text(run / "config.yaml")
    # Manifests travel, and can be read by whoever can read weights or not.
    with suppress(OSError, ValueError):
        context["run"] = redact_values(read_json(run / "run.json"))
    # One that an earlier version has written may have it, whatever the config says now.
    if "git_diff: full" not in context.get("config", ""):
        _drop_diff(context.get("run"))
    evaluation = latest_evaluation(run, step)
    if evaluation is not None:
        context["evaluation"] = evaluation
    return context


def _drop_diff(record: Any) -> None:
    git = record.get("git") if isinstance(record, dict) else None
    if isinstance(git, dict):
        git.pop("diff", None)


def crossed(interval: Every, before: tuple[int, float], now: tuple[int, float], batches: Batches | None) -> bool:
    """Whether something that happens every so often is due at a point, when it last happened at the one before.

    Points are (step, Unix seconds). In steps and tokens it is due when a multiple lies between the two, so checkpoints
    need not fall on multiples; by time when so much has passed, or the clock went back: it had been ahead, and nobody
    knows for how long. Tokens without known batches: always.
    """
    if interval.unit == "seconds":
        return not 0 <= now[1] - before[1] < interval.amount or now[0] < before[0]
    if interval.unit == "steps":
        return now[0] // interval.amount != before[0] // interval.amount
    if batches is None:
        return True
    return batches.tokens_before(now[0]) // interval.amount != batches.tokens_before(before[0]) // interval.amount


def _backwards(path: Path) -> Iterator[dict[str, Any]]:
    """Records from the end of the file on: it may be long, and only its end is asked for."""
    try:
        with open_regular(path) as file:
            start = size = file.seek(0, os.SEEK_END)
            rest = b""
            while start > 0 and size - start < _LOOK_BACK_BYTES:
                end, start = start, max(0, start - _BLOCK_BYTES)
                file.seek(start)
                lines = (file.read(end - start) + rest).split(b"\n")
                rest = lines.pop(0)[:LINE_BYTES]  # of what is too long for a line the beginning, which is passed over
                yield from parse_json_lines(reversed(lines))
            if start == 0:
                yield from parse_json_lines([rest])
    except OSError:
        return
