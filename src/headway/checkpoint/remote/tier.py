"""Checkpoints of a run in object storage or on a shared file system: who may write there, sending, finding.

    <url>/<name of the run>/run-001/
        run.json                      which run the place belongs to
        owners/00000001.json          who has claimed it, one object for each claim
        newest.json                   a hint, for stores whose listings are behind
        step-00001000/3fa9c1d2e4b5a697-shard-....safetensors
        step-00001000/manifest.json   sent last: without it there is no checkpoint

Without the digits before its files (`remote_files.sent_name`) a folder of a step is a checkpoint like any other
(docs/checkpoint-format.md). `run-002` comes into being when a run is started over (`--restart`); what was before stays
as it is.

**Fencing.** Whoever sends, publishes or removes something looks first whether its claim is there and is the newest
(`remote_claim`). What a process sends that was stopped right after it had looked, however late, lies under names that
are nobody else's.

**Identity.** Nothing of another run is taken, replaced or removed: each manifest says which run made it
(`run_identity`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from headway.checkpoint.format.file_hash import is_as_written
from headway.checkpoint.format.manifest import MANIFEST, Manifest, read_manifest, step_name, step_of
from headway.checkpoint.format.sealing import SEALED, VARIABLE, Undecipherable
from headway.checkpoint.remote.files import Journal, names_there, sent_name, unexpected_objects
from headway.checkpoint.remote.objects import NoAnswer, Objects
from headway.checkpoint.remote.ownership import (
    NEWEST,
    RESTARTED_FILE,
    Claim,
    Claims,
    FencedError,
    OtherRunError,
    PlaceOwner,
    check_mount_not_emptied,
    claim_name,
    highest,
    other_run,
    read_claim,
)
from headway.checkpoint.remote.sealed_objects import SealedObjects
from headway.checkpoint.run_identity import (
    CLAIM_FILE,
    OF_RUN,
    RUN_FILE,
    Relation,
    RunIdentity,
    read_run_id,
    run_record,
)
from headway.core.console import warning
from headway.core.errors import CheckpointError, ConfigError
from headway.core.faults import fault_point
from headway.core.files import write_json
from headway.core.foreign import LISTING_BYTES, parse_json, read_bytes

_JOURNALS = ".uploads"
#: The journals of uploads, in the run directory.
UPLOADS = f"{_JOURNALS}/step-*.jsonl"
_ASIDE = "manifest.set-aside.json"
_GENERATION = re.compile(r"run-([0-9]{3,})")
#: Key of a manifest's context: the number of the claim that the attempt had when it began; None without one.
CLAIM = "claim"


class SupersededError(CheckpointError):
    """A later attempt of the same run has published another state of the step."""


class RemoteTier:
    """The remote checkpoints of one generation of a run.

    Args:
        objects: The run's folder there, generation included.
        claim: What this process may write by; None reads only.
        identity: Which run reads or writes; None for a person, who may read everything.
    """

    def __init__(self, objects: Objects, claim: Claim | None = None, identity: RunIdentity | None = None) -> None:
        self.objects, self.claim, self.identity = objects, claim, identity
        self.claims = Claims(objects)
        self._key_fits = False
        self._newest_claim = 0  # that any manifest which was read names

    @property
    def url(self) -> str:
        """Where it lies."""
        return self.objects.url

    @classmethod
    def find(cls, place: Objects, run: Path, identity: RunIdentity | None = None) -> RemoteTier:
        """The generation that a run directory belongs to. For one that knows of none: the newest that is its run's, or
        that its run may continue, or else the newest there is.

        Args:
            place: The folder for all generations of the run.
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
        """Say whether a run owns the place, or may continue the run that does."""
        owner = self.owner()
        if owner is None:
            return True
        return owner.record["id"] == identity.id or identity.obstacle(owner.configs, owner.data) is None

    @staticmethod
    def newest_generation(place: Objects) -> int:
        """Number of the newest generation of a run; 0 when there is none."""

        def is_there(number: int) -> bool:
            folder = place.at(_generation(number))
            return any(folder.read(name) is not None for name in (claim_name(1), RUN_FILE, NEWEST))

        listed = [int(match[1]) for name in place.folders() if (match := _GENERATION.fullmatch(name))]
        start = max(listed, default=0)
        # Listings may be behind; and claims may have been removed.
        return start + highest(lambda n: is_there(start + n))

    # Owning

    def owner(self) -> PlaceOwner | None:
        """Return the run that owns the place; None if nothing but its checkpoints can tell."""
        return self.claims.owner()

    def take(self, run: Path, attempt: int, identity: RunIdentity | None = None) -> RemoteTier:
        """Claim the run's remote tier for an attempt that owns the run directory: this fences every earlier one.

        Args:
            identity: The run's; as its directory alone tells it when not given.

        Raises:
            CheckpointError: the store cannot be reached.
            ConfigError: the place is another run's, or the store cannot keep two attempts from having one claim.
        """
        known = read_claim(run)
        known = known if known is not None and known.url == self.url else None
        if known is not None:
            check_mount_not_emptied(
                self.objects, "this run", f"if it was removed on purpose, remove {run / CLAIM_FILE}"
            )
        identity = identity or RunIdentity(run, read_run_id(run), run.resolve().name)
        claim = self.claims.make(identity, attempt, max(self._newest_claim, 0 if known is None else known.number))
        identity.keep()
        write_json(run / CLAIM_FILE, asdict(claim))
        (run / RESTARTED_FILE).unlink(missing_ok=True)
        return type(self)(self.objects, claim, identity)

    def assert_owner(self, publishes: bool = True) -> None:
        """Make sure that this process's claim is there and is the newest; call it before publishing anything.

        Args:
            publishes: Something becomes visible or goes; a file that no manifest names yet does not.

        Raises:
            FencedError: another attempt has the tier.
            OtherRunError: another run has it.
        """
        assert self.claim is not None, "only who has claimed a tier may write to it"
        assert self.identity is not None, "known to whoever claims"
        self.claims.assert_held(self.claim, self.identity, publishes)

    # Whose a checkpoint is

    def relation_of(self, manifest: Manifest) -> Relation:
        """Say whether a checkpoint is of the run that reads or writes here; a person's it always is."""
        return "own" if self.identity is None else self.identity.relation(manifest)

    def check_same_run(self, manifest: Manifest) -> None:
        """Refuse a checkpoint that another run has made.

        Raises:
            OtherRunError: it is one.
        """
        if self.identity is not None:
            check_same_run(self.url, self.identity, manifest)

    def own_manifests(self) -> list[Manifest]:
        """All manifests of this run that can be read, by rising step."""
        return [manifest for manifest in self.manifests() if self.relation_of(manifest) == "own"]

    # Reading

    def steps(self) -> list[int]:
        """Steps of which something is here, rising; whether it is whole, their manifests tell."""
        found = {step for name in self.objects.folders() if (step := step_of(name)) is not None}
        hint = self.objects.read(NEWEST)
        if hint is not None:
            try:
                known = parse_json(hint)
                found.update({int(known["step"])} if "step" in known else ())  # a claim alone has none
            except (ValueError, TypeError):
                warning(f"{self.objects.url_of(NEWEST)} cannot be read; going by the listing alone")
        return sorted(found)

    def manifest(self, step: int) -> Manifest | None:
        """What a remote checkpoint says about itself; None when there is none.

        Raises:
            CheckpointError: it cannot be trusted, or the store cannot be reached.
            ConfigError: it is encrypted, and there is no key, or another one. That is no damage: a run that passed it
                over would go back, and replace it.
        """
        name = f"{step_name(step)}/{MANIFEST}"
        try:
            content = self.objects.read(name, LISTING_BYTES)
        except Undecipherable:
            if self._has_the_key():
                raise
            raise ConfigError(
                "it cannot be decrypted with the key that is given, nor can any other checkpoint here",
                where=self.objects.url_of(name),
                fix=f"set {VARIABLE} to the key that it was sent with",
            ) from None
        if content is None:
            if not isinstance(self.objects, SealedObjects) and self.objects.facts(f"{name}{SEALED}") is not None:
                raise ConfigError(
                    "it is encrypted, and there is no key", where=self.objects.url_of(name), fix=f"set {VARIABLE}"
                )
            return None
        try:
            manifest = Manifest.parse(content)
            if manifest.step != step:
                raise ValueError(f"belongs to step {manifest.step}")
        except ValueError as error:
            raise CheckpointError(
                f"{MANIFEST} {error}", where=self.objects.url_of(name), fix="use another checkpoint"
            ) from None
        number = manifest.context.get(CLAIM)
        self._newest_claim = max(self._newest_claim, number if isinstance(number, int) else 0)
        return manifest

    def _has_the_key(self) -> bool:
        """Whether anything that is sealed here can be opened, so that what cannot is damaged."""
        if not self._key_fits and isinstance(self.objects, SealedObjects):
            names = (f"{step_name(step)}/{name}" for step in reversed(self.steps()) for name in (MANIFEST, _ASIDE))
            self._key_fits = self.objects.open_one_of(names)
        return self._key_fits

    def look_through(
        self, steps: Iterable[int] | None = None
    ) -> Iterator[tuple[int, Manifest | CheckpointError | ConfigError]]:
        """Of all steps, or of these, each that has a manifest: what that says, or why it cannot be trusted or read.

        Raises:
            UnreachableError: the store cannot be reached.
        """
        for step in self.steps() if steps is None else steps:
            try:
                manifest = self.manifest(step)
            except NoAnswer:
                raise
            except (CheckpointError, ConfigError) as error:
                yield step, error
                continue
            if manifest is not None:
                yield step, manifest

    def manifests(self, notice: Callable[[str], None] = warning) -> list[Manifest]:
        """All that can be read, by rising step; `notice` is told about the others.

        Raises:
            ConfigError: there are some, and none can be read with the key that is given.
        """
        found, closed = [], None
        for _, manifest in self.look_through():
            if isinstance(manifest, Manifest):
                found.append(manifest)
                continue
            if isinstance(manifest, ConfigError):
                closed = manifest
            notice(f"passing over {manifest.where}: {manifest.what}")
        if closed is not None and not found:
            raise closed
        return found

    # Writing

    def publish(self, folder: Path, journal: Path, advance: Callable[[int], None] = lambda _: None) -> bool:
        """Send a local checkpoint: files first, the manifest last. What an earlier try has sent is not sent again.

        Args:
            folder: The checkpoint.
            journal: Where to note what has been sent; removed at the end.
            advance: Told the bytes that are done.

        Returns:
            False when it was there already.

        Raises:
            FencedError: another attempt owns the remote tier.
            OtherRunError: another run owns it, or the checkpoint of that step there.
            SupersededError: a later attempt of this run has published another state of that step.
            CheckpointError: the local checkpoint is damaged, or the store cannot be used.
            ConfigError: what is published of the step cannot be read with the key that is given.
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
            target, path = f"{name}/{sent_name(manifest, file)}", folder / file
            version = sent.version_of(file, entry.hash)
            there = self.objects.facts(target) if version is not None else None
            if there is None or there.bytes != entry.bytes or there.version != version:
                if path.stat().st_size != entry.bytes or not is_as_written(path, entry):
                    raise CheckpointError(f"{file} is damaged and is not sent", where=str(folder), fix="none is needed")
                fault_point("upload.file")
                self.assert_owner(publishes=False)
                sent.note(file, entry.hash, self.objects.put(target, path).version)
            advance(entry.bytes)
        fault_point("upload.manifest")
        self.assert_owner()
        if self.objects.facts(f"{name}/{_ASIDE}") is not None:
            warning(f"{self.objects.url_of(name)} replaces what was set aside there")
            self.objects.remove([f"{name}/{_ASIDE}"])
        if self.objects.create(f"{name}/{MANIFEST}", content):
            self._remove_strangers(manifest)
        else:
            self.assert_owner()
            # An attempt before, which had looked whose the tier is when it was still its own.
            if not self._is_there(manifest):
                raise CheckpointError(
                    f"another process has just published {name}", where=self.url, fix="none is needed: it is withdrawn"
                )
        self._hint(manifest.step)
        journal.unlink(missing_ok=True)
        return True

    def _remove_strangers(self, manifest: Manifest) -> None:
        """Remove what another attempt has sent of a step that is published now, or what was set aside there: each may
        be as large as the checkpoint, and would stay as long."""
        folder = self.objects.at(step_name(manifest.step))
        try:
            for name in unexpected_objects(folder.folders(), manifest):
                self._remove(folder, name)
        except (FencedError, OtherRunError):
            raise
        except (CheckpointError, ConfigError) as error:  # the checkpoint is there
            warning(f"what else lies in {folder.url} is not removed: {error.what}")

    def _remove(self, folder: Objects, name: str) -> None:
        """Remove an object as long as the tier is ours; whoever has it since may have published one of that name."""
        self.assert_owner()
        folder.remove([name])

    def _is_there(self, manifest: Manifest) -> bool:
        """Whether this very state is published; another one of the same step is withdrawn, if it is this run's to
        replace.

        Raises:
            OtherRunError: it is another run's, or may be.
            SupersededError: a later attempt of this run has published it.
            ConfigError: which state is published cannot be read with the key that is given.
        """
        there, why = None, ""
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
        """Refuse to put a state in the place of another one of the same step that it does not supersede."""
        where = self.objects.url_of(step_name(there.step))
        if self.relation_of(there) == "unknown":
            raise OtherRunError(
                f"step {there.step} there has no run id and was made with a config that this run never had: it may be"
                " another run's, and is not replaced",
                where=where,
                fix="look at it with `headway checkpoints list`; if it can go, remove that folder, else choose another"
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
        """Remove a checkpoint; its manifest first, so that there is never half of one to be found."""
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
        # By name what a listing may not show yet, by the listing what the manifest does not name.
        for name in {*(names_there(known) if known else ()), *folder.folders()}:
            self._remove(folder, name)
        folder.remove_folder()

    def set_aside(self, step: int) -> bool:
        """Hide a checkpoint by giving its manifest another name; its files stay until the run saves at that step again.
        Whether there was one."""
        self.assert_owner()
        folder = self.objects.at(step_name(step))
        content = folder.read(MANIFEST, LISTING_BYTES)
        if content is None:
            return False
        with suppress(ValueError):  # a damaged one is out of the way then, too
            self.check_same_run(Manifest.parse(content))
        folder.write(_ASIDE, content)
        self._remove(folder, MANIFEST)
        return True

    def _hint(self, step: int) -> None:
        assert self.claim is not None, "it has published"
        self.claims.write_hint(self.claim, step)


def check_same_run(url: str, identity: RunIdentity, manifest: Manifest) -> None:
    """Refuse a remote checkpoint that another run has made.

    Args:
        url: Of the tier.
        identity: The run that reads or writes there.

    Raises:
        OtherRunError: it is one.
    """
    made_by = run_record(manifest.context.get(OF_RUN))
    if made_by is not None and identity.relation(manifest) == "other":
        published = f", whose attempt {manifest.context.get('attempt')} has published {step_name(manifest.step)}"
        raise other_run(url, made_by, published, "holds checkpoints of")


def journal_of(run: Path, step: int) -> Path:
    """Where a run notes what it has sent of a checkpoint."""
    return run / _JOURNALS / f"{step_name(step)}.jsonl"


def _generation(number: int) -> str:
    return f"run-{number:03d}"
