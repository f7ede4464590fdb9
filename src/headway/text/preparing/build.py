"""From units to shards: recorded results are reused; other units are surveyed, deduplicated and encoded.

Without a search for duplicates, a unit is read once. With one, it is read twice: the first pass surveys all documents
and saves their fingerprints, the search decides which ones to remove, and the second pass encodes the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.config.sections.data import DataConfig
from headway.config.template import CHAT
from headway.config.units import Amount
from headway.core.console import Progress, progress
from headway.core.process.faults import fault_point
from headway.data.in_use import check_not_in_use
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.text.dedup import StoredPrints, prints_recipe
from headway.text.preparing.collecting import KEPT, PRINTS, UnitCollector, search_files
from headway.text.preparing.duplicates import Texts, search
from headway.text.preparing.encode import PieceWorker
from headway.text.preparing.inputs import InputHashes, files_of
from headway.text.preparing.pieces import PieceResult, Recipe, Verdict, Work
from headway.text.preparing.pools import Line, Lines, UnitPool
from headway.text.preparing.records import WORK, Records, Shards, Survey, key_of
from headway.text.preparing.tasks import UnitTask
from headway.text.preparing.units import Unit, units_of
from headway.text.preparing.workers import Pipeline, prepared
from headway.text.reading.sources import Source

# Version of the code's results; it is raised when they change for equal input, so that old records are not reused.
_CODE = 1
# Version of the results for units in which a source's limit may be reached.
_LIMITS = 3
# Documents of streams, between the two passes.
_TEXTS = "texts"


@dataclass
class Outcome:
    """A unit and its results."""

    unit: Unit
    inputs: list[dict[str, Any]]
    """The description of its input (see `InputHashes.of`)."""
    key: str
    """The key of its survey."""
    survey: Survey
    shards: Shards
    budget: Amount | None = None
    """The rest of its source's limit at its start."""


class Builder:
    """Makes a store's shards.

    Args:
        data: The config.
        sources: The sources that `find_sources` found.
        records: Recorded results; new ones are added.
        hashes: Hashes of the inputs.
        recipe: The settings that all pieces share; the builder sets its tokenizer and bound.
        described_steps: The cleaning steps of each source with everything they depend on.
        tokenizer: The vocabulary.
        workers: Number of pieces to process at a time.
        pool: Other machines, which process the units that can travel.
        keeps_for: Processes of runs whose shards stay in the store.
        chat: Hash of what determines the ids of conversations, beside the vocabulary.

    Attributes:
        duplicates: The report of the search for duplicates, if there was one.
        processed: Bytes of the units that had to be read, by the key of their survey.
    """

    def __init__(
        self,
        data: DataConfig,
        sources: Sequence[Source],
        records: Records,
        hashes: InputHashes,
        recipe: Recipe,
        *,
        described_steps: Sequence[Any],
        tokenizer: Tokenizer,
        workers: int,
        pool: UnitPool | None,
        keeps_for: Collection[int],
        chat: str | None,
    ) -> None:
        self.keeps_for = keeps_for
        self._chat = chat
        self._data = data
        self._sources = sources
        self.records = records
        self._hashes = hashes
        self._recipe = recipe
        self._steps = described_steps
        self._workers = workers
        self._tokenizer = tokenizer
        self._pool = pool
        self.duplicates: dict[str, Any] | None = None
        self.processed: dict[str, int] = {}
        self._open: set[UnitCollector] = set()

    def run(self, bound: int) -> list[Outcome]:
        """Make the shards of all units, in input order; documents whose hash is below `bound` are held out.

        Raises:
            DataError: The input is malformed or changed while it was read; a safety limit rejects the removal of
                duplicates; or a run is reading the present store, which must change.
            OSError: The files cannot be written, for example because the disk is full.
        """
        self.records.used.clear()
        self.records.reused.clear()
        self.records.new_file("", _TEXTS).unlink(missing_ok=True)
        recipe = replace(self._recipe, bound=bound)
        if not self._data.dedup.wanted:
            return self._read_pass(recipe)
        outcomes = self._read_pass(replace(recipe, tokenizer=None, fingerprints=self._data.dedup))
        self._encode_pass(recipe, outcomes, self._search(outcomes))
        return outcomes

    def _search(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        """Search for duplicates, and return the verdict on each unit."""
        prints = [StoredPrints(self.records.path_of(f"{WORK}/{outcome.key}.{PRINTS}")) for outcome in outcomes]
        kept = [self._load_kept(outcome) for outcome in outcomes]
        names = [self._name(outcome) for outcome in outcomes]
        texts = Texts([outcome.unit.pieces for outcome in outcomes], kept)
        scratch = self.records.folder / WORK
        self.duplicates, verdicts = search(prints, kept, names, self._data.dedup, texts=texts, scratch=scratch)
        return verdicts

    def _read_pass(self, recipe: Recipe) -> list[Outcome]:
        """Survey all units, and also encode them if the recipe has a tokenizer."""
        outcomes: list[Outcome] = []
        others = search_files(recipe)
        label = "tokenizing" if recipe.tokenizer else "reading"
        with self._pipeline(recipe, label, self._input_bytes()) as (lines, bar):
            for outcome in self._outcomes(bar):
                outcomes.append(outcome)
                survey = self.records.survey(outcome.key, others)
                key = self._shards_key(outcome, recipe, None) if recipe.tokenizer else None
                shards = self.records.shards(key, self._name(outcome)) if survey and key else Shards()
                if survey and shards:
                    outcome.survey = survey
                    outcome.shards = shards
                    bar.skip(outcome.unit.bytes)
                    outcome.unit = outcome.unit.without_texts(self._texts_for(recipe))
                else:
                    line = _UnitJob(self, outcome, bar, recipe, key).submit(lines)
                    if outcome.budget is not None:
                        line.drain()  # the next unit's budget depends on this unit's result
        return outcomes

    def _encode_pass(self, recipe: Recipe, outcomes: Sequence[Outcome], verdicts: Sequence[Verdict]) -> None:
        total = sum(outcome.unit.bytes for outcome in outcomes)
        with self._pipeline(recipe, "tokenizing", total) as (lines, bar):
            for outcome, verdict in zip(outcomes, verdicts, strict=True):
                key = self._shards_key(outcome, recipe, verdict)
                shards = self.records.shards(key, self._name(outcome))
                if shards:
                    outcome.shards = shards
                    bar.skip(outcome.unit.bytes)
                else:
                    _UnitJob(self, outcome, bar, recipe, key, verdict=verdict).submit(lines)

    @contextmanager
    def _pipeline(self, recipe: Recipe, label: str, total: int | None) -> Iterator[tuple[Lines, Progress]]:
        lines = Lines(recipe, self.records, workers=self._workers, pool=self._pool, tokenizer=self._tokenizer)
        with progress(label, total, "B") as bar, lines:
            try:
                yield lines, bar
                lines.drain()
            finally:
                for collector in self._open:
                    collector.abandon()
                self._open.clear()

    def _input_bytes(self) -> int | None:
        """Return the maximum number of bytes to read; None if a source is a stream, whose size is unknown."""
        if any(source.stream is not None for source in self._sources):
            return None
        return sum(file.bytes for source in self._sources for file in source.files)

    def _outcomes(self, bar: Progress) -> Iterator[Outcome]:
        """Yield units with their keys, one after another; a source ends when its limit is reached."""
        for number, source in enumerate(self._sources):
            budget: Amount | None = self._data.sources[number].limit
            left = sum(file.bytes for file in source.files)
            for unit in units_of(number, source, self._data.shard_bytes):
                left -= unit.bytes
                inputs = self._hashes.of(unit)
                outcome = Outcome(unit, inputs, self._survey_key(unit, inputs, budget), Survey(), Shards(), budget)
                yield outcome
                if budget is not None:
                    spent = outcome.survey.read if budget.unit == "documents" else outcome.survey.read_bytes
                    budget = Amount(budget.amount - spent, budget.unit)
                    if not outcome.survey.complete or budget.amount <= 0:
                        bar.skip(left)  # the rest of the source is not read
                        break

    def _survey_key(self, unit: Unit, inputs: list[dict[str, Any]], budget: Amount | None) -> str:
        config = self._data.sources[unit.source]
        how = {"field": config.field, "template": config.text_template, "skip_bad": self._recipe.skip_bad}
        prints = None
        if self._data.dedup.wanted:
            prints = prints_recipe(self._data.dedup)
        limit = str(budget) if budget is None else f"{budget}, {_LIMITS}"
        # Marks of corrected results: earlier versions read such input differently.
        fixes = ["numbers as JSON"] if config.template is not None else []
        if self._recipe.skip_bad and any(piece.file.format == "csv" for piece in unit.pieces):
            fixes.append("rest of CSV")
        return key_of("survey", _CODE, how, self._steps[unit.source], inputs, limit, prints, *fixes)

    def _shards_key(self, outcome: Outcome, recipe: Recipe, verdict: Verdict | None) -> str:
        # A folder's tokenizer_config.json may name another end-of-text token for an equal tokenizer.json.
        vocabulary = (self._tokenizer.fingerprint, self._tokenizer.end_of_text_id)
        tokens = (*vocabulary, recipe.special_tokens_in_text, str(recipe.bound))
        if self._sources[outcome.unit.source].template == CHAT:
            return key_of("chat", _CODE, outcome.key, *tokens, self._chat, _hash_of(verdict))
        begin = [["begin", *recipe.begin]] if recipe.begin else []
        fixes = self._tokenizer.special_in_text.key_marks(recipe.special_tokens_in_text)
        fixes += ["cut at words"] if self._tokenizer.was_cut_otherwise else []
        return key_of("shards", _CODE, outcome.key, *tokens, *fixes, *begin, _hash_of(verdict))

    def _name(self, outcome: Outcome) -> str:
        return self._sources[outcome.unit.source].name

    def _texts_for(self, recipe: Recipe) -> Path | None:
        """Return the file that holds the documents of streams for the second pass, if there is one."""
        return self.records.new_file("", _TEXTS) if recipe.fingerprints is not None else None

    def _load_kept(self, outcome: Outcome) -> NDArray[np.bool_]:
        """Return, per document read, whether it passed the cleaning."""
        if not any(self._recipe.clean):
            return np.ones(outcome.survey.read, dtype=bool)
        kept: NDArray[np.bool_] = np.load(self.records.path_of(f"{WORK}/{outcome.key}.{KEPT}"), allow_pickle=False)
        return kept


class _UnitJob:
    """A unit to process, here or elsewhere; its outcome is complete when its results are recorded."""

    def __init__(
        self,
        builder: Builder,
        outcome: Outcome,
        bar: Progress,
        recipe: Recipe,
        shards_key: str | None,
        *,
        verdict: Verdict | None = None,
    ) -> None:
        self._builder = builder
        self._outcome = outcome
        self._bar = bar
        self._recipe = recipe
        self._key = shards_key
        self._verdict = verdict
        pieces = outcome.unit.pieces
        # If the source's limit was reached within the unit, survey and verdict cover only the first pieces.
        self._pieces = pieces if verdict is None else pieces[: len(outcome.survey.piece_documents)]
        self._next = 0
        self._ended = False
        self._collector: UnitCollector | None = None

    @property
    def travels(self) -> bool:
        """Whether another machine can process it: not documents of a stream, nor a unit that a limit may end."""
        whole = self._outcome.budget is None or self._verdict is not None
        return whole and all(piece.texts is None and piece.problem is None for piece in self._pieces)

    def task(self) -> UnitTask:
        """Return the unit as another machine gets it."""
        outcome = self._outcome
        name = self._builder._name(outcome)
        verdicts = tuple(self._verdicts())
        return UnitTask(name, self._survey_key, self._key, self._pieces, outcome.inputs, verdicts)

    def submit(self, lines: Lines) -> Line | Pipeline:
        """Submit the unit, and return what processes it."""
        if not self._builder.processed:  # this unit is the first change to the store
            check_not_in_use(self._builder._data.store, self._builder.keeps_for)
        self._builder.processed[self._outcome.key] = self._outcome.unit.bytes
        self._check_unchanged()
        return lines.submit(self)

    def work(self) -> Iterator[Work]:
        """Yield the work on each piece, for workers of this machine; `accept` gets the results in this order."""
        outcome = self._outcome
        builder = self._builder
        name = builder._name(outcome)
        key = self._survey_key
        self._collector = UnitCollector(builder.records, self._recipe, name, key, self._key)
        if key is not None:
            outcome.survey = self._collector.survey
        outcome.shards = self._collector.shards
        builder._open.add(self._collector)
        verdicts = self._verdicts()
        for piece in self._pieces:
            yield Work(piece, verdict=next(verdicts, None))

    @property
    def _survey_key(self) -> str | None:
        """The key of the unit's survey; None if it has been surveyed before."""
        return self._outcome.key if self._verdict is None else None

    def _verdicts(self) -> Iterator[Verdict]:
        """Yield the verdict on each piece, after the search for duplicates."""
        if self._verdict is not None:
            yield from _split_verdict(self._verdict, self._outcome.survey.piece_documents)

    def accept(self, result: PieceResult) -> None:
        """Take the result of the next piece.

        Raises:
            DataError: The piece could not be processed, or an input file has changed.
        """
        assert self._collector is not None
        piece = self._pieces[self._next]
        self._next += 1
        if not self._ended:
            if self._verdict is None:
                result = self._within_budget(piece, result)
            self._collector.add(result)
        self._bar.advance(piece.bytes)
        fault_point("data.piece")
        if self._next == len(self._pieces):
            self._bar.skip(self._outcome.unit.bytes - sum(piece.bytes for piece in self._pieces))
            self._check_unchanged()
            self._collector.finish()
            self._builder._open.discard(self._collector)
            self._outcome.unit = self._outcome.unit.without_texts(self._builder._texts_for(self._recipe))
            fault_point("data.unit")

    def accept_recorded(self) -> bool:
        """Take what another machine has recorded in the store's folder; return false if it is not complete."""
        builder = self._builder
        outcome = self._outcome
        survey = builder.records.survey(outcome.key, search_files(self._recipe)) if self._verdict is None else None
        shards = builder.records.shards(self._key, builder._name(outcome)) if self._key else Shards()
        if shards is None or (survey is None and self._verdict is None):
            return False
        self._check_unchanged()
        outcome.survey = survey or outcome.survey
        outcome.shards = shards
        self._bar.advance(size := sum(piece.bytes for piece in self._pieces))
        self._bar.skip(outcome.unit.bytes - size)
        fault_point("data.unit")
        return True

    def _within_budget(self, piece: Any, result: PieceResult) -> PieceResult:
        """Return the result, or, if the source's limit falls into the piece, the result of the part before it."""
        budget = self._outcome.budget
        survey = self._outcome.survey
        if budget is None:
            return result
        counted = "read" if budget.unit == "documents" else "read_bytes"
        spent = getattr(survey, counted)
        more = getattr(result, counted)
        if result.error is None and spent + more < budget.amount:
            return result
        worker = PieceWorker(*prepared(self._recipe, 1, self._builder._tokenizer))
        within = worker.process(Work(piece, budget=Amount(budget.amount - spent, budget.unit)))
        if result.error is not None and not within.ended:  # the error is not behind the limit
            return result
        self._ended = True
        survey.complete = False
        return within

    def _check_unchanged(self) -> None:
        """Check that the files still match the unit's key."""
        for file in files_of(self._outcome.unit):
            self._builder._hashes.check_unchanged(file)


def _split_verdict(verdict: Verdict, counts: Sequence[int]) -> Iterator[Verdict]:
    """Split a unit's verdict into those of its pieces, which have `counts` documents."""
    start = document = paragraph = 0
    for count in counts:
        keep = verdict.keep[start : start + count]
        start += count
        if verdict.paragraphs is None or verdict.paragraph_counts is None:
            yield Verdict(keep)
            continue
        stay = int(keep.sum())
        paragraph_counts = verdict.paragraph_counts[document : document + stay]
        size = int(paragraph_counts.sum())
        yield Verdict(keep, verdict.paragraphs[paragraph : paragraph + size], paragraph_counts)
        document = document + stay
        paragraph = paragraph + size


def _hash_of(verdict: Verdict | None) -> str | None:
    """Return the SHA-256 of a verdict; None for one that keeps everything."""
    if verdict is None or (verdict.keep.all() and (verdict.paragraphs is None or verdict.paragraphs.all())):
        return None
    digest = hashlib.sha256(np.packbits(verdict.keep).tobytes())
    if verdict.paragraphs is not None:
        digest.update(np.packbits(verdict.paragraphs).tobytes())
    return digest.hexdigest()
