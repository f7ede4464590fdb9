"""The feed of a config with a mixture, stages and packing; and what `headway data preview` says of it."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from headway.cli.application import application
from headway.config import Config, LaneGrid, resolve
from headway.core.errors import ConfigError
from headway.data.feeding import rows as rows_module
from headway.data.feeding.order import permute
from headway.data.feeding.prefetch import Prefetcher
from headway.data.feeding.token_feed import TokenFeed
from headway.data.store import TokenStore
from support.feeds import preview

GRID = LaneGrid(lanes=4, micro_batches=2, micro_batch=3)
STAGES = [
    {"start": 0.25, "weights": {"first": 1, "second": 1}, "change": "linear"},
    {"start": 0.5, "sequence_length": 8},
]


def config_of(store: TokenStore, stages: Any = STAGES, weights: Any = (3, 1), **data: Any) -> Config:
    """40 steps of 24 rows of 16 tokens."""
    sources = [{"path": f"{name}.jsonl", "name": name} for name in ("first", "second")]
    for source, weight in zip(sources, weights or (), strict=False):
        source["weight"] = weight
    values = {"sources": sources, "store": str(store.path), "mixture": {"stages": stages}, **data}
    train = {"steps": 40, "sequence_length": 16, "global_batch": 24}
    return resolve(Config.model_validate({"seed": 5, "data": values, "train": train}))


def flat(feed: TokenFeed, step: int, lanes: int = 4) -> list[tuple[int, ...]]:
    """Rows of a step, with their last target."""
    return [
        (*ids, targets[-1])
        for lane in range(lanes)
        for batch in feed.batch(step, lane)
        for ids, targets in zip(batch["ids"].tolist(), batch["targets"].tolist(), strict=True)
    ]


def rows_of(store: TokenStore, length: int) -> dict[tuple[int, ...], tuple[str, int]]:
    """Every training row of a length, cut by hand: its source and number."""
    rows = {}
    for source in store.sources("train"):
        tokens = store.read("train", source, 0, store.tokens("train", source)).tolist()
        for number in range((len(tokens) - 1) // length):
            rows[tuple(tokens[number * length : number * length + length + 1])] = (source, number)
    return rows


def test_without_a_mixture_the_order_is_what_it_always_was(store: TokenStore) -> None:
    feed = TokenFeed.of(config_of(store, [], None).row_settings, GRID, store)
    rows = rows_of(store, 16)
    numbered = [*rows]  # over the sources in order
    from headway.core.random import derive_seed

    total = len(numbered)
    position = np.arange(24 * 39, 24 * 40)
    epoch = int(position[0] // total)
    assert position[-1] // total == epoch, "the step chosen lies within an epoch"
    order = permute(position % total, total, derive_seed(5, "rows", epoch))
    assert flat(feed, 39) == [numbered[row] for row in order]


def test_rows_come_in_the_asked_shares_and_lengths(store: TokenStore) -> None:
    feed = TokenFeed.of(config_of(store).row_settings, GRID, store)
    long, short = rows_of(store, 16), rows_of(store, 8)
    for step in (0, 9):
        assert Counter(long[row][0] for row in flat(feed, step)) == {"first": 18, "second": 6}
    for step in (20, 39):
        batch = feed.batch(step, 1)[0]
        assert batch["ids"].shape == batch["targets"].shape == (6, 8), "as many tokens as in rows of 16"
        assert Counter(short[row][0] for row in flat(feed, step)) == {"first": 24, "second": 24}


@pytest.mark.parametrize(("packing", "warned"), [("best_fit", True), ("pad", False), ("concat", False)])
def test_padding_of_best_fit_is_warned_of_by_the_first_worker(
    store: TokenStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], packing: str, warned: bool
) -> None:
    monkeypatch.setattr(rows_module, "_MUCH_PADDING", 0.0)  # there is some in the last row, whatever the documents
    feed = TokenFeed.of(config_of(store, packing=packing).row_settings, GRID, store)
    capsys.readouterr()
    figures = feed.packing_figures(16)
    assert figures["first"].padding_tokens or packing == "concat"
    assert ("warning: packing best_fit" in capsys.readouterr().err) == warned
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    feed.packing_figures(16)
    assert capsys.readouterr().err == ""


def test_ledger_counts_and_metrics_are_what_was_fed(store: TokenStore) -> None:
    feed = TokenFeed.of(config_of(store).row_settings, GRID, store)
    rows = {16: rows_of(store, 16), 8: rows_of(store, 8)}
    seen = [Counter(rows[len(row) - 1][row][0] for row in flat(feed, step)) for step in range(40)]
    for first, last in ((0, 40), (3, 21), (12, 13), (20, 40)):
        assert feed.rows_by_source(first, last) == sum(seen[first:last], Counter())
    metrics = feed.metrics(14)
    assert metrics["data/share/first"] == seen[14]["first"] / 24
    used = sum(seen[:15], Counter())
    assert metrics["data/epochs/second"] == pytest.approx(
        used["second"] / sum(s == "second" for s, _ in rows[16].values())
    )


@pytest.mark.parametrize("grid", [(1, 8, 3), (8, 1, 3), (2, 2, 6), (4, 6, 1), (1, 1, 24), (24, 1, 1)])
def test_the_rows_of_a_step_do_not_depend_on_the_grid(store: TokenStore, grid: tuple[int, int, int]) -> None:
    other = TokenFeed.of(config_of(store).row_settings, LaneGrid(*grid), store)
    feed = TokenFeed.of(config_of(store).row_settings, GRID, store)
    for step in (0, 13, 20, 39):
        assert flat(other, step, grid[0]) == flat(feed, step)


def test_a_batch_depends_on_nothing_but_its_step_and_lane(store: TokenStore) -> None:
    first, second = (TokenFeed.of(config_of(store).row_settings, GRID, store) for _ in range(2))
    ahead = [flat(first, step) for step in range(40)]
    assert [flat(second, step) for step in reversed(range(40))] == ahead[::-1]


@pytest.mark.parametrize(("depth", "workers"), [(1, 1), (2, 2), (7, 4)])
def test_a_batch_does_not_depend_on_prefetching_threads_or_workers(store: TokenStore, depth: int, workers: int) -> None:
    wanted = TokenFeed.of(config_of(store).row_settings, GRID, store)
    feed = TokenFeed.of(config_of(store).row_settings, GRID, store)  # one for all of them: threads share it
    readers = [Prefetcher(feed, GRID.of_worker(rank, workers), 17, 23, depth) for rank in range(workers)]
    for step in range(17, 23):
        lanes = {lane: batch for reader in readers for lane, batch in reader.next()[1].items()}
        assert sorted(lanes) == list(range(4))
        for lane, batches in lanes.items():
            for batch, other in zip(batches, wanted.batch(step, lane), strict=True):
                assert torch.equal(batch["ids"], other["ids"]) and torch.equal(batch["targets"], other["targets"])
    for reader in readers:
        reader.close()


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
def test_packed_rows_are_mixed_too(store: TokenStore, packing: str) -> None:
    feed = TokenFeed.of(config_of(store, STAGES[:1], packing=packing, document_mask=True).row_settings, GRID, store)
    assert feed.rows_by_source(0, 10) == {"first": 180, "second": 60}
    batch = feed.batch(3, 0)[0]
    assert batch["ids"].shape == (3, 16) and "documents" in batch


def test_a_preview_is_what_the_step_sees(store: TokenStore) -> None:
    config = config_of(store)
    for step in (12, 20):
        feed, view = TokenFeed.of(config.row_settings, GRID, store), preview(config, GRID, store, step)
        seen = flat(feed, step)
        assert [tuple(row.ids) for row in view.rows] == [row[:-1] for row in seen]
        for row, tokens in zip(view.rows, seen, strict=True):
            length = len(tokens) - 1  # short rows may be alike, so the text is looked up where it is said to be
            assert tuple(store.read("train", row.source, row.source_row * length, length + 1)) == tokens
            assert row.first_token == row.source_row * view.sequence_length and row.padding == 0
        places = [(row.lane, row.micro_batch, row.row) for row in view.rows]
        size = view.micro_batch
        assert places == [(lane, batch, row) for lane in range(4) for batch in range(2) for row in range(size)]
        counts = Counter(row.source for row in view.rows)
        assert [source.step for source in view.sources] == [counts[n] / len(seen) for n in ("first", "second")]
    assert (view.first_step, view.last_step, view.sequence_length, view.micro_batch) == (20, 40, 8, 6)
    assert [source.asked for source in view.sources] == [0.5, 0.5]


def test_a_preview_cuts_texts_where_documents_end(store: TokenStore) -> None:
    view = preview(config_of(store, []), GRID, store, 0)
    ends = 0
    for row in view.rows:
        inner = sum(token == store.end_of_text_id for token in row.ids[:-1])
        assert len(row.documents) == inner + 1
        ends += inner
        assert not any("<|endoftext|>" in text for text in row.documents)
    assert ends
    packed = preview(config_of(store, [], packing="pad"), GRID, store, 0)
    assert all(len(row.documents) == 1 and row.first_token is None for row in packed.rows)
    assert any(row.padding for row in packed.rows)


def test_the_verb(store: TokenStore, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    config = config_of(store)
    file.write_text(
        yaml.safe_dump(
            {"seed": 5, "data": config.data.model_dump(mode="json", include={"sources", "store", "mixture"})}
        )
    )
    train = [
        "train.steps=40",
        "train.sequence_length=16",
        "train.global_batch=24",
        "train.micro_batch=3",
        "train.lanes=4",
    ]
    result = CliRunner().invoke(
        application(), ["data", "preview", str(file), *train, "--step", "12", "--rows", "2", "--json"]
    )
    assert result.exit_code == 0, result.output
    view = preview(config, GRID, store, 12, 2)
    assert json.loads(result.stdout) == json.loads(json.dumps(dataclasses.asdict(view)))
    assert len(view.rows) == 8
    result = CliRunner().invoke(application(), ["data", "preview", str(file), *train, "--step", "12", "--rows", "1"])
    assert result.stdout.count(": epoch ") == 4
    assert "(1 of 6 rows)" in result.stdout and "ASKED" in result.stdout
    result = CliRunner().invoke(application(), ["data", "preview", str(file), *train, "--step", "40"])
    assert isinstance(result.exception, ConfigError) and "no step 40" in result.exception.what


def test_shares_of_a_mixture_are_not_told_where_its_length_is_open(store: TokenStore, tmp_path: Path) -> None:
    from headway.text.cli.inspect import _asked_shares

    train = ["train.sequence_length=16", "train.global_batch=24"]
    files = {}
    for name, config in {"mixed": config_of(store), "plain": config_of(store, [], None)}.items():
        data = config.model_dump(mode="json")["data"]
        files[name] = tmp_path / f"{name}.yaml"
        files[name].write_text(yaml.safe_dump({"data": data}))
    assert _asked_shares(files["mixed"], train, store) == {}
    assert sum(_asked_shares(files["mixed"], [*train, "train.steps=40"], store).values()) == pytest.approx(1)
    assert sum(_asked_shares(files["plain"], train, store).values()) == pytest.approx(1)


def test_a_dry_run_lists_the_mixture(store: TokenStore) -> None:
    from headway.run.session.preview import preview

    text = preview(config_of(store, STAGES[1:]))
    assert "mixture    step 0: first 75.0%, second 25.0%, rows of 16 tokens\n" in text
    assert "           step 20: first 75.0%, second 25.0%, rows of 8 tokens\n" in text
    assert "grid       1 lane of 3 micro-batches of 8 rows\n" in text
    many = preview(config_of(store))
    assert "... 10 changes of shares between ..." in many
    assert "mixture" not in preview(config_of(store, [], None))
    shorter = preview(config_of(store, [{"start": 0, "sequence_length": 8}]))
    rows = sum((store.tokens("train", source) - 1) // 8 for source in store.sources("train"))
    assert f"data       {store.path}: {rows} rows of 8 tokens\n" in shorter
    assert f"{40 * 24 * 16 / (rows * 8):.2f} epochs\n" in shorter


def test_the_longest_rows_of_a_stretch_of_steps_are_known(store: TokenStore) -> None:
    longer_later = [{"start": 0, "sequence_length": 8}, {"start": 0.5, "sequence_length": 16}]
    feed = TokenFeed.of(config_of(store, longer_later).row_settings, GRID, store)
    assert (feed.longest_step(0, 40), feed.longest_step(30, 40), feed.longest_step(3, 10)) == (20, 30, 3)
    assert feed.batch(20, 0)[0]["ids"].shape == (3, 16) and feed.batch(3, 0)[0]["ids"].shape == (6, 8)
    shorter_later = TokenFeed.of(config_of(store).row_settings, GRID, store)
    assert (shorter_later.longest_step(0, 40), shorter_later.longest_step(25, 40)) == (0, 25)
    plain = TokenFeed.of(config_of(store, [], None).row_settings, GRID, store)
    assert plain.longest_step(7, 40) == 7
