"""The remote tier: checkpoints of a run in object storage or on a shared file system.

    <url>/<name of the run>/run-001/
        run.json                      the run that owns the tier
        owners/00000001.json          the attempts that acquired the tier, one claim each
        newest.json                   a hint, for stores whose listings lag
        step-00001000/3fa9c1d2e4b5a697-shard-....safetensors
        step-00001000/manifest.json   uploaded last: without it there is no checkpoint
        records/9b1d...-records.zip   lines of the run's records that all later checkpoints share

Apart from the digits before its files (`files.sent_name`), the folder of a step is a checkpoint like any other
(docs/checkpoint-format.md). A restart of the run (`--restart`) creates `run-002` and leaves the earlier generation as
it is.

**Fencing.** The number and the token of a claim are the fencing token. Before each upload, publication or removal, a
process checks that its claim exists and is the newest (`ownership`). A process may be stopped right after this check
and upload a file much later; file names that are unique to its checkpoint make that harmless.

**Identity.** A run never adopts, replaces or removes checkpoints of another run: each manifest names the run that made
it (`run_identity`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from headway.checkpoint.format.file_hash import is_as_written
from headway.checkpoint.format.manifest import MANIFEST, Manifest, read_manifest, step_name
from headway.checkpoint.records import RECORDS, RECORDS_FILE
from headway.checkpoint.remote.files import SENT_AS, Journal, names_there, sent_name, unexpected_objects
from headway.checkpoint.remote.objects import NoAnswer, Objects
from headway.checkpoint.remote.ownership import (
    NEWEST,
    RESTARTED_FILE,
    Claim,
    FencedError,
    OtherRunError,
    PlaceOwner,
    TierOwnership,
    check_mount_not_emptied,
    claim_name,
    read_claim,
)
from headway.checkpoint.remote.sent_records import SentRecords
from headway.checkpoint.remote.tier_reader import ASIDE, CLAIM, TierReader
from headway.checkpoint.run_identity import (
    CLAIM_FILE,
    RUN_FILE,
    RunIdentity,
    read_run_id,
)
from headway.core.console import warning
from headway.core.errors import CheckpointError, ConfigError
from headway.core.files.atomic import write_json
from headway.core.files.foreign import LISTING_BYTES, read_bytes
from headway.core.process.faults import fault_point
from headway.core.storage import highest

_JOURNALS = ".uploads"
#: The upload journals in the run directory.
UPLOADS = f"{_JOURNALS}/step-*.jsonl"
_GENERATION = re.compile(r"run-([0-9]{3,})")
#: Marks a tier whose change of keys is not finished: an attempt with one of the keys would take half of it as damaged.
RESEALING = "resealing.json"


class SupersededError(CheckpointError):
    """The error of an upload when a later attempt of the run has published another state of the step."""


class RemoteTier(TierReader):
    """The remote checkpoints of one generation of a run.

    Args:
        objects: The folder of the generation.
        claim: The claim that lets this process write; None for read-only access.
        identity: The run that reads or writes; None for a person, who may read everything.
    """

    def __init__(self, objects: Objects, claim: Claim | None = None, identity: RunIdentity | None = None) -> None:
        super().__init__(objects, identity)
        self.claim = claim
        self.ownership = TierOwnership(objects)
        self.records = SentRecords(objects, lambda: self.assert_owner(publishes=False))

    @classmethod
    def find(cls, place: Objects, run: Path, identity: RunIdentity | None = None) -> RemoteTier:
        """Return the generation that a run directory belongs to.

        A directory without a recorded generation belongs to the newest one that its run owns or may continue, or else
        to the newest one of all.

        Args:
            place: The folder of all generations of the run.
            run: The run directory.
            identity: The run; None for a person.
        """
        known = read_claim(run)
        if known is not None and known.url.startswith(f"{place.url}/"):
            return cls(place.at(known.url.rsplit("/", 1)[-1]), identity=identity)
        newest = cls.newest_generation(place)
        if newest and (run / RESTARTED_FILE).exists():
            return cls(place.at(_generation(newest + 1)), identity=identity)
        tiers = [cls(place.at(_generation(number)), identity=identity) for number in range(max(newest, 1), 0, -1)]
        if identity is None or len(tiers) == 1:
            return tiers[0]
        return next((tier for tier in tiers if tier.may_be_of(identity)), tiers[0])

    def may_be_of(self, identity: RunIdentity) -> bool:
        """Return whether a run owns the tier, or may continue the run that does."""
        owner = self.owner()
        if owner is None:
            return True
        return owner.record["id"] == identity.id or identity.obstacle(owner.configs, owner.data) is None

    @staticmethod
    def newest_generation(place: Objects) -> int:
        """Return the number of the newest generation of a run; 0 if there is none."""

        def is_there(number: int) -> bool:
            folder = place.at(_generation(number))
            return any(folder.read(name) is not None for name in (claim_name(1), RUN_FILE, NEWEST))

        listed = [int(match[1]) for name in place.names() if (match := _GENERATION.fullmatch(name))]
        start = max(listed, default=0)
        # Listings may lag, and claims may have been removed.
        return start + highest(lambda n: is_there(start + n))

    # Ownership

    def owner(self) -> PlaceOwner | None:
        """Return the run that owns the tier; None if only its checkpoints can tell."""
        return self.ownership.owner()

    def acquire(self, run: Path, attempt: int, identity: RunIdentity | None = None) -> RemoteTier:
        """Acquire the tier for an attempt that owns the run directory; this fences every earlier attempt.

        Args:
            run: The run directory.
            attempt: Number of the attempt.
            identity: The run; if None, it is read from the run directory.

        Returns:
            The tier with the right to write.

        Raises:
            CheckpointError: The store cannot be reached.
            ConfigError: Another run owns the tier, or the store cannot prevent two attempts from sharing a claim.
        """
        known = read_claim(run)
        known = known if known is not None and known.url == self.url else None
        if known is not None:
            check_mount_not_emptied(
                self.objects, "this run", f"if it was removed on purpose, remove {run / CLAIM_FILE}"
            )
        identity = identity or RunIdentity(run, read_run_id(run), run.resolve().name)
        claim = self.ownership.acquire(identity, attempt, max(self.newest_claim, 0 if known is None else known.number))
        identity.keep()
        write_json(run / CLAIM_FILE, asdict(claim))
        (run / RESTARTED_FILE).unlink(missing_ok=True)
        return type(self)(self.objects, claim, identity)

    def assert_owner(self, publishes: bool = True) -> None:
        """Raise an error unless this process's claim exists and is the newest; call this before each write.

        Args:
            publishes: Whether the write makes something visible or removes it. The upload of a file that no manifest
                names yet does neither.

        Raises:
            FencedError: Another attempt owns the tier.
            OtherRunError: Another run owns the tier.
        """
        assert self.claim is not None, "a write needs an acquired tier"
        assert self.identity is not None, "an acquired tier has an identity"
        self.ownership.assert_held(self.claim, self.identity, publishes)

    # Writing

    def publish(self, folder: Path, journal: Path, advance: Callable[[int], None] = lambda _: None) -> bool:
        """Upload a local checkpoint: its files first, then the manifest, which publishes it.

        Files that an earlier try uploaded are not uploaded again.

        Args:
            folder: The checkpoint.
            journal: File that records the finished uploads; removed at the end.
            advance: Called with the number of bytes done.

        Returns:
            Whether the checkpoint is new; False if it was published already.

        Raises:
            FencedError: Another attempt owns the tier.
            OtherRunError: Another run owns the tier, or the published checkpoint of that step.
            SupersededError: A later attempt of this run has published another state of that step.
            CheckpointError: The local checkpoint is damaged, or the store cannot be used.
            ConfigError: The published checkpoint of that step cannot be read with the given key.
        """
        manifest = read_manifest(folder)
        content = read_bytes(folder / MANIFEST)
        name = step_name(manifest.step)
        self.assert_owner()
        if self._is_there(manifest):
            journal.unlink(missing_ok=True)
            return False
        sent = Journal(journal, self.url, manifest.state_sha256)
        for file, entry in manifest.files.items():
            target = f"{name}/{sent_name(manifest, file)}"
            path = folder / file
            version = sent.version_of(file, entry.hash)
            # What another machine has sent was fetched here, and compared with its hash, before it became a checkpoint.
            known = version is not None or SENT_AS in manifest.context
            there = self.objects.stat(target) if known else None
            if (
                there is None
                or there.bytes != entry.bytes
                or (version is not None and (there.version or "") != version)
            ):
                if path.stat().st_size != entry.bytes or not is_as_written(path, entry):
                    raise CheckpointError(
                        f"{file} is damaged and is not uploaded", where=str(folder), fix="none is needed"
                    )
                fault_point("upload.file")
                self.assert_owner(publishes=False)
                sent.note(file, entry.hash, self.objects.upload(target, path).version or "")
            advance(entry.bytes)
        if (folder / RECORDS_FILE).is_file() and RECORDS in manifest.context:
            self.records.send(folder, manifest)
        fault_point("upload.manifest")
        self.assert_owner()
        if self.objects.stat(f"{name}/{ASIDE}") is not None:
            warning(f"{self.objects.url_of(name)} replaces the checkpoint that was set aside there")
            self.objects.remove([f"{name}/{ASIDE}"])
        if self.objects.create(f"{name}/{MANIFEST}", content):
            self._remove_unexpected_objects(manifest)
        else:
            self.assert_owner()
            # An earlier attempt published it, after it had checked its ownership in time.
            if not self._is_there(manifest):
                raise CheckpointError(
                    f"another process has just published {name}", where=self.url, fix="none is needed: it was removed"
                )
        self._hint(manifest.step)
        journal.unlink(missing_ok=True)
        return True

    def _remove_unexpected_objects(self, manifest: Manifest) -> None:
        """Remove files of other attempts, or of a checkpoint set aside, from the folder of a published checkpoint.

        They may take as much space as the checkpoint, and would stay as long as it does.
        """
        folder = self.objects.at(step_name(manifest.step))
        try:
            for name in unexpected_objects(folder.names(), manifest):
                self._remove(folder, name)
        except (FencedError, OtherRunError):
            raise
        except (CheckpointError, ConfigError) as error:  # the checkpoint itself is published
            warning(f"other objects in {folder.url} are not removed: {error.what}")

    def _remove(self, folder: Objects, name: str) -> None:
        """Remove an object if this attempt still owns the tier: a new owner may have published one of that name."""
        self.assert_owner()
        folder.remove([name])

    def _is_there(self, manifest: Manifest) -> bool:
        """Return whether this state is published; withdraw another state of the step if this run may replace it.

        Raises:
            OtherRunError: Another run made, or may have made, the published state.
            SupersededError: A later attempt of this run published it.
            ConfigError: The published manifest cannot be read with the given key.
        """
        there = None
        why = ""
        try:
            there = self.manifest(manifest.step)
            if there is None:
                return False
        except NoAnswer:
            raise
        except CheckpointError as error:
            why = error.what
        if there is not None:
            self.check_same_run(there)
            if there.state_sha256 == manifest.state_sha256:
                return True
            self._check_may_replace(there, manifest)
            why = "it holds another state"
        folder = self.objects.at(step_name(manifest.step))
        warning(f"replacing {folder.url}: {why}")
        self._remove(folder, MANIFEST)
        return False

    def _check_may_replace(self, there: Manifest, manifest: Manifest) -> None:
        """Raise an error if a state does not supersede the published state of its step."""
        where = self.objects.url_of(step_name(there.step))
        if self.relation_of(there) == "unknown":
            raise OtherRunError(
                f"step {there.step} there has no run id and was made with a config that this run never had: it may"
                " belong to another run, and is not replaced",
                where=where,
                fix="look at it with `headway checkpoints list`; remove that folder if it can go, or choose another"
                " name=... or checkpoint.remote.url",
            )
        claims = there.context.get(CLAIM), manifest.context.get(CLAIM)
        if isinstance(claims[0], int) and isinstance(claims[1], int) and claims[0] > claims[1]:
            raise SupersededError(
                f"another state of step {there.step} is there, saved by attempt {there.context.get('attempt')}, which"
                f" has had the run later (claim {claims[0]} after {claims[1]}): it is not replaced",
                where=where,
                fix=f"`headway checkpoints restore RUN --from {self.url} --step {there.step}` makes the one there the"
                " run's, once the folder of that step here is moved away; to keep both, copy this one to another place",
            )

    def discard(self, step: int) -> None:
        """Remove a checkpoint; its manifest goes first, so that half a checkpoint is never visible."""
        folder = self.objects.at(step_name(step))
        try:
            known = self.manifest(step)
        except NoAnswer:
            raise
        except CheckpointError:
            known = None
        if known is not None:
            self.check_same_run(known)
        self._remove(folder, MANIFEST)
        fault_point("upload.discard")
        # Listings may lag, so remove the manifest's files by name; the listing finds files that it does not name.
        for name in {*(names_there(known) if known else ()), *folder.names()}:
            self._remove(folder, name)
        folder.remove_folder()

    def set_aside(self, step: int) -> bool:
        """Hide a checkpoint by renaming its manifest; its files stay until the run saves at that step again.

        Returns:
            Whether there was a checkpoint.
        """
        self.assert_owner()
        folder = self.objects.at(step_name(step))
        content = folder.read(MANIFEST, LISTING_BYTES)
        if content is None:
            return False
        with suppress(ValueError):  # a damaged manifest is set aside too
            self.check_same_run(Manifest.parse(content))
        folder.write(ASIDE, content)
        self._remove(folder, MANIFEST)
        return True

    def _hint(self, step: int) -> None:
        assert self.claim is not None, "it has published"
        self.ownership.write_hint(self.claim, step)


def journal_of(run: Path, step: int) -> Path:
    """Return the path of a checkpoint's upload journal."""
    return run / _JOURNALS / f"{step_name(step)}.jsonl"


def _generation(number: int) -> str:
    return f"run-{number:03d}"
