"""Copies of a run's checkpoints in its remote tier: which are uploaded, and which are removed there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint.contents import Periodic
from headway.checkpoint.format.folders import checkpoint_folders
from headway.checkpoint.format.manifest import Manifest, read_manifest, step_name, step_of
from headway.checkpoint.index import REMOTE, CheckpointIndex
from headway.checkpoint.pruning import candidate_of
from headway.checkpoint.remote.acquire import resolve_identity
from headway.checkpoint.remote.objects import GivenUp, NoAnswer
from headway.checkpoint.remote.open import place_of
from headway.checkpoint.remote.ownership import FencedError, OtherRunError, read_claim
from headway.checkpoint.remote.tier import UPLOADS, RemoteTier
from headway.checkpoint.remote.uploader import Uploader
from headway.checkpoint.retention import Candidate, Rules, outdated
from headway.checkpoint.run_identity import RunIdentity
from headway.checkpoint.skipped_ranges import Ranges, is_outdated
from headway.core.console import warning
from headway.core.errors import CheckpointError, ConfigError, HeadwayError

if TYPE_CHECKING:
    from headway.config import Batches, Interval

#: How long an unfinished run that ends waits for an upload; it may be in the grace period of a preemption.
LEAVING_SECONDS = 20.0
#: How long to retry one request to a store before the upload of a checkpoint fails.
PATIENCE_SECONDS = 600.0


@dataclass(frozen=True)
class TierAccess:
    """Access of an attempt to its run's remote tier."""

    run: Path
    remote: Mapping[str, Any]
    """URL, options and keys of the tier."""
    identity: RunIdentity
    attempt: int
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set to make the tier give up."""

    def open(self) -> RemoteTier:
        """Return the remote tier as this attempt acquired it; acquire it now if the store was away at the start."""
        name = self.run.resolve().name  # the same name as in `find_tier`
        place = place_of(self.remote, name, patience_seconds=PATIENCE_SECONDS, stopping=self.stopping)
        tier = RemoteTier.find(place, self.run, self.identity)
        claim = read_claim(self.run)
        if claim is not None and claim.url == tier.url and claim.attempt >= self.attempt:
            if claim.attempt > self.attempt:
                raise FencedError(f"attempt {claim.attempt} owns the run now", where=tier.url, fix="stop this process")
            return RemoteTier(tier.objects, claim, self.identity)
        return tier.acquire(self.run, self.attempt, resolve_identity(tier, self.identity))


class RemoteCopies:
    """Uploads of a run's checkpoints, at intervals of their own.

    Args:
        access: The tier.
        rules: Retention rules of the tier.
        every: Interval of uploads; None uploads every checkpoint.
        batches: Tokens of each step, for intervals in tokens.
        index: Records what is in the tier.
        last_step: The last step of the run.
        skipped_ranges: Half-open ranges of steps whose rows are skipped.
        tell_upload: Called on the upload's thread with each step and the seconds that it took, or None if it failed.
    """

    def __init__(
        self,
        access: TierAccess,
        rules: Rules,
        every: Interval | None,
        batches: Batches | None,
        index: CheckpointIndex,
        *,
        last_step: int | None,
        skipped_ranges: Ranges,
        tell_upload: Callable[[int, float | None], None],
    ) -> None:
        self._directory = access.run / "checkpoints"
        self._last_step = last_step
        self._submitted = Periodic(every, last_step, batches)
        self._retention = RemoteRetention(access.run, rules, batches, index, skipped_ranges)
        self._uploader = Uploader(access.run, access.open, self._retention, tell_upload, access.stopping)
        self._send_newest()  # the previous attempt may not have finished its upload

    def add(self, folder: Path, manifest: Manifest) -> None:
        """Queue the upload of a new checkpoint, if one is due."""
        last = self._submitted.last
        # If that upload failed, this one replaces it.
        has_failed = last is not None and not self._uploader.queue.has(last[0])
        if has_failed or self._submitted.is_due(_made_at(manifest)):
            self._submit(folder, manifest)

    def _submit(self, folder: Path, manifest: Manifest) -> None:
        self._submitted.last = _made_at(manifest)
        self._uploader.submit(folder, manifest, manifest.step == self._last_step)

    def note_rollback(self, step: int, skipped_ranges: Ranges) -> None:
        """Treat uploads of later steps as not done; never raises."""
        self._retention.skipped_ranges = skipped_ranges
        self._submitted.note_rollback(step)
        self._uploader.queue.note_rollback(step)
        self._send_newest()  # first, so that the tier always has a checkpoint to resume from

    def close(self, patience_seconds: float | None) -> CheckpointError | None:
        """Upload the newest checkpoint if it is not uploaded yet, and end.

        Args:
            patience_seconds: How long to wait at most; see `CheckpointMaintainer.close`.

        Returns:
            Why another owner of the tier keeps the newest checkpoint out of it, if one does.
        """
        finished = self._send_newest()
        if patience_seconds is None and not finished:
            patience_seconds = LEAVING_SECONDS
        return self._uploader.close(patience_seconds)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for outstanding uploads, and return whether they ended in time."""
        return self._uploader.queue.wait(seconds)

    def pinned(self) -> set[int]:
        """Return the steps that must not be removed here, because their upload is under way or queued."""
        return self._uploader.queue.pinned()

    def _send_newest(self) -> bool:
        """Queue the newest checkpoint, even if the upload interval skipped it: the next attempt resumes from it.

        A failure gives a warning.

        Returns:
            Whether it is the last one of the run.
        """
        try:
            folders = checkpoint_folders(self._directory)
            newest = max(folders, default=None)
            finished = newest is not None and newest == self._last_step
            if newest is not None and not self._uploader.queue.has(newest):
                self._submit(folders[newest], read_manifest(folders[newest]))
        except (HeadwayError, OSError) as error:
            warning(f"the newest checkpoint is not uploaded: {error}")
            return False
        return finished


def _made_at(manifest: Manifest) -> tuple[int, float]:
    """Return the step and the Unix time of a checkpoint."""
    return manifest.step, float(manifest.context.get("time") or time.time())


class RemoteRetention:
    """Removes checkpoints from the remote tier; called on the upload's thread with every checkpoint published there.

    Args:
        run: The run directory.
        rules: The retention rules.
        batches: Tokens of each step, for rules in tokens.
        index: Records what is in the tier.
        skipped_ranges: Half-open ranges of steps whose rows are skipped.
    """

    def __init__(
        self, run: Path, rules: Rules, batches: Batches | None, index: CheckpointIndex, skipped_ranges: Ranges
    ) -> None:
        self._run = run
        self._rules = rules
        self._batches = batches
        self._index = index
        self.skipped_ranges = skipped_ranges
        """Changed from another thread when the run rolls back."""
        self._candidates: dict[int, Candidate] | None = None
        self._withdrawn: Ranges = ()
        self._cleared = False

    def __call__(self, tier: RemoteTier, manifest: Manifest) -> None:
        """Index a published checkpoint, and remove those that the rules no longer keep."""
        rules = self._rules
        if is_outdated(manifest, self.skipped_ranges):  # the run rolled back during the upload
            self._discard(tier, manifest.step)
            return
        self._withdraw_outdated(tier)
        self._index.add(manifest, REMOTE, tier.objects.url_of(step_name(manifest.step)))
        if self._candidates is None:
            self._candidates = {
                found.step: candidate_of(found, rules.keep_metric, self._batches) for found in tier.own_manifests()
            }
        self._candidates[manifest.step] = candidate_of(manifest, rules.keep_metric, self._batches)
        candidates = [c for c in self._candidates.values() if c.step <= manifest.step]
        for step in outdated(candidates, rules, time.time()):
            self._discard(tier, step)
        self._clear_remains(tier, manifest.step)

    def _discard(self, tier: RemoteTier, step: int) -> bool:
        """Remove a remote checkpoint, and return whether that succeeded."""
        try:
            tier.discard(step)
        except (FencedError, OtherRunError, GivenUp):
            raise
        except CheckpointError as error:
            warning(f"the old checkpoint of step {step} cannot be removed from {tier.url}: {error.what}")
            return False
        if self._candidates is not None:
            self._candidates.pop(step, None)
        self._index.forget(REMOTE, step)
        return True

    def _withdraw_outdated(self, tier: RemoteTier) -> None:
        """Remove remote checkpoints trained on rows that are skipped now: another machine might resume from them.

        This takes place once per attempt, and again after each rollback.
        """
        skipped_ranges = self.skipped_ranges
        if skipped_ranges == self._withdrawn:
            return
        done = True
        for manifest in tier.own_manifests():
            if is_outdated(manifest, skipped_ranges):
                where = tier.objects.url_of(step_name(manifest.step))
                warning(f"removing {where}: it was trained on rows that are skipped now")
                done = self._discard(tier, manifest.step) and done
        if done:
            self._withdrawn = skipped_ranges

    def _clear_remains(self, tier: RemoteTier, newest: int) -> None:
        """Remove the files of older checkpoints without a manifest.

        Failed uploads and killed removals leave them. They may be as large as a whole checkpoint, and the retention
        rules do not see them. This takes place once per attempt, and again when an upload has left its journal.
        """
        journals = [path for path in self._run.glob(UPLOADS) if (step_of(path.stem) or newest) < newest]
        if self._cleared and not journals:
            return
        try:
            for step in tier.steps():
                if step < newest and _is_remains(tier, step):
                    tier.discard(step)
        except (FencedError, OtherRunError, GivenUp):
            raise
        except CheckpointError as error:
            warning(f"files of unfinished uploads cannot be removed from {tier.url}: {error.what}")
            return
        for path in journals:
            path.unlink(missing_ok=True)
        self._cleared = True


def _is_remains(tier: RemoteTier, step: int) -> bool:
    """Return whether a step has files but no manifest, not even one set aside or encrypted."""
    try:
        if tier.manifest(step) is not None:
            return False
    except NoAnswer:
        raise
    except (CheckpointError, ConfigError):
        return False
    names = tier.objects.at(step_name(step)).names()
    return bool(names) and not any(name.startswith("manifest.") for name in names)
