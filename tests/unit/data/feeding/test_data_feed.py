"""Batches as a function of (step, lane)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headway.config import Batches, Config
from headway.config.schema import DataConfig
from headway.core.errors import DataError
from headway.core.types import Feed
from headway.data.feeding.dataset_feed import DatasetEvaluationFeed, DatasetFeed, Reader
from headway.data.feeding.evaluation_feed import EvaluationFeed
from headway.data.feeding.plan import PlainPlan
from headway.data.feeding.segmented import dataset_plan
from headway.data.feeding.token_feed import TokenFeed
from headway.data.store import TokenStore
from headway.text.preparing.prepare import prepare
from support.feeds import plain_feed
from support.work import count_lines

GRID: dict[str, Any] = {"lanes": 4, "micro_batches": 2, "micro_batch": 3}
DATASET: dict[str, Any] = {"lanes": 4, "micro_batch": 3}


def plan_of_rows(rows: int, *batches: tuple[int, int]) -> PlainPlan:
    return PlainPlan(["dataset"], [rows], 1, Batches(batches or ((0, 24),)))


def feed_of(store: TokenStore, sequence_length: int = 16, **values: Any) -> TokenFeed:
    return plain_feed(store, **{"sequence_length": sequence_length, "seed": 7, **GRID, **values})


def rows_of(store: TokenStore, sequence_length: int) -> dict[tuple[int, ...], str]:
    """Every training row, cut by hand, with its source."""
    rows = {}
    for source in store.sources("train"):
        tokens = store.read("train", source, 0, store.tokens("train", source)).tolist()
        for start in range(0, len(tokens) - sequence_length, sequence_length):
            rows[tuple(tokens[start : start + sequence_length + 1])] = source
    return rows


def flat(batches: Any) -> list[tuple[int, ...]]:
    """Rows of micro-batches with their last target."""
    return [
        (*ids, targets[-1])
        for batch in batches
        for ids, targets in zip(batch["ids"].tolist(), batch["targets"].tolist(), strict=True)
    ]


def test_shapes_and_targets(store: TokenStore) -> None:
    batches = feed_of(store).batch(3, 2)
    assert len(batches) == 2
    for batch in batches:
        assert batch["ids"].shape == batch["targets"].shape == (3, 16)
        assert batch["ids"].dtype == batch["targets"].dtype == torch.int64
        assert torch.equal(batch["ids"][:, 1:], batch["targets"][:, :-1])
        assert batch["ids"].is_contiguous() and batch["targets"].is_contiguous()


def test_every_row_comes_once_per_epoch_and_none_spans_two_sources(store: TokenStore) -> None:
    rows = rows_of(store, 16)
    feed = feed_of(store)
    assert feed.rows == len(rows)
    steps = -(-3 * feed.rows // 24)
    seen = [row for step in range(steps) for lane in range(4) for row in flat(feed.batch(step, lane))]
    for epoch in range(3):
        assert set(seen[epoch * feed.rows : (epoch + 1) * feed.rows]) == set(rows)
    assert seen[: feed.rows] != seen[feed.rows : 2 * feed.rows]


def test_a_batch_depends_on_nothing_but_its_step_and_lane(store: TokenStore) -> None:
    first, second = feed_of(store), feed_of(TokenStore.open(store.path))
    ahead = [flat(first.batch(step, lane)) for step in range(5) for lane in range(4)]
    back = [flat(second.batch(step, lane)) for step in reversed(range(5)) for lane in reversed(range(4))]
    assert ahead == back[::-1]
    assert flat(feed_of(store, seed=8).batch(0, 0)) != ahead[0]


@pytest.mark.parametrize("other", [(1, 8, 3), (8, 1, 3), (2, 2, 6), (4, 6, 1)])
def test_the_rows_of_a_step_do_not_depend_on_the_grid(store: TokenStore, other: tuple[int, int, int]) -> None:
    lanes, micro_batches, micro_batch = other
    wanted = [row for lane in range(4) for row in flat(feed_of(store).batch(2, lane))]
    feed = feed_of(store, lanes=lanes, micro_batches=micro_batches, micro_batch=micro_batch)
    assert [row for lane in range(lanes) for row in flat(feed.batch(2, lane))] == wanted


def test_ledger_counts_are_what_was_fed(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.data.feeding import plan as module

    rows, feed = rows_of(store, 16), feed_of(store)
    monkeypatch.setattr(module, "_CHUNK", 10)
    for first, last in ((0, 1), (0, 50), (3, 20), (7, 7), (11, 12)):
        seen = Counter(
            rows[row] for step in range(first, last) for lane in range(4) for row in flat(feed.batch(step, lane))
        )
        assert feed.rows_by_source(first, last) == {"first": seen["first"], "second": seen["second"]}


def test_ledger_counts_are_quick(store: TokenStore) -> None:
    feed, counted = feed_of(store), list[Counter[str]]()
    few = count_lines(lambda: counted.append(feed.rows_by_source(0, 1_000)))
    many = count_lines(lambda: counted.append(feed.rows_by_source(0, 10_000_000)))
    assert [sum(rows.values()) for rows in counted] == [24_000, 240_000_000]
    assert many < few + 1000


def test_too_little_text_is_said(store: TokenStore) -> None:
    with pytest.raises(DataError, match="no source has the 100,001 tokens of one row") as caught:
        feed_of(store, 100_000)
    assert "train.sequence_length" in str(caught.value.fix)
    with pytest.raises(DataError):
        feed_of(store, split="nonsense")


def test_a_source_too_short_for_a_row_gives_none(
    tmp_path: Path, config: Callable[..., DataConfig], documents: Callable[..., list[str]]
) -> None:
    (tmp_path / "short.txt").write_text("ab")
    (tmp_path / "long.txt").write_text(" ".join(documents(20)))
    prepare(config(["short.txt", "long.txt"], validation=0), workers=1)
    feed = feed_of(TokenStore.open(tmp_path / "store"), 32)
    assert feed.rows_by_source(0, 3) == {"long": 72}


def test_one_row_fills_batches_of_many(store: TokenStore) -> None:
    longest = max(store.tokens("train", source) for source in store.sources("train"))
    feed = feed_of(store, longest - 1)
    assert feed.rows == 1
    rows = flat(feed.batch(0, 0))
    assert len(rows) == 6 and len(set(rows)) == 1


def test_evaluation_is_evenly_spaced_and_whole(store: TokenStore) -> None:
    everything = EvaluationFeed(store, sequence_length=16, micro_batch=4)
    rows = [row for index in range(len(everything)) for row in flat([everything.batch(index)])]
    assert len(set(rows)) == len(rows) == everything.rows
    assert len(everything) == -(-everything.rows // 4)
    some = EvaluationFeed(store, sequence_length=16, limit=5, micro_batch=4)
    assert (len(some), some.rows) == (2, 5)
    assert some.batch(1)["ids"].shape == (1, 16)
    chosen = [rows.index(row) for index in range(2) for row in flat([some.batch(index)])]
    assert chosen == [i * everything.rows // 5 for i in range(5)]
    with pytest.raises(IndexError):
        some.batch(2)


def test_a_tiny_split_gives_one_short_row(store: TokenStore) -> None:
    longest = max(store.tokens("validation", source) for source in store.sources("validation"))
    feed = EvaluationFeed(store, sequence_length=10**6, micro_batch=4)
    assert (len(feed), feed.rows) == (1, 1)
    assert feed.batch(0)["ids"].shape == (1, longest - 1)
    with pytest.raises(DataError, match="holds no text"):
        EvaluationFeed(store, split="nonsense", sequence_length=16, micro_batch=4)


class Squares:
    """A map-style dataset; an index out of range is an error, as in a list."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return torch.tensor([float(index)]), index * index


def test_any_dataset_can_be_fed() -> None:
    feed = DatasetFeed(Reader(Squares(10)), plan_of_rows(10), **DATASET)
    assert feed.rows == 10 and feed.rows_by_source(2, 5) == {"dataset": 72}
    seen = []
    for step in range(5):
        for lane in range(4):
            for x, y in feed.batch(step, lane):
                assert x.shape == (3, 1) and torch.equal(x[:, 0].long() ** 2, y)
                seen += x[:, 0].long().tolist()
    assert all(sorted(seen[i : i + 10]) == list(range(10)) for i in range(0, 120, 10))
    lists = DatasetFeed(Reader(Squares(10), collate=lambda rows: [y for _, y in rows]), plan_of_rows(10), **DATASET)
    assert lists.batch(0, 0) == [[i * i for i in seen[:3]], [i * i for i in seen[3:6]]]
    with pytest.raises(DataError, match="no rows"):
        dataset_plan(Config().row_settings, 0)


def test_a_dataset_is_fed_in_batches_that_grow() -> None:
    feed = DatasetFeed(Reader(Squares(100)), plan_of_rows(100, (0, 4), (2, 12)), lanes=2, micro_batch=2)
    seen = []
    for step, micro_batches in enumerate([1, 1, 3, 3]):
        for lane in range(2):
            batches = feed.batch(step, lane)
            assert [len(x) for x, _ in batches] == [2] * micro_batches
            seen += [int(value) for x, _ in batches for value in x[:, 0]]
    assert len(set(seen)) == 32 and feed.rows_by_source(1, 3) == {"dataset": 16}
    assert feed.describe(2)["step_rows"] == 4 and feed.describe(3)["step_rows"] == [[0, 4], [2, 12]]


def test_a_short_evaluation_row_can_be_cut_into_equal_parts(store: TokenStore) -> None:
    longest = max(store.tokens("validation", source) for source in store.sources("validation"))
    for parts in (1, 4, longest // 2 + 1, longest - 1):
        feed = EvaluationFeed(store, sequence_length=parts * longest, micro_batch=1, parts=parts)
        length = feed.batch(0)["ids"].shape[1]
        assert length % parts == 0 and 0 <= longest - 1 - length < parts
    with pytest.raises(DataError, match=f"rows are cut into {longest} parts"):
        EvaluationFeed(store, sequence_length=longest, micro_batch=1, parts=longest)


def test_a_dataset_is_evaluated_in_order_and_whole() -> None:
    feed = DatasetEvaluationFeed(Reader(Squares(10)), micro_batch=4)
    assert [batch[0][:, 0].tolist() for batch in map(feed.batch, range(len(feed)))] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]
    with pytest.raises(IndexError):
        feed.batch(3)


def test_feeds_keep_the_shared_protocol(store: TokenStore) -> None:
    feeds: list[Feed] = [feed_of(store), DatasetFeed(Reader(Squares(4)), plan_of_rows(4), **DATASET)]
    for feed in feeds:
        assert sum(feed.rows_by_source(0, 2).values()) == 48


def test_rows_are_copies_that_may_be_written_to(store: TokenStore) -> None:
    feed = feed_of(store)
    batch = feed.batch(0, 0)[0]
    before = batch["targets"].clone()
    batch["ids"].zero_()
    assert torch.equal(batch["targets"], before)
    assert np.count_nonzero(feed.batch(0, 0)[0]["ids"].numpy())
