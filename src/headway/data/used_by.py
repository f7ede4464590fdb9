"""Records of the runs that use a token store, so that a new preparation keeps the files they need.

A run leaves a mark in the store when an attempt begins: its directory, the fingerprint of its data, and the process
that owns it. The run directory holds a copy of the manifest (`headway.data.pinned`). A mark is valid as long as the run
directory and that copy exist.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.core.files.atomic import write_json
from headway.core.files.foreign import read_json_object
from headway.data.pinned import kept_manifest
from headway.data.shards import shard_files

#: Folder of the marks in a store.
MARKS = ".runs"


@dataclass(frozen=True)
class Use:
    """One run's use of a store."""

    mark: str
    """Path of the mark, relative to the store."""
    run: Path
    pid: int
    """Process that owns the run, or owned it last."""
    manifest: dict[str, Any]

    @property
    def files(self) -> list[str]:
        """Files of shards that the run reads, relative to the store."""
        return [
            f"{split}/{source}/{name}"
            for split, sources in self.manifest["splits"].items()
            for source, part in sources.items()
            for shard in part["shards"]
            for name in shard_files(shard)
        ]


def mark_use(store: Path, run: Path, data: str, pid: int) -> None:
    """Leave the mark of a run. A store that cannot be written needs no mark, since no preparation can change it."""
    name = hashlib.sha256(str(run.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    with suppress(OSError):
        (store / MARKS).mkdir(exist_ok=True)
        write_json(store / MARKS / f"{name}.json", {"run": str(run.resolve()), "data": data, "pid": pid})


def uses_of(store: Path) -> list[Use]:
    """Return the runs that need present or former files of the store."""
    return list(_uses(store))


def _uses(store: Path) -> Iterator[Use]:
    for path in sorted((store / MARKS).glob("*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            mark = read_json_object(path, 2**16)
            run = Path(str(mark["run"]))
            manifest = kept_manifest(run, str(mark["data"])) if (run / "config.yaml").is_file() else None
            if manifest is not None:
                yield Use(f"{MARKS}/{path.name}", run, int(mark["pid"]), manifest)
