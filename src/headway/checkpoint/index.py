"""The index of a run's checkpoints, in SQLite: their places, metrics and lineage.

Folders and manifests are the source of truth, and `rebuild` makes the index from them. So an index that is lost, broken
or unwritable costs a warning, never a run.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.checkpoint.format.folders import checkpoint_folders
from headway.checkpoint.format.manifest import Manifest, read_manifest
from headway.core.console import warning
from headway.core.errors import CheckpointError
from headway.core.files.foreign import as_number, open_regular, parse_json

FILE_NAME = "checkpoints.sqlite"
LOCAL = "local"
REMOTE = "remote"

#: Incremented when the tables change; an index of another version is rebuilt.
_VERSION = 1
_BUSY_SECONDS = 10.0
#: File systems that do not share memory between machines, which WAL needs (sqlite.org/wal.html, section 1).
_NETWORK = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "glusterfs", "afs", "orangefs", "9p"}

_TABLES = """
CREATE TABLE checkpoints (
    step INTEGER NOT NULL, state_sha256 TEXT NOT NULL, run TEXT, time REAL, attempt INTEGER, kind TEXT,
    bytes INTEGER, files INTEGER, tensors INTEGER, world_size INTEGER,
    parent_step INTEGER, parent_sha256 TEXT, metrics TEXT NOT NULL DEFAULT '{}',
    PRIMARY KEY (step, state_sha256));
CREATE TABLE places (
    step INTEGER NOT NULL, state_sha256 TEXT NOT NULL, tier TEXT NOT NULL, place TEXT NOT NULL,
    complete INTEGER NOT NULL, time REAL NOT NULL,
    PRIMARY KEY (step, state_sha256, tier));
"""


@dataclass(frozen=True)
class Place:
    """A place that holds a checkpoint."""

    tier: str
    """`local` or `remote`."""
    place: str
    """Folder or URL."""
    complete: bool
    """Whether all of it is there; False during a transfer."""


@dataclass(frozen=True)
class Entry:
    """One checkpoint of the index."""

    step: int
    state_sha256: str
    run: str | None = None
    time: float | None = None
    attempt: int | None = None
    kind: str | None = None
    """`full` or `light`."""
    bytes: int | None = None
    files: int | None = None
    tensors: int | None = None
    world_size: int | None = None
    parent_step: int | None = None
    """The checkpoint that its attempt started from, or rolled back to; None for step 0, or if unknown."""
    parent_sha256: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics recorded at its step."""
    places: tuple[Place, ...] = ()


_COLUMNS = [name for name in Entry.__dataclass_fields__ if name not in ("metrics", "places")]


def entry_of(manifest: Manifest, run: str | None) -> Entry:
    """Make the index entry of a manifest."""
    context = manifest.context
    parent = context.get("parent")
    parent = parent if isinstance(parent, dict) else {}
    metrics = context.get("metrics")
    return Entry(
        step=manifest.step,
        state_sha256=manifest.state_sha256,
        run=run,
        time=as_number(context.get("time")),
        attempt=_whole(context.get("attempt")),
        kind=str(context["kind"]) if context.get("kind") else None,
        bytes=_whole(manifest.total_bytes),
        files=len(manifest.files),
        tensors=len(manifest.tensors),
        world_size=_whole(context.get("world_size")),
        parent_step=_whole(parent.get("step")),
        parent_sha256=str(parent["state_sha256"]) if parent.get("state_sha256") else None,
        metrics={k: number for k, v in metrics.items() if (number := as_number(v)) is not None}
        if isinstance(metrics, dict)
        else {},
    )


class CheckpointIndex:
    """The index of one run. Every call opens and closes the file, so that several processes can use it in turn.

    Args:
        run: The run directory.
        report: Called once with a message if the index cannot be used.
    """

    def __init__(self, run: Path, report: Callable[[str], None] = warning) -> None:
        self.path = Path(run) / FILE_NAME
        self._run = Path(run).resolve().name
        self._report = report
        self._reported = False

    def add(self, manifest: Manifest, tier: str, place: str, complete: bool = True) -> bool:
        """Add a checkpoint and its place in one tier; its places in other tiers stay.

        Returns:
            Whether the index could be written.
        """

        def put(connection: sqlite3.Connection) -> None:
            self._put(connection, entry_of(manifest, self._run))
            self._put_place(connection, manifest.step, manifest.state_sha256, Place(tier, place, complete))

        return self._change(put)

    def forget(self, tier: str, step: int) -> bool:
        """Remove a checkpoint's place in a tier; a checkpoint without a place leaves the index.

        Returns:
            Whether the index could be written.
        """

        def remove(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM places WHERE tier = ? AND step = ?", (tier, step))
            self._delete_unplaced(connection)

        return self._change(remove)

    def rebuild(self, found: Iterable[tuple[Manifest, str]]) -> bool:
        """Update the local places in the index to match the run directory; places in other tiers stay.

        A live run may have saved and removed checkpoints since the search. So a checkpoint that the search missed stays
        if it can be read now, and one that is gone now is not added.

        Args:
            found: The checkpoints in the run directory, each with its folder.

        Returns:
            Whether the index could be written.
        """
        found = list(found)

        def put(connection: sqlite3.Connection) -> None:
            there = checkpoint_folders(self.path.parent / "checkpoints")
            looked_at = {manifest.step for manifest, _ in found}
            for (step,) in connection.execute("SELECT step FROM places WHERE tier = ?", (LOCAL,)).fetchall():
                if step not in there or (step not in looked_at and not _is_readable(there[step])):
                    connection.execute("DELETE FROM places WHERE tier = ? AND step = ?", (LOCAL, step))
            for manifest, folder in found:
                if manifest.step in there:
                    self._put(connection, entry_of(manifest, self._run))
                    self._put_place(connection, manifest.step, manifest.state_sha256, Place(LOCAL, folder, True))
            self._delete_unplaced(connection)

        return self._change(put)

    def entries(self) -> list[Entry]:
        """Return all checkpoints in ascending order of steps; empty if there is no readable index."""
        if not self.path.exists():
            return []
        try:
            with self._open() as connection:
                rows = connection.execute(f"SELECT {', '.join(_COLUMNS)}, metrics FROM checkpoints").fetchall()
                places: dict[tuple[int, str], list[Place]] = {}
                found = connection.execute("SELECT step, state_sha256, tier, place, complete FROM places ORDER BY tier")
                for step, state, tier, place, complete in found:
                    places.setdefault((step, state), []).append(Place(tier, place, bool(complete)))
            return sorted(
                (
                    Entry(
                        **dict(zip(_COLUMNS, row, strict=False)),
                        metrics=parse_json(row[-1]),
                        places=tuple(places.get((row[0], row[1]), ())),
                    )
                    for row in rows
                ),
                key=lambda entry: (entry.step, entry.time or 0.0),
            )
        except (sqlite3.Error, OSError, TypeError, ValueError) as error:  # a column may hold any type
            self._report_once("read", error)
            return []

    def _put(self, connection: sqlite3.Connection, entry: Entry) -> None:
        values = [getattr(entry, name) for name in _COLUMNS]
        marks = ", ".join("?" * (len(values) + 1))
        connection.execute(
            f"INSERT OR REPLACE INTO checkpoints ({', '.join(_COLUMNS)}, metrics) VALUES ({marks})",
            (*values, json.dumps(dict(entry.metrics))),
        )

    def _put_place(self, connection: sqlite3.Connection, step: int, state: str, place: Place) -> None:
        # A tier has one checkpoint per step, so another state of it has been replaced.
        connection.execute("DELETE FROM places WHERE tier = ? AND step = ?", (place.tier, step))
        connection.execute(
            "INSERT INTO places VALUES (?, ?, ?, ?, ?, ?)",
            (step, state, place.tier, place.place, int(place.complete), time.time()),
        )
        self._delete_unplaced(connection)

    def _delete_unplaced(self, connection: sqlite3.Connection) -> None:
        connection.execute(
            "DELETE FROM checkpoints WHERE NOT EXISTS (SELECT 1 FROM places"
            " WHERE places.step = checkpoints.step AND places.state_sha256 = checkpoints.state_sha256)"
        )

    def _change(self, change: Callable[[sqlite3.Connection], None]) -> bool:
        for _ in range(2):
            try:
                with self._open() as connection:
                    change(connection)
                return True
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError) or not self._set_aside(error):
                    self._report_once("written", error)
                    return False
            except OSError as error:
                self._report_once("written", error)
                return False
        return False

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open a connection inside one transaction, and make the tables if needed."""
        if self.path.exists():
            open_regular(self.path).close()  # SQLite would wait for a FIFO
        with closing(sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level=None)) as connection:
            # A rollback journal needs only file locks, which network file systems may have.
            mode = "DELETE" if on_network(self.path.parent) else "WAL"
            with suppress(sqlite3.OperationalError):  # another process is changing the mode
                connection.execute(f"PRAGMA journal_mode={mode}")
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute("BEGIN IMMEDIATE")
            try:
                if connection.execute("SELECT 1 FROM sqlite_master WHERE type NOT IN ('table', 'index')").fetchone():
                    # A view may be a query that never ends.
                    raise sqlite3.DatabaseError("it has views or triggers")
                if connection.execute("PRAGMA user_version").fetchone()[0] != _VERSION:
                    connection.execute("DROP TABLE IF EXISTS checkpoints")
                    connection.execute("DROP TABLE IF EXISTS places")
                    for statement in _TABLES.strip().split(";\n"):
                        connection.execute(statement.rstrip(";"))
                    connection.execute(f"PRAGMA user_version={_VERSION}")
                yield connection
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    def _set_aside(self, error: sqlite3.DatabaseError) -> bool:
        """Move a broken index aside, and return whether that succeeded."""
        try:
            self.path.replace(self.path.with_suffix(".sqlite.broken"))
            for rest in ("-wal", "-shm", "-journal"):
                Path(f"{self.path}{rest}").unlink(missing_ok=True)
        except OSError:
            return False
        self._report(f"{self.path} is broken ({error}) and made anew; headway checkpoints list fills it")
        return True

    def _report_once(self, what: str, error: Exception) -> None:
        if not self._reported:
            self._reported = True
            self._report(f"{self.path} cannot be {what}: {error}; checkpoints are not affected")


def _is_readable(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except CheckpointError:
        return False
    return True


def on_network(folder: Path, mounts: Path = Path("/proc/mounts")) -> bool:
    """Return whether a folder is on a network file system; False if that is unknown."""
    target = str(folder.resolve())
    best = ""
    kind = ""
    try:
        for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
            _, point, found, *_ = line.split(" ")
            point = point.replace("\\040", " ")
            if (target == point or target.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
                best = point
                kind = found
    except (OSError, ValueError):
        return False
    return kind in _NETWORK or kind.startswith("fuse.")


def _whole(value: Any) -> int | None:
    """Return an integer that SQLite can hold; None for anything else."""
    return value if type(value) is int and -(2**63) <= value < 2**63 else None
