"""Fixtures that several folders use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import headway, write_config, write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny corpus and its token store; tests only read it."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    result = headway("data", "prepare", write_config(folder))
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture
def tiny(corpus: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes a config for the tiny corpus whose runs are in this test's own folder."""

    def write(**sections: Any) -> Path:
        data = {"store": str(corpus / "store"), "sources": [str(corpus / "corpus.jsonl")], **sections.pop("data", {})}
        return write_config(tmp_path, data=data, **sections)

    return write
