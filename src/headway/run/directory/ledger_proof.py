"""A proof, from a run directory, its config and its token store, that every row of the plan was used exactly once.

The ledger records which steps are part of a checkpoint, and how many rows of each source they took. The config and the
store's manifest determine which rows these were. The proof combines both. The commits must join from step 0 to the last
checkpoint, each by an attempt that trained its steps. The recomputed rows must be as many as each commit records.
Within every epoch of every source, no row may be used twice or left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from headway.checkpoint.run_identity import RUN_ID, in_words, run_record
from headway.config import Config, DataConfig, load_resolved
from headway.config.sections.segments import Segment, up_to
from headway.core.console import progress
from headway.core.errors import CheckpointError, HeadwayError
from headway.core.format import plural
from headway.data.feeding.plan import RowPlan
from headway.data.feeding.segmented import dataset_plan, describe_rows, plan_of
from headway.data.feeding.training_rows import training_rows
from headway.data.pinned import pinned
from headway.data.remote_store import open_store
from headway.run.directory.beginning import beginning_problems
from headway.run.directory.ledger import (
    TAKEN_OVER,
    Commit,
    Ledger,
    LedgerDecision,
    Rollback,
    SegmentStart,
    merged_ranges,
    plan_fingerprint,
)
from headway.run.directory.ledger_beginning import AttemptSteps, Beginning
from headway.run.directory.ledger_run import checkpoints_of_others, manifest_of, recorded_facts, restored_from_others
from headway.run.directory.row_count import EpochCount, RowCount, count_by_looking, count_by_plan, without
from headway.telemetry.record import Run, as_int, as_text, dig, open_run

#: Largest number of rows, of the run or of an epoch of all sources, for which every row is checked by default.
LOOK_AT = 100_000_000


@dataclass
class LedgerProof:
    """The result of checking a ledger. The run's rows are proven if there are no problems."""

    run: Path
    run_id: str | None = None
    """None for a run of an older version."""
    commits: list[Commit] = field(default_factory=list)
    rollbacks: list[Rollback] = field(default_factory=list)
    decisions: list[LedgerDecision] = field(default_factory=list)
    """Decisions about unhealthy steps; those to skip rows are part of the proof."""
    segments: list[SegmentStart] = field(default_factory=list)
    """Segments of a run that was changed; the rows of each follow from its own plan."""
    beginnings: list[Beginning] = field(default_factory=list)
    """Checkpoints of other runs from which this run, and those before it, began."""
    taken_over: list[Commit] = field(default_factory=list)
    """Commits whose steps were trained elsewhere: the run continues from a checkpoint of another disk."""
    restored: list[str] = field(default_factory=list)
    """Checkpoints of other runs that were restored into this one by hand, in words."""
    checkpoint_step: int | None = None
    """The newest checkpoint; None if there is none."""
    not_updated: int = 0
    """Steps without an update, as the newest checkpoint counts them: their rows were read but changed no weight."""
    epochs: list[EpochCount] = field(default_factory=list)
    looked_at: int = 0
    """Number of rows checked one by one; 0 if counts were enough."""
    problems: list[str] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Number of steps that the proof covers."""
        return self.commits[-1].last_step if self.commits else 0

    @property
    def rows(self) -> int:
        """Number of rows in the commits in force."""
        return sum(sum(commit.rows.values()) for commit in self.commits)

    @property
    def skipped_ranges(self) -> list[tuple[int, int]]:
        """Half-open ranges of steps whose rows are skipped by decision."""
        return merged_ranges([(d.first_step, d.last_step) for d in self.decisions if d.action == "rollback"])

    @property
    def basis(self) -> list[str]:
        """The checks that the proof rests on, in words."""
        if not self.epochs:
            return []
        looked = f"each of the {self.looked_at:,} rows was checked, epoch by epoch"
        not_looked = (
            "rows were counted, not checked one by one (--every-row): a source's rows have consecutive positions,"
            " and an epoch's order is a bijection by construction (a Feistel network with cycle walking)"
        )
        return [
            "commits join from step 0 to the newest checkpoint, each by an attempt that did its steps",
            *_begun(self.beginnings),
            *(self._taken_over(commit) for commit in self.taken_over),
            *self.restored,
            "the rows of each source in every commit are as many as the plan has, recomputed",
            *(
                ["rows are those of each segment's own plan, and epochs continue across its border"]
                if self.segments
                else []
            ),
            looked if self.looked_at else not_looked,
            *([self._without_update()] if self.not_updated else []),
        ]

    def _taken_over(self, commit: Commit) -> str:
        return (
            f"but steps {commit.first_step:,} to {commit.last_step - 1:,} were trained elsewhere: only"
            f" {commit.checkpoint} records that"
        )

    def _without_update(self) -> str:
        skipped = (range(d.first_step, d.last_step) for d in self.decisions if d.action == "skip")
        # Later attempts repeat steps, and the ledger may be ahead of the checkpoint.
        named = len({step for steps in skipped for step in steps if step < (self.checkpoint_step or 0)})
        return (
            f"not all rows were trained on: {self.not_updated:,} {plural(self.not_updated, 'step')} had no update (a"
            f" decision to skip, an overflow in fp16, or no trained token), as the newest checkpoint counts; the ledger"
            f" names {named:,}"
        )


def prove(run: Path, store: Path | None = None, every_row: bool | None = None) -> LedgerProof:
    """Check the ledger of a run.

    Args:
        run: The run directory.
        store: The token store; the config's if None.
        every_row: Whether to check every row one by one, or only counts; None decides by the number of rows.

    Raises:
        CheckpointError: There is no run.
    """
    record = open_run(run)
    proof = LedgerProof(run)
    try:
        ledger = Ledger(run / "ledger.jsonl")
        proof.commits, proof.rollbacks = ledger.history()
        proof.decisions = ledger.decisions()
        proof.segments = ledger.segments()
        proof.beginnings = ledger.beginnings()
    except CheckpointError as error:
        proof.problems.append(error.what)
        return proof
    proof.taken_over = _taken_over(proof, record)
    proof.run_id = as_text(record.facts.get(RUN_ID))
    begun_at = {begun.step for begun in proof.beginnings}
    proof.restored = list(restored_from_others(record, begun_at))
    proof.checkpoint_step = max((checkpoint.step for checkpoint in record.checkpoints), default=None)
    if proof.checkpoint_step is not None:
        cursor = dig(manifest_of(record, proof.checkpoint_step), "cursor")
        proof.not_updated = sum(as_int(dig(cursor, key)) or 0 for key in ("skipped_steps", "steps_without_target"))
    proof.problems += [
        *_ends_problems(proof),
        *_attempt_problems(proof, record),
        *checkpoints_of_others(record, {commit.last_step for commit in proof.taken_over}),
        *beginning_problems(run, proof.beginnings),
        *_decision_problems(proof, record),
    ]
    if not proof.commits:
        return proof
    try:
        config = load_resolved(record.path / "config.yaml")
        plan, fingerprints = _plan(config, record, proof.commits, store)
        ranges = [(commit.first_step, commit.last_step) for commit in proof.commits]
        counted = without(plan, _counted(plan, ranges, every_row, proof), ranges, proof.skipped_ranges)
    except (HeadwayError, IndexError) as error:
        what = error.what if isinstance(error, HeadwayError) else str(error)
        proof.problems.append(f"the rows cannot be recomputed: {what}")
        return proof
    proof.epochs = counted.epochs
    proof.problems += [
        *_segment_problems(proof, config.segments),
        *_plan_problems(proof.commits, fingerprints),
        *_count_problems(proof.commits, plan, counted),
        *_epoch_problems(counted),
    ]
    return proof


def _ends_problems(proof: LedgerProof) -> Iterator[str]:
    newest = proof.checkpoint_step
    steps = proof.steps
    if not proof.commits:
        yield "the ledger has no commit"
    if newest is not None and newest > steps:
        yield (
            f"checkpoint step-{newest:08d} is not in the ledger, which ends at step {steps:,}"
            " (the next attempt commits it; until then its rows are not proven)"
        )
    if proof.commits and (newest is None or newest < steps):
        found = "there is none" if newest is None else f"the newest is of step {newest:,}"
        yield f"the ledger goes up to checkpoint {proof.commits[-1].checkpoint}, but {found}"


def _decision_problems(proof: LedgerProof, record: Run) -> Iterator[str]:
    """Yield differences between the skipped ranges of the newest checkpoint and the decisions in the ledger."""
    step = proof.checkpoint_step
    if step is None:
        return
    manifest = manifest_of(record, step)
    skipped = dig(manifest, "context", "left_out") or []
    # A change of the run may have cut a range short right after the checkpoint.
    made_with = set(up_to([(int(first), int(last)) for first, last in skipped], step))
    decided = set(up_to([(d.first_step, d.last_step) for d in proof.decisions if d.action == "rollback"], step))
    for first, last in sorted(made_with - decided):
        yield f"step-{step:08d} skips steps {first:,} to {last - 1:,}, for which the ledger has no decision"
    for first, last in sorted(decided - made_with):
        yield f"step-{step:08d} was trained on the rows of steps {first:,} to {last - 1:,}, which the ledger skips"


def _attempt_problems(proof: LedgerProof, record: Run) -> Iterator[str]:
    saved_by = {checkpoint.step: checkpoint.attempt for checkpoint in record.checkpoints}
    for begun, commits in groupby(proof.commits, lambda commit: _run_of(commit, proof)):
        attempts = _attempts(begun, record)
        newest = 0
        for commit in commits:
            steps = f"steps {commit.first_step:,} to {commit.last_step - 1:,}"
            if commit.checkpoint != f"step-{commit.last_step:08d}":
                yield f"{steps} are recorded in {commit.checkpoint}, which is of another step"
            by = saved_by.get(commit.last_step)
            if by is not None and by != commit.attempt:
                yield f"{steps} are recorded for attempt {commit.attempt}, but {commit.checkpoint} is of attempt {by}"
            if commit in proof.taken_over:
                yield from _taker_problems(commit, proof, attempts)
                continue
            attempt = attempts.get(commit.attempt)
            if attempt is None:
                yield f"{steps} are recorded for attempt {commit.attempt}, which the run never had"
                continue
            if commit.attempt < newest:
                yield f"{steps} are recorded for attempt {commit.attempt}, after ones of attempt {newest}"
            first = attempt.first_step
            last = attempt.last_step
            if newest < commit.attempt and first is not None and first < commit.first_step:
                # A rollback would have struck the earlier attempts' commits of these steps.
                again = f"steps {first:,} to {commit.first_step - 1:,}"
                yield f"attempt {commit.attempt} did {again} again, which the ledger still records from before"
            newest = max(newest, commit.attempt)
            if (first is not None and commit.first_step < first) or (last is not None and commit.last_step > last):
                yield f"{steps} are recorded for attempt {commit.attempt}, which did steps {first} to {(last or 0) - 1}"


def _run_of(commit: Commit, proof: LedgerProof) -> Beginning | None:
    """Return the beginning up to which another run did the steps of a commit; None if this run did them."""
    copied = (begun for begun in proof.beginnings if begun.attempts)
    return next((begun for begun in copied if commit.last_step <= begun.step), None)


def _attempts(begun: Beginning | None, record: Run) -> dict[int, AttemptSteps]:
    """Return the attempts of the run that did the steps up to a beginning, or of this run, by number."""
    if begun is not None:
        return {attempt.number: attempt for attempt in begun.attempts}
    return {one.number: AttemptSteps(one.number, one.first_step, one.last_step) for one in record.attempts}


def _taken_over(proof: LedgerProof, record: Run) -> list[Commit]:
    """Return the commits that were taken over, without those whose steps an attempt here trained.

    Steps of an attempt here need the same proof as all others, whatever the ledger records.
    """
    recorded = {(d.first_step, d.last_step) for d in proof.decisions if d.action == TAKEN_OVER}
    found = []
    for commit in proof.commits:
        attempt = _attempts(_run_of(commit, proof), record).get(commit.attempt)
        is_done_here = attempt is not None and attempt.has_done(commit.last_step)
        if (commit.first_step, commit.last_step) in recorded and not is_done_here:
            found.append(commit)
    return found


def _taker_problems(commit: Commit, proof: LedgerProof, attempts: Mapping[int, AttemptSteps]) -> Iterator[str]:
    claim = f"steps {commit.first_step:,} to {commit.last_step - 1:,} are recorded as taken over by attempt"
    for decision in proof.decisions:
        of = (decision.action, decision.first_step, decision.last_step)
        if of != (TAKEN_OVER, commit.first_step, commit.last_step):
            continue
        taker = attempts.get(decision.attempt)
        if taker is None:
            yield f"{claim} {decision.attempt}, which the run never had"
        elif taker.first_step is not None and taker.first_step < commit.last_step:
            yield f"{claim} {decision.attempt}, which began with step {taker.first_step:,}"


def _begun(beginnings: Sequence[Beginning]) -> Iterator[str]:
    """Describe beginnings from other runs' checkpoints, as part of the basis of a proof."""
    first = 0
    for begun in beginnings:
        made_by = run_record(begun.run)
        other = begun.place if made_by is None else in_words(made_by)
        manifest = f"step-{begun.step:08d} (manifest {begun.manifest_sha256[:12]})"
        if begun.attempts:
            steps = f"steps {first:,} to {begun.step - 1:,}"
            yield f"{steps} are those of {other}: its ledger was copied with its checkpoint {manifest}"
        else:
            yield f"but the run continues from {manifest} of {other}, whose ledger did not reach it"
        first = begun.step


def _plan(
    config: Config, record: Run, commits: list[Commit], store: Path | None
) -> tuple[RowPlan, Callable[[int], set[str]]]:
    """Return the plan, and a function that gives the plan fingerprints that a commit up to a step may have."""
    recorded = str(dig(record.facts, "fingerprints", "data"))
    if dig(record.facts, "fingerprints", "tokenizer") is None:
        # A run of a task of its own: without segments only the ledger records the length of its dataset.
        rows = next((commit.epoch_rows for commit in commits if commit.epoch_rows), None)
        if rows is None:
            raise CheckpointError("the ledger does not say how many rows the dataset has")
        plan = dataset_plan(config.row_settings, rows)
        return plan, lambda step: {plan_fingerprint(plan.describe(step), step, {"data": recorded}, config.segments)}
    place = {"store": _store_path(config.data, record, store), "remote": None if store else config.data.remote}
    opened = open_store(config.data.model_copy(update=place), check=False)
    opened = pinned(opened, record.path, config.segments[-1].data if config.segments else recorded, check=False)
    split = training_rows(config.data, config.train.sequence_length, opened, config.segments)
    plan = plan_of(config.row_settings, split)
    found = {"data": opened.fingerprint, "tokenizer": opened.tokenizer_fingerprint}
    tasks = [{**task, **found} for task in _recorded_tasks(record)]

    def fingerprints(step: int) -> set[str]:
        rows = describe_rows(plan, split, step)
        older = {plan_fingerprint(rows, step, task, config.segments, with_others=True) for task in tasks}
        return {plan_fingerprint(rows, step, found, config.segments), *older}

    return plan, fingerprints


def _recorded_tasks(record: Run) -> list[dict[str, str]]:
    """Return the fingerprints of the tasks of the run's attempts, each once."""
    tasks: list[dict[str, str]] = []
    for facts in recorded_facts(record):
        found = dig(facts, "fingerprints")
        if isinstance(found, dict):
            task = {kind: value for kind, value in found.items() if kind != "config"}
            if task not in tasks:
                tasks.append(task)
    return tasks


def _store_path(data: DataConfig, record: Run, store: Path | None) -> Path:
    """Return the path of the store; a relative path starts from the folder in which the run was started."""
    folder = record.facts.get("folder")
    places = [store] if store else [*([Path(folder)] if isinstance(folder, str) else []), Path()]
    paths = [place if store else place / data.store for place in places]
    return next((path for path in paths if path.is_dir()), paths[-1])


def _counted(plan: RowPlan, ranges: list[tuple[int, int]], every_row: bool | None, proof: LedgerProof) -> RowCount:
    stretches = list(plan.stretches(0, ranges[-1][1]))
    rows = sum(plan.counts(0, ranges[-1][1]))
    if every_row is None:
        every_row = max(rows, *(sum(plan.epoch_rows(first)) for first, _ in stretches)) <= LOOK_AT
    if not every_row:
        return count_by_plan(plan, ranges)
    with progress("checking rows", rows, "rows") as bar:
        counted = count_by_looking(plan, ranges, bar.advance)
    proof.looked_at = rows
    return counted


def _segment_problems(proof: LedgerProof, segments: Sequence[Segment]) -> Iterator[str]:
    if segments and [*segments] != [Segment.model_validate(start.segment) for start in proof.segments]:
        yield "the segments in the ledger differ from those in the run's config"


def _plan_problems(commits: list[Commit], fingerprints: Callable[[int], set[str]]) -> Iterator[str]:
    for commit in commits:
        if commit.plan is not None and commit.plan not in fingerprints(commit.last_step):
            yield (
                f"steps {commit.first_step:,} to {commit.last_step - 1:,} were done with another plan of rows"
                " (another seed, batch, mixture or store than the run's config has for them)"
            )


def _count_problems(commits: list[Commit], plan: RowPlan, counted: RowCount) -> Iterator[str]:
    for commit, counts in zip(commits, counted.by_range, strict=True):
        pairs = zip(plan.sources, counts, strict=True)
        wanted = {name: rows for name, rows in pairs if rows or name in commit.rows}  # a source may have joined later
        if commit.rows != wanted:
            steps = f"steps {commit.first_step:,} to {commit.last_step - 1:,}"
            yield f"{steps}: the ledger counts {_listed(commit.rows)}, the plan has {_listed(wanted)}"


def _epoch_problems(counted: RowCount) -> Iterator[str]:
    for epoch in counted.epochs:
        if not epoch.sound:
            yield (
                f"epoch {epoch.first_epoch} of source '{epoch.source}' has {epoch.twice:,} rows more than once and"
                f" misses {epoch.skipped:,}"
            )


def _listed(rows: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} of {name}" for name, count in rows.items()) or "none"
