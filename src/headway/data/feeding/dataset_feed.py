"""Batches of a map-style dataset: samples read by a thread, or by processes that decode them.

A sample is a pure function of (seed, step, lane, row), so neither the number of processes nor that of workers matters,
and a process that dies is replaced by one that reads the same samples.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from headway.core.errors import DataError, HeadwayError
from headway.core.random import derive_seed
from headway.data.feeding.decoding import DecodingProcesses
from headway.data.feeding.plan import RowPlan
from headway.data.feeding.planned_feed import PlannedFeed

#: Stands for the step in the seeds of an evaluation's samples.
_EVALUATION = -1


class Reader:
    """Reads samples of a map-style dataset, and makes micro-batches of them.

    Args:
        dataset: With `__len__`, and `__getitem__(i)` or `__getitem__(i, rng)` with a `numpy.random.Generator`.
        seed: Seed of the run.
        collate: Makes a micro-batch from a list of samples; PyTorch's default when not given.
    """

    def __init__(self, dataset: Any, seed: int = 0, collate: Callable[[list[Any]], Any] | None = None) -> None:
        self.dataset = dataset
        self._seed = seed
        self._collate = collate or default_collate
        self._takes_rng = takes_rng(dataset)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.dataset)

    def sample(self, step: int, lane: int, row: int) -> Any:
        """Read one sample.

        Raises:
            DataError: the dataset raised an error, other than that of a file that cannot be read now, or of its end.
        """
        try:
            if not self._takes_rng:
                return self.dataset[row]
            rng = np.random.Generator(np.random.Philox(key=self._derived(step, lane, row)))
            return self.dataset.__getitem__(row, rng)
        except (HeadwayError, OSError, StopIteration):
            raise
        except Exception as error:
            raise DataError(
                f"item {row} of the dataset cannot be read: {type(error).__name__}: {error}",
                where=f"{type(self.dataset).__name__}.__getitem__({row})",
                fix="repair the item or what reads it; the run continues from its newest checkpoint",
            ) from error

    def micro_batch(self, step: int, lane: int, rows: Sequence[int], begin: Callable[[int], None] | None = None) -> Any:
        """Read the samples of a micro-batch, and collate them.

        Args:
            begin: Called with the row of each sample before it is read, in a process that does nothing else: then the
                generators of Python, NumPy and PyTorch are seeded for the sample.
        """
        samples = []
        for row in rows:
            if begin is not None:
                begin(row)
                self._seed_generators(step, lane, row)
            samples.append(self.sample(step, lane, row))
        return self._collate(samples)

    def _seed_generators(self, step: int, lane: int, row: int) -> None:
        seed = self._derived(step, lane, row)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)

    def _derived(self, step: int, lane: int, row: int) -> int:
        return derive_seed(self._seed, "sample", step, lane, row)


def takes_rng(dataset: Any) -> bool:
    """Return whether a dataset takes a generator for each sample: `__getitem__(i, rng)`."""
    try:
        parameters = inspect.signature(type(dataset).__getitem__).parameters
    except (AttributeError, TypeError, ValueError):  # written in C
        return False
    return "rng" in parameters


class DatasetFeed(PlannedFeed):
    """Rows of a map-style dataset.

    Args:
        reader: Reads the dataset.
        plan: The rows of each step.
        lanes: Lanes of a step.
        micro_batch: Rows of a micro-batch.
        processes: Processes that read ahead; with 0 the caller reads.
        patience_seconds: How long a process may take for one sample.
    """

    def __init__(
        self,
        reader: Reader,
        plan: RowPlan,
        *,
        lanes: int,
        micro_batch: int,
        processes: int = 0,
        patience_seconds: float = 150.0,
    ) -> None:
        super().__init__(plan, lanes, micro_batch)
        self._reader = reader
        self._processes = processes
        self._patience = patience_seconds

    def batch(self, step: int, lane: int) -> Sequence[Any]:
        """Return the micro-batches of one lane of one step, as `collate` makes them."""
        return [self._reader.micro_batch(step, lane, picks.rows.tolist()) for picks in self.picks(step, lane)]

    def ahead(self, steps: range, lanes: Sequence[int]) -> Generator[dict[int, Sequence[Any]]] | None:
        """Return the micro-batches of these lanes, step by step, read by processes; None if there are none."""
        if not self._processes:
            return None
        processes = DecodingProcesses(self._read, self._processes, self._patience)
        return self._read_ahead(processes, steps, lanes)

    def _read_ahead(
        self, processes: DecodingProcesses, steps: range, lanes: Sequence[int]
    ) -> Generator[dict[int, Sequence[Any]]]:
        jobs = ((s, lane, part) for s in steps for lane in lanes for part in range(self._parts(s)))
        with processes:
            read = processes.read(jobs)
            for step in steps:
                yield {lane: [next(read) for _ in range(self._parts(step))] for lane in lanes}

    def _parts(self, step: int) -> int:
        """Return the number of micro-batches of a lane of a step."""
        return -(-self.plan.step_rows(step) // self.lanes // self.micro_batch(step))

    def _read(self, job: tuple[int, int, int], begin: Callable[[int], None]) -> Any:
        step, lane, part = job
        return self._reader.micro_batch(step, lane, self.picks(step, lane)[part].rows.tolist(), begin)


class DatasetEvaluationFeed:
    """All rows of a map-style dataset, in order.

    Args:
        reader: Reads the dataset.
        micro_batch: Rows of a micro-batch; the last one may have fewer.
        processes, patience_seconds: As in `DatasetFeed`.
    """

    def __init__(
        self, reader: Reader, *, micro_batch: int, processes: int = 0, patience_seconds: float = 150.0
    ) -> None:
        self._reader = reader
        self._micro_batch = micro_batch
        self._processes = processes
        self._patience = patience_seconds

    def __len__(self) -> int:
        """Return the number of micro-batches in one evaluation."""
        return -(-len(self._reader) // self._micro_batch)

    def batch(self, index: int) -> Any:
        """Return micro-batch `index`, as `collate` makes it."""
        return self._reader.micro_batch(_EVALUATION, 0, self._rows(index))

    def ahead(self, indices: Sequence[int]) -> Generator[Any]:
        """Yield micro-batches, read ahead by processes if there are any."""
        if not self._processes:
            yield from map(self.batch, indices)
            return
        with DecodingProcesses(self._read, self._processes, self._patience) as processes:
            yield from processes.read(indices)

    def _read(self, index: int, begin: Callable[[int], None]) -> Any:
        return self._reader.micro_batch(_EVALUATION, 0, self._rows(index), begin)

    def _rows(self, index: int) -> range:
        if not 0 <= index < len(self):
            raise IndexError(f"micro-batch {index} of {len(self)}")
        start = index * self._micro_batch
        return range(start, min(start + self._micro_batch, len(self._reader)))
