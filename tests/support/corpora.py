"""Small corpora and stores that tests of `text` and `data` share: their `conftest.py` take these fixtures."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headway.config.schema import DataConfig
from headway.core.console import Progress, progress
from headway.data.store import TokenStore
from headway.text.preparing.prepare import prepare
from headway.text.reading import sources as source_module

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "rain", "falls", "on", "hills"]


def make_documents(count: int, seed: int = 0, words: int = 60) -> list[str]:
    """Distinct texts."""
    draw = random.Random(seed)
    return [
        f"document {seed}/{number}: " + " ".join(draw.choices(WORDS, k=draw.randint(5, words)))
        for number in range(count)
    ]


def write_jsonl(path: Path, documents: list[str], **fields: Any) -> Path:
    """One record per document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text, **fields}) + "\n" for text in documents), "utf-8")
    return path


@pytest.fixture(autouse=True)
def in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # which a function from there adds it to
    yield


@pytest.fixture(scope="session")
def documents() -> Callable[..., list[str]]:
    return make_documents


@pytest.fixture(scope="session")
def jsonl() -> Callable[..., Path]:
    return write_jsonl


@pytest.fixture
def bars_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], list[Progress]]:
    """Those that a module shows from now on, as they are left."""

    def watch(module: ModuleType) -> list[Progress]:
        made: list[Progress] = []

        @contextmanager
        def recorded(*arguments: Any) -> Iterator[Progress]:
            with progress(*arguments) as bar:
                made.append(bar)
                yield bar

        monkeypatch.setattr(module, "progress", recorded)
        return made

    return watch


@pytest.fixture
def twenty_files(tmp_path: Path, documents: Callable[..., list[str]]) -> Path:
    """A folder of twenty small files."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, text in enumerate(documents(20)):
        (folder / f"{number:02d}.txt").write_text(text)
    return folder


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., DataConfig]:
    """A data config with a small vocabulary whose store is `store` in the test's folder."""

    def make(sources: Any, **values: Any) -> DataConfig:
        values.setdefault("tokenizer", {"vocab_size": 300})
        values.setdefault("store", tmp_path / "store")
        sources = sources if isinstance(sources, list) else [sources]
        sources = [str(source) if isinstance(source, Path) else source for source in sources]
        return DataConfig.model_validate({"sources": sources, **values})

    return make


@pytest.fixture
def store(tmp_path: Path, config: Callable[..., DataConfig], monkeypatch: pytest.MonkeyPatch) -> TokenStore:
    """Two sources in several shards."""
    monkeypatch.setattr(source_module, "PIECE_BYTES", 1000)
    write_jsonl(tmp_path / "first.jsonl", make_documents(60, seed=1))
    write_jsonl(tmp_path / "second.jsonl", make_documents(40, seed=2))
    data = config([tmp_path / "first.jsonl", tmp_path / "second.jsonl"], shard_bytes=3000, validation=0.2)
    prepare(data, workers=1)
    return TokenStore.open(data.store)
