"""`metrics.csv`: all figures of a benchmark for other programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from headway.lab.bench.analysis import METRICS, base_of, efficiency, mean
from headway.lab.bench.quoting import in_csv
from headway.lab.bench.results import CellResult


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
        writer.writerow(in_csv(line))
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
