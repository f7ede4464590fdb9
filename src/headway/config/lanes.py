"""The grid of a global batch: lanes, micro-batches and rows; and the threads that compute it."""

from __future__ import annotations

from collections.abc import Iterable
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
    """In a lane of the largest batch; while `train.batch_ramp` has smaller ones, `micro_batches_of` them."""
    micro_batch: int

    def micro_batches_of(self, rows: int) -> int:
        """Micro-batches in a lane of a global batch of so many rows."""
        return rows // (self.lanes * self.micro_batch)

    def of_worker(self, rank: int, workers: int) -> range:
        """The contiguous lanes that a worker computes."""
        share = self.lanes // workers
        return range(rank * share, (rank + 1) * share)


def resolve_lanes(config: Config, workers: int) -> LaneGrid:
    """The grid for a number of workers. With `train.micro_batch=auto` its cut into micro-batches is one to begin with.

    Raises:
        ConfigError: the rows cannot be cut that way; the message has the nearest number that works.
    """
    train, elastic = config.train, config.determinism == "elastic"
    rows = train.batches.common_rows
    lanes = _lanes(config, workers, rows)
    # With a power of two as lanes, as elastic runs have, this also makes the workers one.
    if lanes % workers:
        raise ConfigError(
            f"{lanes} lanes cannot be shared evenly by {workers} workers",
            where="train.lanes, parallel.workers",
            fix=f"parallel.workers={nearest(workers, divisors(lanes))}"
            + "".join(f", or train.lanes={n}" for n in _lane_choices(rows, workers, elastic, near=lanes)),
        )
    per_lane = rows // lanes
    given = train.micro_batch if isinstance(train.micro_batch, int) else None
    micro_batch = given or max(n for n in range(1, _AT_MOST + 1) if per_lane % n == 0)
    if per_lane % micro_batch:
        raise ConfigError(
            f"a lane of {per_lane} rows{_common(config)} cannot be cut into micro-batches of {micro_batch} rows",
            where=f"train.micro_batch, train.lanes, {_batch_keys(config)}",
            fix=f"train.micro_batch={nearest(micro_batch, divisors(per_lane))}",
        )
    return LaneGrid(lanes, train.global_batch_rows // lanes // micro_batch, micro_batch)


def resolve_threads(config: Config, workers: int, lanes: int, cores: int) -> int:
    """CPU threads per worker, at least 1.

    In `elastic` runs the number must not depend on the number of workers, because some kernels' bits depend on it.
    """
    if config.parallel.threads != "auto":
        return config.parallel.threads
    return max(1, cores // (lanes if config.determinism == "elastic" else workers))


def _lanes(config: Config, workers: int, rows: int) -> int:
    """The number of lanes given or chosen, which divides the rows."""
    elastic = config.determinism == "elastic"
    if config.train.lanes == "auto":
        if elastic:
            return min(_AT_MOST, rows & -rows)  # the largest power of two that divides the rows
        if rows % workers:
            raise ConfigError(
                f"a global batch of {rows} rows{_common(config)} cannot be shared evenly by {workers} workers",
                where=f"{_batch_keys(config)}, parallel.workers",
                fix=f"parallel.workers={nearest(workers, divisors(rows))}, or {_other_batch(config, rows, workers)}",
            )
        return workers
    lanes = config.train.lanes
    choices = _lane_choices(rows, workers, elastic, near=lanes) or _lane_choices(rows, 1, elastic, near=lanes)
    if elastic and not _is_power_of_two(lanes):
        raise ConfigError(
            f"determinism 'elastic' sums in a binary tree, which {lanes} lanes do not fill",
            where="train.lanes, determinism",
            fix=f"train.lanes={choices[0]}",
        )
    if rows % lanes:
        raise ConfigError(
            f"a global batch of {rows} rows{_common(config)} cannot be cut into {lanes} lanes",
            where=f"{_batch_keys(config)}, train.lanes",
            fix=f"train.lanes={choices[0]}, or {_other_batch(config, rows, lanes)}",
        )
    return lanes


def _common(config: Config) -> str:
    """What the number of rows in a message is, where a ramp has several."""
    sizes, common = config.train.batches.sizes, config.train.batches.common_rows
    return f" (batches of {', '.join(map(str, sizes))} rows have {common} in common)" if len(sizes) > 1 else ""


def _batch_keys(config: Config) -> str:
    return "train.batch_ramp, train.global_batch" if config.train.batch_ramp else "train.global_batch"


def _other_batch(config: Config, rows: int, of: int) -> str:
    if config.train.batch_ramp:
        return f"batches that are multiples of {of} rows"
    return f"train.global_batch={_nearest_multiple(rows, of)}"


def _lane_choices(rows: int, workers: int, elastic: bool, near: int) -> list[int]:
    """The nearest number of lanes that would do; none if there is no such number."""
    choices = [n for n in divisors(rows) if n % workers == 0 and (not elastic or _is_power_of_two(n))]
    return [nearest(near, choices)] if choices else []


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def divisors(number: int) -> list[int]:
    """All divisors, rising."""
    return [n for n in range(1, number + 1) if number % n == 0]


def nearest(wanted: int, choices: Iterable[int]) -> int:
    """The choice that is closest to what was wanted; the smaller of two."""
    return min(choices, key=lambda n: (abs(n - wanted), n))


def _nearest_multiple(number: int, of: int) -> int:
    return max(1, round(number / of)) * of
