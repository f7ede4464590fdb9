"""The current number of workers: fewer when some are permanently lost, all again when they may be back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.config import resolve_grid
from headway.core.errors import ConfigError
from headway.core.format import counted
from headway.run.supervisor.restart_policy import AttemptOutcome

if TYPE_CHECKING:
    from headway.config import Config
    from headway.config.sections.parallel import ParallelConfig

#: A run that repeatedly fails to grow waits up to this much longer between tries.
_MOST_PATIENCE = 64


@dataclass(frozen=True)
class _Workers:
    """How many workers there are, and the GPUs that they may use."""

    count: int
    devices: Sequence[str]


@dataclass(frozen=True)
class _Trial:
    """A trial with all workers, and the fewer to return to if it fails."""

    newest_step: int
    before: _Workers


class WorkerPool:
    """The number of workers, and the GPUs that they may use.

    A worker is lost for good when it is to blame for two failures without a new checkpoint between them: it died, hung
    or failed to start again. A trial with all workers fails when its attempt ends before it has made a checkpoint.

    Args:
        config: Resolved, with the desired number of workers.
        devices: `CUDA_VISIBLE_DEVICES` of this process, if it is set; if empty, it keeps the run off all GPUs.
        clock: Returns seconds that never decrease.
    """

    def __init__(self, config: Config, devices: str | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._parallel = config.parallel
        self._clock = clock
        self._allowed = allowed_sizes(config)
        count = config.parallel.workers
        self._all = _Workers(count, devices.split(",") if devices is not None else [str(n) for n in range(count)])
        self._now = self._all
        self._cool_down = float(config.supervise.grow_after.amount)
        self._patience = 1
        self._since = 0.0
        self._tried: _Trial | None = None
        self._blamed: tuple[int, int] | None = None

    @property
    def size(self) -> int:
        """The current number of workers of each machine."""
        return self._now.count

    def parallel_of(self, machines: int) -> ParallelConfig:
        """Return the section `parallel` of an attempt with these workers.

        Args:
            machines: How many machines take part.
        """
        return self._parallel.model_copy(update={"workers": self.size, "machines": machines, "min_machines": None})

    @property
    def devices(self) -> str | None:
        """The value of `CUDA_VISIBLE_DEVICES` while a GPU is left out; None to leave it unchanged."""
        return ",".join(self._now.devices) if len(self._now.devices) < len(self._all.devices) else None

    def shrink(self, outcome: AttemptOutcome, newest_step: int) -> str | None:
        """Continue with fewer workers, if the run may have fewer, and one is lost for good or a trial failed.

        Args:
            newest_step: Step of the newest checkpoint.

        Returns:
            The reason, in words; None if the number stays.
        """
        if outcome.is_final or outcome.kind in ("finished", "preempted"):
            return None
        if self._tried is not None and newest_step > self._tried.newest_step:
            self._tried = None
            self._patience = 1
        if self._tried is not None and not outcome.is_from_outside:
            why = f"{counted(self.size, 'worker')} were tried again in vain"
            self._patience = min(_MOST_PATIENCE, self._patience * 2)
            return self._resize(why, self._tried.before)
        if outcome.rank is None or outcome.kind == "slow":
            return None
        before = self._blamed
        self._blamed = (outcome.rank, newest_step)
        fewer = [size for size in self._allowed if size < self.size]
        if before != self._blamed or not fewer:
            return None
        devices = [device for rank, device in enumerate(self._now.devices) if rank != outcome.rank]
        return self._resize(f"worker {outcome.rank} is lost for good", _Workers(fewer[-1], devices))

    def _resize(self, why: str, to: _Workers) -> str:
        self._now = to
        self._since = self._clock()
        self._blamed = None
        self._tried = None
        return f"{why}; the run continues with {counted(to.count, 'worker')}"

    @property
    def may_grow(self) -> bool:
        """Whether it is time to try with all workers."""
        return self.size < self._all.count and self._clock() - self._since >= self._cool_down * self._patience

    def grow(self, newest_step: int) -> None:
        """Try with all workers again; after a failure the next trial waits twice as long.

        Args:
            newest_step: Step of the newest checkpoint, from which the trial begins.
        """
        self._tried = _Trial(newest_step, self._now)
        self._now = self._all


def allowed_sizes(config: Config) -> Sequence[int]:
    """Return the numbers of workers that the run may have, in rising order."""
    most = config.parallel.workers
    fewest = config.parallel.min_workers or most
    return [size for size in range(fewest, most + 1) if _fits(config, size)]


def _fits(config: Config, size: int) -> bool:
    try:
        resolve_grid(config, size)
    except ConfigError:
        return False
    return True
