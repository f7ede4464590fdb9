"""Access to the data that a run began with, in a store that has been prepared again since.

A shard's name is a hash of everything that the shard depends on, so a store that grew keeps its old shards. A run keeps
a copy of its manifest in its own directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.core.errors import DataError
from headway.data.remote_store import open_store
from headway.data.store import TokenStore
from headway.data.used_by import kept_manifest, manifest_path

if TYPE_CHECKING:
    from headway.config import DataConfig
    from headway.config.sections.segments import Segment


def pinned(store: TokenStore, run: Path, data: str, check: bool = True) -> TokenStore:
    """Return a store as the run knows it, with the data of a fingerprint.

    Args:
        store: The store with its present manifest.
        run: The run directory.
        data: The fingerprint.
        check: Check that all shards exist.

    Raises:
        DataError: the run has not kept the manifest, or the store lacks some of its shards.
    """
    if store.fingerprint == data:
        return store
    manifest = kept_manifest(run, data)
    if manifest is None:
        raise DataError(
            f"the data fingerprint is {store.fingerprint[:12]}, but the run's is {data[:12]}, and the run has no copy"
            " of that manifest",
            where=f"{store.path}, {manifest_path(run, data)}",
            fix="restore the token store that the run had, or choose another name=... for a new run",
        )
    known = store.with_manifest(manifest)
    if check:
        known.check()
    return known


def open_run_store(data: DataConfig, run: Path, segments: Sequence[Segment], **options: Any) -> TokenStore:
    """Open the store of a run, with the data of its last segment.

    Args:
        data: Of the run's config.
        run: The run directory.
        segments: Of the run.
        options: Passed to `open_store`.

    Raises:
        DataError: as in `open_store` and `pinned`.
    """
    store = open_store(data, **options)
    return pinned(store, run, segments[-1].data) if segments else store
