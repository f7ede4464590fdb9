"""Parts of a checkpoint on their way through the remote tier, for machines that share no disk.

    step-00001000/3fa9c1d2e4b5a697-shard-00002.safetensors   sent by the machine that has worker 2
    step-00001000/3fa9c1d2e4b5a697-part-00002.json           sent last: what the part holds
    step-00001000/3fa9c1d2e4b5a697-failed-00002.txt          or why it will not come

The first worker's process fetches the parts of other machines into its own folder, compares them with the hashes that
they were written with, and publishes the whole as if all workers had written there. So the first machine has every
checkpoint whole, and the tier gets each byte once: files that are there already are not sent again.

The digits before the names belong to one save of one attempt. So no file of one save replaces
a file of another, whoever sends it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.checkpoint.format.file_hash import is_as_written
from headway.checkpoint.format.manifest import step_name
from headway.checkpoint.remote.open import place_of
from headway.checkpoint.remote.ownership import Claim
from headway.checkpoint.remote.tier import RemoteTier, journal_of
from headway.checkpoint.run_identity import RunIdentity
from headway.checkpoint.save.parts import CheckpointPart, failure_name, note_name
from headway.core.errors import CheckpointError, HeadwayError
from headway.core.files.foreign import LISTING_BYTES, parse_json
from headway.core.files.hashes import fingerprint

#: How long to retry one request to the store before a part fails.
_PATIENCE_SECONDS = 120.0


@dataclass(frozen=True)
class Relay:
    """Where machines without a common disk exchange parts, and on behalf of which claim."""

    run: Path
    remote: Mapping[str, Any]
    """URL, options and encryption of the tier."""
    claim: Claim
    identity: RunIdentity
    first_rank: int
    """The first worker that is not on the first worker's machine."""

    def open(self) -> RemoteTier:
        """Return the tier as the first worker has acquired it."""
        place = place_of(self.remote, self.run.resolve().name, patience_seconds=_PATIENCE_SECONDS)
        return RemoteTier(place.at(self.claim.url.rsplit("/", 1)[-1]), self.claim, self.identity)


class RelayedSave:
    """The parts of one save.

    Args:
        relay: The tier.
        step: Finished steps.
        number: Number of the save within the attempt, equal on all workers.
    """

    def __init__(self, relay: Relay, step: int, number: int) -> None:
        self._relay, self._step, self._tier = relay, step, relay.open()
        self.digits = fingerprint([relay.claim.token, relay.claim.attempt, step, number])[:16]

    def _name(self, name: str) -> str:
        return f"{step_name(self._step)}/{self.digits}-{name}"

    def send(self, folder: Path, rank: int, part: CheckpointPart) -> None:
        """Send the files of a worker's part, and then the note that makes it known.

        Raises:
            CheckpointError: The tier has another owner, or the store cannot be used.
            ConfigError: The store denies access.
        """
        for file in part.files:
            self._tier.assert_owner(publishes=False)
            self._tier.objects.upload(self._name(file), folder / file)
        self._tier.objects.write(self._name(note_name(rank)), json.dumps(part.record()).encode())

    def report_failure(self, rank: int, why: str) -> None:
        """Report that a part will not come, if the store can be reached."""
        with suppress(HeadwayError):
            self._tier.objects.with_patience(5.0).write(
                self._name(failure_name(rank)), why.encode("utf-8", "backslashreplace")[:4096]
            )

    def begin(self) -> None:
        """Remember that parts of the step are about to be in the tier, so that they are removed if nothing follows."""
        journal = journal_of(self._relay.run, self._step)
        journal.parent.mkdir(parents=True, exist_ok=True)
        journal.touch()

    def note(self, rank: int) -> CheckpointPart | None:
        """Return another worker's part; None if it has not come yet.

        Raises:
            CheckpointError: It will not come, or the store cannot be used.
        """
        if (why := self._tier.objects.read(self._name(failure_name(rank)))) is not None:
            reason = why.decode("utf-8", "replace")
            raise CheckpointError(f"worker {rank}'s part does not come: {reason}", where=self._tier.url)
        content = self._tier.objects.read(self._name(note_name(rank)), LISTING_BYTES)
        if content is None:
            return None
        try:
            part = CheckpointPart.parse(parse_json(content))
            if not all(re.fullmatch(rf"shard-{rank:05d}[0-9.-]*\.safetensors(\.sealed)?", file) for file in part.files):
                raise ValueError("files of another worker")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"the note about worker {rank}'s part cannot be read: {error}",
                where=self._tier.objects.url_of(self._name(note_name(rank))),
            ) from None
        return part

    def fetch(self, part: CheckpointPart, folder: Path, advance: Callable[[int], None] = lambda _: None) -> None:
        """Download the files of a part, and compare them with what was written.

        Args:
            part: The part.
            folder: The folder of the save.
            advance: Called with the number of bytes done.

        Raises:
            CheckpointError: A file differs, or the store cannot be used.
        """
        for file, entry in part.files.items():
            self._tier.objects.download(self._name(file), folder / file, entry.bytes, advance)
            if not is_as_written(folder / file, entry):
                where = self._tier.objects.url_of(self._name(file))
                raise CheckpointError(f"{file} has changed on its way", where=where)
