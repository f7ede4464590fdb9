"""A store of 1e12 tokens (sparse files) is fed as quickly, and in as little memory, as a small one."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.config import Config, LaneGrid, resolve
from headway.data.feeding.token_feed import TokenFeed
from headway.data.store import TokenStore
from support.work import count_calls, count_lines

SHARDS, EACH, STEPS = 10_000, 100_000_000, 100_000_000
GRID = LaneGrid(lanes=1, micro_batches=1, micro_batch=8)
MIXTURE = {
    "temperature": 2,
    "stages": [
        {"start": 0.3, "weights": {"first": 1, "second": 1}, "change": "linear"},
        {"start": 0.6, "sequence_length": 512},
    ],
}


@pytest.fixture
def large(store: TokenStore, tmp_path: Path) -> Path:
    """The small store with shards that claim to be many and long."""
    manifest: dict[str, Any] = json.loads(json.dumps(store.manifest))
    manifest["splits"].pop("validation", None)
    for name, count in (("first", SHARDS * 3 // 4), ("second", SHARDS // 4)):
        part = manifest["splits"]["train"][name]
        model = part["shards"][0]
        part["shards"] = [{**model, "file": f"{number:05d}.bin", "tokens": EACH} for number in range(count)]
        part["tokens"], part["documents"] = EACH * count, model["documents"] * count
        folder = tmp_path / "large" / "train" / name
        folder.mkdir(parents=True)
        for shard in part["shards"]:
            with (folder / shard["file"]).open("wb") as file:
                file.truncate(EACH * np.dtype(manifest["dtype"]).itemsize)
    (tmp_path / "large" / "manifest.json").write_text(json.dumps(manifest))
    return tmp_path / "large"


def config_of(store: Path, mixture: dict[str, Any]) -> Config:
    sources = [{"path": f"{name}.jsonl", "name": name} for name in ("first", "second")]
    values = {"sources": sources, "store": str(store), "mixture": mixture}
    train = {"steps": STEPS, "sequence_length": 1024, "global_batch": 8}
    return resolve(Config.model_validate({"data": values, "train": train}))


@pytest.mark.parametrize("mixture", [{}, MIXTURE])
def test_first_and_late_batches_come_at_once(large: Path, mixture: dict[str, Any]) -> None:
    config = config_of(large, mixture)
    feed = TokenFeed.of(config.row_settings, GRID, TokenStore.open(large))
    assert feed.rows == pytest.approx(SHARDS * EACH / 1024, rel=1e-6)
    work = []
    for step in (0, STEPS - 1):
        work.append(
            count_calls(lambda s=step: TokenFeed.of(config.row_settings, GRID, TokenStore.open(large)).batch(s, 0))
        )
        assert sum(batch["ids"].numel() for batch in feed.batch(step, 0)) == 8 * 1024
    assert max(work) < 20 * SHARDS, "a look at each of the files, and at none of the 1e9 rows but those of the step"
    assert work[1] < 1.5 * work[0], "what comes before a step costs nothing"
    if mixture:
        assert count_lines(lambda: feed.rows_by_source(0, STEPS)) < 200_000
        # 60 million steps of 8 rows and 40 million of 16.
        assert sum(feed.rows_by_source(0, STEPS).values()) == 60_000_000 * 8 + 40_000_000 * 16


@pytest.mark.parametrize("mixture", [{}, MIXTURE])
def test_a_late_batch_looks_at_its_own_rows_and_no_others(
    large: Path, mixture: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, mapped = [], []
    read, map_file = TokenStore.read, TokenStore._map

    def counted_read(self: TokenStore, split: str, source: str, start: int, count: int) -> Any:
        tokens.append(count)
        return read(self, split, source, start, count)

    def counted_map(*arguments: Any) -> Any:
        mapped.append(arguments)
        return map_file(*arguments)

    monkeypatch.setattr(TokenStore, "read", counted_read)
    monkeypatch.setattr(TokenStore, "_map", counted_map)
    feed = TokenFeed.of(config_of(large, mixture).row_settings, GRID, TokenStore.open(large, check=False))
    assert not tokens and not mapped
    (batch,) = feed.batch(STEPS - 1, 0)
    rows, length = batch["ids"].shape
    assert tokens == [length + 1] * rows and 0 < len(mapped) <= 2 * rows


@pytest.mark.parametrize("mixture", [pytest.param({}, marks=pytest.mark.slow), MIXTURE])
def test_feeding_takes_no_memory_that_grows_with_the_store(large: Path, mixture: dict[str, Any]) -> None:
    store, config = TokenStore.open(large, check=False), config_of(large, mixture)
    tracemalloc.start()
    try:
        feed = TokenFeed.of(config.row_settings, GRID, store)
        for step in range(0, STEPS, STEPS // 50):
            feed.batch(step, 0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * 2**20, "a permutation of the rows alone would take 8 GB"
