"""How many workers the run has now: fewer when some are lost for good, all again when they may be back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.config import resolve_grid
from headway.core.errors import ConfigError
from headway.core.format import counted
from headway.supervisor.restart_policy import Ending

if TYPE_CHECKING:
    from headway.config import Config

#: A run that grows in vain again and again tries it at most this much more seldom.
_MOST_PATIENCE = 64


@dataclass(frozen=True)
class _Trial:
    """All workers again, which have still to show that they get on; and what to go back to if they do not."""

    newest_step: int
    size: int
    devices: list[str]


class WorkerPool:
    """The number of workers, and the GPUs that they may use.

    A worker is lost for good when the same one is to blame for two endings without a new checkpoint between them: it
    died, hung or failed to start again. All of them are tried in vain when an attempt with all again fails before it
    has made a checkpoint.

    Args:
        config: Resolved, with the number of workers that are wanted.
        devices: `CUDA_VISIBLE_DEVICES` of this process, if it is set; empty, it keeps the run off all GPUs.
        clock: Seconds that only rise.
    """

    def __init__(self, config: Config, devices: str | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._wanted, self._clock = config.parallel.workers, clock
        self._allowed = allowed_sizes(config)
        self._all_devices = devices.split(",") if devices is not None else [str(n) for n in range(self._wanted)]
        self._devices = list(self._all_devices)
        self._cool_down = float(config.supervise.grow_after.amount)
        self._patience, self._since = 1, 0.0
        self._tried: _Trial | None = None
        self._blamed: tuple[int, int] | None = None
        self.size = self._wanted

    @property
    def devices(self) -> str | None:
        """What `CUDA_VISIBLE_DEVICES` shall be while a GPU is left out; None for as it is."""
        return ",".join(self._devices) if len(self._devices) < len(self._all_devices) else None

    def lose(self, ending: Ending, newest_step: int) -> str | None:
        """Go on with fewer workers, if the run may have fewer, and one is lost for good or all were tried in vain.

        Args:
            newest_step: Of the newest checkpoint.

        Returns:
            Why, in words; None when the number stays.
        """
        if ending.is_final or ending.kind in ("finished", "preempted"):
            return None
        if self._tried is not None and newest_step > self._tried.newest_step:
            self._tried, self._patience = None, 1
        if self._tried is not None and not ending.is_from_outside:
            why = f"{counted(self.size, 'worker')} were tried again in vain"
            self._patience = min(_MOST_PATIENCE, self._patience * 2)
            return self._go_on(why, self._tried.size, self._tried.devices)
        if ending.rank is None or ending.kind == "slow":
            return None
        before, self._blamed = self._blamed, (ending.rank, newest_step)
        fewer = [size for size in self._allowed if size < self.size]
        if before != self._blamed or not fewer:
            return None
        devices = [device for rank, device in enumerate(self._devices) if rank != ending.rank]
        return self._go_on(f"worker {ending.rank} is lost for good", fewer[-1], devices)

    def _go_on(self, why: str, size: int, devices: list[str]) -> str:
        self.size, self._devices = size, devices
        self._since, self._blamed, self._tried = self._clock(), None, None
        return f"{why}; the run goes on with {counted(size, 'worker')}"

    @property
    def may_grow(self) -> bool:
        """Whether it is time to try with all workers."""
        return self.size < self._wanted and self._clock() - self._since >= self._cool_down * self._patience

    def grow(self, newest_step: int) -> None:
        """With all of them again; in vain, the next try comes twice as late.

        Args:
            newest_step: Of the newest checkpoint, which the attempt with all of them begins from.
        """
        self._tried = _Trial(newest_step, self.size, self._devices)
        self.size, self._devices = self._wanted, list(self._all_devices)


def allowed_sizes(config: Config) -> Sequence[int]:
    """The numbers of workers that the run may have, rising."""
    most = config.parallel.workers
    fewest = config.parallel.min_workers or most
    return [size for size in range(fewest, most + 1) if _fits(config, size)]


def _fits(config: Config, size: int) -> bool:
    try:
        resolve_grid(config, size)
    except ConfigError:
        return False
    return True
