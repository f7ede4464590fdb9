"""Batches of any map-style dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import default_collate

from headway.core.errors import DataError
from headway.data.feeding.plan import PlainPlan, RowPlan
from headway.data.feeding.planned_feed import PlannedFeed
from headway.data.feeding.segmented import SegmentedPlan

if TYPE_CHECKING:
    from headway.config import Config


#: Name of the only source of a run on a map-style dataset.
DATASET = "dataset"


def dataset_plan(config: Config, rows: int) -> RowPlan:
    """Make the plan of a resolved config for a map-style dataset with so many rows.

    Raises:
        DataError: The dataset is empty.
    """
    if not rows:
        raise DataError("the dataset has no rows", where=DATASET, fix="give it at least one")
    if config.segments:
        return SegmentedPlan(config)
    return PlainPlan([DATASET], [rows], config.seed, config.train.batches)


class DatasetFeed(PlannedFeed):
    """Rows of any map-style dataset: an object with `__len__` and `__getitem__` that is a pure function of the index.

    Args:
        dataset: The dataset.
        plan: The rows of each step.
        lanes: Lanes of a step.
        micro_batch: Rows of a micro-batch.
        collate: Makes a micro-batch from a list of rows; torch's default when not given.
    """

    def __init__(
        self,
        dataset: Any,
        plan: RowPlan,
        *,
        lanes: int,
        micro_batch: int,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        super().__init__(plan, lanes, micro_batch)
        self._dataset, self._collate = dataset, collate or default_collate

    def batch(self, step: int, lane: int) -> Sequence[Any]:
        """Return the micro-batches of one lane of one step, as `collate` makes them."""
        return [self._collate([self._dataset[i] for i in p.rows.tolist()]) for p in self.picks(step, lane)]


class DatasetEvaluationFeed:
    """All rows of a map-style dataset, in order.

    Args:
        dataset: The dataset.
        micro_batch: Rows of a micro-batch; the last one may have fewer.
        collate: Makes a micro-batch from a list of rows; torch's default when not given.
    """

    def __init__(self, dataset: Any, *, micro_batch: int, collate: Callable[[list[Any]], Any] | None = None) -> None:
        self._dataset, self._micro_batch, self._collate = dataset, micro_batch, collate or default_collate

    def __len__(self) -> int:
        """Return the number of micro-batches in one evaluation."""
        return -(-len(self._dataset) // self._micro_batch)

    def batch(self, index: int) -> Any:
        """Return micro-batch `index`, as `collate` makes it."""
        if not 0 <= index < len(self):
            raise IndexError(f"micro-batch {index} of {len(self)}")
        start = index * self._micro_batch
        end = min(start + self._micro_batch, len(self._dataset))
        return self._collate([self._dataset[row] for row in range(start, end)])
