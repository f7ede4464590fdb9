"""Reading of a remote tier: which checkpoints are published there, and whose they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from headway.checkpoint.format.manifest import MANIFEST, Manifest, step_name, step_of
from headway.checkpoint.format.sealing import SEALED, VARIABLE, Undecipherable
from headway.checkpoint.remote.objects import NoAnswer, Objects
from headway.checkpoint.remote.ownership import NEWEST, other_run
from headway.checkpoint.remote.sealed_objects import SealedObjects
from headway.checkpoint.run_identity import OF_RUN, Relation, RunIdentity, run_record
from headway.core.console import warning
from headway.core.errors import CheckpointError, ConfigError
from headway.core.files.foreign import LISTING_BYTES, parse_json

#: The manifest of a checkpoint that was set aside.
ASIDE = "manifest.set-aside.json"
#: Key of a manifest's context: the number of the attempt's claim when it began; None without a claim.
CLAIM = "claim"


class TierReader:
    """The checkpoints of one generation of a run that are published in its remote tier.

    Args:
        objects: The folder of the generation.
        identity: The run that reads; None for a person, who may read everything.
    """

    def __init__(self, objects: Objects, identity: RunIdentity | None = None) -> None:
        self.objects = objects
        self.identity = identity
        self._key_fits = False
        self.newest_claim = 0
        """The highest number of a claim in any manifest that was read so far."""

    @property
    def url(self) -> str:
        """The URL of the tier."""
        return self.objects.url

    def relation_of(self, manifest: Manifest) -> Relation:
        """Return how a checkpoint relates to the run that reads or writes here; "own" for a person."""
        return "own" if self.identity is None else self.identity.relation(manifest)

    def check_same_run(self, manifest: Manifest) -> None:
        """Raise an error if another run made a checkpoint.

        Raises:
            OtherRunError: Another run made it.
        """
        if self.identity is not None:
            check_same_run(self.url, self.identity, manifest)

    def own_manifests(self) -> list[Manifest]:
        """Return all readable manifests of this run, in ascending order of steps."""
        return [manifest for manifest in self.manifests() if self.relation_of(manifest) == "own"]

    def steps(self) -> list[int]:
        """Return the steps that have a folder here, in ascending order; only a manifest makes one a checkpoint."""
        found = {step for name in self.objects.names() if (step := step_of(name)) is not None}
        hint = self.objects.read(NEWEST)
        if hint is not None:
            try:
                known = parse_json(hint)
                found.update({int(known["step"])} if "step" in known else ())  # no step before the first upload
            except (ValueError, TypeError):
                warning(f"{self.objects.url_of(NEWEST)} cannot be read; using only the listing")
        return sorted(found)

    def manifest(self, step: int) -> Manifest | None:
        """Return the manifest of a remote checkpoint; None if there is none.

        Raises:
            CheckpointError: The manifest cannot be trusted, or the store cannot be reached.
            ConfigError: The manifest is encrypted, and the key is missing or wrong. This does not count as damage: a
                run that passed the checkpoint over would resume from an older one and then replace it.
        """
        name = f"{step_name(step)}/{MANIFEST}"
        try:
            content = self.objects.read(name, LISTING_BYTES)
        except Undecipherable:
            if self._has_the_key():
                raise
            raise ConfigError(
                "it cannot be decrypted with the given key, nor can any other checkpoint here",
                where=self.objects.url_of(name),
                fix=f"set {VARIABLE} to the key that it was uploaded with",
            ) from None
        if content is None:
            if not isinstance(self.objects, SealedObjects) and self.objects.stat(f"{name}{SEALED}") is not None:
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
        self.newest_claim = max(self.newest_claim, number if isinstance(number, int) else 0)
        return manifest

    def _has_the_key(self) -> bool:
        """Return whether the key opens any sealed object here, so that one that it does not open is damaged."""
        if not self._key_fits and isinstance(self.objects, SealedObjects):
            names = (f"{step_name(step)}/{name}" for step in reversed(self.steps()) for name in (MANIFEST, ASIDE))
            self._key_fits = self.objects.open_one_of(names)
        return self._key_fits

    def look_through(
        self, steps: Iterable[int] | None = None
    ) -> Iterator[tuple[int, Manifest | CheckpointError | ConfigError]]:
        """Yield each step that has a manifest, with the manifest or the reason why it cannot be trusted or read.

        Args:
            steps: Steps to look at; all steps if None.

        Raises:
            UnreachableError: The store cannot be reached.
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
        """Return all readable manifests, in ascending order of steps.

        Args:
            notice: Called with a message about each unreadable manifest.

        Raises:
            ConfigError: There are manifests, and none can be read with the given key.
        """
        found = []
        closed = None
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


def check_same_run(url: str, identity: RunIdentity, manifest: Manifest) -> None:
    """Raise an error if another run made a remote checkpoint.

    Args:
        url: URL of the tier.
        identity: The run that reads or writes there.
        manifest: The checkpoint's manifest.

    Raises:
        OtherRunError: Another run made it.
    """
    made_by = run_record(manifest.context.get(OF_RUN))
    if made_by is not None and identity.relation(manifest) == "other":
        published = f", whose attempt {manifest.context.get('attempt')} has published {step_name(manifest.step)}"
        raise other_run(url, made_by, published, "holds checkpoints of")
