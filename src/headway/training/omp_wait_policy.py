"""OpenMP's waiting threads sleep while other processes want the processors, and spin otherwise."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from headway.core.coordination.launched import workers_of_this_machine
from headway.core.machine.neighbours import Load, LoadMeter, WaitMode, choose_at_start, choose_wait_mode, look_at_start
from headway.core.machine.openmp import WaitSwitch, chosen_by_user, find_libgomp
from headway.core.machine.system import Machine
from headway.training.job import Callback, Job

#: Time between looks: long beside what a look takes, short beside what a neighbour costs.
_EVERY_SECONDS = 2.0


class WaitingThreads(Callback):
    """Chooses how threads wait when an attempt starts, and again every two seconds.

    It does nothing where there is nothing to choose: with one thread, on a GPU, with an OpenMP library other than
    GNU's, or where the user has chosen by `OMP_WAIT_POLICY` or `GOMP_SPINCOUNT`.

    Args:
        at_start: Returns the mode to begin with, for threads over all workers and the number of these.
        measure: Makes a function that returns the load since its last call.
    """

    def __init__(
        self,
        at_start: Callable[[int, int], WaitMode] = lambda threads, workers: choose_at_start(
            look_at_start(Machine(), threads, workers)
        ),
        measure: Callable[[], Callable[[], Load]] = lambda: LoadMeter(Machine()).read,
    ) -> None:
        self._at_start = at_start
        self._measure = measure
        self._switch: WaitSwitch | None = None
        self._threads = 0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._recorded: bool | None = None

    def on_start(self, job: Job) -> None:
        """Choose, before the first step."""
        threads = torch.get_num_threads()
        library = find_libgomp()
        if job.world.device.type != "cpu" or threads < 2 or chosen_by_user() is not None or library is None:
            return
        workers = workers_of_this_machine(job.world.size)
        self._switch = WaitSwitch(library, threads, workers)
        self._threads = threads * workers
        self._apply(self._at_start(self._threads, workers))
        self._closing.clear()
        self._thread = threading.Thread(target=self._work, name="headway-wait-mode", daemon=True)
        self._thread.start()

    def on_step(self, job: Job, step: int, metrics: dict[str, float]) -> None:
        """Record the mode when it has changed."""
        if self._switch is not None and self._recorded != self._switch.sleeps:
            self._recorded = self._switch.sleeps
            metrics["health/threads_sleep"] = float(self._recorded)

    def on_end(self, job: Job) -> None:
        """Leave the library as it was."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._switch is not None:
            self._switch.spin()
            self._switch = self._recorded = None

    def _apply(self, mode: WaitMode) -> None:
        assert self._switch is not None, "started"
        if mode == "sleep":
            self._switch.sleep()
        else:
            self._switch.spin()

    def _work(self) -> None:
        assert self._switch is not None, "started"
        read = self._measure()
        while not self._closing.wait(_EVERY_SECONDS):
            before: WaitMode = "sleep" if self._switch.sleeps else "spin"
            self._apply(choose_wait_mode(read(), before, self._threads))
