"""`metrics.csv`: all figures of a benchmark for other programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from headway.lab.bench.analysis import METRICS, base_of, efficiency, mean
from headway.lab.bench.results import CellResult

#: Characters that spreadsheets take for the start of a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def render_csv(results: Sequence[CellResult]) -> str:
    """Return a line per cell; unknown values are empty."""
    cell_keys = ["strategy", "workers", "model", "precision", "micro_batch", "sequence_length", "scaling", "machines"]
    metric_keys = [key for metric in METRICS for key in (metric.name, f"{metric.name}_ci95_half_width")]
    out = io.StringIO()
    writer = csv.DictWriter(
        out,
        [
            "suite",
            *cell_keys,
            "status",
            "reason",
            "doubt",
            "skipped_steps",
            "repeats",
            "repeats_asked",
            "scaling_efficiency",
            "base_workers",
            *metric_keys,
            "environment",
            "conditions",
            "key",
        ],
        lineterminator="\n",
    )
    writer.writeheader()
    for result in results:
        line: dict[str, Any] = {key: getattr(result.cell, key) for key in cell_keys}
        line |= _outcome(result)
        line |= {"suite": result.suite, "key": result.key}
        line |= {"environment": result.environment_id, "conditions": result.conditions}
        base = base_of(result, results)
        share = efficiency(result, results)
        line |= {"scaling_efficiency": share, "base_workers": base.cell.workers if base and share is not None else None}
        for metric in METRICS:
            found = mean(result, metric)
            line[metric.name] = None if found is None else found.value
            line[f"{metric.name}_ci95_half_width"] = None if found is None else found.half_width
        writer.writerow(_in_csv(line))
    return out.getvalue()


def _outcome(result: CellResult) -> dict[str, Any]:
    failure = result.last_failure
    return {
        "status": result.status,
        "reason": (failure.reason or "") if failure else "; ".join(result.odd_endings),
        "doubt": result.doubt or "",
        "skipped_steps": result.skipped_steps if result.measured else None,
        "repeats": len(result.measured),
        "repeats_asked": result.repeats_asked,
    }


def _in_csv(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line whose texts are not formulas; numbers do not change."""
    return {key: _no_formula(value) if isinstance(value, str) else value for key, value in line.items()}


def _no_formula(text: str) -> str:
    return f"'{text}" if text.startswith(_FORMULA) else text
