"""The status line of a run.

On a terminal it is a live line that rewrites itself; in a log it is a plain line every so many steps. Unknown parts are
omitted.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headway.core.console import has_table, notice, show_live, write_log
from headway.core.format import format_count, format_seconds
from headway.core.statistics import perplexity
from headway.telemetry.metrics import WITHOUT_TARGET

#: Number of recent steps over which speed and ETA are averaged.
_WINDOW = 100

#: Shortest time between updates of a terminal.
_REFRESH_SECONDS = 0.1


@dataclass(frozen=True)
class Status:
    """The content of the line; None is unknown."""

    step: int
    total_steps: int
    loss: float | None = None
    without_target: bool = False
    """No token of the step was a target, so it has no loss."""
    items_per_second: float | None = None
    mfu: float | None = None
    """As a share of the peak, 0 to 1."""
    eta_seconds: float | None = None
    spent_usd: float | None = None
    total_usd: float | None = None
    """Estimate for the whole run."""
    budget_usd: float | None = None
    saved_seconds_ago: float | None = None
    item: str = "tok"
    """Unit of the speed."""


def render(status: Status) -> str:
    """Return the line, e.g. `step 1,200/10,000 · loss 3.214 · 41.2k tok/s · mfu 52.1 % · eta 2 h 14 m`."""
    parts = [f"step {status.step:,}/{status.total_steps:,}"]
    if status.loss is not None:
        parts.append(f"loss {status.loss:.3f}")
    elif status.without_target:
        parts.append("no target")
    if status.items_per_second is not None:
        parts.append(f"{format_count(status.items_per_second)} {status.item}/s")
    if status.mfu is not None:
        parts.append(f"mfu {status.mfu:.1%}".replace("%", " %"))
    if status.eta_seconds is not None and status.step < status.total_steps:
        parts.append(f"eta {format_seconds(status.eta_seconds)}")
    if status.spent_usd is not None:
        parts.append(_cost(status.spent_usd, status.total_usd, status.budget_usd))
    if status.saved_seconds_ago is not None:
        parts.append(f"saved {_age(status.saved_seconds_ago)} ago")
    return " · ".join(parts)


def _cost(spent: float, total: float | None, budget: float | None) -> str:
    text = f"${spent:,.2f}"
    if total is not None:
        text += f" of ${total:,.2f}"
    if budget is not None and (spent if total is None else total) > budget:
        text += f", over the budget of ${budget:,.2f}"
    return text


def _age(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 10 else format_seconds(seconds)


def render_evaluation(
    step: int,
    loss: float,
    replay: float | None,
    figures: Mapping[str, float],
    *,
    language_model: bool,
) -> str:
    """Return the line of an evaluation; for a language model with the perplexity exp(loss).

    Args:
        step: The step.
        loss: Validation loss.
        replay: That of replayed sources, if there are any.
        figures: Metrics of a task of the user's own, and parts of its loss, by name.
        language_model: Whether items are tokens.
    """
    text = f"step {step:,} · validation loss {loss:.3f}"
    text = f"{text} · perplexity {perplexity(loss):,.2f}" if language_model else text
    text = text if replay is None else f"{text} · replay loss {replay:.3f}"
    return " · ".join([text, *(f"{name.partition('/')[2]} {value:.4g}" for name, value in figures.items())])


def _show(text: str) -> None:
    """Print a plain line; next to a table of several runs it goes to the log alone."""
    show = write_log if has_table() else notice
    show(text)


class StatusLine:
    """Shows a run's progress on standard error. The first worker makes it when an attempt starts.

    Speed is averaged over recent steps. The first step of an attempt, which compiles and warms up, counts for neither
    speed nor ETA once there is a second one. The time of evaluations and checkpoints between steps counts for the ETA.

    Args:
        total_steps: Number of steps of the run.
        log_every: Steps between plain lines; the first and the last step of an attempt always have one.
        work: Work done after so many steps, in a unit that takes constant time; steps if not given.
        clock: Returns seconds that never decrease.
        language_model: Whether items are tokens; otherwise they are samples, whose loss has no perplexity.
        total_usd: Returns what the run will have spent in so many seconds; not given if its price is unknown.
        budget_usd: The most that the run may spend.
    """

    def __init__(
        self,
        total_steps: int,
        log_every: int = 10,
        work: Callable[[int], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        language_model: bool = True,
        total_usd: Callable[[float], float] | None = None,
        budget_usd: float | None = None,
    ) -> None:
        self._total_steps = total_steps
        self._log_every = log_every
        self._total_usd = total_usd
        self._budget_usd = budget_usd
        self._language_model = language_model
        self._work = work or (lambda step: step)
        self._clock = clock
        self._ends: deque[tuple[float, int]] = deque(maxlen=_WINDOW + 1)
        self._speeds: deque[Mapping[str, float]] = deque(maxlen=_WINDOW)
        self._saved_at: float | None = None
        self._shown_at = -math.inf
        self._newest: tuple[int, Mapping[str, float]] | None = None
        self._logged_step = -1
        self._is_over = False

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step, with the metrics that go to `metrics.jsonl`."""
        now = self._clock()
        first = self._newest is None
        if self._newest is not None and step <= self._newest[0]:
            self._ends.clear()  # the run was rolled back
        if len(self._ends) == 1:
            self._speeds.clear()
        self._speeds.append(metrics)
        self._ends.append((now, step))
        self._newest = (step, metrics)
        due = first or step % self._log_every == 0 or step == self._total_steps
        if not due and now - self._shown_at < _REFRESH_SECONDS:
            return
        self._shown_at = now
        live = sys.stderr.isatty() or has_table()
        if live:
            show_live(self._text())
        if due:
            self._logged_step = step
            # A live line leaves no trace, so the attempt's log file gets the plain line in either case.
            (write_log if live else notice)(self._text())

    def evaluation(self, step: int, loss: float, replay: float | None, figures: Mapping[str, float]) -> None:
        """Show a finished evaluation."""
        _show(render_evaluation(step, loss, replay, figures, language_model=self._language_model))

    def saved(self) -> None:
        """Note that a checkpoint has been saved."""
        self._saved_at = self._clock()

    def close(self, *, is_over: bool = False) -> None:
        """Remove the live line and leave the newest state as a plain line.

        Args:
            is_over: Whether no step will follow, whatever the number of steps of the run.
        """
        self._is_over = is_over
        show_live("")
        if self._newest is not None and (sys.stderr.isatty() or self._newest[0] != self._logged_step):
            _show(self._text())
        self._newest = None

    def _text(self) -> str:
        assert self._newest is not None, "nothing is shown before the first step"
        return render(self._status(*self._newest))

    def _status(self, step: int, metrics: Mapping[str, float]) -> Status:
        eta = None if self._is_over else self._eta(step)
        spent = metrics.get("cost/spent_usd")
        total = None
        if spent is not None and eta is not None and self._total_usd is not None:
            total = self._total_usd(eta)
        return Status(
            step=step,
            total_steps=self._total_steps,
            loss=metrics.get("train/loss"),
            without_target=WITHOUT_TARGET in metrics,
            items_per_second=self._mean("speed/tokens_per_second"),
            item="tok" if self._language_model else "samples",
            mfu=self._mean("speed/mfu"),
            eta_seconds=eta,
            spent_usd=spent,
            total_usd=total,
            budget_usd=self._budget_usd,
            saved_seconds_ago=None if self._saved_at is None else self._clock() - self._saved_at,
        )

    def _eta(self, step: int) -> float | None:
        began, first_step = self._ends[0]
        if step == first_step:
            return None
        seconds = self._ends[-1][0] - began
        done = self._work(step)
        return seconds / (done - self._work(first_step)) * (self._work(self._total_steps) - done)

    def _mean(self, name: str) -> float | None:
        """Return the mean of a rate over recent steps, weighted by their seconds (total tokens by total seconds)."""
        pairs = [(m[name], m.get("speed/step_seconds", 1.0)) for m in self._speeds if name in m]
        seconds = sum(weight for _, weight in pairs)
        return sum(value * weight for value, weight in pairs) / seconds if seconds > 0 else None
