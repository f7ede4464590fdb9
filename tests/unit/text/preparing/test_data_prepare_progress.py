"""What is shown while a store is made: totals that are reached, and nothing that stands still."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headway.config.sections.data import DataConfig
from headway.core.console import Progress
from headway.text.preparing import build, duplicates
from headway.text.preparing.prepare import prepare

Configs = Callable[..., DataConfig]


@pytest.fixture
def bars(bars_of: Callable[[ModuleType], list[Progress]]) -> list[Progress]:
    """Those of the passes over the input, as they were left."""
    return bars_of(build)


@pytest.mark.parametrize("dedup", [False, True])
def test_what_lies_behind_a_limit_leaves_the_total(
    config: Configs, twenty_files: Path, bars: list[Progress], dedup: bool
) -> None:
    source = {"path": str(twenty_files), "limit": "5 documents"}
    report = prepare(config([source], shard_bytes=1, validation=0, dedup={"documents": dedup}), workers=1)
    assert report.documents == 5 and len(bars) == 1 + dedup
    size = sum(file.stat().st_size for file in sorted(twenty_files.iterdir())[:5])
    assert [(bar.done, bar.total) for bar in bars] == [(size, size)] * len(bars)


def test_a_stream_among_the_files_has_no_total_until_it_was_read(
    config: Configs, twenty_files: Path, bars: list[Progress], documents: Callable[..., list[str]]
) -> None:
    stream = {"path": "python:", "name": "stream"}
    texts = {"stream": documents(30, seed=1)}
    prepare(config([twenty_files, stream], validation=0, dedup={"documents": True}), workers=1, iterables=texts)
    reading, encoding = bars
    assert reading.total is None and reading.done > sum(file.stat().st_size for file in twenty_files.iterdir())
    assert encoding.done == encoding.total == reading.done


def test_the_search_for_duplicates_shows_each_stage(
    config: Configs, twenty_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Progress] = []

    def bar(*arguments: Any, **values: Any) -> Progress:
        made.append(Progress(*arguments, **values))
        return made[-1]

    monkeypatch.setattr(duplicates, "Progress", bar)
    for file in twenty_files.iterdir():
        file.write_text(f"{file.read_text()}\n\n{file.name} goes on with a second paragraph that is long enough " * 2)
    dedup = {"near": True, "paragraphs": True, "paragraph_bytes": 1}
    prepare(config(twenty_files, validation=0, dedup=dedup), workers=1)
    assert [(each.label, each.done, each.total, each.unit) for each in made] == [
        ("searching for equal documents", 20, 20, "documents"),
        ("searching for similar documents", 20, 20, "bands"),
        ("searching for equal paragraphs", 60, 60, "paragraphs"),
    ]
