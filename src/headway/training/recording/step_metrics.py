"""The metrics of a step, and the time that it took."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from headway.core.coordination.heartbeat import Phase, beat
from headway.telemetry.hardware import device_name, peak_flops, peak_memory_gib
from headway.telemetry.metrics import LEFT_OUT, WITHOUT_TARGET
from headway.training.job import Job

if TYPE_CHECKING:
    from headway.data.feeding.prefetch import Prefetcher
    from headway.training.step import StepResult


class StepMetrics:
    """Measures a step from the end of the previous one, without the time of evaluation and checkpoints."""

    def __init__(self, job: Job, feed: Prefetcher) -> None:
        self._job = job
        self._feed = feed
        peak = peak_flops(device_name(job.world.device), job.config.train.precision)
        self._peak = peak * job.world.size if peak else None
        self.restart()

    def restart(self) -> None:
        """Start timing the next step."""
        beat(Phase.DATA, self._job.state.cursor.step)
        self._start = time.perf_counter()
        self._waited = self._feed.wait_seconds

    def metrics(self, result: StepResult) -> dict[str, float]:
        """Return the metrics of the step that has just ended; unknown ones are absent."""
        beat(Phase.RECORD, self._job.state.cursor.step)
        seconds = time.perf_counter() - self._start
        if result.left_out:
            return {LEFT_OUT: float(self._job.state.cursor.left_out_steps)}
        judged = {"train/loss": result.loss, "train/grad_norm": result.grad_norm}
        metrics = {
            **(judged if result.items else {WITHOUT_TARGET: 1.0}),
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
