"""The grid of a global batch: lanes, micro-batches and rows; and the threads that compute it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.core.errors import ConfigError

if TYPE_CHECKING:
    from headway.config.schema import Config

#: Lanes of an elastic run, and rows of a micro-batch, when the config leaves them open: at most this many.
_AT_MOST = 8


@dataclass(frozen=True)
class LaneGrid:
    """How the rows of one step are cut: `lanes` x `micro_batches` x `micro_batch` rows."""

    lanes: int
    micro_batches: int
    micro_batch: int

    def of_worker(self, rank: int, workers: int) -> range:
        """The contiguous lanes that a worker computes."""
        share = self.lanes // workers
        return range(rank * share, (rank + 1) * share)


def resolve_lanes(config: Config, workers: int) -> LaneGrid:
    """The grid for a number of workers.

    Raises:
        ConfigError: the rows cannot be cut that way; the message has the nearest number that works.
    """
    train, elastic = config.train, config.determinism == "elastic"
    rows = train.global_batch_rows
    by_itself = _largest_power_of_two(rows) if elastic else workers
    lanes = by_itself if train.lanes == "auto" else train.lanes
    if rows % lanes:
        raise ConfigError(
            f"a global batch of {rows} rows cannot be cut into {lanes} lanes",
            where="parallel.workers" if train.lanes == "auto" else "train.lanes",
            fix=f"use {_nearest_divisor(rows, lanes)} of them, or train.global_batch={_nearest_multiple(rows, lanes)}",
        )
    if elastic and (not _is_power_of_two(lanes) or not _is_power_of_two(workers)):
        raise ConfigError(
            f"determinism 'elastic' sums in a binary tree; {lanes} lanes on {workers} workers are no powers of two",
            where="train.lanes, parallel.workers",
            fix="use 1, 2, 4, 8, ... of each",
        )
    if lanes % workers:
        raise ConfigError(
            f"{lanes} lanes cannot be shared by {workers} workers",
            where="parallel.workers",
            fix=f"use {_nearest_divisor(lanes, workers)} workers, or train.lanes={_nearest_multiple(lanes, workers)}",
        )
    per_lane = rows // lanes
    micro_batch = train.micro_batch or max(n for n in range(1, _AT_MOST + 1) if per_lane % n == 0)
    if per_lane % micro_batch:
        raise ConfigError(
            f"a lane of {per_lane} rows cannot be cut into micro-batches of {micro_batch} rows",
            where="train.micro_batch",
            fix=f"train.micro_batch={_nearest_divisor(per_lane, micro_batch)}",
        )
    return LaneGrid(lanes, per_lane // micro_batch, micro_batch)


def resolve_threads(config: Config, workers: int, lanes: int, cores: int) -> int:
    """CPU threads per worker, at least 1.

    In `elastic` runs the number must not depend on the number of workers, because some kernels' bits depend on it.
    """
    if config.parallel.threads != "auto":
        return config.parallel.threads
    return max(1, cores // (lanes if config.determinism == "elastic" else workers))


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _largest_power_of_two(rows: int) -> int:
    """The largest power of two up to the limit that divides `rows`."""
    return min(_AT_MOST, rows & -rows)


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((n for n in range(1, number + 1) if number % n == 0), key=lambda n: (abs(n - wanted), n))


def _nearest_multiple(number: int, of: int) -> int:
    return max(1, round(number / of)) * of
