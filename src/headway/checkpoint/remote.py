"""Checkpoints of a run in object storage or on a shared file system: who may write there, sending, finding.

    <url>/<name of the run>/run-001/
        owners/00000001.json          who has claimed the run, one object for each claim
        newest.json                   a hint, for stores whose listings are behind
        step-00001000/3fa9c1d2e4b5a697-shard-....safetensors
        step-00001000/manifest.json   sent last: without it there is no checkpoint

Without the digits before its files (`remote_files.sent_name`) a folder of a step is a checkpoint like any other
(docs/checkpoint-format.md). `run-002` comes into being when a run is started over (`--restart`); what was before stays
as it is.

**Fencing.** Claims are numbered without gaps, and each is made by a put that fails where there is such an object
already (S3: If-None-Match). The owner is whoever made the last one; before it sends, publishes or removes anything, it
looks whether there is a next one. No listing is needed for that, and listings may be stale. What a process sends that
was stopped right after it had looked, however late, lies under names that are nobody else's.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from headway.checkpoint.file_hash import is_as_written
from headway.checkpoint.format import MANIFEST, Manifest, read_manifest, step_name, step_of
from headway.checkpoint.objects import NoAnswer, Objects, UnreachableError
from headway.checkpoint.remote_claim import CLAIM_FILE, RESTARTED_FILE, Claim, in_words, read_claim
from headway.checkpoint.remote_files import Journal, names_there, sent_name, strangers
from headway.checkpoint.sealed_objects import SealedObjects
from headway.checkpoint.sealing import SEALED, VARIABLE, Undecipherable
from headway.core.console import warning
from headway.core.errors import CheckpointError, ConfigError
from headway.core.faults import fault_point
from headway.core.files import write_json
from headway.core.foreign import parse_json
from headway.core.machine import host_name

_JOURNALS = ".uploads"
#: The journals of uploads, in the run directory.
UPLOADS = f"{_JOURNALS}/step-*.jsonl"
_NEWEST = "newest.json"
_ASIDE = "manifest.set-aside.json"


class FencedError(CheckpointError):
    """Another attempt has claimed the remote tier since."""


class RemoteTier:
    """The remote checkpoints of one generation of a run.

    Args:
        objects: The run's folder there, generation included.
        claim: What this process may write by; None reads only.
    """

    def __init__(self, objects: Objects, claim: Claim | None = None) -> None:
        self.objects, self.claim = objects, claim
        self._key_fits = False

    @property
    def url(self) -> str:
        """Where it lies."""
        return self.objects.url

    @classmethod
    def find(cls, place: Objects, run: Path) -> RemoteTier:
        """The generation that a run directory belongs to; for one that knows of none, the newest there is.

        Args:
            place: The folder for all generations of the run.
        """
        known = read_claim(run)
        if known is not None and known.url.startswith(f"{place.url}/"):
            return cls(place.at(known.url.rsplit("/", 1)[-1]))
        newest = cls.newest_generation(place)
        after = newest + 1 if newest and (run / RESTARTED_FILE).exists() else max(newest, 1)
        return cls(place.at(_generation(after)))

    @staticmethod
    def newest_generation(place: Objects) -> int:
        """Number of the newest generation of a run; 0 when there is none."""
        return _last(lambda n: place.read(f"{_generation(n)}/{_owner(1)}") is not None)

    # Owning

    def take(self, run: Path, attempt: int) -> RemoteTier:
        """Claim the run's remote tier for an attempt that owns the run directory: this fences every earlier one.

        Raises:
            CheckpointError: the store cannot be reached.
            ConfigError: it cannot keep two attempts from having one claim.
        """
        number = _last(lambda n: self.objects.read(_owner(n)) is not None)
        known = read_claim(run)
        if self.objects.local and not number and known is not None and known.url == self.url:
            raise UnreachableError(
                "what this run has sent there is gone",
                where=self.url,
                fix=f"mount what belongs there; if it was removed on purpose, remove {run / CLAIM_FILE} too",
            )
        while True:
            number += 1
            claim = Claim(self.url, number, secrets.token_hex(8), attempt, host_name(), time.time())
            if self.objects.create(_owner(number), claim.render()):
                break
        self._refuse_overwriting(_owner(number))
        write_json(run / CLAIM_FILE, asdict(claim))
        (run / RESTARTED_FILE).unlink(missing_ok=True)
        return type(self)(self.objects, claim)

    def _refuse_overwriting(self, name: str) -> None:
        """Try to make an object that is there once more: a store that does as if it were not there says so of claims
        too, and each attempt would take itself for the only one."""
        if self.objects.local or not self.objects.create(name, b"{}"):
            return
        self.objects.remove([name])
        raise ConfigError(
            "the store writes over what is there although it is asked not to (If-None-Match): two machines could send"
            " to one run at a time",
            where=self.url,
            fix="choose a store that supports conditional puts, or a folder that the machines mount (file://)",
        )

    def assert_owner(self) -> None:
        """Make sure that nobody has claimed the tier since; call it before publishing anything.

        Raises:
            FencedError: somebody has.
        """
        assert self.claim is not None, "only who has claimed a tier may write to it"
        later = self.objects.read(_owner(self.claim.number + 1))
        if later is not None:
            raise FencedError(
                f"attempt {self.claim.attempt} no longer owns the remote checkpoints; {in_words(later)} does",
                where=self.url,
                fix="stop this process; the other one goes on with the run",
            )

    # Reading

    def steps(self) -> list[int]:
        """Steps of which something is here, rising; whether it is whole, their manifests tell."""
        found = {step for name in self.objects.folders() if (step := step_of(name)) is not None}
        hint = self.objects.read(_NEWEST)
        if hint is not None:
            try:
                found.add(int(parse_json(hint)["step"]))
            except (ValueError, KeyError, TypeError):
                warning(f"{self.objects.url_of(_NEWEST)} cannot be read; going by the listing alone")
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
            content = self.objects.read(name)
        except Undecipherable:
            if self._has_the_key():
                raise
            raise ConfigError(
                "it cannot be decrypted with the key that is given, nor can any other checkpoint here",
                where=self.objects.url_of(name),
                fix=f"set {VARIABLE} to the key that it was sent with",
            ) from None
        if content is None:
            if not isinstance(self.objects, SealedObjects) and self.objects.read(f"{name}{SEALED}") is not None:
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
            CheckpointError: the local checkpoint is damaged, or the store cannot be used.
            ConfigError: what is published of the step cannot be read with the key that is given.
        """
        manifest = read_manifest(folder)
        content = (folder / MANIFEST).read_bytes()
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
                self.assert_owner()
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
            for name in strangers(folder.folders(), manifest):
                self._remove(folder, name)
        except FencedError:
            raise
        except (CheckpointError, ConfigError) as error:  # the checkpoint is there
            warning(f"what else lies in {folder.url} is not removed: {error.what}")

    def _remove(self, folder: Objects, name: str) -> None:
        """Remove an object as long as the tier is ours; whoever has it since may have published one of that name."""
        self.assert_owner()
        folder.remove([name])

    def _is_there(self, manifest: Manifest) -> bool:
        """Whether this very state is published; another one of the same step is withdrawn.

        Raises:
            ConfigError: which state is published cannot be read with the key that is given.
        """
        try:
            there = self.manifest(manifest.step)
            if there is None:
                return False
            if there.state_sha256 == manifest.state_sha256:
                return True
            why = "it holds another state"
        except NoAnswer:
            raise
        except CheckpointError as error:
            why = error.what
        folder = self.objects.at(step_name(manifest.step))
        warning(f"replacing {folder.url}: {why}")
        self._remove(folder, MANIFEST)
        return False

    def discard(self, step: int) -> None:
        """Remove a checkpoint; its manifest first, so that there is never half of one to be found."""
        folder = self.objects.at(step_name(step))
        try:
            known = self.manifest(step)
        except NoAnswer:
            raise
        except CheckpointError:
            known = None
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
        content = folder.read(MANIFEST)
        if content is None:
            return False
        folder.write(_ASIDE, content)
        self._remove(folder, MANIFEST)
        return True

    def _hint(self, step: int) -> None:
        self.objects.write(_NEWEST, json.dumps({"step": step, "time": time.time()}).encode())


def journal_of(run: Path, step: int) -> Path:
    """Where a run notes what it has sent of a checkpoint."""
    return run / _JOURNALS / f"{step_name(step)}.jsonl"


def _generation(number: int) -> str:
    return f"run-{number:03d}"


def _owner(number: int) -> str:
    return f"owners/{number:08d}.json"


def _last(there: Callable[[int], bool]) -> int:
    """The highest of numbers that are there from 1 on without gaps; 0 when there is none."""
    low, high = 0, 1
    while there(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if there(middle) else (low, middle)
    return low
