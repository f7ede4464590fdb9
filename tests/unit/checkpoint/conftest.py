"""A writer of checkpoints, with its process beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.checkpoint.save.messages import WriterSettings
from headway.checkpoint.save.writer import CheckpointWriter


@pytest.fixture
def settings(tmp_path: Path) -> WriterSettings:
    return WriterSettings(tmp_path / "checkpoints", patience_seconds=20.0)


@pytest.fixture
def writer(settings: WriterSettings) -> Iterator[CheckpointWriter]:
    writer = CheckpointWriter(settings)
    yield writer
    writer.close()
