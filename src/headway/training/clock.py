"""Time and signals around the loop. None of it changes what is computed."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, Self

from headway.config.units import Interval
from headway.core.console import is_first_worker
from headway.core.errors import Preempted
from headway.core.heartbeat import Phase, beat
from headway.core.preemption_board import SIGNAL_KEY
from headway.core.signals import STOP_SIGNALS, handled, pending_signals
from headway.telemetry.hardware import device_name, peak_flops, peak_memory_gib
from headway.telemetry.metrics import LEFT_OUT
from headway.training.save_interval import ChosenInterval, failure_rate

if TYPE_CHECKING:
    from headway.checkpoint.save.outcomes import Outcome
    from headway.data.feeding.prefetch import Prefetcher
    from headway.training.loop import Job
    from headway.training.notices import NoticeReader
    from headway.training.step import StepResult


#: A scheduler signals every process of a job, and the supervisor passes its own signal on: both are one Ctrl-C.
_DUPLICATE_SECONDS = 1.0

#: Handlers that stay until the process ends. Python would restore the previous handlers when it frees these.
_permanent_handlers: list[object] = []


class StopSignals:
    """Turns signals (`STOP_SIGNALS`) and notices into requests that the loop reads between steps.

    A second Ctrl-C acts at once.

    Args:
        notices: Reads the board of the attempt; without it only signals count.
        own_process: This process ends with the attempt. Once all is saved after a signal, further signals ask for
            nothing more. They must not end the process before it has reported why it stops: the first worker that
            leaves has the agent send a signal to the rest.
    """

    def __init__(self, notices: NoticeReader | None = None, own_process: bool = False) -> None:
        self.name: str | None = None
        self._notices, self._own_process = notices, own_process
        self._interrupted: float | None = None
        self._handled = handled(STOP_SIGNALS, self._handle)

    @property
    def stop(self) -> bool:
        """Whether a signal has arrived, or a notice that asks to stop."""
        return self.name is not None or (self._notices is not None and self._notices.stop() is not None)

    @property
    def save(self) -> bool:
        """Whether a notice asks to save and continue."""
        return self._notices is not None and self._notices.save()

    def reason(self) -> str:
        """Return why the run stops, once all workers have agreed to stop."""
        found = self._notices.stop(now=True) if self._notices is not None else None
        if found is not None:  # use the first worker's name of a signal that it has posted
            return found.what if found.key == SIGNAL_KEY else str(found)
        if self.name is not None and self._notices is not None and is_first_worker():
            self._notices.post_signal(self.name)
        return self.name or "a signal to another worker"

    def __enter__(self) -> Self:
        self._before = self._handled.__enter__()
        if pending_signals:
            self.name = signal.Signals(pending_signals[-1]).name
            pending_signals.clear()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if self._own_process and kind is not None and issubclass(kind, Preempted):
            _permanent_handlers.append(self._handled)
        else:
            self._handled.__exit__(kind, *error)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        if self._interrupted is None:
            self._interrupted = now
        elif now - self._interrupted >= _DUPLICATE_SECONDS:
            signal.signal(number, self._before[signal.SIGINT])
            signal.raise_signal(number)


class SaveClock:
    """Decides when a checkpoint is due by time. Workers' clocks differ, so the loop lets them agree.

    Args:
        every: The interval; this clock ignores intervals of steps and tokens.
        chosen: Chooses the interval when `every` is `auto`; None on workers whose clock does not count then.
    """

    def __init__(self, every: Interval | Literal["auto"], chosen: ChosenInterval | None = None) -> None:
        self._chosen = chosen if every == "auto" else None
        self._seconds: float | None = None
        if isinstance(every, Interval) and every.unit == "seconds":
            self._seconds = every.amount
        elif self._chosen is not None:
            self._seconds = self._chosen.seconds
        self._start = time.monotonic()

    @classmethod
    def of(cls, job: Job) -> SaveClock:
        """Make the clock of a worker; with `auto`, the first worker's clock chooses the interval."""
        settings = job.config.checkpoint
        if settings.every != "auto" or not job.world.is_first:
            return cls(settings.every)
        return cls("auto", ChosenInterval(failure_rate(job.config.run_directory, settings.failures_per_day)))

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Time a save, during which training waits."""
        start = time.monotonic()
        yield
        self._start = time.monotonic()
        if self._chosen is not None:
            self._seconds = self._chosen.after_save(self._start - start)

    def written(self, outcome: Outcome) -> None:
        """Learn from a finished save how long it took; a failed save does not count."""
        if self._chosen is not None and outcome.error is None:
            self._seconds = self._chosen.after_write(outcome.seconds)

    def due(self) -> bool:
        """Return whether the interval has passed; always False if it is not a time."""
        return self._seconds is not None and time.monotonic() - self._start >= self._seconds


def saves_before_last_step(job: Job) -> bool:
    """Return whether a copy of the state may be needed after the current step and before the last one."""
    settings, step, last = job.config.checkpoint, job.state.cursor.step, job.total_steps
    if step >= last - 1:
        return False
    by_step = [every for every in (settings.every, settings.memory_every) if isinstance(every, Interval)]
    if settings.every == "auto" or any(every.unit == "seconds" for every in by_step):
        return True
    return any(job.config.train.batches.is_due_between(every, step, last) for every in by_step)


class StepMetrics:
    """Measures a step from the end of the previous one, without the time of evaluation and checkpoints."""

    def __init__(self, job: Job, feed: Prefetcher) -> None:
        self._job, self._feed = job, feed
        peak = peak_flops(device_name(job.world.device), job.config.train.precision)
        self._peak = peak * job.world.size if peak else None
        self.restart()

    def restart(self) -> None:
        """Start timing the next step."""
        beat(Phase.DATA, self._job.state.cursor.step)
        self._start, self._waited = time.perf_counter(), self._feed.wait_seconds

    def metrics(self, result: StepResult) -> dict[str, float]:
        """Return the metrics of the step that has just ended; unknown ones are absent."""
        beat(Phase.RECORD, self._job.state.cursor.step)
        seconds = time.perf_counter() - self._start
        if result.left_out:
            return {LEFT_OUT: float(self._job.state.cursor.left_out_steps)}
        metrics = {
            "train/loss": result.loss,
            "train/grad_norm": result.grad_norm,
            "train/learning_rate": result.learning_rate,
            "train/items": float(result.items),
            "train/skipped_steps": float(self._job.state.cursor.skipped_steps),
            "speed/step_seconds": seconds,
            "speed/tokens_per_second": result.items / seconds,
            "speed/data_wait_share": (self._feed.wait_seconds - self._waited) / seconds,
            **result.model_metrics,
        }
        if self._job.state.cursor.loss_scale is not None:
            metrics["train/loss_scale"] = float(self._job.state.cursor.loss_scale)
        memory = peak_memory_gib(self._job.world.device)
        if memory is not None:
            metrics["memory/peak_gib"] = memory
        flops = self._job.task.item_flops(self._job.state.cursor.step - 1)
        if flops and self._peak:
            metrics["speed/mfu"] = flops * result.items / seconds / self._peak
        return metrics
