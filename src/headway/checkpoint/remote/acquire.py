"""Acquisition of a run's remote tier, with checks that it is not another run's: two runs may share URL and name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint.format.manifest import Manifest
from headway.checkpoint.index import REMOTE, CheckpointIndex
from headway.checkpoint.remote.audit_anchor import anchor_log
from headway.checkpoint.remote.open import place_of
from headway.checkpoint.remote.ownership import OtherRunError, PlaceOwner, other_run, read_claim
from headway.checkpoint.remote.tier import RESEALING, RemoteTier
from headway.checkpoint.remote.tier_reader import check_same_run
from headway.checkpoint.run_identity import IDENTITY, OF_RUN, RunIdentity, run_record
from headway.core.errors import CheckpointError, ConfigError, HeadwayError

if TYPE_CHECKING:
    from headway.config import RemoteConfig


def find_tier(remote: RemoteConfig, identity: RunIdentity, **options: Any) -> RemoteTier:
    """Return the remote tier of a run (`RemoteTier.find`), for reading.

    Args:
        remote: The config's `checkpoint.remote`.
        identity: The run.
        options: Options for `Objects`.
    """
    place = place_of(remote.model_dump(mode="json"), identity.run.resolve().name, **options)
    return RemoteTier.find(place, identity.run, identity)


def acquire_tier(remote: RemoteConfig, attempt: int, identity: RunIdentity, **options: Any) -> RemoteTier:
    """Acquire the remote tier of a run for an attempt that owns the run directory.

    Args:
        remote: The config's `checkpoint.remote`.
        attempt: Number of the attempt.
        identity: The run. If its directory adopts the run that owns the tier, the returned tier has the new identity.
        options: Options for `Objects`.

    Raises:
        OtherRunError: Another run owns the tier; neither its checkpoints nor its uploads are touched.
        CheckpointError: The store cannot be reached.
    """
    tier = find_tier(remote, identity, **options)
    if tier.objects.read(RESEALING) is not None:
        raise CheckpointError(
            "a change of the keys of these checkpoints is not finished, and some have the old key",
            where=tier.url,
            fix=f"headway checkpoints reseal {identity.run} with both keys, where it was begun",
        )
    identity = resolve_identity(tier, identity)
    acquired = tier.acquire(identity.run, attempt, identity)
    anchor_log(remote, identity.run)
    return acquired


def is_sent(remote: RemoteConfig, identity: RunIdentity, manifest: Manifest, **options: Any) -> bool:
    """Return whether a checkpoint is published in the run's remote tier.

    The store is asked only if the index does not list it. Otherwise, a lost or unwritable index would make every start
    of a finished run upload the checkpoint again.

    Args:
        remote: The config's `checkpoint.remote`.
        identity: The run.
        manifest: The local checkpoint.
        options: Options for `Objects`.
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
    except HeadwayError:  # the upload will report it
        return False
    return there is not None and there.state_sha256 == manifest.state_sha256 and tier.relation_of(there) == "own"


def resolve_identity(tier: RemoteTier, identity: RunIdentity) -> RunIdentity:
    """Check that a run owns a tier before the run acquires it, since that fences the present owner.

    The owner follows from the tier's own record and its claims, or else from its newest checkpoint. A tier without any
    id was written by an older version. It belongs to the run if any checkpoint there was made with a config that the
    run has had.

    Returns:
        The identity. A directory without checkpoints adopts the run that owns the tier, if config and data are the
        same: it continues that run on this machine. `RemoteTier.acquire` records that.

    Raises:
        OtherRunError: Another run owns the tier, or the owner is unknown.
        ConfigError: The newest checkpoint is encrypted, and cannot be read with the given key.
        CheckpointError: The store cannot be reached.
    """
    owner = tier.owner()
    claim = read_claim(identity.run)
    if owner is not None:
        identity = _as_owner(tier, identity, owner)
    was_here = owner is not None or (claim is not None and claim.url == tier.url)
    unreadable = None
    theirs = False
    for _, found in tier.look_through(reversed(tier.steps())):
        if not isinstance(found, Manifest):
            if was_here and isinstance(found, ConfigError):
                raise found  # with a new key, either key could read only a part of the run's checkpoints
            unreadable = found
            continue
        relation = identity.relation(found)
        made_by = run_record(found.context.get(OF_RUN))
        if relation == "other" and made_by is not None:
            if owner is not None:
                check_same_run(tier.url, identity, found)
            configs = frozenset({found.context.get(IDENTITY)})
            data = found.context.get("data")
            identity = _as_owner(tier, identity, PlaceOwner(made_by, configs, data, "as its newest checkpoint says"))
        elif relation == "unknown" and owner is None:
            theirs = True
            continue
        return identity
    if theirs:
        raise _other_config(tier)
    if unreadable is not None and not was_here:
        raise OtherRunError(
            f"the owner of the remote checkpoints under this run's name is unknown: {unreadable.what}",
            where=unreadable.where,
            fix=f"{unreadable.fix}; or choose another name=... or checkpoint.remote.url, or start over with --restart",
        )
    return identity


def _as_owner(tier: RemoteTier, identity: RunIdentity, owner: PlaceOwner) -> RunIdentity:
    """Return the identity with the owner's id, if the run is the owner or may continue it."""
    if owner.record["id"] == identity.id:
        return identity
    obstacle = identity.obstacle(owner.configs, owner.data)
    if obstacle is not None:
        raise other_run(tier.url, owner.record, f", {owner.claimed} ({obstacle})")
    return replace(identity, id=owner.record["id"])


def _other_config(tier: RemoteTier) -> OtherRunError:
    return OtherRunError(
        "the remote checkpoints under this run's name were made with another config: they belong to another run",
        where=tier.url,
        fix="choose another name=... or checkpoint.remote.url, or start over with --restart; to continue from them"
        " anyway, first `headway checkpoints restore` one, then train with --accept-changes",
    )
