"""Lists of runs in a folder, and what a few runs have recorded, next to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headway.core.format import UNKNOWN, format_count, format_seconds
from headway.telemetry.catalogue import metric
from headway.telemetry.metrics import NO_VALUES
from headway.telemetry.record import Run, check_runs_folder, finished_steps, is_run, open_run
from headway.telemetry.summary import Summary, loss_text, median, result_text, share_text, summarize, usd_text


@dataclass(frozen=True)
class Listing:
    """One line of `runs list`: the newest values, so that long histories need not be read."""

    name: str
    state: str
    step: int
    total_steps: int | None
    train_loss: float | None
    """Loss of the last step."""
    validation_loss: float | None
    """Newest, if it is among the last few hundred records."""
    tokens_per_second: float | None
    """Median over the last few hundred records; None if the items are samples."""
    attempts: int
    updated: float | None
    """Last record, Unix seconds."""
    samples_per_second: float | None = None
    """As for tokens, in a run of a module of the user's own."""
    spent_usd: float | None = None
    """Newest, as recorded with a step."""


def list_runs(folder: Path) -> list[Listing]:
    """List the runs directly in a folder, the most recently updated first.

    Raises:
        CheckpointError: the folder does not exist.
    """
    check_runs_folder(folder)
    found = [_listing(open_run(path)) for path in sorted(folder.iterdir()) if path.is_dir() and is_run(path)]
    return sorted(found, key=lambda item: -(item.updated or 0))


def _listing(run: Run) -> Listing:
    metrics = run.newest_metrics()
    speed = median(metrics, "speed/tokens_per_second")
    language_model = run.is_language_model
    return Listing(
        name=run.name,
        state=run.state,
        step=finished_steps(run.attempt_records, metrics),
        total_steps=run.total_steps,
        train_loss=metrics.last("train/loss"),
        validation_loss=metrics.last("evaluation/loss"),
        tokens_per_second=speed if language_model else None,
        attempts=len(run.attempt_records),
        updated=metrics.last("time"),
        samples_per_second=None if language_model else speed,
        spent_usd=metrics.last("cost/spent_usd"),
    )


@dataclass(frozen=True)
class RecordedMetric:
    """What a run has recorded under one name, in the history that counts."""

    name: str
    unit: str | None
    """The unit in words; None for a metric that a user's own code records."""
    values: int
    """Number of values."""
    last: float
    last_step: int
    lowest: float | None
    """Of the finite values; None if there is none."""
    highest: float | None


def recorded_metrics(run: Run) -> list[RecordedMetric]:
    """Return what a run has recorded, by name."""
    return [_recorded(run, name) for name in run.metrics.names if name not in NO_VALUES]


def _recorded(run: Run, name: str) -> RecordedMetric:
    steps, values = run.metrics.series(name)
    finite = values[np.isfinite(values)]
    known = metric(name)
    return RecordedMetric(
        name=name,
        unit=None if known is None else known.unit.words,
        values=len(values),
        last=float(values[-1]),
        last_step=int(steps[-1]),
        lowest=float(finite.min()) if len(finite) else None,
        highest=float(finite.max()) if len(finite) else None,
    )


@dataclass(frozen=True)
class Comparison:
    """A comparison of several runs."""

    runs: tuple[Run, ...]
    summaries: tuple[Summary, ...]
    differences: dict[str, list[Any]]
    """Config keys whose values differ, with one value for each run; None where a run has no such key."""

    @property
    def names(self) -> list[str]:
        """Return the runs' names, or their paths if two have the same name."""
        names = [run.name for run in self.runs]
        return names if len(set(names)) == len(names) else [str(run.path) for run in self.runs]


def compare_runs(runs: Sequence[Run]) -> Comparison:
    """Compare what runs have recorded, and their configs."""
    return Comparison(tuple(runs), tuple(map(summarize, runs)), differences([run.config for run in runs]))


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return dotted keys whose values differ between configs, in the order of first appearance."""
    flats = [flat(config) for config in configs]
    keys = dict.fromkeys(key for one in flats for key in one)
    table = {key: [one.get(key) for one in flats] for key in keys}
    return {key: values for key, values in table.items() if any(value != values[0] for value in values)}


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, by dotted key."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found.update(flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found


def result_rows(summaries: Sequence[Summary]) -> list[list[str]]:
    """Return one row per result: its label, then one text for each run; what no run can have is left out."""
    of_tokens = [
        ["tokens per second", *(format_count(s.tokens_per_second) for s in summaries)],
        ["MFU", *(share_text(s.mfu) for s in summaries)],
    ]
    of_samples = [["samples per second", *(format_count(s.samples_per_second) for s in summaries)]]
    any_tokens = any(s.language_model for s in summaries)
    return [
        ["state", *(s.state for s in summaries)],
        ["step", *(f"{s.step:,}" + (f" of {s.total_steps:,}" if s.total_steps else "") for s in summaries)],
        *([["tokens", *(format_count(s.tokens) for s in summaries)]] if any_tokens else []),
        ["training loss", *(result_text(s.train_loss, s.train_loss_not_finite_since) for s in summaries)],
        ["validation loss", *(_validation_text(s) for s in summaries)],
        ["best validation loss", *(loss_text(s.best_validation_loss) for s in summaries)],
        *(of_tokens if any_tokens else []),
        *([] if all(s.language_model for s in summaries) else of_samples),
        ["wall time", *(format_seconds(s.seconds) for s in summaries)],
        ["cost", *(usd_text(s.spent_usd) for s in summaries)],
        ["attempts", *(str(s.attempts) for s in summaries)],
        ["state SHA-256", *(s.state_sha256[:12] if s.state_sha256 else UNKNOWN for s in summaries)],
    ]


def _validation_text(summary: Summary) -> str:
    """Format the newest validation loss, with its step if that is not the run's last."""
    text = result_text(summary.validation_loss, summary.validation_loss_not_finite_since)
    is_old = summary.validation_loss is not None and summary.validation_step != summary.step
    return f"{text} at step {summary.validation_step:,}" if is_old else text


def difference_rows(comparison: Comparison) -> list[list[str]]:
    """Return one row per config key that differs: the key, then its value in each run."""
    return [[key, *map(_value_text, values)] for key, values in comparison.differences.items()]


def _value_text(value: Any) -> str:
    return "–" if value is None else str(value)
