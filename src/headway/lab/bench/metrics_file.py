"""`metrics.csv`: all figures of a benchmark for other programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from headway.lab.bench.analysis import METRICS, base_of, efficiency, mean
from headway.lab.bench.results import CellResult

#: Characters that spreadsheets take for the start of a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_OF_CELL = ("strategy", "workers", "model", "precision", "micro_batch", "sequence_length", "scaling", "machines")


def render_csv(results: Sequence[CellResult]) -> str:
    """Return a line per cell; unknown values are empty."""
    lines = [_line(result, results) for result in results]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def _line(result: CellResult, results: Sequence[CellResult]) -> dict[str, Any]:
    """Return the figures of a cell by column; texts are no formulas, and numbers do not change."""
    failure = result.last_failure
    base = base_of(result, results)
    share = efficiency(result, results)
    line: dict[str, Any] = {"suite": result.suite}
    line |= {key: getattr(result.cell, key) for key in _OF_CELL}
    line |= {
        "status": result.status,
        "reason": failure.reason if failure else "; ".join(result.odd_endings),
        "doubt": result.doubt,
        "skipped_steps": result.skipped_steps if result.measured else None,
        "repeats": len(result.measured),
        "repeats_asked": result.repeats_asked,
        "scaling_efficiency": share,
        "base_workers": base.cell.workers if base and share is not None else None,
    }
    for metric in METRICS:
        found = mean(result, metric)
        line[metric.name] = None if found is None else found.value
        line[f"{metric.name}_ci95_half_width"] = None if found is None else found.half_width
    line |= {"environment": result.environment_id, "conditions": result.conditions, "key": result.key}
    formulas = {key: value for key, value in line.items() if isinstance(value, str) and value.startswith(_FORMULA)}
    return {**line, **{key: f"'{text}" for key, text in formulas.items()}}
