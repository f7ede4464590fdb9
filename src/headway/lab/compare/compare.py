"""Comparing models: which documents, which losses, what they show; and the result as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headway.config.sections.benchmarks import BenchmarksConfig
from headway.core.console import warning
from headway.core.errors import ConfigError, DataError, HeadwayError
from headway.core.format import counted
from headway.data.remote_store import open_store
from headway.data.store import TokenStore
from headway.lab.compare.candidates import (
    Candidate,
    Group,
    Tokens,
    differing_keys,
    find_groups,
    open_candidate,
)
from headway.lab.compare.documents import Corpus, StoreCorpus, TextCorpus, evenly, read_corpus, trained_on
from headway.lab.compare.evaluating import HowToEvaluate, items_of, losses_of
from headway.lab.compare.evidence import (
    BITS,
    DIFFERENCES,
    DOCUMENTS,
    NATS,
    Difference,
    Evidence,
    ItemDifference,
    Margin,
    differences_of,
    item_differences,
)
from headway.lab.compare.intervals import Estimate
from headway.telemetry.record import Run, open_run
from headway.telemetry.runs import Comparison, compare_runs, differences


@dataclass(frozen=True)
class Wanted:
    """What a comparison is asked for."""

    data: Path | None = None
    documents: int = DOCUMENTS
    sequence_length: int | None = None
    margin: Margin | None = None
    benchmarks: BenchmarksConfig | None = None


@dataclass(frozen=True)
class Compared:
    """A comparison: what runs have recorded, and the evidence."""

    groups: tuple[Group, ...]
    runs: Comparison
    """Of all run directories, in order."""
    evidence: Evidence | None
    wanted: Wanted
    why_not: HeadwayError | None = None
    """Why there is no evidence, if it was asked for."""
    can_be_evaluated: bool = True
    """Whether every one has weights of a language model that are here."""

    @property
    def curves(self) -> dict[str, list[Run]]:
        """The runs of each group that has some."""
        by_path = {run.path: run for run in self.runs.runs}
        found = {group.name: [by_path[path] for path in group.run_paths] for group in self.groups}
        return {name: runs for name, runs in found.items() if runs}


def compare_models(words: Sequence[str], wanted: Wanted, *, evaluates: bool = True) -> Compared:
    """Compare models with the first one.

    What has stopped the evidence is kept in the result: curves and configs can be compared without it.

    Args:
        words: Runs, folders of exported models, folders of runs, or patterns.
        wanted: On what, and how.
        evaluates: Whether losses are computed; otherwise only what the runs have recorded is compared.

    Raises:
        CheckpointError: a word names no model.
        ConfigError: fewer than two models are given, or one twice.
    """
    groups = tuple(find_groups(words))
    runs = compare_runs([open_run(path) for group in groups for path in group.run_paths])
    if not evaluates:
        return Compared(groups, runs, None, wanted)
    try:
        candidates = {group.name: [open_candidate(path) for path in group.paths] for group in groups}
    except HeadwayError as error:
        return Compared(groups, runs, None, wanted, error, can_be_evaluated=False)
    try:
        evidence = _evidence(candidates, wanted)
    except HeadwayError as error:
        return Compared(groups, runs, None, wanted, error)
    return Compared(groups, runs, replace(evidence, notes=[*evidence.notes, *_notes_on_seeds(groups, runs)]), wanted)


def _evidence(candidates: Mapping[str, Sequence[Candidate]], wanted: Wanted) -> Evidence:
    everyone = [one for members in candidates.values() for one in members]
    corpus, notes = _corpus(everyone, wanted)
    same_tokens = all(everyone[0].tokens.is_same(one.tokens) for one in everyone)
    how = HowToEvaluate.alike(everyone, wanted.sequence_length)
    measured = {name: [losses_of(one, corpus, how) for one in members] for name, members in candidates.items()}
    baseline = next(iter(measured.values()))[0]
    unit = NATS if same_tokens else BITS
    sizes = baseline.tokens.astype(np.float64)
    if not same_tokens:
        assert isinstance(corpus, TextCorpus)
        sizes = corpus.bytes
        notes.append("the models have different tokenizers, so losses are per byte of text, in bits")
    losses = {name: np.stack([one.loss for one in members]) * unit.scale for name, members in measured.items()}
    overall, by_source = differences_of(losses, sizes, corpus.sources, corpus.source_of)
    items: list[ItemDifference] = []
    if wanted.benchmarks is not None:
        benchmarks = wanted.benchmarks
        items = item_differences({name: [items_of(one, benchmarks) for one in of] for name, of in candidates.items()})
    notes.append(f"each document was read by itself, in rows of {how.sequence_length:,} tokens, in {how.precision}")
    if others := {one.sequence_length for one in everyone} - {how.sequence_length}:
        lengths = ", ".join(f"{length:,}" for length in sorted(others))
        more = "a model that reads more at once may do better with it"
        notes.append(f"rows in training were of {lengths} tokens too: {more}")
    return Evidence(
        unit=unit,
        corpus=corpus.name,
        documents=int(np.count_nonzero(sizes)),
        tokens=int(baseline.tokens.sum()),
        overall=overall,
        by_source=by_source,
        items=items,
        notes=notes,
    )


def _notes_on_seeds(groups: Sequence[Group], runs: Comparison) -> Iterator[str]:
    if all(len(group.paths) == 1 for group in groups):
        yield "one run each: the intervals say what other documents would show, not what other seeds would"
    configs = {run.path: run.config for run in runs.runs}
    for group in groups:
        keys = differing_keys(group, differences([configs[path] for path in group.run_paths]))
        if keys:
            yield f"the runs of {group.name} differ in more than their seed: {', '.join(keys[:5])}"


def _corpus(candidates: Sequence[Candidate], wanted: Wanted) -> tuple[Corpus, list[str]]:
    """Choose the documents, without those that a run was trained on, and say what a reader has to know of them."""
    stores = {one.path: _store_of(one) for one in candidates if one.config is not None}
    corpus: Corpus = _shared_split(candidates, stores) if wanted.data is None else read_corpus(wanted.data)
    total = len(corpus.source_of)
    notes = []
    chosen = evenly(total, wanted.documents)
    if len(chosen) < total:
        notes.append(f"{len(chosen):,} of {total:,} documents, evenly spaced")
    corpus = corpus.keep(chosen)
    source = corpus
    if isinstance(corpus, StoreCorpus):
        own = Tokens(corpus.tokenizer, corpus.store.begin_of_text)
        if not all(own.is_same(one.tokens) for one in candidates):
            if any(corpus.store.has_mask("validation", name) for name in corpus.sources):
                notes.append("all of a document counts, also what the store's loss mask leaves out")
            corpus = corpus.as_text()
            if len(corpus.source_of) < len(chosen):
                lost = len(chosen) - len(corpus.source_of)
                notes.append(f"{counted(lost, 'document')} left out, whose text cannot be decoded exactly")
    seen = np.zeros(len(corpus.source_of), dtype=np.bool_)
    for one in candidates:
        store = stores.get(one.path)
        if store is None:
            notes.append(f"{one.path}: its training data are not known here, so they may contain these documents")
        elif isinstance(source, StoreCorpus) and store.fingerprint == source.store.fingerprint:
            assert one.checkpoint is not None, "it has a store"
            if one.checkpoint.context.get("data") not in (None, store.fingerprint):
                notes.append(
                    f"{one.path} was trained on an earlier state of the store; if data.validation was raised since, it"
                    " was trained on some of these documents"
                )
        else:
            found = trained_on(store, one.tokens, list(corpus.documents(one.tokens)))
            if found.any():
                count = counted(int(found.sum()), "document")
                notes.append(f"{count} left out, which {one.path} was trained on")
            seen |= found
    if seen.all():
        raise DataError(
            "the runs were trained on every one of these documents, so their losses say nothing of new text",
            where=corpus.name,
            fix="--data FILE, with text that no run was trained on",
        )
    return (corpus.keep(np.flatnonzero(~seen)) if seen.any() else corpus), notes


def _store_of(candidate: Candidate) -> TokenStore | None:
    """Open the store that a run was trained on; None, with a warning, if it is not here."""
    assert candidate.config is not None
    try:
        return open_store(candidate.config.data)
    except HeadwayError as error:
        warning(f"the token store of {candidate.path} cannot be opened: {error.what} ({error.where})")
        return None


def _shared_split(candidates: Sequence[Candidate], stores: Mapping[Path, TokenStore | None]) -> StoreCorpus:
    """Return what the one store of all runs holds out.

    Raises:
        ConfigError: there is no such store, or there are several.
    """
    by_hash = {store.fingerprint: (path, store) for path, store in stores.items() if store is not None}
    if not by_hash:
        raise ConfigError(
            "the models have no data in common: none of them leads to a token store that is here",
            where=", ".join(str(one.path) for one in candidates),
            fix="--data FILE or STORE, with text that none of them was trained on",
        )
    if len(by_hash) > 1:
        places = "; ".join(f"{path} on {store.path}" for path, store in by_hash.values())
        raise ConfigError(
            "the runs were trained on different token stores, so no held-out documents are common to them",
            where=places,
            fix=f"--data FILE, with text that is new to all; or --data {next(iter(by_hash.values()))[1].path}, without"
            " the documents that another run was trained on",
        )
    _, store = next(iter(by_hash.values()))
    return StoreCorpus.of(store)


def as_json(compared: Compared) -> dict[str, Any]:
    """Return the result as docs/compare.md describes it."""
    evidence = compared.evidence
    margin = compared.wanted.margin
    result: dict[str, Any] = {
        "baseline": compared.groups[0].name,
        "models": {group.name: [str(path) for path in group.paths] for group in compared.groups},
        "runs": [asdict(summary) for summary in compared.runs.summaries],
        "differences": compared.runs.differences,
        "evidence": None,
    }
    if evidence is None:
        why = compared.why_not
        return result if why is None else {**result, "why_not": {"what": why.what, "where": why.where, "fix": why.fix}}
    overall = [_difference_json(one, margin) for one in evidence.overall]
    result |= {"unit": evidence.unit.name, "margin": None if margin is None else margin.text, **overall[0]}
    result["evidence"] = {
        "unit": evidence.unit.name,
        "corpus": evidence.corpus,
        "documents": evidence.documents,
        "tokens": evidence.tokens,
        "margin": None if margin is None else margin.text,
        "overall": overall,
        "by_source": [_difference_json(one, margin) for one in evidence.by_source],
        "items": [_item_json(one) for one in evidence.items],
        "notes": list(evidence.notes),
    }
    return result


def _difference_json(one: Difference, margin: Margin | None) -> dict[str, Any]:
    found = {
        "model": one.model,
        "source": one.source,
        "baseline_loss": one.baseline_loss,
        "loss": one.loss,
        **_estimate_json(one.absolute),
        "relative_effect": one.relative.effect,
        "relative_interval": [one.relative.low, one.relative.high],
        "corrected_p_value": one.corrected_p_value,
        "significant": one.is_shown,
        "detectable": one.absolute.detectable,
        "non_inferior": None if margin is None else one.is_non_inferior(margin),
    }
    if not one.over_seeds and one.relative.standard_error:
        needed = {f"{difference:.1%}": one.relative.documents_for(difference) for difference in DIFFERENCES}
        found["documents_needed"] = needed
    return found


def _estimate_json(estimate: Estimate) -> dict[str, Any]:
    return {
        "effect": estimate.effect,
        "interval": [estimate.low, estimate.high],
        "p_value": estimate.p_value,
        "documents": estimate.documents,
        "method": estimate.method,
    }


def _item_json(one: ItemDifference) -> dict[str, Any]:
    kept = {key: value for key, value in asdict(one).items() if key != "estimate"}
    estimate = _estimate_json(one.estimate)
    estimate["items"] = estimate.pop("documents")
    return {**kept, **estimate}
