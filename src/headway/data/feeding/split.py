"""The rows of all sources of one split, of any length."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError
from headway.data.feeding.packing import PackingFigures, total_figures
from headway.data.feeding.rows import RowBlock, SourceRows, join_blocks, open_rows
from headway.data.store import TokenStore


class PartedRows:
    """The rows of a source whose parts are cut into rows separately, so that added data does not move a row.

    Args:
        parts: Rows of every part of the data; None for a part that has nothing of the source.

    Attributes:
        counts: Rows of each part.
    """

    def __init__(self, parts: Sequence[SourceRows | None]) -> None:
        self.counts = [0 if part is None else part.count for part in parts]
        self._parts = [part for part in parts if part is not None]
        self._starts = np.cumsum([0, *(part.count for part in self._parts)])
        self.count = int(self._starts[-1])

    def read(self, rows: NDArray[np.int64]) -> RowBlock:
        """Read rows by number."""
        numbers = np.searchsorted(self._starts, rows, side="right") - 1
        return _read_by_number(numbers, lambda part, place: self._parts[part].read(rows[place] - self._starts[part]))

    def figures(self) -> PackingFigures:
        """Return the figures of all parts together."""
        return total_figures([part.figures() for part in self._parts])


class SplitRows:
    """Rows by source and number.

    Args:
        store: The store, or its parts in the order in which they were added.
        split: Name of the split.
        lengths: Tokens per row, one length or several; sources that have no row of any length are omitted.
        packing: `data.packing`.
        document_mask: `data.document_mask`.
        only: Names of sources; the others are omitted.

    Attributes:
        sources: Names of the sources that have rows.
        too_short: Tokens of each source that has none.
        where: The store's place, for messages.

    Raises:
        DataError: No source has enough tokens for one row.
    """

    def __init__(
        self,
        store: TokenStore | list[TokenStore],
        split: str,
        *lengths: int,
        packing: Literal["concat", "best_fit", "pad"] = "concat",
        document_mask: bool = False,
        only: Collection[str] | None = None,
    ) -> None:
        parts: Sequence[TokenStore] = store if isinstance(store, list) else [store]
        self.where = str(parts[-1].path)
        self.packing = packing
        self.document_mask = document_mask
        found = dict.fromkeys(name for part in parts for name in part.sources(split))
        names = [name for name in found if only is None or name in only]

        def rows_of(name: str, length: int) -> SourceRows:
            opened = [
                open_rows(part, split, name, length, packing, document_mask=document_mask)
                if name in part.sources(split)
                else None
                for part in parts
            ]
            return opened[0] if len(opened) == 1 and opened[0] is not None else PartedRows(opened)

        opened = {name: {length: rows_of(name, length) for length in lengths} for name in names}
        tokens = {name: sum(p.tokens(split, name) for p in parts if name in p.sources(split)) for name in names}
        self._opened = {name: rows for name, rows in opened.items() if any(r.count for r in rows.values())}
        self.sources = tuple(self._opened)
        self.too_short = {name: tokens[name] for name in opened if name not in self._opened}
        self._shortest = min(lengths)
        self._leaving_out = {name for part in parts for name in self.sources if part.leaves_out_rows(split, name)}
        masked = {name for part in parts for name in self.sources if part.has_mask(split, name)}
        self._keeping = masked - self._leaving_out
        if not self.sources:
            longest = max(self.too_short.values(), default=0)
            if longest > self._shortest:
                raise DataError(
                    f"no row of {self._shortest:,} tokens in split '{split}' has a trained token",
                    where=self.where,
                    fix="prepare more conversations, lower train.sequence_length, or set data.packing: best_fit",
                )
            raise DataError(
                f"no source has the {self._shortest + 1:,} tokens of one row in split '{split}': the longest has"
                f" {longest:,}",
                where=self.where,
                fix="prepare more text, or lower train.sequence_length",
            )

    def short_source_warning(self) -> str | None:
        """Return one line for the user about the sources that have no row, or None."""
        if not self.too_short:
            return None
        names = ", ".join(f"'{name}' ({tokens:,} tokens)" for name, tokens in self.too_short.items())
        return f"left out, since they have fewer than the {self._shortest + 1:,} tokens of one row: {names}"

    def untrained_notice(self, length: int) -> str | None:
        """Return one line on the share of rows of a length that are left out, since no token is trained, or None."""
        names = [name for name in self.sources if name in self._leaving_out]
        shares = {name: self._opened[name][length].figures().untrained_share for name in names}
        parts = [f"{name} {share:.1%}".replace("%", " %") for name, share in shares.items() if share]
        parts += [f"none of {name}, which an earlier version prepared" for name in sorted(self._keeping)]
        return f"rows of {length:,} tokens without a trained one, left out: {', '.join(parts)}" if parts else None

    def counts(self, length: int) -> list[int]:
        """Count the rows of this length that each source has."""
        return [rows[length].count for rows in self._opened.values()]

    def counts_by_part(self, source: str, length: int) -> list[int]:
        """Count the rows of this length that each part of the data has of one source."""
        rows = self._opened[source][length]
        return list(rows.counts) if isinstance(rows, PartedRows) else [rows.count]

    def figures(self, length: int) -> dict[str, PackingFigures]:
        """Return how each source's documents fill rows of this length."""
        return {name: rows[length].figures() for name, rows in self._opened.items()}

    def of_source(self, source: int, length: int) -> SourceRows:
        """Return the rows of one source, by its number."""
        return self._opened[self.sources[source]][length]

    def read(self, length: int, sources: NDArray[np.intp], rows: NDArray[np.int64]) -> RowBlock:
        """Read rows of any sources, in the given order.

        Args:
            length: Tokens per row, T.
            sources: Numbers of sources, (n,), n at least 1.
            rows: Numbers of rows within them, (n,).
        """
        first = int(sources[0])
        if len(self.sources) == 1 or (sources == first).all():
            return self.of_source(first, length).read(rows)
        return _read_by_number(sources, lambda source, place: self.of_source(source, length).read(rows[place]))


def _read_by_number(numbers: NDArray[np.intp], read: Callable[[int, NDArray[np.intp]], RowBlock]) -> RowBlock:
    """Read rows of several parts or sources in the given order; `read` gets a number and the places of its rows."""
    found = np.unique(numbers).tolist()
    places = [np.flatnonzero(numbers == number) for number in found]
    return join_blocks([read(number, place) for number, place in zip(found, places, strict=True)], places)
