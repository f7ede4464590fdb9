"""Prefetching: a thread reads batches ahead, so that training does not wait for data."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from headway.core.types import Feed, ReadsAhead

#: The output for a step: the step and, per lane, its micro-batches.
StepBatches = tuple[int, dict[int, Sequence[Any]]]

# Interval between checks for a stop request while no batch is ready.
_LOOK_SECONDS = 0.2
# `close` abandons a thread that still reads a batch after this time: data that does not arrive must not keep a process
# from exiting once it has saved its state.
_CLOSE_SECONDS = 5.0


class Prefetcher:
    """Reads the batches of steps `first_step` to `last_step` (exclusive) on a thread, in order.

    Use it as an iterator inside a `with` block; it hands out `(step, {lane: micro-batches})`.

    Args:
        feed: The feed that reads the batches.
        lanes: The lanes of this worker.
        first_step: First step, counted from 0.
        last_step: The step after the last one.
        depth: Number of steps to keep ready.
        stopped: Returns whether a stop was requested. It is polled while no batch is ready, so that the consumer does
            not wait for the next one.

    Attributes:
        wait_seconds: Total time that the consumer has waited so far.
    """

    def __init__(
        self,
        feed: Feed,
        lanes: Sequence[int],
        first_step: int,
        last_step: int,
        depth: int = 2,
        *,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.wait_seconds = 0.0
        self._stopped = stopped
        self._feed = feed
        self._lanes = list(lanes)
        self._last_step = last_step
        self._depth = max(1, depth)
        # With a device, batches go to page-locked memory, which makes copies to it asynchronous. A new thread begins on
        # device 0; pinning from there would take memory of another worker's GPU.
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._begin(first_step)

    def rewind(self, step: int) -> None:
        """Hand out the batches of `step` next, and those after it."""
        self._end(None)  # a dataset need not be safe for two threads
        self._begin(step)

    def _begin(self, first_step: int) -> None:
        self._steps = range(first_step, self._last_step)
        self._ready: queue.Queue[StepBatches | BaseException] = queue.Queue(self._depth)
        self._next_step = first_step
        self._closed = threading.Event()
        # Processes that read ahead are started here: the thread would start them amid the first pass of the model.
        ahead = self._feed.ahead(self._steps, self._lanes) if isinstance(self._feed, ReadsAhead) else None
        # The thread's own objects: an abandoned thread must not touch those of its successor.
        arguments = self._steps, ahead, self._ready, self._closed
        self._thread = threading.Thread(target=self._work, args=arguments, name="headway-prefetch", daemon=True)
        self._thread.start()

    def next(self) -> StepBatches:
        """Return the next step's batches.

        Raises:
            StopIteration: The last step has been handed out, the prefetcher is closed, or a stop was requested and the
                batches are not ready.
            Exception: Reading the batch failed; the error is raised at the step of the batch.
        """
        if self._next_step >= self._steps.stop or self._closed.is_set():
            raise StopIteration
        start = time.perf_counter()
        item = self._wait()
        self.wait_seconds += time.perf_counter() - start
        if item is None:
            raise StopIteration
        if isinstance(item, BaseException):
            self.close()
            if isinstance(item, StopIteration):  # raised as it is, it would pass for the end of the run
                raise RuntimeError("the feed ended before the last step") from item
            raise item
        self._next_step += 1
        return item

    def _wait(self) -> StepBatches | BaseException | None:
        """Wait for the next item; return None if a stop is requested before it comes."""
        while True:
            try:
                return self._ready.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                if self._stopped():
                    return None

    def close(self) -> None:
        """Stop the thread and drop what it has read."""
        self._end(_CLOSE_SECONDS)

    def _end(self, seconds: float | None) -> None:
        """Stop the thread, and wait for it for at most `seconds`; None waits without a limit."""
        self._closed.set()
        until = None if seconds is None else time.monotonic() + seconds
        while self._thread.is_alive() and (until is None or time.monotonic() < until):
            # The thread may be about to put one more batch: make room until it has noticed the stop.
            while not self._ready.empty():
                self._ready.get_nowait()
            self._thread.join(timeout=0.01)

    def _work(
        self,
        steps: range,
        ahead: Generator[dict[int, Sequence[Any]]] | None,
        ready: queue.Queue[StepBatches | BaseException],
        closed: threading.Event,
    ) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            for step in steps:
                batches = next(ahead) if ahead else {lane: self._feed.batch(step, lane) for lane in self._lanes}
                ready.put((step, _pinned(batches) if self._device is not None else batches))
                if closed.is_set():
                    return
        except BaseException as error:  # the consumer raises it
            ready.put(error)
        finally:
            if ahead is not None:
                ahead.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepBatches:
        return self.next()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _pinned(value: Any) -> Any:
    """Copy every tensor of a nested batch into page-locked memory, except those on a device and sparse ones."""
    if isinstance(value, torch.Tensor):
        return value.pin_memory() if value.device.type == "cpu" and value.layout == torch.strided else value
    if isinstance(value, Mapping):
        return {key: _pinned(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_pinned, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(_pinned, value))
    return value
