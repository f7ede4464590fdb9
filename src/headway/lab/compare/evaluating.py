"""Losses of candidates on documents, and their results on items of benchmarks, kept next to each run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headway.config.sections.benchmarks import BenchmarksConfig, is_file
from headway.core.arrays import Floats, Ints
from headway.core.console import Progress, notice, progress
from headway.core.errors import DataError
from headway.core.files.atomic import write_json
from headway.core.files.foreign import read_json_object
from headway.core.files.hashes import fingerprint, sha256_file
from headway.core.files.paths import user_cache
from headway.core.format import counted
from headway.lab.compare.candidates import Candidate
from headway.lab.compare.documents import Corpus
from headway.lab.compare.evidence import ItemResults
from headway.parallel.world import pick_device
from headway.training.evaluation.benchmarks import run_benchmarks
from headway.training.evaluation.document_losses import Document, DocumentLosses, document_losses
from headway.training.evaluation.inference import load_trained

#: Folder of kept results, in a run directory or in the user's cache.
FOLDER = "document-losses"
#: Of what is kept; another number makes earlier files unused.
_VERSION = 1
_MOST_BYTES = 2**28


@dataclass(frozen=True)
class HowToEvaluate:
    """What all candidates are evaluated with."""

    sequence_length: int
    """Tokens per row."""
    precision: str

    @classmethod
    def alike(cls, candidates: Sequence[Candidate], sequence_length: int | None) -> HowToEvaluate:
        """Choose what all candidates can do: the shortest of their rows, and their precision if it is one."""
        shortest = min(candidate.sequence_length for candidate in candidates)
        precisions = {one.config.train.precision for one in candidates if one.config is not None}
        return cls(sequence_length or shortest, precisions.pop() if len(precisions) == 1 else "fp32")


def losses_of(candidate: Candidate, corpus: Corpus, how: HowToEvaluate) -> DocumentLosses:
    """Return the losses of a candidate on documents, computed now or kept from an earlier call.

    Raises:
        DataError: a loss is not finite.
        CheckpointError, ConfigError: as `load_trained`.
    """
    device = pick_device("auto")
    numbers = [how.sequence_length, how.precision, device.type, _VERSION]
    file = _kept_in(candidate) / f"{fingerprint([candidate.identity, corpus.digest, *numbers])}.json"
    found = _read_losses(file, len(corpus.source_of))
    if found is None:
        notice(f"evaluating {candidate.path} on {counted(len(corpus.source_of), 'document')}")
        trained = load_trained(candidate.path, step=candidate.step, device=device)
        with progress("evaluating", total=len(corpus.source_of), unit="documents") as shown:
            documents = _counted(corpus.documents(candidate.tokens), shown)
            found = document_losses(trained, documents, sequence_length=how.sequence_length, precision=how.precision)
        _keep(file, {"loss": found.loss.tolist(), "tokens": found.tokens.tolist()})
    if not np.isfinite(found.loss).all():
        number = int(np.flatnonzero(~np.isfinite(found.loss))[0])
        raise DataError(
            f"the loss of document {number:,} is not finite",
            where=f"{candidate.path} on {corpus.name}",
            fix="the model has diverged: headway report shows where",
        )
    return found


def _counted(documents: Iterable[Document], shown: Progress) -> Iterator[Document]:
    for document in documents:
        yield document
        shown.advance()


def _read_losses(file: Path, documents: int) -> DocumentLosses | None:
    """Read kept losses; None if there are none of so many documents."""
    try:
        kept = read_json_object(file, _MOST_BYTES)
        loss: Floats = np.array(kept["loss"], dtype=np.float64)
        tokens: Ints = np.array(kept["tokens"], dtype=np.int64)
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    is_whole = loss.shape == tokens.shape == (documents,) and bool((tokens >= 0).all())
    return DocumentLosses(loss, tokens) if is_whole else None


def items_of(candidate: Candidate, wanted: BenchmarksConfig) -> dict[str, ItemResults]:
    """Return the results of a candidate on every item, by task, computed now or kept from an earlier call.

    Raises:
        ConfigError: lm-eval is not installed.
        HeadwayError: the tasks failed.
    """
    asked = wanted.model_dump(mode="json", include={"tasks", "limit", "few_shot"})
    files = {task: sha256_file(Path(task)) for task in wanted.tasks if is_file(task)}
    file = _kept_in(candidate) / f"items-{fingerprint([candidate.identity, asked, files, _VERSION])}.json"
    try:
        found: dict[str, Any] = read_json_object(file, _MOST_BYTES)
        return _as_items(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        notice(f"benchmarks of {candidate.path}: {', '.join(wanted.tasks)}")
    found = run_benchmarks(candidate.path, candidate.step, wanted, wanted.device, items=True)["items"]
    _keep(file, found)
    return _as_items(found)


def _as_items(found: dict[str, Any]) -> dict[str, ItemResults]:
    return {
        task: ItemResults(
            {name: {item: float(value) for item, value in of.items()} for name, of in kept["metrics"].items()},
            {name: bool(better) for name, better in kept["higher_is_better"].items()},
        )
        for task, kept in found.items()
    }


def _kept_in(candidate: Candidate) -> Path:
    """Return the folder of kept results; an export must hold nothing else, so its results are in the user's cache."""
    return (user_cache() if candidate.checkpoint is None else candidate.path) / FOLDER


def _keep(file: Path, value: Any) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, value, exact=True)
    except OSError as error:
        notice(f"not kept for the next call: {error.strerror or error} ({file.parent})")
