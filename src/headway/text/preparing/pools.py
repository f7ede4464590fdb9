"""Pools of processors for units of input: the workers of this machine, and other machines behind one protocol."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from headway.text.preparing.pieces import PieceResult, Recipe, Work
from headway.text.preparing.records import Records
from headway.text.preparing.tasks import Order, UnitTask
from headway.text.preparing.workers import Pipeline, pipeline

if TYPE_CHECKING:
    from headway.data.tokenizing.tokenizer import Tokenizer


class UnitJob(Protocol):
    """A unit of input to process."""

    @property
    def travels(self) -> bool:
        """Whether another machine can process it."""
        ...

    def work(self) -> Iterator[Work]:
        """Yield the work on each of its pieces, for workers of this machine."""
        ...

    def accept(self, result: PieceResult) -> None:
        """Take the result of the next piece that `work` has yielded.

        Raises:
            DataError: The piece could not be processed.
        """
        ...

    def task(self) -> UnitTask:
        """Return the unit as another machine gets it."""
        ...

    def accept_recorded(self) -> bool:
        """Take what another machine has recorded in the store's folder; return false if it is not complete."""
        ...


class Line(Protocol):
    """Processes units as they are submitted."""

    def submit(self, job: UnitJob) -> None:
        """Process a unit, now or later.

        Raises:
            HeadwayError: This unit or an earlier one failed.
        """
        ...

    def drain(self) -> None:
        """Wait until all submitted units are recorded.

        Raises:
            HeadwayError: A unit failed.
        """
        ...


class UnitPool(Protocol):
    """Machines that process units of input."""

    def check(self) -> None:
        """Check that the machines can be had; called before any work.

        Raises:
            ConfigError: They cannot.
        """
        ...

    def open(self, order: Order) -> AbstractContextManager[Line]:
        """Return a line for the length of a block; at its end, nothing of it runs any more.

        Args:
            order: What all units share; `order.folder` is the folder in which their results are recorded.

        Raises:
            HeadwayError: The machines refuse it.
        """
        ...


class Lines:
    """The line of other machines, if there are any, and that of this one for the units that cannot travel.

    Args:
        recipe: The settings that all pieces share.
        records: Where the results are recorded.
        workers: Number of pieces that this machine processes at a time.
        pool: The other machines.
        tokenizer: The recipe's tokenizer, if it is loaded already.
    """

    def __init__(
        self, recipe: Recipe, records: Records, *, workers: int, pool: UnitPool | None, tokenizer: Tokenizer | None
    ) -> None:
        self._recipe = recipe
        self._records = records
        self._workers = workers
        self._pool = pool
        self._tokenizer = tokenizer
        self._stack = ExitStack()

    @cached_property
    def _near(self) -> Pipeline:
        return self._stack.enter_context(pipeline(self._recipe, self._workers, self._tokenizer))

    @cached_property
    def _far(self) -> Line | None:
        if self._pool is None:
            return None
        return self._stack.enter_context(self._pool.open(Order.of(self._recipe, self._records)))

    def submit(self, job: UnitJob) -> Line | Pipeline:
        """Submit a unit, and return what processes it.

        Raises:
            HeadwayError: A unit failed, or no machine can be had.
        """
        if job.travels and self._far is not None:
            self._far.submit(job)
            return self._far
        for work in job.work():
            self._near.submit(work, job.accept)
        return self._near

    def drain(self) -> None:
        """Wait until all submitted units are recorded.

        Raises:
            HeadwayError: A unit failed.
        """
        for name in ("_near", "_far"):
            line: Line | Pipeline | None = self.__dict__.get(name)
            if line is not None:
                line.drain()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
