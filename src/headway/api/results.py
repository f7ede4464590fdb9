"""A run in Python: its numbers, its history, and how a notebook shows it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from headway.config import load_resolved
from headway.core.errors import CheckpointError
from headway.core.format import format_count, format_seconds

if TYPE_CHECKING:
    from headway.config import Config
    from headway.telemetry.metrics import Metrics
    from headway.telemetry.record import Run as RunRecord


@dataclass(frozen=True, repr=False)
class Run:
    """A run directory and its results: what `headway.train` returns, or `Run("runs/mine")` for any other.

    Each property reads the directory anew, so it also tells of a run that is still training.
    """

    directory: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "directory", Path(self.directory))

    @property
    def config(self) -> Config:
        """The complete config of the run.

        Raises:
            ConfigError: there is none that this version can read.
        """
        return load_resolved(self.directory / "config.yaml")

    @property
    def metrics(self) -> Metrics:
        """The recorded history: `run.metrics.series("train/loss")`, `.to_pandas()`, `.plot("train/loss")`.

        Raises:
            CheckpointError: the directory is not that of a run.
        """
        return self._record().metrics

    @property
    def state(self) -> str:
        """`finished`, `running`, `died`, `failed`, ..."""
        return self._record().state

    @property
    def step(self) -> int:
        """Finished steps."""
        return self.metrics.last_step

    @property
    def loss(self) -> float | None:
        """Training loss of the last step."""
        return self.metrics.last("train/loss")

    @property
    def validation_loss(self) -> float | None:
        """Loss of the last evaluation."""
        return self.metrics.last("evaluation/loss")

    def _record(self) -> RunRecord:
        from headway.telemetry.record import open_run

        return open_run(self.directory)

    def _numbers(self) -> list[tuple[str, str]]:
        """Return the known numbers of the run with their names."""
        from headway.telemetry.summary import loss_text, summarize, usd_text

        found = summarize(self._record())
        speed = found.tokens_per_second if found.language_model else found.samples_per_second
        unit = "tok/s" if found.language_model else "samples/s"
        total = "" if found.total_steps is None else f" of {found.total_steps:,}"
        known = {
            "state": found.state,
            "step": f"{found.step:,}{total}",
            "loss": found.train_loss and loss_text(found.train_loss),
            "validation loss": found.validation_loss and loss_text(found.validation_loss),
            "perplexity": found.perplexity and f"{found.perplexity:,.2f}",
            "speed": speed and f"{format_count(speed)} {unit}",
            "time": found.seconds and format_seconds(found.seconds),
            "cost": found.spent_usd and usd_text(found.spent_usd),
        }
        return [(name, str(text)) for name, text in known.items() if text]

    def __repr__(self) -> str:
        try:
            numbers = self._numbers()
        except CheckpointError as error:
            return f"Run({str(self.directory)!r}): {error.what}"
        return f"Run({str(self.directory)!r}): " + ", ".join(f"{name} {text}" for name, text in numbers)

    def _repr_html_(self) -> str | None:
        """Return numbers, loss curves and links for a notebook; None where there is no run."""
        try:
            numbers = self._numbers()
            metrics = self.metrics
        except CheckpointError:
            return None
        cells = "".join(f"<td style='text-align:left'>{escape(text)}</td>" for _, text in numbers)
        heads = "".join(f"<th style='text-align:left'>{escape(name)}</th>" for name, _ in numbers)
        losses = [name for name in ("train/loss", "evaluation/loss") if name in metrics.names]
        curve = metrics.plot(*losses)._repr_html_() if losses else ""
        links = [self.directory / name for name in ("report.html", "config.yaml", "metrics.jsonl", "samples.txt")]
        shown = " · ".join(
            f'<a href="{escape(os.path.relpath(path))}" target="_blank">{path.name}</a>'
            for path in links
            if path.exists()
        )
        name = f"<b>{escape(str(self.directory))}</b>"
        return f"<div>{name}<table><tr>{heads}</tr><tr>{cells}</tr></table>{curve}<p>{shown}</p></div>"
