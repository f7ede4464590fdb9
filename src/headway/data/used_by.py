"""Records of the runs that use a token store, so that a new preparation keeps the files they need.

A run leaves a mark in the store when an attempt begins: its directory, the fingerprint of its data, and the process
that owns it. The run directory holds a copy of the manifest, with which `headway.data.pinned` reads the data that the
run began with. A mark is valid as long as the run directory and that copy exist.

A supervisor asks which runs use a store, so this module loads no NumPy.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.core.errors import DataError
from headway.core.files.atomic import atomic_write, write_json
from headway.core.files.foreign import read_bytes, read_json_object
from headway.core.files.hashes import fingerprint
from headway.data.store_manifest import MANIFEST, parse_manifest

#: Folder of the marks in a store.
MARKS = ".runs"
#: Folder of a run directory with the manifests of its data.
FOLDER = "data"


def manifest_path(run: Path, data: str) -> Path:
    """Return the path of a run's copy of the manifest with fingerprint `data`."""
    return run / FOLDER / f"manifest-{data[:16]}.json"


def keep_manifest(run: Path, store: Path, data: str) -> None:
    """Copy the manifest of a store to a run directory, if its fingerprint is `data`."""
    kept = manifest_path(run, data)
    if kept.exists():
        return
    content = read_bytes(store / MANIFEST)
    if fingerprint(parse_manifest(content, str(store / MANIFEST))) == data:
        kept.parent.mkdir(exist_ok=True)
        with atomic_write(kept) as file:
            file.write(content)


def kept_manifest(run: Path, data: str) -> dict[str, Any] | None:
    """Return the manifest with fingerprint `data` that a run has kept; None if it is missing or damaged."""
    path = manifest_path(run, data)
    if not path.is_file():
        return None
    try:
        manifest = parse_manifest(read_bytes(path), str(path))
    except (DataError, OSError):
        return None
    return manifest if fingerprint(manifest) == data else None


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
        from headway.data.shards import shard_files

        return [
            f"{split}/{source}/{name}"
            for split, sources in self.manifest["splits"].items()
            for source, part in sources.items()
            for shard in part["shards"]
            for name in shard_files(shard)
        ]


def mark_use(store: Path, run: Path, data: str, pid: int) -> None:
    """Leave the mark of a run. A store that cannot be written needs no mark, since no preparation can change it."""
    with suppress(OSError):
        (store / MARKS).mkdir(exist_ok=True)
        mark = {"run": str(run.resolve()), "store": str(store.resolve()), "data": data, "pid": pid}
        write_json(mark_of(store, run), mark)


def mark_of(store: Path, run: Path) -> Path:
    """Return where a run's mark in a store lies."""
    name = hashlib.sha256(str(run.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return store / MARKS / f"{name}.json"


def runs_using(store: Path) -> list[Path]:
    """Return the run directories of the runs that need present or former files of the store."""
    return [use.run for use in uses_of(store)]


def uses_of(store: Path) -> list[Use]:
    """Return the runs that need present or former files of the store."""
    uses = []
    for path in sorted((store / MARKS).glob("*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            mark = read_json_object(path, 2**16)
            if _is_of_another(mark, store):
                continue
            run = Path(str(mark["run"]))
            manifest = kept_manifest(run, str(mark["data"])) if (run / "config.yaml").is_file() else None
            if manifest is not None:
                uses.append(Use(f"{MARKS}/{path.name}", run, int(mark["pid"]), manifest))
    return uses


def _is_of_another(mark: dict[str, Any], store: Path) -> bool:
    """Return whether a mark came here with a copy of the store that the run uses, and which is still there."""
    there = mark.get("store")  # absent in marks of earlier versions
    if not isinstance(there, str) or Path(there) == store.resolve():
        return False
    return (Path(there) / MANIFEST).is_file()
