"""The prints of a whole corpus as one sequence of documents, read in blocks.

Documents are numbered source by source, in the order in which sources first appear, and within a source in input order.
So among otherwise equal documents, the lowest number is the one to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headway.core.arrays import Ints
from headway.text.dedup.fingerprints import Prints
from headway.text.dedup.workspace import BLOCK

# Arrays of units that stay mapped; each keeps a file open.
_MAPPED = 128

Field = Literal["hashes", "sizes", "signatures", "paragraph_counts"]


class Corpus:
    """The documents of all units.

    Args:
        prints: Prints of each unit, in input order.
        sources: Each unit's source.

    Attributes:
        names: The sources, in order of appearance.
        count: Number of documents.
    """

    def __init__(self, prints: Sequence[Prints], sources: Sequence[str]) -> None:
        if len(prints) != len(sources):
            raise ValueError(f"{len(prints)} units, but {len(sources)} names of sources")
        self.names = list(dict.fromkeys(sources))
        number = {name: place for place, name in enumerate(self.names)}
        self._units = sorted(range(len(prints)), key=lambda unit: number[sources[unit]])
        self._prints = [prints[unit] for unit in self._units]
        self._unit_sources = np.array([number[sources[unit]] for unit in self._units], dtype=np.int64)
        lengths = [len(each) for each in self._prints]
        self._starts = np.cumsum([0, *lengths])
        self.count = int(self._starts[-1])
        self._mapped = lru_cache(maxsize=_MAPPED)(lambda unit, field: getattr(self._prints[unit], field))

    def units(self) -> Iterator[tuple[int, int, int, Prints]]:
        """Yield each unit in order: its place in the input, source, number of its first document, prints."""
        starts = self._starts[:-1].tolist()
        yield from zip(self._units, self._unit_sources.tolist(), starts, self._prints, strict=True)

    def blocks(self, values_of: Callable[[Prints], NDArray[Any]]) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield a value of each document in blocks, each with the number of its first document."""
        for _, _, start, prints in self.units():
            values = values_of(prints)
            for first in range(0, len(values), BLOCK):
                yield start + first, values[first : first + BLOCK]

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of document numbers, each of the size of a block."""
        for start in range(0, self.count, BLOCK):
            yield start, min(start + BLOCK, self.count)

    def take(self, field: Field, numbers: Ints) -> NDArray[Any]:
        """Return the values of a field for documents in any order."""
        units = self._unit_of(numbers)
        order = np.argsort(units, kind="stable")
        cuts = np.flatnonzero(np.diff(units[order])) + 1
        taken: NDArray[Any] | None = None
        for part in np.split(order, cuts) if len(order) else []:
            unit = int(units[part[0]])
            values = self._mapped(unit, field)
            if taken is None:
                taken = np.empty((len(numbers), *values.shape[1:]), dtype=values.dtype)
            taken[part] = values[numbers[part] - self._starts[unit]]
        return np.zeros(0, dtype=np.int64) if taken is None else taken

    def source_of(self, numbers: Ints) -> Ints:
        """Return the sources of documents, as indices into `names`."""
        return self._unit_sources[self._unit_of(numbers)]

    def place(self, number: int) -> tuple[int, int]:
        """Return the unit of a document (its place in the input), and the document's number in the unit."""
        unit = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self._units[unit], number - int(self._starts[unit])

    def rank(self, numbers: Ints) -> list[NDArray[Any]]:
        """Return keys for `np.lexsort`, least significant first, that sort the document to keep first.

        An earlier source comes first, then more text, then the smaller hash. None of these depends on the order of
        files or on their division into units.
        """
        return [self.take("hashes", numbers)[:, 0], -self.take("sizes", numbers), self.source_of(numbers)]

    def close(self) -> None:
        """Unmap all files."""
        self._mapped.cache_clear()

    def _unit_of(self, numbers: Ints) -> NDArray[np.intp]:
        return np.searchsorted(self._starts, numbers, side="right") - 1
