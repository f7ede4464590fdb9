"""The assignment of document pieces to rows.

Rows hold C = T + 1 tokens: T inputs and the target after the last one. A document of n tokens has n - 1 targets of its
own. A document with more than T targets is cut into rows of T targets, and each piece begins with the last target of
the piece before. The remainder is packed like a document. Nothing else is cut. So every token but the first of a
document is a target exactly once, with as much context as a row can hold: where a piece continues a document from
another row, its first token is not a target of the token before it. A document of one token has nothing to predict and
is omitted.

`best_fit` packs by best-fit decreasing (Ding et al. 2024, "Fewer Truncations Improve Language Modeling", section 3):
the longest piece first, each into the fullest row that still has room. Pieces of equal length go to rows of equal room
together, as in histogram packing (Krell et al. 2021, section 3.1); this gives an identical packing with far fewer
look-ups. Documents are packed block by block, so memory is bounded, and a change far behind a document does not move
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headway.core.arrays import Bools, Ints, UInt64s
from headway.core.statistics import add_counts

Packing = Literal["best_fit", "pad"]

#: (first tokens of pieces, ascending, and their lengths), (n,) each -> whether a token after a piece's first one is
#: trained, bool (n,)
HasTarget = Callable[[Ints, Ints], Bools]

#: Documents of a block. A block has more if they would fill fewer than `_BLOCK_ROWS` rows, so that its last, half
#: empty rows are few among many, but at most `_MAX_BLOCK_DOCUMENTS`. It has fewer if documents are very long.
_BLOCK_DOCUMENTS = 2**16
_BLOCK_ROWS = 2**10
_MAX_BLOCK_DOCUMENTS = 2**22
_MAX_BLOCK_ROWS = 2**19


@dataclass(frozen=True)
class Plan:
    """Rows as lists of pieces; a piece is a run of consecutive tokens of one document.

    Rows are ordered by their first token, and the pieces of a row by their place in the text.
    """

    starts: UInt64s
    """First token of each piece in the source's stream, (pieces,)."""
    lengths: NDArray[np.uint32]
    """Tokens of each piece, (pieces,)."""
    rows: UInt64s
    """Row r has the pieces rows[r] to rows[r + 1] (exclusive), (rows + 1,)."""
    continued: Bools
    """Whether a piece continues a document from another row, (pieces,)."""


@dataclass
class PackingFigures:
    """Figures on how a source's documents fill its rows."""

    documents: int = 0
    tokens: int = 0
    """Tokens of the documents."""
    rows: int = 0
    row_tokens: int = 0
    """Tokens that rows have room for: rows * (T + 1)."""
    padding_tokens: int = 0
    cut_documents: int = 0
    """Documents that are in more than one row; `best_fit` and `pad` cut only documents longer than a row."""
    left_out_documents: int = 0
    """Documents of a single token."""
    pieces: int = 0
    """Pieces of documents; a piece is the part of a document that lies in one row."""
    targets: int = 0
    """Targets that belong to the same document as their input."""
    judged: int = 0
    """Pieces (of `concat`: rows) that were searched for a trained target; 0 where all have one."""
    untrained: int = 0
    """Those without one, which are left out."""
    attended_pairs: int = 0
    """Sum over pieces of their squared number of targets: pairs of inputs within a piece."""

    @property
    def padding_share(self) -> float:
        """Share of the rows' tokens that are padding."""
        return self.padding_tokens / self.row_tokens if self.row_tokens else 0.0

    @property
    def cut_share(self) -> float:
        """Share of the documents that are cut."""
        return self.cut_documents / self.documents if self.documents else 0.0

    @property
    def untrained_share(self) -> float:
        """Share of the pieces (of `concat`: of the rows) that are left out, since none of their targets is trained."""
        return self.untrained / self.judged if self.judged else 0.0

    @property
    def attention_length(self) -> float:
        """The mean, over all targets, of the number of targets in their piece; at most T.

        It is the sequence length for FLOP counts if attention stays inside documents: `flops_per_token` at this length
        times the targets is the cost of all pieces, computed one by one.
        """
        return self.attended_pairs / self.targets if self.targets else 0.0

    def add(self, other: PackingFigures) -> None:
        """Add the figures of another part of the source, or of another source."""
        add_counts(self, other, (field.name for field in fields(self)))

    def to_json(self) -> dict[str, Any]:
        """Return the figures as plain data for reports, with the shares."""
        shares = {"padding_share": self.padding_share, "cut_share": self.cut_share}
        return {**asdict(self), **shares, "attention_length": self.attention_length}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> PackingFigures:
        """Restore figures from the output of `to_json`, of earlier versions, too."""
        value = {"judged": 0, "untrained": 0, **value}
        return cls(**{field.name: int(value[field.name]) for field in fields(cls)})


def total_figures(parts: Iterable[PackingFigures]) -> PackingFigures:
    """Sum the figures of several sources."""
    total = PackingFigures()
    for part in parts:
        total.add(part)
    return total


def plan_rows(
    parts: Iterable[NDArray[np.integer[Any]]],
    sequence_length: int,
    packing: Packing,
    has_target: HasTarget | None = None,
) -> Iterator[tuple[Plan, PackingFigures]]:
    """Plan the rows of a source, block by block: a pure function of the document lengths, T, the packing and the mask.

    Args:
        parts: Where each document starts in the source's stream, and the end of the last one; ascending,
            (documents + 1,). Any number of parts, each of which begins where the one before ends, so that an index
            larger than memory can be read as it is needed.
        sequence_length: Inputs per row, T.
        packing: `data.packing`.
        has_target: Tells the pieces with a target from those that are left out; all have one if not given.

    Yields:
        Each block's rows (`Plan.starts` count from the stream's beginning, `Plan.rows` from the block's) with its
        figures.
    """
    for bounds in _blocks(parts, sequence_length + 1):
        yield plan_block(bounds, sequence_length, packing, has_target)


def _blocks(parts: Iterable[NDArray[np.integer[Any]]], capacity: int) -> Iterator[Ints]:
    """Yield the bounds of documents that are packed together; they do not depend on how `parts` cuts the index."""
    waiting: list[Ints] = []
    bounds = np.empty(0, dtype=np.int64)
    for part in parts:
        waiting.append(np.asarray(part, dtype=np.int64))
        # Join them only when that doubles the array, so that many small parts are not copied over and over.
        if sum(map(len, waiting)) > max(len(bounds), _BLOCK_DOCUMENTS):
            bounds = _joined([bounds, *waiting])
            waiting = []
            while (size := _block_size(bounds, capacity)) < len(bounds) - 1:
                yield bounds[: size + 1]
                bounds = bounds[size:]
    bounds = _joined([bounds, *waiting])
    while len(bounds) > 1:
        size = _block_size(bounds, capacity)
        yield bounds[: size + 1]
        bounds = bounds[size:]


def _joined(parts: list[Ints]) -> Ints:
    """Join the bounds of consecutive parts, where the end of one is the start of the next."""
    parts = [part for part in parts if len(part)]
    return np.concatenate([part[:-1] for part in parts[:-1]] + parts[-1:]) if parts else np.empty(0, dtype=np.int64)


def _block_size(bounds: Ints, capacity: int) -> int:
    """Return the number of documents in the first block, or all of them if they are too few for a block.

    The documents after the block have no influence on it.
    """
    documents = len(bounds) - 1

    def fill(rows: int) -> int:
        return int(np.searchsorted(bounds, bounds[0] + rows * capacity, side="left"))

    size = max(_BLOCK_DOCUMENTS, min(fill(_BLOCK_ROWS), _MAX_BLOCK_DOCUMENTS))
    return max(1, min(size, fill(_MAX_BLOCK_ROWS), documents))


def plan_block(
    bounds: Ints, sequence_length: int, packing: Packing, has_target: HasTarget | None
) -> tuple[Plan, PackingFigures]:
    """Plan the rows of documents that are packed together; `bounds` has the format of the parts of `plan_rows`."""
    capacity = sequence_length + 1
    sizes = np.diff(bounds)
    whole = np.maximum(sizes - 1, 0) // sequence_length  # pieces that fill a row
    rest = sizes - whole * sequence_length  # remaining tokens, with the one that the last whole piece shares with them
    has_rest = rest > 1

    number = np.arange(whole.sum()) - np.repeat(np.cumsum(whole) - whole, whole)
    whole_starts = np.repeat(bounds[:-1], whole) + number * sequence_length
    whole_documents = np.repeat(np.arange(len(sizes)), whole)
    rest_documents = np.flatnonzero(has_rest)
    rest_starts = (bounds[:-1] + whole * sequence_length)[has_rest]
    rest_sizes = rest[has_rest]
    pieces = len(whole_starts) + len(rest_starts)
    if has_target is not None:
        kept = has_target(whole_starts, np.full(len(whole_starts), capacity))
        whole_starts = whole_starts[kept]
        number = number[kept]
        whole_documents = whole_documents[kept]
        kept = has_target(rest_starts, rest_sizes)
        rest_starts = rest_starts[kept]
        rest_sizes = rest_sizes[kept]
        rest_documents = rest_documents[kept]
    if packing == "best_fit":
        row_of_rest, rest_rows = best_fit(rest_sizes, capacity)
    else:
        row_of_rest = np.arange(len(rest_sizes))
        rest_rows = len(rest_sizes)

    starts = np.concatenate([whole_starts, rest_starts])
    lengths = np.concatenate([np.full(len(whole_starts), capacity), rest_sizes])
    row_of = np.concatenate([np.arange(len(whole_starts)), row_of_rest + len(whole_starts)])
    continued = np.concatenate([number > 0, whole[rest_documents] > 0])
    plan = _sorted_plan(starts, lengths, continued, row_of, len(whole_starts) + rest_rows)
    figures = PackingFigures(
        documents=len(sizes),
        tokens=int(sizes.sum()),
        rows=len(plan.rows) - 1,
        row_tokens=(len(plan.rows) - 1) * capacity,
        padding_tokens=(len(plan.rows) - 1) * capacity - int(lengths.sum()),
        cut_documents=int((np.bincount(np.concatenate([whole_documents, rest_documents])) > 1).sum()),
        left_out_documents=int((sizes < 2).sum()),
        pieces=len(starts),
        judged=0 if has_target is None else pieces,
        untrained=pieces - len(starts),
        targets=int((lengths - 1).sum()),
        attended_pairs=int(((lengths - 1) ** 2).sum()),
    )
    return plan, figures


def _sorted_plan(
    starts: Ints,
    lengths: Ints,
    continued: Bools,
    row_of: Ints,
    rows: int,
) -> Plan:
    """Sort rows by their first piece, and the pieces of each row by their place in the text."""
    first = np.full(rows, np.iinfo(np.int64).max)
    np.minimum.at(first, row_of, starts)
    rank = np.empty(rows, dtype=np.int64)
    rank[np.argsort(first)] = np.arange(rows)
    order = np.lexsort((starts, rank[row_of]))
    counts = np.bincount(rank[row_of], minlength=rows)
    bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint64)
    return Plan(starts[order].astype(np.uint64), lengths[order].astype(np.uint32), bounds, continued[order])


def plan_trained_rows(
    tokens: int, sequence_length: int, has_target: HasTarget
) -> Iterator[tuple[Plan, PackingFigures]]:
    """Plan the rows of `concat` that have a trained target, block by block.

    Args:
        tokens: Tokens of the source.
        sequence_length: Inputs per row, T.
        has_target: As for `plan_rows`.

    Yields:
        As `plan_rows`; each row is one piece, of which the figures count nothing but rows and pieces.
    """
    rows = max(0, tokens - 1) // sequence_length
    for first in range(0, rows, _BLOCK_DOCUMENTS):
        starts = np.arange(first, min(rows, first + _BLOCK_DOCUMENTS), dtype=np.int64) * sequence_length
        lengths = np.full(len(starts), sequence_length + 1)
        kept = has_target(starts, lengths)
        count = int(kept.sum())
        yield (
            Plan(
                starts[kept].astype(np.uint64),
                lengths[kept].astype(np.uint32),
                np.arange(count + 1, dtype=np.uint64),
                np.zeros(count, dtype=np.bool_),
            ),
            PackingFigures(rows=count, pieces=count, judged=len(starts), untrained=len(starts) - count),
        )


def of_trained_rows(figures: PackingFigures, trained: PackingFigures, sequence_length: int) -> PackingFigures:
    """Return the figures of `concat` for the rows that `plan_trained_rows` leaves, all else as if there were all."""
    row_tokens = trained.rows * (sequence_length + 1)
    judged = {"judged": trained.judged, "untrained": trained.untrained}
    return replace(figures, rows=trained.rows, row_tokens=row_tokens, **judged)


def concat_figures(parts: Iterable[NDArray[np.integer[Any]]], tokens: int, sequence_length: int) -> PackingFigures:
    """Compute the figures of documents that are joined and cut every T tokens (`concat`).

    The rest of the source's `tokens` after the last whole row is in no row.

    Args:
        parts: As in `plan_rows`.
        tokens: Tokens of the source.
        sequence_length: Inputs per row, T.
    """
    length = sequence_length
    rows = max(0, tokens - 1) // length
    total = PackingFigures(rows=rows, row_tokens=rows * (length + 1))
    for part in parts:
        bounds = np.asarray(part, dtype=np.int64)
        # A document's targets belong to the inputs [first, last); row r has the inputs [r * T, r * T + T).
        first = bounds[:-1]
        last = np.minimum(bounds[1:] - 1, rows * length)
        inside = last > first
        first = first[inside]
        last = last[inside]
        first_row = first // length
        last_row = (last - 1) // length
        cut = last_row > first_row
        head = np.where(cut, (first_row + 1) * length, last) - first
        tail = (last - last_row * length)[cut]
        between = int((last_row - first_row - 1)[cut].sum())
        total.add(
            PackingFigures(
                documents=len(bounds) - 1,
                tokens=int(bounds[-1] - bounds[0]),
                cut_documents=int(cut.sum()),
                pieces=len(head) + len(tail) + between,
                targets=int((last - first).sum()),
                attended_pairs=int((head**2).sum() + (tail**2).sum()) + between * length**2,
            )
        )
    return total


def best_fit(sizes: Ints, capacity: int) -> tuple[Ints, int]:
    """Pack pieces into bins by best-fit decreasing.

    Args:
        sizes: Sizes of the pieces, 1 to `capacity`, (n,).
        capacity: Capacity of a bin.

    Returns:
        The bin of each piece, int64 (n,), and the number of bins.
    """
    order = np.argsort(-sizes, kind="stable")
    runs, bins = _fill(np.bincount(sizes, minlength=capacity + 1), capacity)
    run = np.array(runs, dtype=np.int64).reshape(-1, 3)
    first_bin = run[:, 0]
    run_bins = run[:, 1]
    per_bin = run[:, 2]
    # Pieces of a run, in order of size, go to its bins: `per_bin` to the first, `per_bin` to the next, ...
    in_run = run_bins * per_bin
    place = np.arange(len(sizes)) - np.repeat(np.cumsum(in_run) - in_run, in_run)
    bin_of = np.empty(len(sizes), dtype=np.int64)
    bin_of[order] = np.repeat(first_bin, in_run) + place // np.repeat(per_bin, in_run)
    return bin_of, bins


def _fill(counts: Ints, capacity: int) -> tuple[list[tuple[int, int, int]], int]:
    """Pack a histogram of sizes by best-fit decreasing.

    Args:
        counts: Pieces of each size, (capacity + 1,).
        capacity: Capacity of a bin.

    Returns:
        Runs (first bin, bins, pieces per bin) that take the pieces in descending order of size; and the number of bins.
    """
    runs: list[tuple[int, int, int]] = []
    groups: list[list[tuple[int, int]]] = [[] for _ in range(capacity + 1)]  # by room: (first bin, bins)
    rooms = 0  # bit r is set while `groups[r]` is not empty
    bins = 0
    for size in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[size])
        while left:
            fitting = rooms >> size
            if fitting:
                # The least room that suffices. If the piece fits there once more, the remainder is again the least.
                room = size + (fitting & -fitting).bit_length() - 1
                first, count = groups[room].pop()
            else:
                room = capacity
                first = bins
                count = -(-left // (capacity // size))
                bins += count
            each = min(room // size, left)
            used = min(count, left // each)
            runs.append((first, used, each))
            left -= used * each
            if used < count:
                groups[room].append((first + used, count - used))
                rooms |= 1 << room
            elif not groups[room]:
                rooms &= ~(1 << room)
            room -= each * size
            groups[room].append((first, used))
            rooms |= 1 << room
    return runs, bins
