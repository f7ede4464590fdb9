"""Ownership of the remote tier: one run owns it, and only the newest attempt of that run may write.

    run-001/run.json               the run that owns the tier; made once, by a conditional put
    run-001/owners/00000001.json   the attempts that acquired the tier, one claim each
    run-001/newest.json            a hint; names the newest claim too

A claim is the fencing token of an attempt. Claims are numbered, and a conditional put (S3: If-None-Match) makes each
one, so that two attempts never get the same number. The attempt with the highest number is the owner. Before it
publishes or removes anything, it reads its own claim and looks for a later one. That needs no listing, since listings
may be stale.

Claims are plain objects, which a lifecycle rule or a clean-up may remove. So a new claim gets a higher number than any
that is listed, known to the run directory or named by the hint. An owner whose claim is gone writes it again under the
same number, with a warning, unless there is evidence of a later owner.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from headway.checkpoint.remote.objects import Objects, UnreachableError
from headway.checkpoint.run_identity import CLAIM_FILE, RUN_FILE, RunIdentity, in_words, run_record
from headway.core.console import warning
from headway.core.errors import CheckpointError, ConfigError
from headway.core.files.foreign import SETTINGS_BYTES, parse_json, read_bytes
from headway.core.machine.system import host_name
from headway.core.storage import highest
from headway.core.user_command import suggest

#: Marks a new run directory after `--restart`, which will create a new generation of the remote tier.
RESTARTED_FILE = ".restarted"
NEWEST = "newest.json"
OWNERS = "owners"
_CLAIM_NAME = re.compile(r"([0-9]{8,})\.json")


class FencedError(CheckpointError):
    """The error of an attempt that no longer owns the remote tier."""


class OtherRunError(ConfigError):
    """The error for a remote tier, or a checkpoint in it, that belongs to another run."""


@dataclass(frozen=True)
class Claim:
    """The record that an attempt acquired the remote tier."""

    url: str
    """URL of the generation."""
    number: int
    """Counted from 1."""
    token: str
    attempt: int
    host: str
    time: float
    run: Mapping[str, Any] | None = None
    """Id, name and seed of the run; None in claims of older versions."""
    config: str | None = None
    """Fingerprint of the run's config at that time."""
    data: str | None = None
    """Fingerprint of its data, if known."""

    def render(self) -> bytes:
        """Return the content of the claim's object."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, content: bytes) -> Claim | None:
        """Parse the content of a claim's object; None if it is unreadable."""
        try:
            claim = cls(**parse_json(content))
        except (ValueError, TypeError):
            return None
        right = isinstance(claim.number, int) and isinstance(claim.attempt, int) and isinstance(claim.time, int | float)
        return claim if right else None

    def __str__(self) -> str:
        who = f"attempt {self.attempt} on {self.host}"
        made_by = run_record(self.run)
        return who if made_by is None else f"{who} of {in_words(made_by)}"


@dataclass(frozen=True)
class PlaceOwner:
    """The run that owns a remote tier."""

    record: Mapping[str, Any]
    """Id, name and seed."""
    configs: frozenset[str | None]
    """Fingerprints of its config: the current one by its newest claim, or else the first one."""
    data: str | None
    claimed: str
    """The last attempt that acquired the tier, in words."""


def read_claim(run: Path) -> Claim | None:
    """Return the claim that a run directory records; None if there is no readable one."""
    try:
        return Claim.parse(read_bytes(run / CLAIM_FILE, SETTINGS_BYTES))
    except OSError:
        return None


def other_run(url: str, record: Mapping[str, Any], more: str = "", holds: str = "belongs to") -> OtherRunError:
    """Make the error of a run whose remote tier belongs to another run."""
    return OtherRunError(
        f"the remote tier {holds} {in_words(record)}{more}: nothing there is taken, replaced or removed",
        where=url,
        fix="choose another name=... or checkpoint.remote.url, or begin a new generation next to it with --restart; to"
        " continue that run here, first `headway checkpoints restore` it into a new run directory of its name",
    )


class TierOwnership:
    """Ownership of one generation of a run's remote tier.

    Args:
        objects: The folder of the generation.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def at(self, number: int) -> Claim | None:
        """Return the claim with a number; None if there is no such object.

        An unreadable object counts as a claim of an unknown attempt.
        """
        content = self._objects.read(claim_name(number))
        if content is None:
            return None
        return Claim.parse(content) or Claim(self._objects.url, number, "", 0, "an unknown host", 0.0)

    def last(self, known: int = 0) -> int:
        """Return the highest number of any claim that exists or is known to have existed; 0 if there never was one.

        Args:
            known: A number that is known to have existed.
        """
        number = self.hint().get("claim")
        start = max([known, number if isinstance(number, int) else 0, *self._listed()])
        # Listings may lag.
        return start + highest(lambda n: self._objects.read(claim_name(start + n)) is not None)

    def _listed(self) -> list[int]:
        names = self._objects.at(OWNERS).names()
        return [int(match[1]) for name in names if (match := _CLAIM_NAME.fullmatch(name))]

    def hint(self) -> dict[str, Any]:
        """Return the content of the hint; empty if there is no readable one."""
        try:
            found = parse_json(self._objects.read(NEWEST) or b"{}")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def owner(self) -> PlaceOwner | None:
        """Return the run that owns the tier; None if only its checkpoints can tell."""
        content = self._objects.read(RUN_FILE)
        try:
            first = parse_json(content) if content is not None else {}
        except ValueError:
            first = {}
        last = self.at(self.last())
        newest = None if last is None else run_record(last.run)
        record = (run_record(first) if isinstance(first, dict) else None) or newest
        if record is None:
            return None
        same = last is not None and newest is not None and newest["id"] == record["id"]
        config, data = (last.config, last.data) if same and last else (first.get("config"), first.get("data"))
        return PlaceOwner(record, frozenset({config}), data, "as it says there" if last is None else _when(last))

    def record_owner(self, identity: RunIdentity) -> None:
        """Record a run as the owner of the tier if there is no owner yet.

        Raises:
            OtherRunError: Another run owns the tier.
        """
        if identity.id is None:
            return
        facts = {"config": identity.config, "data": identity.data}
        record = {**identity.record(), **facts, "host": host_name(), "time": time.time()}
        content = self._objects.read(RUN_FILE)
        if content is None and self._objects.create(RUN_FILE, json.dumps(record).encode()):
            return
        try:
            found = run_record(parse_json(content or self._objects.read(RUN_FILE) or b"{}"))
        except ValueError:
            found = None
        if found is not None and found["id"] != identity.id:
            raise other_run(self._objects.url, found)

    def acquire(self, identity: RunIdentity, attempt: int, known: int) -> Claim:
        """Acquire the tier by making the next claim.

        Args:
            identity: The run.
            attempt: Number of the attempt.
            known: The number of a claim that is known to have existed.

        Raises:
            OtherRunError: Another run owns the tier.
            ConfigError: The store cannot prevent two attempts from sharing a claim.
        """
        self.record_owner(identity)
        number = self.last(known)
        while True:
            number += 1
            claim = Claim(
                self._objects.url,
                number,
                secrets.token_hex(8),
                attempt,
                host_name(),
                time.time(),
                None if identity.id is None else identity.record(),
                identity.config,
                identity.data,
            )
            if self._objects.create(claim_name(number), claim.render()):
                break
            faster = self.at(number)
            made_by = None if faster is None else run_record(faster.run)
            if made_by is not None and identity.id is not None and made_by["id"] != identity.id:
                raise other_run(self._objects.url, made_by)
        self._check_not_overwriting(claim_name(number))
        self.write_hint(claim)
        return claim

    def _check_not_overwriting(self, name: str) -> None:
        """Raise an error if the store overwrites an existing object in a conditional put.

        With such a store, each of two attempts would believe that it owns the tier.
        """
        if self._objects.local or not self._objects.create(name, b"{}"):
            return
        self._objects.remove([name])
        raise ConfigError(
            "the store overwrites existing objects in conditional puts (If-None-Match): two machines could write to one"
            " run at the same time",
            where=self._objects.url,
            fix="choose a store that supports conditional puts, or a folder that the machines mount (file://)",
        )

    def write_hint(self, claim: Claim, step: int | None = None) -> None:
        """Write the hint: the newest claim and the newest step; without a step, the previous one stays."""
        newest = self.hint().get("step") if step is None else step
        known = {} if newest is None else {"step": newest}
        by = {
            "claim": claim.number,
            "token": claim.token,
            "attempt": claim.attempt,
            "host": claim.host,
            "run": claim.run,
        }
        self._objects.write(NEWEST, json.dumps({**known, "time": time.time(), **by}).encode())

    def assert_held(self, claim: Claim, identity: RunIdentity, publishes: bool) -> None:
        """Raise an error unless a claim exists and is the newest.

        Args:
            claim: The claim of this process.
            identity: The run that made it.
            publishes: Whether the coming write makes something visible or removes it; the hint is checked too then.

        Raises:
            FencedError: There is a later claim, or another one in its place.
            OtherRunError: Another run owns the tier.
            CheckpointError: The store cannot be reached.
        """
        mine = self.at(claim.number)
        if mine is not None and mine.token != claim.token:
            raise self._lost_to(claim, mine)
        later = self.at(claim.number + 1)
        if later is not None:
            raise self._lost_to(claim, later)
        if publishes or mine is None:
            self._compare_with_hint(claim, is_gone=mine is None)
        if mine is None:
            self._restore_claim(claim, identity)

    def _compare_with_hint(self, claim: Claim, is_gone: bool) -> None:
        """Look for a later claim in the hint, which may outlive the claim itself.

        If this process's claim is gone, a foreign claim of any number counts: this process wrote the hint last, unless
        another attempt has acquired the tier since.
        """
        hint = self.hint()
        number = hint.get("claim")
        token = hint.get("token")
        if not isinstance(number, int):
            return
        if number > claim.number or (is_gone and token is not None and token != claim.token):
            by = f"attempt {hint.get('attempt')} on {hint.get('host')} has claimed them since (number {number})"
            raise self._lost(claim, hint.get("run"), by, by)

    def _restore_claim(self, claim: Claim, identity: RunIdentity) -> None:
        check_mount_not_emptied(self._objects, "this attempt")
        self.record_owner(identity)
        others = (self.at(number) for number in {*self._listed(), self.last()})
        for other in others:
            if other is not None and (other.number > claim.number or other.time > claim.time):
                raise self._lost_to(claim, other)
        name = claim_name(claim.number)
        if not self._objects.create(name, claim.render()):
            raise self._lost_to(claim, self.at(claim.number) or claim)
        self.write_hint(claim)
        warning(
            f"{self._objects.url_of(name)}, by which attempt {claim.attempt} owns the remote checkpoints, was removed"
            " and is made again; exclude owners/ from clean-ups and lifecycle rules, which headway doctor looks for:"
            f" {suggest('doctor')}"
        )

    def _lost_to(self, claim: Claim, by: Claim) -> FencedError | OtherRunError:
        return self._lost(claim, by.run, f"{by} does", _when(by))

    def _lost(self, claim: Claim, run: Any, who: str, since: str) -> FencedError | OtherRunError:
        made_by = run_record(run)
        mine = run_record(claim.run)
        if made_by is not None and mine is not None and made_by["id"] != mine["id"]:
            return other_run(self._objects.url, made_by, f", {since}")
        return FencedError(
            f"attempt {claim.attempt} no longer owns the remote checkpoints; {who}",
            where=self._objects.url,
            fix="stop this process; the other one continues the run",
        )


def check_mount_not_emptied(objects: Objects, who: str, fix: str = "if it was emptied on purpose, start again") -> None:
    """Raise an error if a folder on a mounted file system is empty: the file system is probably not mounted.

    Args:
        objects: The folder.
        who: The writer of its former content, for the message.
        fix: The advice if the folder was emptied on purpose.

    Raises:
        UnreachableError: The folder is empty.
    """
    if objects.local and not objects.names():
        raise UnreachableError(
            f"everything that {who} uploaded there is gone", where=objects.url, fix=f"mount the file system; {fix}"
        )


def claim_name(number: int) -> str:
    """Return the name of a claim's object."""
    return f"{OWNERS}/{number:08d}.json"


def _when(claim: Claim) -> str:
    try:
        at = datetime.fromtimestamp(claim.time).astimezone().isoformat(" ", "seconds")
    except (ValueError, OSError, OverflowError, TypeError):
        at = "an unknown time"
    return f"claimed by attempt {claim.attempt} on {claim.host} at {at}"
