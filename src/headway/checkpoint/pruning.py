"""Pruning: removal of a run's checkpoints that the retention rules no longer keep."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headway.checkpoint.contents import step_metrics
from headway.checkpoint.format.folders import checkpoint_folders, discard
from headway.checkpoint.format.manifest import Manifest, UnreadableManifest, read_manifest
from headway.checkpoint.lineage import origin_of
from headway.checkpoint.retention import Candidate, Rules, kept, outdated
from headway.core import console
from headway.core.errors import CheckpointError
from headway.core.files.foreign import as_number
from headway.core.process.faults import fault_point

if TYPE_CHECKING:
    from headway.config import Batches


class Pruner:
    """The pruner of a run's `checkpoints` folder.

    Args:
        directory: The folder.
        rules: The retention rules.
        batches: Tokens of each step, for rules in tokens.
        pinned: Return the steps in use, for example by an upload.
        forget: Called with the step of each removed checkpoint.
    """

    def __init__(
        self,
        directory: Path,
        rules: Rules,
        batches: Batches | None = None,
        pinned: Callable[[], Collection[int]] = tuple,
        forget: Callable[[int], object] = lambda _: None,
    ) -> None:
        self.directory = Path(directory)
        self.rules = rules
        self._batches = batches
        self._pinned = pinned
        self._forget = forget
        self._known: dict[int, Candidate] = {}

    def __call__(self, manifest: Manifest) -> None:
        """Remove checkpoints that the rules no longer keep after a save; a failed removal only gives a warning.

        Folders of later steps were passed over when the run resumed. They are evidence, and stay until the run reaches
        their steps.
        """
        self._known[manifest.step] = self._candidate(manifest)
        candidates = self.candidates(manifest.step)
        gone = outdated(candidates, self.rules, time.time(), self._pinned())
        folders = checkpoint_folders(self.directory)
        for step in gone:
            try:
                fault_point("checkpoint.prune")
                if folders[step].exists():
                    discard(folders[step])
            except OSError as error:
                console.warning(f"the old checkpoint {folders[step]} cannot be removed: {error.strerror}")
                continue
            self._known.pop(step, None)
            self._forget(step)

    def candidates(self, up_to: int | None = None) -> list[Candidate]:
        """Return the checkpoints that the rules decide on; each manifest is read once."""
        found = []
        for step, folder in checkpoint_folders(self.directory).items():
            if up_to is not None and step > up_to:
                continue
            if step not in self._known:
                try:
                    self._known[step] = self._candidate(read_manifest(folder))
                except UnreadableManifest:
                    continue  # decided when it can be read again, since a rule may keep it
                except CheckpointError:
                    found.append(Candidate(step, 0.0, good=False))
                    continue
            found.append(self._known[step])
        return found

    def kept(self) -> dict[int, str]:
        """Return the steps that stay, each with the rule that keeps it."""
        return kept(self.candidates(), self.rules, time.time())

    def _candidate(self, manifest: Manifest) -> Candidate:
        found = candidate_of(manifest, self.rules.keep_metric, self._batches)
        if found.metric is None and self.rules.keep_best:
            # The metric may be recorded after the save, or the manifest may be of a version without metrics.
            metric = step_metrics(self.directory.parent, manifest.step).get(self.rules.keep_metric)
            return replace(found, metric=metric)
        return found


def candidate_of(manifest: Manifest, metric: str, batches: Batches | None) -> Candidate:
    """Return the facts that the rules need about a checkpoint, from its manifest."""
    metrics = manifest.context.get("metrics")
    moment = manifest.context.get("time")
    value = metrics.get(metric) if isinstance(metrics, dict) else None
    return Candidate(
        step=manifest.step,
        time=as_number(moment) or 0.0,
        metric=as_number(value),
        tokens=None if batches is None else batches.tokens_before(manifest.step),
        origin=origin_of(manifest.context),
    )
