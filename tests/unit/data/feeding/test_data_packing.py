"""Plans of rows: which pieces of which documents share one."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headway.data.feeding import packing
from headway.data.feeding.packing import PackingFigures, Plan, best_fit, concat_figures, plan_rows, total_figures


def bounds_of(sizes: list[int]) -> NDArray[np.uint64]:
    return np.concatenate([[0], np.cumsum(np.array(sizes, dtype=np.int64))]).astype(np.uint64)


def planned(
    sizes: list[int], length: int, how: packing.Packing = "best_fit"
) -> tuple[list[list[range]], PackingFigures]:
    """Each row as the ranges of tokens of its pieces, and the figures."""
    rows: list[list[range]] = []
    total = PackingFigures()
    for plan, figures in plan_rows([bounds_of(sizes)], length, how):
        pieces = [range(s, s + n) for s, n in zip(plan.starts.tolist(), plan.lengths.tolist(), strict=True)]
        rows += [pieces[a:b] for a, b in pairwise(plan.rows.tolist())]
        total.add(figures)
    return rows, total


def best_fit_one_by_one(sizes: list[int], capacity: int) -> list[int]:
    """Best-fit decreasing as it is defined; the fill of each bin."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [number for number, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting, key=lambda number: rooms[number])] -= size
        else:
            rooms.append(capacity - size)
    return [capacity - room for room in rooms]


def first_fit(sizes: list[int], capacity: int) -> int:
    """Bins of first-fit in the order of the text."""
    rooms: list[int] = []
    for size in sizes:
        place = next((number for number, room in enumerate(rooms) if room >= size), None)
        if place is None:
            rooms.append(capacity - size)
        else:
            rooms[place] -= size
    return len(rooms)


@pytest.fixture(scope="module")
def real_sizes() -> list[int]:
    """Token counts of real texts, at 3.5 bytes a token: the standard library's modules."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(p for p in folder.rglob("*.py") if "site-packages" not in p.parts)
    return [max(2, int(p.stat().st_size / 3.5) + 1) for p in files]


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 60))
def test_runs_of_equal_sizes_pack_as_one_by_one(sizes: list[int], capacity: int) -> None:
    bins, count = best_fit(np.array(sizes, dtype=np.int64), capacity)
    fill = np.bincount(bins, weights=sizes, minlength=count).astype(int).tolist()
    assert sorted(fill) == sorted(best_fit_one_by_one(sizes, capacity))


@given(st.lists(st.integers(1, 70), min_size=1, max_size=40), st.integers(1, 30), st.sampled_from(["best_fit", "pad"]))
def test_every_target_is_there_once_and_nothing_is_cut_without_need(
    sizes: list[int], length: int, how: packing.Packing
) -> None:
    rows, figures = planned(sizes, length, how)
    bounds = bounds_of(sizes).tolist()
    targets = [token for row in rows for piece in row for token in piece[1:]]
    assert sorted(targets) == [t for a, b in pairwise(bounds) for t in range(a + 1, b)]
    pieces = {(piece.start, piece.stop) for row in rows for piece in row}
    for start, end in pairwise(bounds):
        if 2 <= end - start <= length + 1:
            assert (start, end) in pieces
        else:
            # Cut where a row is full, and nowhere else.
            cuts = range(start, end - 1, length)
            assert all((cut, min(cut + length + 1, end)) in pieces for cut in cuts)
    assert all(row and sum(map(len, row)) <= length + 1 for row in rows)
    assert how == "best_fit" or all(len(row) == 1 for row in rows)
    firsts = [row[0].start for row in rows]
    assert firsts == sorted(firsts) and all(piece.start > row[0].start for row in rows for piece in row[1:])

    placed = sum(len(piece) for row in rows for piece in row)
    assert figures.rows == len(rows) and figures.row_tokens == len(rows) * (length + 1)
    assert figures.padding_tokens == figures.row_tokens - placed
    assert figures.targets == len(targets) == sum(max(0, size - 1) for size in sizes)
    assert figures.cut_documents == sum(size > length + 1 for size in sizes)
    assert figures.left_out_documents == sizes.count(1)
    assert (figures.documents, figures.tokens) == (len(sizes), sum(sizes))
    assert figures.pieces == len(pieces)
    assert figures.attended_pairs == sum((len(piece) - 1) ** 2 for row in rows for piece in row)
    assert figures.attention_length <= length


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        ([1], []),
        ([1, 1, 1], []),
        ([2], [[range(2)]]),
        ([8], [[range(8)]]),  # exactly T
        ([9], [[range(9)]]),  # T + 1 fills a row
        ([10], [[range(9)], [range(8, 10)]]),  # T + 2 is cut: one target is left
        ([17], [[range(9)], [range(8, 17)]]),
        ([20, 25], [[range(9)], [range(8, 17)], [range(16, 20)], [range(20, 29)], [range(28, 37)], [range(36, 45)]]),
        ([5, 4, 6, 3], [[range(5), range(5, 9)], [range(9, 15), range(15, 18)]]),
        ([10, 7], [[range(9)], [range(8, 10), range(10, 17)]]),  # what is left over is packed like a document
        ([3, 2], [[range(3), range(3, 5)]]),  # all of it is shorter than a row
        ([], []),
    ],
    ids=str,
)
def test_rows_of_eight(sizes: list[int], rows: list[list[range]]) -> None:
    assert planned(sizes, 8)[0] == rows


def test_a_row_for_each_when_padded() -> None:
    rows, figures = planned([5, 1, 20, 9], 8, "pad")
    assert rows == [[range(5)], [range(6, 15)], [range(14, 23)], [range(22, 26)], [range(26, 35)]]
    assert figures.padding_tokens == 4 + 5


def test_real_texts_are_padded_by_less_than_half_a_percent(real_sizes: list[int]) -> None:
    for length in (512, 1024, 2048, 4096):
        rows, figures = planned(real_sizes, length)
        assert figures.padding_share <= 0.005
        joined = concat_figures([bounds_of(real_sizes)], sum(real_sizes), length)
        assert figures.cut_documents == sum(size > length + 1 for size in real_sizes)
        assert joined.cut_documents > 1.1 * figures.cut_documents
        rest = [len(p) for row in rows for p in row if len(p) <= length]
        assert len(rows) - sum(len(p) > length for row in rows for p in row) <= first_fit(rest, length + 1)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(1, 12))
def test_figures_of_joined_documents(sizes: list[int], length: int) -> None:
    figures = concat_figures([bounds_of(sizes)], sum(sizes), length)
    document = np.repeat(np.arange(len(sizes)), sizes)
    rows = max(0, len(document) - 1) // length
    pieces: dict[tuple[int, int], int] = {}
    for token in range(rows * length):
        if document[token] == document[token + 1]:
            key = (int(document[token]), token // length)
            pieces[key] = pieces.get(key, 0) + 1
    assert (figures.rows, figures.padding_tokens, figures.documents) == (rows, 0, len(sizes))
    assert figures.targets == sum(pieces.values())
    assert figures.attended_pairs == sum(count**2 for count in pieces.values())
    assert figures.pieces == len(pieces)
    assert figures.cut_documents == sum(np.bincount([d for d, _ in pieces], minlength=1) > 1)


def test_blocks_are_packed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """So what comes later in a source moves nothing before it, and memory does not grow with the source."""
    monkeypatch.setattr(packing, "_BLOCK_DOCUMENTS", 10)
    monkeypatch.setattr(packing, "_BLOCK_ROWS", 4)
    sizes = [3, 7, 5, 2, 9, 4, 6, 8, 5, 3] * 6
    rows, _ = planned(sizes, 8)
    other, _ = planned([*sizes[:-1], 9], 8)
    moved = next(number for number, (a, b) in enumerate(zip(rows, other, strict=False)) if a != b)
    assert rows[moved][0].start >= 4 * sum(sizes[:10])
    blocks = list(plan_rows([bounds_of(sizes)], 8, "best_fit"))
    assert [figures.documents for _, figures in blocks] == [10] * 6
    assert total_figures(figures for _, figures in blocks).tokens == sum(sizes)


def test_blocks_grow_with_short_documents_and_shrink_with_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_BLOCK_DOCUMENTS", 10)
    monkeypatch.setattr(packing, "_BLOCK_ROWS", 4)
    monkeypatch.setattr(packing, "_MAX_BLOCK_ROWS", 8)
    monkeypatch.setattr(packing, "_MAX_BLOCK_DOCUMENTS", 15)

    def documents(sizes: list[int], length: int) -> list[int]:
        return [figures.documents for _, figures in plan_rows([bounds_of(sizes)], length, "best_fit")]

    assert documents([3] * 40, 8) == [12, 12, 12, 4]  # four rows of nine tokens
    assert documents([2] * 40, 8) == [15, 15, 10]  # not more than 15, however few rows they fill
    assert documents([30] * 9, 8) == [3, 3, 3]  # eight rows
    assert documents([500, 500, 4], 8) == [1, 1, 1]  # a document is never shared out


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.lists(st.integers(0, 60), max_size=8))
def test_shards_are_nothing_to_a_plan(sizes: list[int], cuts: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_BLOCK_DOCUMENTS", 10)
        patch.setattr(packing, "_BLOCK_ROWS", 4)
        whole = bounds_of(sizes)
        places = [0, *sorted(cut for cut in cuts if cut < len(sizes)), len(sizes)]
        parts = [whole[start : end + 1] for start, end in pairwise(places)]
        joined, cut = (list(plan_rows(given, 8, "best_fit")) for given in ([whole], parts))
    assert [figures for _, figures in cut] == [figures for _, figures in joined]
    assert b"".join(as_bytes(plan) for plan, _ in cut) == b"".join(as_bytes(plan) for plan, _ in joined)


def test_memory_does_not_grow_with_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the index no more is read than the blocks need that are asked for."""
    monkeypatch.setattr(packing, "_BLOCK_DOCUMENTS", 10)
    monkeypatch.setattr(packing, "_BLOCK_ROWS", 1)
    read: list[int] = []

    def shards() -> Iterator[NDArray[np.uint64]]:
        for number in range(100):
            read.append(number)
            yield bounds_of([5] * 4) + np.uint64(20 * number)

    blocks = plan_rows(shards(), 8, "best_fit")
    for count in range(1, 11):
        next(blocks)
        assert 4 * len(read) <= 10 * count + 20


def test_the_plan_is_what_it_was() -> None:
    """Another packing of the same text would be another training run: `packing_plans._VERSION` has to say so."""
    sizes = [(number * 7919) % 3001 + 1 for number in range(20_000)]
    digest = hashlib.sha256()
    for plan, _ in plan_rows([bounds_of(sizes)], 1024, "best_fit"):
        digest.update(as_bytes(plan))
    assert digest.hexdigest()[:16] == "5cedfb8e90a6bc9e"


def as_bytes(plan: Plan) -> bytes:
    return b"".join(a.astype("<u8").tobytes() for a in (plan.starts, plan.lengths, plan.rows))


def test_figures_survive_json() -> None:
    _, figures = planned([5, 1, 20, 9], 8)
    assert PackingFigures.from_json(figures.to_json()) == figures
    assert figures.to_json()["padding_share"] == figures.padding_share
