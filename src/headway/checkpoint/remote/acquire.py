"""Claiming the remote tier of a run, and of no other one: two runs may be told the same URL and the same name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint.format.manifest import Manifest
from headway.checkpoint.index import REMOTE, CheckpointIndex
from headway.checkpoint.remote.open import place_of
from headway.checkpoint.remote.ownership import OtherRunError, PlaceOwner, other_run, read_claim
from headway.checkpoint.remote.tier import RemoteTier, check_same_run
from headway.checkpoint.run_identity import IDENTITY, OF_RUN, RunIdentity, run_record
from headway.core.errors import ConfigError, HeadwayError

if TYPE_CHECKING:
    from headway.config import RemoteConfig


def find_tier(remote: RemoteConfig, identity: RunIdentity, **options: Any) -> RemoteTier:
    """The remote tier of a run (`RemoteTier.find`).

    Args:
        options: For `Objects`.
    """
    place = place_of(remote.model_dump(mode="json"), identity.run.resolve().name, **options)
    return RemoteTier.find(place, identity.run, identity)


def claim_tier(remote: RemoteConfig, attempt: int, identity: RunIdentity, **options: Any) -> RemoteTier:
    """Claim the remote tier of a run for an attempt that owns the run directory.

    Args:
        identity: The run's. Where its directory takes up the run that owns the place, the tier has the new one.

    Raises:
        OtherRunError: the place is another run's; its checkpoints and whoever sends them are left in peace.
        CheckpointError: the store cannot be reached.
    """
    tier = find_tier(remote, identity, **options)
    identity = settle_identity(tier, identity)
    return tier.take(identity.run, attempt, identity)


def is_sent(remote: RemoteConfig, identity: RunIdentity, manifest: Manifest, **options: Any) -> bool:
    """Whether a checkpoint is known to be in the run's remote tier. The store is asked only where the index does not
    say so: one that is lost, or could never be written, would have a finished run sent again and again.

    Args:
        options: For `Objects`.
    """
    return _is_sent_by_index(remote, identity.run, manifest) or _is_in_store(remote, identity, manifest, **options)


def _is_sent_by_index(remote: RemoteConfig, run: Path, manifest: Manifest) -> bool:
    tier = f"{remote.url.rstrip('/')}/{run.resolve().name}/"
    return any(
        place.tier == REMOTE and place.place.startswith(tier)
        for entry in CheckpointIndex(run).entries()
        if (entry.step, entry.state_sha256) == (manifest.step, manifest.state_sha256)
        for place in entry.places
    )


def _is_in_store(remote: RemoteConfig, identity: RunIdentity, manifest: Manifest, **options: Any) -> bool:
    try:
        tier = find_tier(remote, identity, **options)
        there = tier.manifest(manifest.step)
    except HeadwayError:  # whoever sends it will tell
        return False
    return there is not None and there.state_sha256 == manifest.state_sha256 and tier.relation_of(there) == "own"


def settle_identity(tier: RemoteTier, identity: RunIdentity) -> RunIdentity:
    """Make sure that a tier is a run's own before it is claimed, which fences whoever has it.

    The tier tells whose it is: by its own record and its claims, or else by its newest checkpoint. One in which nothing
    has an id was written by an older version, and is the run's if any checkpoint there was made with a config that the
    run has had.

    Returns:
        The identity. A directory that has made no checkpoint takes up the run that owns the place, if config and data
        are the same: it continues that run on this machine. `RemoteTier.take` writes that down.

    Raises:
        OtherRunError: the place is another run's, or it cannot be told whose it is.
        ConfigError: the newest checkpoint is encrypted, and cannot be read with the key that is given.
        CheckpointError: the store cannot be reached.
    """
    owner, claim = tier.owner(), read_claim(identity.run)
    if owner is not None:
        identity = _as_owner(tier, identity, owner)
    was_here = owner is not None or (claim is not None and claim.url == tier.url)
    unreadable, theirs = None, False
    for _, found in tier.look_through(reversed(tier.steps())):
        if not isinstance(found, Manifest):
            if was_here and isinstance(found, ConfigError):
                raise found  # with another key than before, each would have a part of the run that is useless to it
            unreadable = found
            continue
        relation = identity.relation(found)
        made_by = run_record(found.context.get(OF_RUN))
        if relation == "other" and made_by is not None:
            if owner is not None:
                check_same_run(tier.url, identity, found)
            configs, data = frozenset({found.context.get(IDENTITY)}), found.context.get("data")
            identity = _as_owner(tier, identity, PlaceOwner(made_by, configs, data, "as its newest checkpoint says"))
        elif relation == "unknown" and owner is None:
            theirs = True
            continue
        return identity
    if theirs:
        raise _other_config(tier)
    if unreadable is not None and not was_here:
        raise OtherRunError(
            f"whose the remote checkpoints under this run's name are cannot be told: {unreadable.what}",
            where=unreadable.where,
            fix=f"{unreadable.fix}; or choose another name=... or checkpoint.remote.url, or start over with --restart",
        )
    return identity


def _as_owner(tier: RemoteTier, identity: RunIdentity, owner: PlaceOwner) -> RunIdentity:
    """The identity under the owner's id, if it is the owner's or may become so."""
    if owner.record["id"] == identity.id:
        return identity
    obstacle = identity.obstacle(owner.configs, owner.data)
    if obstacle is not None:
        raise other_run(tier.url, owner.record, f", {owner.claimed} ({obstacle})")
    return replace(identity, id=owner.record["id"])


def _other_config(tier: RemoteTier) -> OtherRunError:
    return OtherRunError(
        "the remote checkpoints under this run's name were made with another config: they are another run's",
        where=tier.url,
        fix="choose another name=... or checkpoint.remote.url, or start over with --restart; to go on with them all the"
        " same, first `headway checkpoints restore` one, then train with --accept-changes",
    )
