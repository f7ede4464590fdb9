"""The grid of a global batch (lanes, micro-batches and rows) and the number of CPU threads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headway.config.schema import Config
from headway.config.strategies import find_strategy
from headway.core.errors import ConfigError

#: Largest default of the lanes of an elastic run, and of the rows of a micro-batch.
_AT_MOST = 8


@dataclass(frozen=True)
class LaneGrid:
    """The division of a step's rows: `lanes` x `micro_batches` x `micro_batch` rows."""

    lanes: int
    micro_batches: int
    """Micro-batches in a lane of the largest batch; for the smaller ones of `train.batch_ramp`, see
    `micro_batches_of`."""
    micro_batch: int
    interleaved: bool = False
    """Whether worker `r` of `w` computes lanes `r`, `r + w`, `r + 2w`, ... instead of neighbouring ones."""

    def micro_batches_of(self, rows: int) -> int:
        """Return the number of micro-batches in a lane of a global batch of so many rows."""
        return rows // (self.lanes * self.micro_batch)

    def of_worker(self, rank: int, workers: int) -> range:
        """Return the lanes that a worker computes."""
        if self.interleaved:
            return range(rank, self.lanes, workers)
        share = self.lanes // workers
        return range(rank * share, (rank + 1) * share)


def resolve_lanes(config: Config, workers: int) -> LaneGrid:
    """Resolve the grid for a number of workers. With `train.micro_batch=auto`, its micro-batch is only a first choice.

    Raises:
        ConfigError: the rows cannot be divided that way; the fix has the nearest number that works.
    """
    train = config.train
    elastic = config.determinism == "elastic"
    rows = train.batches.common_rows
    lanes = _lanes(config, workers, rows)
    # Elastic runs have a power of two as lanes, so this makes their number of workers a power of two as well.
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
    # Lanes that are computed at the same time are neighbours, so shards can be summed lane by lane in the fixed tree.
    interleaved = elastic and find_strategy(config.parallel.strategy).cuts_parameters
    return LaneGrid(lanes, train.global_batch_rows // lanes // micro_batch, micro_batch, interleaved)


def resolve_threads(config: Config, workers: int, lanes: int, cores: int, at_most: int | None = None) -> int:
    """Return the number of CPU threads per worker, at least 1.

    In `elastic` runs the number must not depend on the number of workers, because some kernels' bits depend on it.

    Args:
        config: Of the run.
        workers: Workers on this machine.
        lanes: Lanes of a global batch.
        cores: Processors that the workers here may use together.
        at_most: Upper limit of what is chosen (`OMP_NUM_THREADS`); `parallel.threads` itself is taken as given.
    """
    if config.parallel.threads != "auto":
        return config.parallel.threads
    share = cores // (lanes if config.determinism == "elastic" else workers)
    return max(1, share if at_most is None else min(share, at_most))


def _lanes(config: Config, workers: int, rows: int) -> int:
    """Return the given or default number of lanes, which divides the rows."""
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
    """Explain the number of rows in a message if a ramp has several."""
    sizes = config.train.batches.sizes
    common = config.train.batches.common_rows
    return f" (batches of {', '.join(map(str, sizes))} rows have {common} in common)" if len(sizes) > 1 else ""


def _batch_keys(config: Config) -> str:
    return "train.batch_ramp, train.global_batch" if config.train.batch_ramp else "train.global_batch"


def _other_batch(config: Config, rows: int, of: int) -> str:
    if config.train.batch_ramp:
        return f"batches that are multiples of {of} rows"
    return f"train.global_batch={_nearest_multiple(rows, of)}"


def _lane_choices(rows: int, workers: int, elastic: bool, near: int) -> list[int]:
    """Return the nearest valid number of lanes in a list; empty if there is none."""
    choices = [n for n in divisors(rows) if n % workers == 0 and (not elastic or _is_power_of_two(n))]
    return [nearest(near, choices)] if choices else []


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def nearest(wanted: int, choices: Iterable[int]) -> int:
    """Return the choice that is closest to a wanted number; the smaller one of two."""
    return min(choices, key=lambda n: (abs(n - wanted), n))


def _nearest_multiple(number: int, of: int) -> int:
    return max(1, round(number / of)) * of
