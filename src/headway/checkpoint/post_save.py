"""Work after a checkpoint is published: index it, upload it, and apply the retention rules.

None of this is essential for training: a failure gives a warning, and the run continues.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint.contents import crossed, step_context
from headway.checkpoint.format.folders import checkpoint_folders
from headway.checkpoint.format.manifest import Manifest, read_manifest, step_name, step_of
from headway.checkpoint.index import LOCAL, REMOTE, CheckpointIndex
from headway.checkpoint.pruning import Pruner, candidate_of
from headway.checkpoint.remote.acquire import resolve_identity
from headway.checkpoint.remote.objects import GivenUp, NoAnswer
from headway.checkpoint.remote.open import place_of
from headway.checkpoint.remote.ownership import FencedError, OtherRunError, read_claim
from headway.checkpoint.remote.tier import UPLOADS, RemoteTier
from headway.checkpoint.remote.uploader import Uploader
from headway.checkpoint.retention import Candidate, Every, Rules, outdated
from headway.checkpoint.run_identity import RunIdentity, run_identity
from headway.checkpoint.skipped_ranges import LEFT_OUT, Ranges, is_outdated, ranges_of
from headway.core.console import warning
from headway.core.errors import CheckpointError, ConfigError, HeadwayError

if TYPE_CHECKING:
    from headway.config import Batches, Config

#: How long an unfinished run that ends waits for an upload; it may be in the grace period of a preemption.
LEAVING_SECONDS = 20.0
#: How long to retry one request to a store before the upload of a checkpoint fails.
PATIENCE_SECONDS = 600.0


class CheckpointMaintainer:
    """The maintainer of a run's checkpoints; called with the manifest of every published checkpoint.

    Args:
        settings: Result of `CheckpointMaintainer.settings`: plain JSON values, which can go to another process.
        tell_upload: Called on another thread with each step and the seconds that its upload took, or None if it failed.
    """

    def __init__(
        self, settings: Mapping[str, Any], tell_upload: Callable[[int, float | None], None] = lambda *_: None
    ) -> None:
        self._tell_upload = tell_upload
        self.run = Path(settings["run"])
        self.directory = self.run / "checkpoints"
        self._attempt, self._identity = int(settings["attempt"]), RunIdentity(self.run, **settings["identity"])
        self._skipped_ranges = ranges_of(settings)
        self._last_step: int | None = settings["last_step"]
        self._full_every = Every.parse(settings["full_every"])
        self._remote: Mapping[str, Any] | None = settings["remote"]
        rules = Rules.parse(settings["rules"])
        self._remote_rules = Rules.parse(self._remote["rules"]) if self._remote else rules
        self._remote_every = Every.parse(self._remote["every"]) if self._remote else None
        intervals = (self._full_every, rules.keep_every, self._remote_rules.keep_every, self._remote_every)
        self._batches = _batches(settings) if any(i is not None and i.unit == "tokens" for i in intervals) else None
        self._registry = CheckpointIndex(self.run)
        self._last_full: tuple[int, float] | None = None
        self._last_ordered: tuple[int, float] | None = None
        self._remote_steps: dict[int, Candidate] | None = None
        self._cleared = False
        self._withdrawn: Ranges = ()
        self.lost: CheckpointError | None = None
        """Set by `close`: why another owner of the remote tier keeps the newest checkpoint out of it."""
        self._stopping, self._finished = threading.Event(), False
        self._uploader = self._start_uploader() if self._remote else None
        self._prune = Pruner(
            self.directory, rules, self._batches, self._pinned, lambda step: self._registry.forget(LOCAL, step)
        )

    @staticmethod
    def settings(
        config: Config, attempt: int, skipped_ranges: Sequence[Sequence[int]] = (), data: str | None = None
    ) -> dict[str, Any]:
        """Return the settings of a maintainer as JSON values.

        Args:
            config: The resolved config.
            attempt: Number of the attempt that saves.
            skipped_ranges: Half-open ranges of steps whose rows are skipped.
            data: Fingerprint of the data.
        """
        checkpoint, remote = config.checkpoint, config.checkpoint.remote
        return {
            "run": str(Path(config.run_directory).absolute()),
            "attempt": attempt,
            LEFT_OUT: [list(steps) for steps in skipped_ranges],
            "identity": run_identity(config, data).settings(),
            "last_step": config.train.steps,
            "tokens_per_step": [list(part) for part in config.train.batches.token_parts()],
            "full_every": Every.of(checkpoint.full_every),
            "rules": asdict(Rules.of(checkpoint)),
            "remote": None
            if remote is None
            else {
                **remote.model_dump(mode="json", include={"url", "options", "encrypt"}),
                "every": Every.of(remote.every),
                "rules": asdict(Rules.of(remote)),
            },
        }

    def context(self, step: int) -> dict[str, Any]:
        """Return additional context for the manifest of `step`: `kind`, the step's metrics, and more if it is full.

        Call this once per save, after the metrics of the step are recorded.
        """
        now, every = (step, time.time()), self._full_every
        full = (
            every is None
            or self._last_full is None
            or step == self._last_step
            or crossed(every, self._last_full, now, self._batches)
        )
        if full:
            self._last_full = now
        try:
            return step_context(self.run, step, full)
        except (OSError, ValueError) as error:
            warning(f"the checkpoint of step {step} is saved without metrics and provenance: {error}")
            return {}

    def __call__(self, manifest: Manifest) -> None:
        """Index a checkpoint, queue its upload, and apply the retention rules; never raises."""
        self._finished = manifest.step == self._last_step
        try:
            folder = self.directory / step_name(manifest.step)
            self._registry.add(manifest, LOCAL, str(folder))
            self._hand_over(folder, manifest)
            self._prune(manifest)
        except Exception as error:
            why = error.what if isinstance(error, HeadwayError) else f"{type(error).__name__}: {error}"
            warning(f"after the checkpoint of step {manifest.step}: {why}")

    def close(self, patience_seconds: float | None = None) -> None:
        """Upload the newest checkpoint if it is not uploaded yet, and end; safe to call twice.

        Args:
            patience_seconds: How long to wait for the upload at most, for example the rest of a grace period. If None,
                wait until it has succeeded or failed for good if the run is finished, else `LEAVING_SECONDS`. The next
                attempt continues an unfinished upload.
        """
        if self._uploader is None:
            return
        if patience_seconds is None and not self._finished:
            patience_seconds = LEAVING_SECONDS
        try:
            self._send_newest(self._uploader)
        except (HeadwayError, OSError) as error:
            warning(f"the newest checkpoint is not uploaded: {error}")
        self._uploader.close(patience_seconds)
        self.lost = self._uploader.lost
        self._uploader = None

    def rolled_back(self, step: int, skipped_ranges: Sequence[Sequence[int]]) -> None:
        """Treat saves and uploads of later steps as not done, since the run rolled back to a step; never raises."""
        self._skipped_ranges = ranges_of({LEFT_OUT: skipped_ranges})
        if self._last_full is not None and self._last_full[0] > step:
            self._last_full = None
        if self._last_ordered is not None and self._last_ordered[0] > step:
            self._last_ordered = None
        if self._uploader is None:
            return
        self._uploader.rolled_back(step)
        try:
            self._send_newest(self._uploader)  # first, so that the tier always has a checkpoint to resume from
        except (HeadwayError, OSError) as error:
            warning(f"the newest checkpoint is not uploaded: {error}")

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for outstanding uploads, and return whether they ended in time."""
        return self._uploader is None or self._uploader.wait(seconds)

    # Uploads

    def _start_uploader(self) -> Uploader:
        uploader = Uploader(self.run, self._open_tier, self._sent, self._tell_upload, self._stopping)
        try:
            self._send_newest(uploader)  # the previous attempt may not have finished its upload
        except (HeadwayError, OSError) as error:
            warning(f"the newest checkpoint is not uploaded: {error}")
        return uploader

    def _open_tier(self) -> RemoteTier:
        """Return the remote tier as this attempt acquired it; acquire it now if the store was away at the start."""
        assert self._remote is not None
        name = self.run.resolve().name  # the same name as in `find_tier`
        place = place_of(self._remote, name, patience_seconds=PATIENCE_SECONDS, stopping=self._stopping)
        tier, claim = RemoteTier.find(place, self.run, self._identity), read_claim(self.run)
        if claim is not None and claim.url == tier.url and claim.attempt >= self._attempt:
            if claim.attempt > self._attempt:
                raise FencedError(f"attempt {claim.attempt} owns the run now", where=tier.url, fix="stop this process")
            return RemoteTier(tier.objects, claim, self._identity)
        return tier.acquire(self.run, self._attempt, resolve_identity(tier, self._identity))

    def _hand_over(self, folder: Path, manifest: Manifest) -> None:
        if self._uploader is None:
            return
        now = (manifest.step, float(manifest.context.get("time") or time.time()))
        every = self._remote_every
        if (
            every is None
            or self._last_ordered is None
            or manifest.step == self._last_step
            or not self._uploader.has(self._last_ordered[0])  # that upload failed, and this one replaces it
            or crossed(every, self._last_ordered, now, self._batches)
        ):
            self._last_ordered = now
            self._uploader.submit(folder, manifest, manifest.step == self._last_step)

    def _send_newest(self, uploader: Uploader) -> None:
        """Queue the newest checkpoint, even if the upload interval skipped it: the next attempt resumes from it."""
        folders = checkpoint_folders(self.directory)
        newest = max(folders, default=None)
        self._finished = newest is not None and newest == self._last_step
        if newest is None or uploader.has(newest):
            return
        manifest = read_manifest(folders[newest])
        self._last_ordered = (manifest.step, float(manifest.context.get("time") or time.time()))
        uploader.submit(folders[newest], manifest, self._finished)

    def _sent(self, tier: RemoteTier, manifest: Manifest) -> None:
        """Index a published remote checkpoint, and apply the retention rules to the remote tier."""
        rules = self._remote_rules
        if is_outdated(manifest, self._skipped_ranges):  # the run rolled back during the upload
            self._discard(tier, manifest.step)
            return
        self._withdraw_outdated(tier)
        self._registry.add(manifest, REMOTE, tier.objects.url_of(step_name(manifest.step)))
        if self._remote_steps is None:
            self._remote_steps = {
                found.step: candidate_of(found, rules.keep_metric, self._batches) for found in tier.own_manifests()
            }
        self._remote_steps[manifest.step] = candidate_of(manifest, rules.keep_metric, self._batches)
        candidates = [c for c in self._remote_steps.values() if c.step <= manifest.step]
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
        if self._remote_steps is not None:
            self._remote_steps.pop(step, None)
        self._registry.forget(REMOTE, step)
        return True

    def _withdraw_outdated(self, tier: RemoteTier) -> None:
        """Remove remote checkpoints trained on rows that are skipped now: another machine might resume from them.

        This takes place once per attempt, and again after each rollback.
        """
        skipped_ranges = self._skipped_ranges
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
        journals = [path for path in self.run.glob(UPLOADS) if (step_of(path.stem) or newest) < newest]
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

    def _pinned(self) -> set[int]:
        return self._uploader.pinned() if self._uploader is not None else set()


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


def _batches(settings: Mapping[str, Any]) -> Batches:
    """Return the run's batches; only intervals in tokens need them, and the config package takes long to import."""
    from headway.config import Batches

    return Batches(tuple((int(step), int(tokens)) for step, tokens in settings["tokens_per_step"]))
