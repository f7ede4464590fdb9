"""Work after a checkpoint is published: index it, upload it, and apply the retention rules.

None of this is essential for training: a failure gives a warning, and the run continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint.contents import Periodic, step_context
from headway.checkpoint.format.manifest import Manifest, step_name
from headway.checkpoint.index import LOCAL, CheckpointIndex
from headway.checkpoint.pruning import Pruner
from headway.checkpoint.records import RECORDS, RecordsPacker
from headway.checkpoint.remote.open import place_settings
from headway.checkpoint.remote_copies import RemoteCopies, TierAccess
from headway.checkpoint.retention import Rules
from headway.checkpoint.run_identity import RunIdentity, run_identity
from headway.checkpoint.skipped_ranges import Ranges
from headway.config import Batches, Interval
from headway.core.console import warning
from headway.core.errors import CheckpointError, reason_of

if TYPE_CHECKING:
    from headway.config import Config


@dataclass(frozen=True)
class RemoteSettings:
    """The part of a maintainer's settings that is about the remote tier."""

    place: Mapping[str, Any]
    """URL, options and encryption of the tier (`place_settings`)."""
    every: Interval | None
    """Interval of uploads; None uploads every checkpoint."""
    rules: Rules


@dataclass(frozen=True)
class MaintainerSettings:
    """Settings of a `CheckpointMaintainer`, which can go to another process."""

    run: Path
    """The run directory."""
    attempt: int
    """Number of the attempt that saves."""
    identity: RunIdentity
    last_step: int | None
    """The last step of the run."""
    tokens_per_step: tuple[tuple[int, int], ...]
    """From which step on how many tokens (`Batches.token_parts`)."""
    full_every: Interval | None
    rules: Rules
    skipped_ranges: Ranges = ()
    """Half-open ranges of steps whose rows are skipped."""
    remote: RemoteSettings | None = None

    @classmethod
    def of(
        cls,
        config: Config,
        attempt: int,
        skipped_ranges: Ranges = (),
        data: str | None = None,
        *,
        sends_all: bool = False,
    ) -> MaintainerSettings:
        """Return the settings for a run.

        Args:
            config: The resolved config.
            attempt: Number of the attempt that saves.
            skipped_ranges: Half-open ranges of steps whose rows are skipped.
            data: Fingerprint of the data.
            sends_all: Whether every checkpoint goes to the remote tier, whatever the interval: parts of it are there.
        """
        checkpoint = config.checkpoint
        remote = None
        if checkpoint.remote is not None:
            every = None if sends_all else checkpoint.remote.every
            remote = RemoteSettings(place_settings(checkpoint.remote), every, Rules.of(checkpoint.remote))
        return cls(
            Path(config.run_directory).absolute(),
            attempt,
            run_identity(config, data),
            config.train.steps,
            tuple(config.train.batches.token_parts()),
            checkpoint.full_every,
            Rules.of(checkpoint),
            skipped_ranges,
            remote,
        )

    def batches(self) -> Batches | None:
        """Return the run's batches; None without an interval in tokens."""
        intervals = [self.full_every, self.rules.keep_every]
        if self.remote is not None:
            intervals += [self.remote.every, self.remote.rules.keep_every]
        if not any(interval is not None and interval.unit == "tokens" for interval in intervals):
            return None
        return Batches(self.tokens_per_step)


class CheckpointMaintainer:
    """The maintainer of a run's checkpoints; called with the manifest of every published checkpoint.

    It lives in the first worker's writer process, as long as that does:

        begin ---> uploads the newest checkpoint, if the previous attempt did not
          |
          |    .-- save: context() -> publish -> __call__(): index, queue the upload, prune
          +----+
          |    '-- roll back: note_rollback() -> saves and uploads of later steps count as not done
          |
        close() -> uploads the newest checkpoint, if its interval has skipped it -> `lost`, if it never can be

    Uploads, and removals from the remote tier, take place on a thread (`RemoteCopies`).

    Args:
        settings: Its settings.
        tell_upload: Called on another thread with each step and the seconds that its upload took, or None if it failed.
    """

    def __init__(
        self, settings: MaintainerSettings, tell_upload: Callable[[int, float | None], None] = lambda *_: None
    ) -> None:
        self.run = settings.run
        self.directory = self.run / "checkpoints"
        self.lost: CheckpointError | None = None
        """Set by `close`: why another owner of the remote tier keeps the newest checkpoint out of it."""
        batches = settings.batches()
        self._full = Periodic(settings.full_every, settings.last_step, batches)
        self._index = CheckpointIndex(self.run)
        self._records = RecordsPacker(self.run)
        self._remote: RemoteCopies | None = None
        if settings.remote is not None:
            self._remote = RemoteCopies(
                TierAccess(self.run, settings.remote.place, settings.identity, settings.attempt),
                settings.remote.rules,
                settings.remote.every,
                batches,
                self._index,
                last_step=settings.last_step,
                skipped_ranges=settings.skipped_ranges,
                tell_upload=tell_upload,
            )
        self._prune = Pruner(
            self.directory, settings.rules, batches, self._pinned, lambda step: self._index.forget(LOCAL, step)
        )

    def context(self, step: int, folder: Path) -> dict[str, Any]:
        """Return additional context for the manifest of `step`: `kind`, the step's metrics, and more if it is full.

        Call this once per save, after the metrics of the step are recorded.

        Args:
            step: Finished steps.
            folder: The folder of the save, which gets the run's records if there is a remote tier to take them to.
        """
        now = (step, time.time())
        full = self._full.is_due(now)
        if full:
            self._full.last = now
        try:
            context = step_context(self.run, step, full)
        except (OSError, ValueError) as error:
            warning(f"the checkpoint of step {step} is saved without metrics and provenance: {error}")
            return {}
        if self._remote is not None:
            try:
                context[RECORDS] = self._records.pack(folder)
            except OSError as error:
                warning(f"the checkpoint of step {step} is saved without the records of the run: {error}")
        return context

    def __call__(self, manifest: Manifest) -> None:
        """Index a checkpoint, queue its upload, and apply the retention rules; never raises."""
        try:
            folder = self.directory / step_name(manifest.step)
            self._index.add(manifest, LOCAL, str(folder))
            if self._remote is not None:
                self._remote.add(folder, manifest)
            self._prune(manifest)
        except Exception as error:
            warning(f"after the checkpoint of step {manifest.step}: {reason_of(error)}")

    def close(self, patience_seconds: float | None = None) -> None:
        """Upload the newest checkpoint if it is not uploaded yet, and end; safe to call twice.

        Args:
            patience_seconds: How long to wait for the upload at most, for example the rest of a grace period. If None,
                wait until it has succeeded or failed for good if the run is finished, else
                `remote_copies.LEAVING_SECONDS`. The next attempt continues an unfinished upload.
        """
        if self._remote is not None:
            self.lost = self._remote.close(patience_seconds)
            self._remote = None

    def note_rollback(self, step: int, skipped_ranges: Ranges) -> None:
        """Treat saves and uploads of later steps as not done, since the run rolled back to a step; never raises."""
        self._full.note_rollback(step)
        if self._remote is not None:
            self._remote.note_rollback(step, skipped_ranges)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for outstanding uploads, and return whether they ended in time."""
        return self._remote is None or self._remote.wait(seconds)

    def _pinned(self) -> set[int]:
        return self._remote.pinned() if self._remote is not None else set()
