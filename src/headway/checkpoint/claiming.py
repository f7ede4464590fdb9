"""Claiming the remote tier of a run, and of no other one: two runs may be told the same URL and the same name."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint.folders import checkpoint_folders
from headway.checkpoint.format import Manifest, read_manifest
from headway.checkpoint.registry import REMOTE, Registry
from headway.checkpoint.remote import RemoteTier
from headway.checkpoint.remote_claim import read_claim
from headway.checkpoint.remote_place import place_of
from headway.core.errors import CheckpointError, ConfigError, HeadwayError

if TYPE_CHECKING:
    from headway.config import RemoteConfig

#: Key of a manifest's context: the fingerprint of what decides the run's mathematics (`headway.config.identity`).
IDENTITY = "identity"


def find_tier(remote: RemoteConfig, run: Path, **options: Any) -> RemoteTier:
    """The remote tier of a run (`RemoteTier.find`).

    Args:
        options: For `Objects`.
    """
    return RemoteTier.find(place_of(remote.model_dump(mode="json"), run.resolve().name, **options), run)


def claim_tier(remote: RemoteConfig, run: Path, attempt: int, identity: str, **options: Any) -> RemoteTier:
    """The same, claimed for an attempt that owns the run directory.

    Args:
        identity: What the context of the run's checkpoints says, or will say.

    Raises:
        ConfigError: the checkpoints there are another run's; they and whoever sends them are left in peace.
        CheckpointError: the store cannot be reached.
    """
    tier = find_tier(remote, run, **options)
    refuse_other_runs(tier, run, identity)
    return tier.take(run, attempt)


def is_sent(remote: RemoteConfig, run: Path, manifest: Manifest, **options: Any) -> bool:
    """Whether a checkpoint is known to be in the run's remote tier. The store is asked only where the index does not
    say so: one that is lost, or could never be written, would have a finished run sent again and again.

    Args:
        options: For `Objects`.
    """
    return _is_sent_by_index(remote, run, manifest) or _is_in_store(remote, run, manifest, **options)


def _is_sent_by_index(remote: RemoteConfig, run: Path, manifest: Manifest) -> bool:
    tier = f"{remote.url.rstrip('/')}/{run.resolve().name}/"
    return any(
        place.tier == REMOTE and place.place.startswith(tier)
        for entry in Registry(run).entries()
        if (entry.step, entry.state_sha256) == (manifest.step, manifest.state_sha256)
        for place in entry.places
    )


def _is_in_store(remote: RemoteConfig, run: Path, manifest: Manifest, **options: Any) -> bool:
    try:
        there = find_tier(remote, run, **options).manifest(manifest.step)
    except HeadwayError:  # whoever sends it will tell
        return False
    return there is not None and there.state_sha256 == manifest.state_sha256


def refuse_other_runs(tier: RemoteTier, run: Path, identity: str) -> None:
    """Make sure that a tier is this run's before it is claimed, which fences whoever has it: by the claim that the run
    directory has, or by the checkpoints there, of which one must have been made with this config or with that of one
    here.

    Raises:
        ConfigError: they were made with others, or none can be read; or the newest of its own is encrypted, and cannot
            be read with the key that is given.
        CheckpointError: the store cannot be reached.
    """
    claim = read_claim(run)
    if claim is not None and claim.url == tier.url:
        _refuse_other_keys(tier)
        return
    mine = {None, identity, *_identities(run)}
    unreadable, theirs = None, False
    for _, found in tier.look_through(reversed(tier.steps())):
        if not isinstance(found, Manifest):
            unreadable = found
        elif found.context.get(IDENTITY) in mine:  # of any: the run may have gone on with another config since
            return
        else:
            theirs = True
    if theirs:
        raise _other_runs(tier)
    if unreadable is not None:
        raise ConfigError(
            f"whose the remote checkpoints under this run's name are cannot be told: {unreadable.what}",
            where=unreadable.where,
            fix=f"{unreadable.fix}; or choose another name=... or checkpoint.remote.url, or start over with --restart",
        )


def _refuse_other_keys(tier: RemoteTier) -> None:
    """With another key than before, each would have a part of the run that the other one takes for damaged."""
    for _, found in tier.look_through(reversed(tier.steps())):
        if isinstance(found, ConfigError):
            raise found
        return


def _other_runs(tier: RemoteTier) -> ConfigError:
    return ConfigError(
        "the remote checkpoints under this run's name were made with another config: they are another run's",
        where=tier.url,
        fix="choose another name=... or checkpoint.remote.url, or start over with --restart; to go on with them all the"
        " same, first `headway checkpoints restore` one, then train with --accept-changes",
    )


def _identities(run: Path) -> set[str]:
    """Of the checkpoints here: a run may go on with a config that has changed."""
    found = set()
    for folder in checkpoint_folders(run / "checkpoints").values():
        with suppress(OSError, ValueError, CheckpointError):
            found.add(read_manifest(folder).context.get(IDENTITY))
    return {identity for identity in found if isinstance(identity, str)}
