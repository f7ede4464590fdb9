"""The ledger: a record of the rows that the run has consumed, up to which checkpoint, in which attempt."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Any

from headway.checkpoint.skipped_ranges import Ranges
from headway.config.sections.segments import Segment, begin, up_to
from headway.core.errors import CheckpointError, fix_for
from headway.core.files.atomic import append_json_line
from headway.core.files.foreign import RefusedJson, read_json_lines
from headway.core.files.hashes import canonical_json, fingerprint
from headway.core.files.reserve import write_with_reserve
from headway.run.directory.ledger_beginning import BEGINNING, Beginning, parse_beginning

#: Action of a decision to take a checkpoint's word for the steps before it, of which nothing here tells.
TAKEN_OVER = "taken over"
#: The fingerprints of a task that rows follow from.
_OF_ROWS = ("data", "tokenizer")


@dataclass(frozen=True)
class Commit:
    """Steps `first_step` to `last_step` (exclusive, counted from 0) are part of a checkpoint."""

    attempt: int
    first_step: int
    last_step: int
    rows: dict[str, int]
    """Rows consumed per source."""
    checkpoint: str
    """Name of the checkpoint that they are part of."""
    plan: str | None = None
    """Fingerprint of the data and of the plan of rows up to these steps."""
    epoch_rows: int | None = None
    """Rows in one epoch of all sources, at the row length of the start."""


@dataclass(frozen=True)
class Rollback:
    """A return to an older checkpoint, whose later steps are trained again."""

    to_step: int
    reason: str
    struck: tuple[Commit, ...]
    """The commits that it has struck."""


@dataclass(frozen=True)
class LedgerDecision:
    """A decision about unhealthy steps (`training.health.decisions`)."""

    attempt: int
    first_step: int
    last_step: int
    """Exclusive."""
    action: str
    """`warn`, `skip` (without the update), `rollback` (the rows are skipped for ever), `stop` or `taken over`."""
    reason: str


@dataclass(frozen=True)
class SegmentStart:
    """A segment of the run (`headway.config.sections.segments`), begun by an attempt."""

    attempt: int
    segment: dict[str, Any]

    @property
    def first_step(self) -> int:
        """The first step of the segment."""
        return int(self.segment["first_step"])


class UnwritableLedger(CheckpointError):
    """A line cannot be written, for example on a full disk, or the lines before it cannot be read."""


class UnreadableLedger(CheckpointError):
    """The content of the ledger cannot be read."""


class Ledger:
    """`ledger.jsonl`: one line per commit, rollback or decision, only ever appended to.

    A line that a kill has cut off counts as not written; the caller, who knows the newest checkpoint, then commits
    those steps again. A line that was written has reached the disk, so a decision is known before it is carried out,
    even to the attempt after a power cut.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def commits(self) -> list[Commit]:
        """Return the commits in force, without those rolled back; they join from step 0 without gap or overlap.

        Raises:
            CheckpointError: The lines do not join, so the ledger is broken.
        """
        return self.history()[0]

    def history(self) -> tuple[list[Commit], list[Rollback]]:
        """Return the commits in force, and the rollbacks.

        Raises:
            CheckpointError: The lines do not join, so the ledger is broken.
        """
        commits: list[Commit] = []
        rollbacks: list[Rollback] = []
        for record in self._records():
            try:
                if record["kind"] == "decision":
                    _decision_of(record)
                    continue
                if record["kind"] in ("goodput", "segment", BEGINNING):
                    continue
                if record["kind"] == "rollback":
                    struck = tuple(commit for commit in commits if commit.last_step > record["to_step"])
                    rollbacks.append(Rollback(record["to_step"], str(record["reason"]), struck))
                    commits = commits[: len(commits) - len(struck)]
                    continue
                commit = _commit_of(record)
                joined = commit.first_step == (commits[-1].last_step if commits else 0) < commit.last_step
            except (AttributeError, KeyError, TypeError, ValueError):
                raise self._broken(f"holds a line that is no commit: {record}") from None
            if not joined:
                raise self._broken(f"has a gap or an overlap before step {commit.first_step}")
            commits.append(commit)
        return commits, rollbacks

    def decisions(self) -> list[LedgerDecision]:
        """Return the decisions about steps, each once, even if later attempts repeat them.

        A decision to skip rows concerns the rows of its steps at that time. It ends where a segment gives these steps
        other rows.

        Raises:
            CheckpointError: A line is broken.
        """
        found: dict[tuple[int, int, str], LedgerDecision] = {}
        segments: list[Segment] = []
        for record in self._records():
            if record.get("kind") == "decision":
                try:
                    decision = _decision_of(record)
                except (KeyError, TypeError, ValueError):
                    raise self._broken(f"holds a line that is no decision: {record}") from None
                found.setdefault(_key(decision), decision)
            elif record.get("kind") == "segment":
                try:
                    segments, step = begin(segments, Segment.model_validate(record["segment"]))
                except (KeyError, TypeError, ValueError):
                    raise self._broken(f"holds a line that is no segment: {record}") from None
                found = {_key(part): part for one in found.values() for part in _up_to(one, step)}
        return list(found.values())

    def segments(self) -> list[SegmentStart]:
        """Return the segments in force: each replaces all earlier ones from its first step on.

        Raises:
            CheckpointError: A line is broken.
        """
        found: list[SegmentStart] = []
        for record in self._records():
            if record.get("kind") == "segment":
                try:
                    start = SegmentStart(int(record["attempt"]), dict(record["segment"]))
                    found = [earlier for earlier in found if earlier.first_step < start.first_step]
                except (KeyError, TypeError, ValueError):
                    raise self._broken(f"holds a line that is no segment: {record}") from None
                found.append(start)
        return found

    def beginnings(self) -> list[Beginning]:
        """Return the beginnings from checkpoints of other runs: this run's own is the last one, if it has one.

        The others are those of the runs before it, in the same order.

        Raises:
            CheckpointError: A line is broken, or the lines before one are not those that were copied.
        """
        found: list[Beginning] = []
        before: list[dict[str, Any]] = []
        for record in self._records():
            if record.get("kind") == BEGINNING:
                try:
                    begun = parse_beginning(record)
                except (KeyError, TypeError, ValueError):
                    raise self._broken(f"holds a line that is no beginning: {record}") from None
                if fingerprint(before) != begun.lines_sha256:
                    raise self._broken(f"has other lines up to step {begun.step} than were copied from {begun.place}")
                found.append(begun)
            before.append(record)
        return found

    def lines_up_to(self, step: int) -> list[dict[str, Any]]:
        """Return the lines that stand for the rows up to a step, for the ledger of a run that begins there.

        Returns:
            Lines copied from other ledgers as they are, and those of this run without what was rolled back. Empty if
            no commit ends at the step.

        Raises:
            CheckpointError: The ledger is broken.
        """
        # The lines up to the last beginning.
        copied: list[dict[str, Any]] = []
        since: list[dict[str, Any]] = []
        for record in self._records():
            since.append(record)
            if record.get("kind") == BEGINNING:
                copied += since
                since = []
        known = {canonical_json({key: value for key, value in line.items() if key != "time"}) for line in copied}
        commits = [commit for commit in self.commits() if commit.last_step <= step]
        if not commits or commits[-1].last_step != step:
            return []
        lines = [
            *({"kind": "segment", **vars(start)} for start in self.segments() if start.first_step < step),
            *({"kind": "decision", **vars(one)} for one in self.decisions() if one.first_step < step),
            *({"kind": "commit", **_without_unknown(commit)} for commit in commits),
        ]
        return [*copied, *(line for line in lines if canonical_json(line) not in known)]

    def begin_segment(self, attempt: int, segment: Mapping[str, Any]) -> None:
        """Record a segment, which replaces all others from its first step on.

        Raises:
            UnwritableLedger: The line cannot be written.
        """
        self._append({"kind": "segment", "attempt": attempt, "segment": dict(segment)})

    @property
    def committed_step(self) -> int:
        """Number of steps that are part of a checkpoint; 0 for an empty or missing ledger."""
        commits = self.commits()
        return commits[-1].last_step if commits else 0

    def step_to_follow(self) -> int:
        """Return `committed_step` before a new line is written.

        Raises:
            UnwritableLedger: The ledger cannot be read.
        """
        try:
            return self.committed_step
        except UnreadableLedger as error:
            why = error.__cause__
            raise self._unwritable(why if isinstance(why, OSError) else OSError(error.what)) from error

    def commit(
        self,
        attempt: int,
        first_step: int,
        last_step: int,
        rows_by_source: Mapping[str, int],
        checkpoint: str,
        *,
        plan: str | None = None,
        epoch_rows: int | None = None,
    ) -> None:
        """Record that the steps `first_step` to `last_step` (exclusive) are part of a checkpoint.

        Raises:
            UnwritableLedger: The line cannot be written.
            CheckpointError: The steps do not follow `committed_step`.
        """
        committed = self.step_to_follow()
        if not committed == first_step < last_step:
            raise CheckpointError(
                f"steps {first_step} to {last_step} cannot be committed after step {committed}",
                where=str(self.path),
                fix="this is a mistake in the program that writes the ledger",
            )
        commit = Commit(attempt, first_step, last_step, dict(rows_by_source), checkpoint, plan, epoch_rows)
        self._append({"kind": "commit", **_without_unknown(commit)})

    def decide(self, attempt: int, first_step: int, last_step: int, action: str, reason: str) -> None:
        """Record a decision about the steps `first_step` to `last_step` (exclusive).

        Raises:
            UnwritableLedger: The line cannot be written.
        """
        decision = LedgerDecision(attempt, first_step, last_step, action, reason)
        self._append({"kind": "decision", **vars(decision)})

    def rollback(self, to_step: int, reason: str) -> None:
        """Strike the commits beyond `to_step`: the run resumes from an older checkpoint and consumes these rows again.

        Raises:
            UnwritableLedger: The line cannot be written.
        """
        self._append({"kind": "rollback", "to_step": to_step, "reason": reason})

    def note_goodput(
        self, attempt: int, ratio: float, lost_seconds: Mapping[str, float], lost_steps: Mapping[int, int]
    ) -> None:
        """Record the goodput up to the start of an attempt (`telemetry.goodput`).

        Args:
            attempt: The attempt that has started.
            ratio: Share of productive time, 0 to 1.
            lost_seconds: Lost time by cause.
            lost_steps: Number of lost steps, by the attempt that trained them.

        Raises:
            UnwritableLedger: The line cannot be written.
        """
        seconds = {cause: round(lost, 3) for cause, lost in lost_seconds.items() if lost >= 0.0005}
        lost = {"lost_seconds": seconds, "lost_steps": {str(by): steps for by, steps in lost_steps.items()}}
        self._append({"kind": "goodput", "attempt": attempt, "ratio": round(ratio, 4), **lost})

    def _records(self) -> Iterator[dict[str, Any]]:
        try:
            yield from read_json_lines(self.path, self._refuse)
        except OSError as error:
            what = f"the ledger cannot be read: {error.strerror or error}"
            fix = "see to its disk, or restore ledger.jsonl from a copy"
            raise UnreadableLedger(what, where=str(self.path), fix=fix) from error

    def _refuse(self, problem: RefusedJson) -> None:
        """Refuse a line that means one thing to one reader and another to the next; skipped, it would be lost."""
        raise self._broken(f"holds a line that {problem}")

    def _append(self, record: dict[str, Any]) -> None:
        try:
            line = {**record, "time": time.time()}
            write_with_reserve(self.path.parent, lambda: append_json_line(self.path, line, flush=True))
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> UnwritableLedger:
        return UnwritableLedger(
            f"the ledger cannot be written: {error.strerror or error}",
            where=str(self.path),
            fix=fix_for(error, "make room there, then run the same command again; the checkpoint itself is safe"),
        )

    def _broken(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"the ledger {what}",
            where=str(self.path),
            fix="restore ledger.jsonl from a copy, or choose another name=... for a new run",
        )


def plan_fingerprint(
    plan: Mapping[str, Any],
    last_step: int,
    fingerprints: Mapping[str, str],
    segments: Sequence[Segment],
    *,
    with_others: bool = False,
) -> str:
    """Return the fingerprint of the plan of rows up to a step, for a commit.

    Rows follow from the data as it was in these steps, and from the description of the plan. Whatever else a task is
    made of (a pretrained model, a teacher, a loss) moves no row; its checkpoints record that.

    Args:
        plan: Description of the plan, from the feed's `describe(last_step)`.
        last_step: The step after the last one.
        fingerprints: Fingerprints of the task.
        segments: The segments of the run, which may have begun with other data.
        with_others: Include all fingerprints of the task, as older ledgers do.
    """
    of_rows = {kind: value for kind, value in fingerprints.items() if with_others or kind in _OF_ROWS}
    begun = [segment for segment in segments if segment.first_step < max(1, last_step)]
    if begun:
        of_rows["data"] = begun[-1].data
    return fingerprint({"data": of_rows, "plan": dict(plan)})


def decided(ledger: Ledger) -> Ranges:
    """Return the skipped ranges that the ledger records."""
    return tuple(sorted((d.first_step, d.last_step) for d in ledger.decisions() if d.action == "rollback"))


def merged_ranges(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge ranges into ones that cover the same steps without overlaps."""
    result: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if result and first <= result[-1][1]:
            result[-1] = result[-1][0], max(last, result[-1][1])
        else:
            result.append((first, last))
    return result


def _key(decision: LedgerDecision) -> tuple[int, int, str]:
    return decision.first_step, decision.last_step, decision.action


def _up_to(decision: LedgerDecision, step: int | None) -> Iterator[LedgerDecision]:
    """Yield the part of a decision before a step, from which on steps have other rows."""
    if decision.action != "rollback":
        yield decision
        return
    for first, last in up_to([(decision.first_step, decision.last_step)], step):
        yield replace(decision, first_step=first, last_step=last)


def _decision_of(record: dict[str, Any]) -> LedgerDecision:
    """Parse the decision in a line of the ledger; raise `KeyError` or `ValueError` if there is none."""
    decision = LedgerDecision(**{name: record[name] for name in LedgerDecision.__dataclass_fields__})
    if not (_is_count(decision.attempt) and isinstance(decision.action, str) and isinstance(decision.reason, str)):
        raise ValueError("not a decision's values")
    if not 0 <= decision.first_step < decision.last_step:
        raise ValueError("no steps")
    return decision


def _commit_of(record: dict[str, Any]) -> Commit:
    """Parse the commit in a line of the ledger; raise `KeyError`, `AttributeError` or `ValueError` if there is none."""
    fields = Commit.__dataclass_fields__.values()
    values: dict[str, Any] = {f.name: record[f.name] if f.default is MISSING else record.get(f.name) for f in fields}
    commit = Commit(**values)
    counts = (commit.attempt, commit.first_step, commit.last_step, *commit.rows.values())
    texts = (commit.checkpoint, commit.plan or "", *commit.rows)
    if not (all(map(_is_count, counts)) and all(isinstance(text, str) for text in texts)):
        raise ValueError("not a commit's values")
    if commit.epoch_rows is not None and not _is_count(commit.epoch_rows):
        raise ValueError("not a number of rows")
    return commit


def _without_unknown(commit: Commit) -> dict[str, Any]:
    return {name: value for name, value in vars(commit).items() if value is not None}


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63
