"""A summary of a run in a few numbers, as `runs show`, `runs compare` and the report show it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from headway.core.format import UNKNOWN
from headway.core.statistics import perplexity
from headway.telemetry.metrics import Metrics
from headway.telemetry.record import Run

#: The final training loss is a mean over this share of the steps, since the loss of a single step is noisy ...
_FINAL_SHARE = 0.02
#: ... but over no more steps than this.
_FINAL_STEPS = 100


@dataclass(frozen=True)
class Summary:
    """Headline numbers of one run; None is unknown."""

    name: str
    path: str
    state: str
    """`finished`, `running`, `died`, `failed`, ..."""
    outcome: str
    """How the newest attempt ended, in its own words."""
    attempts: int
    step: int
    total_steps: int | None
    tokens: int | None
    """Tokens that led to the newest weights; repeated ones count once."""
    train_loss: float | None
    """Mean over the last `train_loss_steps` finite steps; None when the newest one is not finite."""
    train_loss_steps: int
    train_loss_not_finite_since: int | None
    """The step since which it is NaN or infinite; None when the newest one is finite."""
    validation_loss: float | None
    """Newest; None when that is not finite."""
    validation_step: int | None
    """Step of the newest evaluation."""
    validation_loss_not_finite_since: int | None
    """As for the training loss."""
    perplexity: float | None
    """exp(validation loss) of a language model."""
    best_validation_loss: float | None
    best_validation_step: int | None
    tokens_per_second: float | None
    """Median over steps; None if the items are samples."""
    mfu: float | None
    """Median over steps, as a share."""
    peak_memory_gib: float | None
    seconds: float | None
    """Time in which an attempt was running."""
    repeated_steps: int
    """Steps that were computed again after restarts."""
    skipped_steps: int | None
    spent_usd: float | None
    updated: float | None
    """Last sign of life, Unix seconds."""
    state_sha256: str | None
    """Hash of the newest checkpoint's state: equal hashes are equal weights."""
    language_model: bool = True
    """False for a module of the user's own."""
    samples_per_second: float | None = None
    """Median over steps, if the items are samples."""
    idle_usd: float | None = None
    """The part of the cost between attempts, while the machines were held."""
    storage_usd: float | None = None
    """The part of the cost of keeping checkpoints."""
    replay_loss: float | None = None
    """Newest finite validation loss of replayed sources."""
    first_replay_loss: float | None = None
    """The first one, which shows whether the model forgets."""


def summarize(run: Run) -> Summary:
    """Compute the headline numbers of a run, as far as its files show them."""
    metrics = run.metrics
    train_loss, window = _final_loss(metrics)
    evaluated, validation = metrics.finite("evaluation/loss")
    at, _ = metrics.series("evaluation/loss")
    _, replay = metrics.finite("evaluation/replay_loss")
    not_finite_since = metrics.not_finite_since("evaluation/loss")
    newest = float(validation[-1]) if len(validation) and not_finite_since is None else None
    skipped = metrics.last("train/skipped_steps")
    speed = median(metrics, "speed/tokens_per_second")
    language_model = run.is_language_model
    return Summary(
        name=run.name,
        path=str(run.path),
        state=run.state,
        outcome=run.outcome,
        attempts=len(run.attempts),
        step=run.step,
        total_steps=run.total_steps,
        tokens=run.tokens,
        train_loss=train_loss,
        train_loss_steps=window,
        train_loss_not_finite_since=metrics.not_finite_since("train/loss"),
        validation_loss=newest,
        validation_step=int(at[-1]) if len(at) else None,
        validation_loss_not_finite_since=not_finite_since,
        perplexity=None if newest is None or not language_model else perplexity(newest),
        best_validation_loss=float(validation.min()) if len(validation) else None,
        best_validation_step=int(evaluated[validation.argmin()]) if len(validation) else None,
        tokens_per_second=speed if language_model else None,
        mfu=median(metrics, "speed/mfu"),
        peak_memory_gib=_max(metrics, "memory/peak_gib"),
        seconds=run.seconds,
        repeated_steps=metrics.repeated_steps,
        skipped_steps=None if skipped is None or not math.isfinite(skipped) else int(skipped),
        spent_usd=_max(metrics, "cost/spent_usd"),
        updated=run.updated,
        state_sha256=run.checkpoints[-1].state_sha256 if run.checkpoints else None,
        language_model=language_model,
        samples_per_second=None if language_model else speed,
        idle_usd=_max(metrics, "cost/idle_usd"),
        storage_usd=_max(metrics, "cost/storage_usd"),
        replay_loss=float(replay[-1]) if len(replay) else None,
        first_replay_loss=float(replay[0]) if len(replay) else None,
    )


def _final_loss(metrics: Metrics) -> tuple[float | None, int]:
    """Return the mean training loss at the end, and the number of steps in that mean.

    A run that has diverged has none: its last good loss is not its result.
    """
    _, losses = metrics.finite("train/loss")
    if not len(losses) or metrics.not_finite_since("train/loss") is not None:
        return None, 0
    window = min(_FINAL_STEPS, max(1, round(len(losses) * _FINAL_SHARE)))
    return float(losses[-window:].mean()), window


def median(metrics: Metrics, name: str) -> float | None:
    """Return the median of one metric's finite values."""
    _, values = metrics.finite(name)
    return float(np.median(values)) if len(values) else None


def _max(metrics: Metrics, name: str) -> float | None:
    _, values = metrics.finite(name)
    return float(values.max()) if len(values) else None


def loss_text(loss: float | None) -> str:
    """Format a loss with four decimals."""
    return UNKNOWN if loss is None else f"{loss:.4f}"


def result_text(loss: float | None, not_finite_since: int | None) -> str:
    """Format a loss at the end of a run, or the step since which it is not finite."""
    return loss_text(loss) if not_finite_since is None else f"not finite since step {not_finite_since:,}"


def usd_text(amount: float | None) -> str:
    """Format an amount of money."""
    return UNKNOWN if amount is None else f"${amount:,.2f}"


def cost_note(summary: Summary) -> str:
    """Describe what the cost of a run consists of besides the attempts themselves."""
    if summary.spent_usd is None:
        return "no price was given"
    parts = {"between attempts": summary.idle_usd, "storage": summary.storage_usd}
    return ", ".join(f"{name} {usd_text(usd)}" for name, usd in parts.items() if usd)


def share_text(share: float | None) -> str:
    """Format a share as percent."""
    return UNKNOWN if share is None else f"{100 * share:.1f} %"


def time_text(moment: float | None) -> str:
    """Format a time in UTC, as in "2026-03-14 12:03 UTC"; unknown if it is outside the calendar."""
    try:
        return UNKNOWN if moment is None else datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return UNKNOWN


def ago_text(moment: float | None, now: float | None = None) -> str:
    """Format how long ago a time was, in its largest unit, as in "3 min ago"."""
    if moment is None:
        return UNKNOWN
    seconds = max(0.0, (time.time() if now is None else now) - moment)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now"
