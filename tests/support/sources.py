"""What tests of sources share: find them, and read all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headway.config.sections.data import MAX_DOCUMENT_BYTES, SourceConfig
from headway.text.reading.documents import Batch
from headway.text.reading.readers import read_batches
from headway.text.reading.sources import Source, find_sources, pieces_of


def find(*paths: str | Path, most: int = MAX_DOCUMENT_BYTES, **values: Any) -> list[Source]:
    """The sources of some paths, all with the same settings; `most` is `data.max_document_bytes`."""
    return find_sources([SourceConfig(path=str(path), **values) for path in paths], most=most)


def read(*paths: str | Path, **values: Any) -> Batch:
    """All that the paths hold, in one batch."""
    whole = Batch([])
    for piece in pieces_of(find(*paths, **values)):
        for batch in read_batches(piece):
            whole.texts += batch.texts
            whole.bad += batch.bad
            whole.empty += batch.empty
    return whole
