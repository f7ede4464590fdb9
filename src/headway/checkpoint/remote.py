"""Checkpoints of a run in object storage or on a shared file system: who may write there, sending, finding.

    <url>/<name of the run>/run-001/
        owners/00000001.json          who has claimed the run, one object for each claim
        newest.json                   a hint, for stores whose listings are behind
        step-00001000/shard-....safetensors
        step-00001000/manifest.json   sent last: without it there is no checkpoint

A folder of a step is a checkpoint like any other (docs/checkpoint-format.md). `run-002` comes into being when a run is
started over (`--restart`); what was before stays as it is.

**Fencing.** Claims are numbered without gaps, and each is made by a put that fails where there is such an object
already (S3: If-None-Match). The owner is whoever made the last one; before it publishes a manifest, it looks whether
there is a next one. No listing is needed for that, and listings may be stale.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headway.checkpoint.file_hash import is_as_written
from headway.checkpoint.format import MANIFEST, Manifest, read_manifest, step_name, step_of
from headway.checkpoint.objects import NoAnswer, Objects
from headway.checkpoint.sealed_objects import SealedObjects
from headway.checkpoint.sealing import SEALED, VARIABLE, encryption_key, key_to_encrypt_with
from headway.core.console import warning
from headway.core.errors import CheckpointError, ConfigError
from headway.core.faults import fault_point
from headway.core.files import read_json_lines, write_json
from headway.core.machine import host_name

#: In the run directory: what this run has claimed. In a new one after `--restart`, the wish to claim afresh.
CLAIM_FILE = "remote.json"
RESTARTED_FILE = ".restarted"
_JOURNALS = ".uploads"
#: The journals of uploads, in the run directory.
UPLOADS = f"{_JOURNALS}/step-*.jsonl"
_NEWEST = "newest.json"
_ASIDE = "manifest.set-aside.json"


@dataclass(frozen=True)
class Claim:
    """Says whose the remote tier of a run is."""

    url: str
    """Of the run there, generation included."""
    number: int
    """Counted from 1 without gaps."""
    token: str
    attempt: int
    host: str
    time: float

    def render(self) -> bytes:
        """The content of the claim's object."""
        return json.dumps(asdict(self)).encode()


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
        """Claim the run's remote tier for an attempt that owns the run directory: this fences every earlier one."""
        number = _last(lambda n: self.objects.read(_owner(n)) is not None)
        while True:
            number += 1
            claim = Claim(self.url, number, secrets.token_hex(8), attempt, host_name(), time.time())
            if self.objects.create(_owner(number), claim.render()):
                break
        write_json(run / CLAIM_FILE, asdict(claim))
        (run / RESTARTED_FILE).unlink(missing_ok=True)
        return type(self)(self.objects, claim)

    def assert_owner(self) -> None:
        """Make sure that nobody has claimed the tier since; call it before publishing anything.

        Raises:
            FencedError: somebody has.
        """
        assert self.claim is not None, "only who has claimed a tier may write to it"
        later = self.objects.read(_owner(self.claim.number + 1))
        if later is not None:
            raise FencedError(
                f"attempt {self.claim.attempt} no longer owns the remote checkpoints; {_in_words(later)} does",
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
                found.add(int(json.loads(hint)["step"]))
            except (ValueError, KeyError, TypeError):
                warning(f"{self.objects.url_of(_NEWEST)} cannot be read; going by the listing alone")
        return sorted(found)

    def manifest(self, step: int) -> Manifest | None:
        """What a remote checkpoint says about itself; None when there is none.

        Raises:
            CheckpointError: it cannot be trusted, or the store cannot be reached.
        """
        name = f"{step_name(step)}/{MANIFEST}"
        content = self.objects.read(name)
        if content is None:
            if not isinstance(self.objects, SealedObjects) and self.objects.read(f"{name}{SEALED}") is not None:
                raise CheckpointError(
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

    def look_through(self, steps: Iterable[int] | None = None) -> Iterator[tuple[int, Manifest | CheckpointError]]:
        """Of all steps, or of these, each that has a manifest: what that says, or why it cannot be trusted.

        Raises:
            UnreachableError: the store cannot be reached.
        """
        for step in self.steps() if steps is None else steps:
            try:
                manifest = self.manifest(step)
            except NoAnswer:
                raise
            except CheckpointError as error:
                yield step, error
                continue
            if manifest is not None:
                yield step, manifest

    def manifests(self, notice: Callable[[str], None] = warning) -> list[Manifest]:
        """All that can be read, by rising step; `notice` is told about the others."""
        found = []
        for _, manifest in self.look_through():
            if isinstance(manifest, Manifest):
                found.append(manifest)
            else:
                notice(f"passing over {manifest.where}: {manifest.what}")
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
        """
        manifest = read_manifest(folder)
        content = (folder / MANIFEST).read_bytes()
        name = step_name(manifest.step)
        self.assert_owner()
        if self._is_there(manifest):
            journal.unlink(missing_ok=True)
            return False
        sent = _Journal(journal, self.url, manifest.state_sha256)
        for file, entry in manifest.files.items():
            target, path = f"{name}/{file}", folder / file
            version = sent.version_of(file, entry.hash)
            there = self.objects.facts(target) if version is not None else None
            if there is None or there.bytes != entry.bytes or there.version != version:
                if path.stat().st_size != entry.bytes or not is_as_written(path, entry):
                    raise CheckpointError(f"{file} is damaged and is not sent", where=str(folder), fix="none is needed")
                fault_point("upload.file")
                sent.note(file, entry.hash, self.objects.put(target, path).version)
            advance(entry.bytes)
        fault_point("upload.manifest")
        self.assert_owner()
        if self.objects.facts(f"{name}/{_ASIDE}") is not None:
            warning(f"{self.objects.url_of(name)} replaces what was set aside there")
            self.objects.remove([f"{name}/{_ASIDE}"])
        if not self.objects.create(f"{name}/{MANIFEST}", content):
            self.assert_owner()
            # An attempt before, which had looked whose the tier is when it was still its own.
            if not self._is_there(manifest):
                raise CheckpointError(
                    f"another process has just published {name}", where=self.url, fix="none is needed: it is withdrawn"
                )
        self._hint(manifest.step)
        journal.unlink(missing_ok=True)
        return True

    def _is_there(self, manifest: Manifest) -> bool:
        """Whether this very state is published; another one of the same step is withdrawn."""
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
        name = f"{step_name(manifest.step)}/{MANIFEST}"
        warning(f"replacing {self.objects.url_of(step_name(manifest.step))}: {why}")
        self.objects.remove([name])
        return False

    def discard(self, step: int) -> None:
        """Remove a checkpoint; its manifest first, so that there is never half of one to be found."""
        self.assert_owner()
        folder = self.objects.at(step_name(step))
        try:
            known = self.manifest(step)
        except NoAnswer:
            raise
        except CheckpointError:
            known = None
        folder.remove([MANIFEST])
        fault_point("upload.discard")
        # By name what a listing may not show yet, by the listing what the manifest does not name.
        folder.remove({*(known.files if known else ()), *folder.folders()})
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
        folder.remove([MANIFEST])
        return True

    def _hint(self, step: int) -> None:
        self.objects.write(_NEWEST, json.dumps({"step": step, "time": time.time()}).encode())


class _Journal:
    """What has been sent of one checkpoint, and as which version: a line per file, each on disk when it counts."""

    def __init__(self, path: Path, url: str, state_sha256: str) -> None:
        self._path, self._head = path, {"url": url, "state_sha256": state_sha256}
        lines = list(read_json_lines(path))
        self._sent = {line["file"]: line for line in lines[1:] if "file" in line}
        if not lines or lines[0] != self._head:
            self._sent = {}
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self._head) + "\n", encoding="utf-8")

    def version_of(self, file: str, sha256: str) -> str | None:
        """The version that was sent; None when it was not, or with another content."""
        line = self._sent.get(file)
        return str(line["version"]) if line is not None and line.get("sha256") == sha256 else None

    def note(self, file: str, sha256: str, version: str) -> None:
        """A file has arrived."""
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"file": file, "sha256": sha256, "version": version}) + "\n")
            stream.flush()
            os.fsync(stream.fileno())


def journal_of(run: Path, step: int) -> Path:
    """Where a run notes what it has sent of a checkpoint."""
    return run / _JOURNALS / f"{step_name(step)}.jsonl"


def read_claim(run: Path) -> Claim | None:
    """The claim that a run directory knows of; None when there is none that can be read."""
    try:
        return Claim(**json.loads((run / CLAIM_FILE).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def place_of(settings: Mapping[str, Any], name: str, **options: Any) -> Objects:
    """The folder for all generations of a run, from the config's `checkpoint.remote`."""
    return open_place(f"{settings['url']}/{name}", settings.get("options"), bool(settings.get("encrypt")), **options)


def open_place(
    url: str, storage: Mapping[str, Any] | None = None, encrypt: bool | None = None, **options: Any
) -> Objects:
    """The objects below a URL.

    Args:
        storage: What `fsspec` needs to reach it.
        encrypt: Whether checkpoints are sealed there; when not given, whether there is a key. With a key, what is
            sealed there can be read in any case.
        options: For `Objects`.

    Raises:
        ConfigError: the URL cannot be used, or there is no key to encrypt with.
    """
    key = key_to_encrypt_with("checkpoint.remote.encrypt") if encrypt else _key_to_read_with(encrypt)
    if key is None:
        return Objects(url, storage, **options)
    sealed = SealedObjects(url, storage, **options)
    sealed.key, sealed.seals = key, encrypt is not False
    return sealed


def _key_to_read_with(encrypt: bool | None) -> bytes | None:
    """The key of the environment. What is wrong with it does not matter where nothing is to be encrypted; of a
    checkpoint that cannot be read without it, that is told."""
    try:
        return encryption_key()
    except ConfigError:
        if encrypt is None:
            raise
        return None


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


def _in_words(claim: bytes) -> str:
    try:
        record = json.loads(claim)
        return f"attempt {record['attempt']} on {record['host']}"
    except (ValueError, KeyError, TypeError):
        return "another one"
