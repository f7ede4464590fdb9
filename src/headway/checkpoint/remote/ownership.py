"""Who may write to the remote checkpoints of a run: the run that owns the place, and of its attempts the newest.

    run-001/run.json               whose the place is; made once, by a put that fails where there is one
    run-001/owners/00000001.json   who has claimed it, one object for each claim
    run-001/newest.json            a hint; names the newest claim too

Claims are numbered, and each is made by a put that fails where there is such an object already (S3: If-None-Match). The
owner is whoever made the one with the highest number. Before it publishes or removes anything, it reads its own claim
and looks for a later one. No listing is needed for that, and listings may be stale.

Claims are plain objects, which a lifecycle rule or a clean-up may remove. So a new claim gets a higher number than any
that is listed, known to the run directory or named by the hint. An owner whose own claim is gone makes it again under
the same number, loudly, unless anything there tells of somebody who has claimed the tier since.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from headway.checkpoint.remote.objects import Objects, UnreachableError
from headway.checkpoint.run_identity import CLAIM_FILE, RUN_FILE, RunIdentity, in_words, run_record
from headway.core.console import warning
from headway.core.errors import CheckpointError, ConfigError
from headway.core.foreign import SETTINGS_BYTES, parse_json, read_bytes
from headway.core.machine import host_name

#: In a new run directory after `--restart`: the wish to claim a generation of its own.
RESTARTED_FILE = ".restarted"
NEWEST = "newest.json"
OWNERS = "owners"
_CLAIM_NAME = re.compile(r"([0-9]{8,})\.json")


class FencedError(CheckpointError):
    """Another attempt has claimed the remote tier since."""


class OtherRunError(ConfigError):
    """The place, or what lies in it, belongs to another run."""


@dataclass(frozen=True)
class Claim:
    """Says whose the remote tier of a run is."""

    url: str
    """Of the run there, generation included."""
    number: int
    """Counted from 1."""
    token: str
    attempt: int
    host: str
    time: float
    run: Mapping[str, Any] | None = None
    """Id, name and seed of the run that claims; None in claims of older versions."""
    config: str | None = None
    """Fingerprint of the run's config at that time."""
    data: str | None = None
    """Fingerprint of its data, if that was known."""

    def render(self) -> bytes:
        """The content of the claim's object."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, content: bytes) -> Claim | None:
        """The claim in an object; None when it cannot be read."""
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
    """The run that owns a place."""

    record: Mapping[str, Any]
    """Id, name and seed."""
    configs: frozenset[str | None]
    """Fingerprints of its config: what it is now, as its newest claim tells, or else what it was at first."""
    data: str | None
    claimed: str
    """Who has claimed the place last, in words."""


def read_claim(run: Path) -> Claim | None:
    """The claim that a run directory knows of; None when there is none that can be read."""
    try:
        return Claim.parse(read_bytes(run / CLAIM_FILE, SETTINGS_BYTES))
    except OSError:
        return None


def other_run(url: str, record: Mapping[str, Any], more: str = "", holds: str = "belongs to") -> OtherRunError:
    """The error of a run that comes to the place of another one."""
    return OtherRunError(
        f"the remote place {holds} {in_words(record)}{more}: nothing there is taken, replaced or removed",
        where=url,
        fix="choose another name=... or checkpoint.remote.url, or begin a new generation beside it with --restart; to"
        " continue that run here, first `headway checkpoints restore` it into a new run directory of its name",
    )


class Claims:
    """The claims on one generation of a run's remote tier.

    Args:
        objects: The generation's folder there.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def at(self, number: int) -> Claim | None:
        """Return the claim of a number; None if there is no such object.

        An object that cannot be read is somebody's claim all the same.
        """
        content = self._objects.read(claim_name(number))
        if content is None:
            return None
        return Claim.parse(content) or Claim(self._objects.url, number, "", 0, "an unknown host", 0.0)

    def last(self, known: int = 0) -> int:
        """Return the highest number there is, or that there is known to have been; 0 if there never was a claim.

        Args:
            known: A number that has been there.
        """
        number = self.hint().get("claim")
        start = max([known, number if isinstance(number, int) else 0, *self._listed()])
        # Listings may be behind.
        return start + highest(lambda n: self._objects.read(claim_name(start + n)) is not None)

    def _listed(self) -> list[int]:
        names = self._objects.at(OWNERS).folders()
        return [int(match[1]) for name in names if (match := _CLAIM_NAME.fullmatch(name))]

    def hint(self) -> dict[str, Any]:
        """Return the content of the hint; empty if there is none that can be read."""
        try:
            found = parse_json(self._objects.read(NEWEST) or b"{}")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def owner(self) -> PlaceOwner | None:
        """Return the run that owns the place; None if nothing but its checkpoints can tell."""
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

    def settle_owner(self, identity: RunIdentity) -> None:
        """Make the place a run's own if it is nobody's.

        Raises:
            OtherRunError: it is another run's.
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

    def make(self, identity: RunIdentity, attempt: int, known: int) -> Claim:
        """Make the next claim.

        Args:
            known: The number of a claim that has been there.

        Raises:
            OtherRunError: the place is another run's.
            ConfigError: the store cannot keep two attempts from having one claim.
        """
        self.settle_owner(identity)
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
        """Try to make an object that is there once more: a store that does as if it were not there says so of claims
        too, and each attempt would take itself for the only one."""
        if self._objects.local or not self._objects.create(name, b"{}"):
            return
        self._objects.remove([name])
        raise ConfigError(
            "the store writes over what is there although it is asked not to (If-None-Match): two machines could send"
            " to one run at a time",
            where=self._objects.url,
            fix="choose a store that supports conditional puts, or a folder that the machines mount (file://)",
        )

    def write_hint(self, claim: Claim, step: int | None = None) -> None:
        """Write the hint: the newest claim, and the newest step, which stays if none is given."""
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
        """Make sure that a claim is there and is the newest.

        Args:
            claim: The one by which this process writes.
            identity: Whose it is.
            publishes: Something is about to become visible or to go: look at the hint too.

        Raises:
            FencedError: there is a later one, or another one in its place.
            OtherRunError: another run has the place.
            CheckpointError: the store cannot be reached.
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
            self._make_again(claim, identity)

    def _compare_with_hint(self, claim: Claim, is_gone: bool) -> None:
        """Look for a later claim in the hint, which may outlive the claim itself. Where the own claim is gone too, one
        of any number counts: this process wrote the hint last unless somebody has claimed the tier since."""
        hint = self.hint()
        number, token = hint.get("claim"), hint.get("token")
        if not isinstance(number, int):
            return
        if number > claim.number or (is_gone and token is not None and token != claim.token):
            by = f"attempt {hint.get('attempt')} on {hint.get('host')} has claimed them since (number {number})"
            raise self._lost(claim, hint.get("run"), by, by)

    def _make_again(self, claim: Claim, identity: RunIdentity) -> None:
        check_mount_not_emptied(self._objects, "this attempt")
        self.settle_owner(identity)
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
            " and is made again; keep clean-ups and lifecycle rules away from owners/ (headway doctor CONFIG looks"
            " for such rules)"
        )

    def _lost_to(self, claim: Claim, by: Claim) -> FencedError | OtherRunError:
        return self._lost(claim, by.run, f"{by} does", _when(by))

    def _lost(self, claim: Claim, run: Any, who: str, since: str) -> FencedError | OtherRunError:
        made_by, mine = run_record(run), run_record(claim.run)
        if made_by is not None and mine is not None and made_by["id"] != mine["id"]:
            return other_run(self._objects.url, made_by, f", {since}")
        return FencedError(
            f"attempt {claim.attempt} no longer owns the remote checkpoints; {who}",
            where=self._objects.url,
            fix="stop this process; the other one continues the run",
        )


def check_mount_not_emptied(objects: Objects, who: str, fix: str = "if it was emptied on purpose, start again") -> None:
    """Refuse a folder of a mounted file system in which nothing is left: its file system is probably not mounted.

    Raises:
        UnreachableError: it is one.
    """
    if objects.local and not objects.folders():
        raise UnreachableError(
            f"what {who} has sent there is gone", where=objects.url, fix=f"mount what belongs there; {fix}"
        )


def claim_name(number: int) -> str:
    """Name of a claim's object."""
    return f"{OWNERS}/{number:08d}.json"


def highest(there: Callable[[int], bool]) -> int:
    """Return the highest of numbers that are there from 1 on without gaps; 0 when there is none."""
    low, high = 0, 1
    while there(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if there(middle) else (low, middle)
    return low


def _when(claim: Claim) -> str:
    try:
        at = datetime.fromtimestamp(claim.time).astimezone().isoformat(" ", "seconds")
    except (ValueError, OSError, OverflowError, TypeError):
        at = "an unknown time"
    return f"claimed by attempt {claim.attempt} on {claim.host} at {at}"
