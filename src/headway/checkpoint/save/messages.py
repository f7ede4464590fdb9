"""The messages between a worker (`writer_client`) and its writer process (`writer_process`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.checkpoint.format.file_layout import Piece
from headway.checkpoint.post_save import MaintainerSettings
from headway.checkpoint.remote.relay import Relay
from headway.checkpoint.save.fence import Fence
from headway.checkpoint.save.outcomes import Upload
from headway.checkpoint.skipped_ranges import Ranges
from headway.core.process.messages import Messages


@dataclass(frozen=True)
class WriterSettings:
    """Settings of a writer process that hold for all saves."""

    directory: Path
    """The run's `checkpoints` folder."""
    keep: int = 3
    """Number of newest checkpoints to keep."""
    fence: Fence | None = None
    rank: int = 0
    workers: int = 1
    patience_seconds: float = 600.0
    """How long the first worker's process waits for the others' parts."""
    stalled_seconds: float = 450.0
    """A process without progress for so long is killed: the disk hangs."""
    memory_snapshots: bool = False
    """Whether the run takes memory snapshots, which need a third buffer."""
    in_place: bool = False
    """Whether the state lies in the buffer that is written, so that it may change only after `settle`."""
    buffers_in: Path | None = None
    """The folder of the buffers where memory is too short for the state; None for memory."""
    max_shard_bytes: int = 2 * 1024**3
    """Approximate size of a file; a larger tensor gets a file of its own."""
    after_save: MaintainerSettings | None = None
    """Without them, the process only keeps the newest `keep` checkpoints."""
    sign: bool = False
    """Whether to sign manifests with the key from the environment."""
    encrypt: bool = False
    """Whether to encrypt files with the key from the environment."""
    relay: Relay | None = None
    """The tier by which parts come from other machines, if they share no disk with the first worker's."""


@dataclass(frozen=True)
class SaveJob:
    """A worker's part of a state, in a staging buffer."""

    number: int
    """Counted from 1 within an attempt, and equal on all workers."""
    step: int
    tag: str
    """Tells saves of the same step apart."""
    descriptor: int
    """File descriptor of the buffer."""
    pieces: tuple[Piece, ...]
    cursor: Mapping[str, int]
    context: Mapping[str, Any]


@dataclass(frozen=True)
class Start:
    """The first message to a writer process."""

    settings: WriterSettings
    lock: int | None
    """File descriptor of the lock that the process holds (`open_writer_lock`)."""


@dataclass(frozen=True)
class Write:
    """Write a state."""

    job: SaveJob


@dataclass(frozen=True)
class FailPart:
    """Report to the first worker's process that this worker's part will not come."""

    job: SaveJob
    why: str


@dataclass(frozen=True)
class Abandon:
    """Give a save up: it is over for the first worker."""

    number: int


@dataclass(frozen=True)
class HoldSnapshot:
    """Keep a state, to be written when the worker dies."""

    job: SaveJob


@dataclass(frozen=True)
class ReleaseSnapshot:
    """Forget the state in a buffer, which is about to be overwritten."""

    descriptor: int


@dataclass(frozen=True)
class RollBack:
    """Treat saves of later steps as not done."""

    step: int
    skipped_ranges: Ranges


@dataclass(frozen=True)
class End:
    """End in good order: memory snapshots are not written."""


@dataclass(frozen=True)
class Ready:
    """The process has begun."""


@dataclass(frozen=True)
class Progress:
    """A write, or a wait for the part of another worker, makes progress."""


@dataclass(frozen=True)
class Said:
    """A line for people."""

    text: str
    only_log: bool


@dataclass(frozen=True)
class Saved:
    """A state is on disk: the whole of it for the first worker, a part for another one."""

    step: int
    seconds: float
    bytes: int


@dataclass(frozen=True)
class Failed:
    """A state could not be written."""

    step: int
    is_fenced: bool
    """Whether another process owns the run now."""
    what: str
    where: str | None
    fix: str | None


@dataclass(frozen=True)
class TierLost:
    """Another owner of the remote tier keeps the newest checkpoint out of it."""

    what: str
    where: str | None
    fix: str | None


ToWriter = Start | Write | FailPart | Abandon | HoldSnapshot | ReleaseSnapshot | RollBack | End
FromWriter = Ready | Progress | Said | Saved | Failed | Upload | TierLost

TO_WRITER = Messages[ToWriter](ToWriter)
FROM_WRITER = Messages[FromWriter](FromWriter)
