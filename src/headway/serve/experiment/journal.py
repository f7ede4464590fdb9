"""What happened in an experiment: a folder whose journal is only ever appended to, and the state that follows from it.

    EXPERIMENT/journal.jsonl   begin, version, outcome and decision, one record a line, flushed before it counts
    EXPERIMENT/secret          proves identifiers of requests
    EXPERIMENT/lock            one server at a time

The state is a fold over the records, so a restart continues where the last record was.
"""

from __future__ import annotations

import secrets
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from headway.core.errors import CheckpointError, ConfigError, fix_for
from headway.core.files.atomic import append_json_line, atomic_write
from headway.core.files.foreign import RefusedJson, read_bytes, read_json_lines
from headway.core.files.locks import lock_file
from headway.serve.experiment.sequential import Counts, SequentialTest
from headway.serve.experiment.split import Split

JOURNAL = "journal.jsonl"
#: How late an outcome may be.
LATE_SECONDS = 7 * 24 * 3600.0


@dataclass(frozen=True)
class Plan:
    """What an experiment is about; the first record of its journal."""

    model: str
    split: Split
    test: SequentialTest


@dataclass(frozen=True)
class Outcome:
    """What came of a request."""

    request: str
    """Its identifier without the proof."""
    asked: float
    arm: int
    unit: str
    success: bool
    time: float


@dataclass(frozen=True)
class Decision:
    """Which arm was stopped, when and why."""

    winner: int
    loser: int
    time: float
    evidence: float
    counts: tuple[Counts, Counts]


@dataclass
class State:
    """What follows from the records so far.

    Attributes:
        seen: Requests with an outcome, by the time they were asked.
        units: Users that count already.
        since: The test counts requests from here on: since then the same versions answer.
    """

    plan: Plan | None = None
    begun: float = 0.0
    since: float = 0.0
    versions: list[tuple[float, int, str]] = field(default_factory=list)
    seen: dict[str, float] = field(default_factory=dict)
    units: set[str] = field(default_factory=set)
    counted: list[Counts] = field(default_factory=lambda: [Counts(), Counts()])
    posted: list[Counts] = field(default_factory=lambda: [Counts(), Counts()])
    decision: Decision | None = None

    def apply(self, record: Mapping[str, Any]) -> None:
        """Add a record.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        kind = record["kind"]
        if kind == "begin":
            arms = record["split"]["arms"]
            split = Split((str(arms[0]), str(arms[1])), float(record["split"]["share"]))
            self.plan = Plan(str(record["model"]), split, SequentialTest(**record["test"]))
            self.begun = self.since = float(record["time"])
        elif kind == "version":
            self._version(float(record["time"]), int(record["arm"]), str(record["version"]))
        elif kind == "outcome":
            self._outcome(Outcome(**{key: value for key, value in record.items() if key != "kind"}))
        elif kind == "decision":
            both = [Counts(**counts) for counts in record["counts"]]
            self.decision = Decision(
                int(record["winner"]),
                int(record["loser"]),
                float(record["time"]),
                float(record["evidence"]),
                (both[0], both[1]),
            )
        else:
            raise ValueError(f"unknown kind {kind}")

    def _version(self, time: float, arm: int, version: str) -> None:
        """Note the version of an arm. Another one begins the test anew, since its proportion is another."""
        present = self.version(arm)
        self.versions.append((time, arm, version))
        if present not in (None, version):
            self.since = time
            self.units.clear()
            self.counted = [Counts(), Counts()]

    def version(self, arm: int) -> str | None:
        """Return the version that an arm answers with."""
        return next((version for _, of, version in reversed(self.versions) if of == arm), None)

    def _outcome(self, outcome: Outcome) -> None:
        self.seen[outcome.request] = outcome.asked
        self.posted[outcome.arm] = _with(self.posted[outcome.arm], outcome.success)
        if self.counts(outcome):
            self.units.add(outcome.unit)
            self.counted[outcome.arm] = _with(self.counted[outcome.arm], outcome.success)

    def counts(self, outcome: Outcome) -> bool:
        """Return whether the test counts an outcome: the first of each user, asked of the present versions.

        The outcomes of one user are alike, and would be taken for more evidence than they are.
        """
        return self.decision is None and outcome.asked >= self.since and outcome.unit not in self.units

    def forget(self, now: float) -> None:
        """Forget requests whose outcomes would be late."""
        self.seen = {name: asked for name, asked in self.seen.items() if now - asked <= LATE_SECONDS}


def _with(counts: Counts, success: bool) -> Counts:
    return Counts(counts.outcomes + 1, counts.successes + success)


def read_state(folder: Path) -> State:
    """Return the state of an experiment.

    Raises:
        CheckpointError: a record was changed.
    """
    path = folder / JOURNAL
    state = State()

    def refused(problem: RefusedJson) -> None:
        raise _damaged(path, str(problem))

    for number, record in enumerate(read_json_lines(path, refused), 1):
        try:
            state.apply(record)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise _damaged(path, f"record {number} is none of an experiment ({error})") from None
    return state


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"the journal was changed: {why}", where=str(path), fix="restore it from a copy")


class Journal:
    """The journal of a running experiment, which no other server writes.

    Args:
        folder: Of the experiment; made if it is not there.

    Raises:
        ConfigError: another server uses it, or it cannot be written.
        CheckpointError: a record was changed.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / JOURNAL
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock: BinaryIO = lock_file(folder / "lock")
            self.key = _secret(folder / "secret")
        except BlockingIOError:
            raise ConfigError(
                "another server uses the folder", where=str(folder), fix="--experiment FOLDER of this server's own"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"the experiment cannot be kept: {error.strerror or error}",
                where=str(folder),
                fix=fix_for(error, "name another folder"),
            ) from error
        self.state = read_state(folder)

    def append(self, kind: str, **values: Any) -> None:
        """Add a record, which would survive a power cut when this returns.

        Raises:
            OSError: it cannot be written; then it does not count.
        """
        record = {"kind": kind, **values}
        append_json_line(self._path, record, flush=True)
        self.state.apply(record)

    def begin(self, plan: Plan, now: float) -> None:
        """Begin the experiment, or continue it.

        Raises:
            ConfigError: the folder has another one.
        """
        known = self.state.plan
        if known is None:
            values = asdict(plan)
            self.append("begin", time=now, **values)
        elif known != plan:
            raise ConfigError(
                f"the folder has another experiment: {known.model} with {known.split}, {known.test}",
                where=str(self._path),
                fix="--experiment FOLDER of a new one, or the options that it began with",
            )

    def close(self) -> None:
        """Leave the folder to another server."""
        self._lock.close()


def _secret(path: Path) -> bytes:
    if not path.exists():
        with atomic_write(path, private=True) as file:
            file.write(secrets.token_bytes(32))
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        path.chmod(0o600)
    return read_bytes(path, 1024)
