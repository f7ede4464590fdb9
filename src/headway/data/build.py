"""One preparation's token shards: what workers encode, written in input order, with the sums for the manifest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from headway.config.schema import DataConfig
from headway.core.console import progress, warning
from headway.core.errors import DataError
from headway.core.faults import fault_point
from headway.data.encode import LISTED, SPLITS, EncodedPiece, encode_all
from headway.data.readers import BadDocument
from headway.data.sources import Piece, Source
from headway.data.tokenizer import Tokenizer
from headway.data.writer import PartWriter

SKIPPED = "skipped.jsonl"
_COUNTS = ("documents", "characters", "text_bytes", "skipped", "empty")


class Totals:
    """What was written.

    Attributes:
        bound: Documents whose hash is below it are held out for validation.
        counts: Per source: documents, tokens, characters, text_bytes, skipped, empty.
        documents: Number of documents per split.
        splits: The manifest's entries, per split and source; filled in by `finish`.
        skipped: The first malformed documents.
    """

    def __init__(self, bound: int, sources: Sequence[Source], folder: Path, shard_tokens: int) -> None:
        self.bound = bound
        self.counts = [dict.fromkeys((*_COUNTS, "tokens"), 0) for _ in sources]
        self.documents = dict.fromkeys(SPLITS, 0)
        self.splits: dict[str, dict[str, Any]] = {}
        self.skipped: list[BadDocument] = []
        self.smallest, self.largest = 2**64, -1
        self._writers = {
            split: [PartWriter(folder / split / source.name, shard_tokens) for source in sources] for split in SPLITS
        }
        self._names = [source.name for source in sources]

    def add(self, encoded: EncodedPiece) -> None:
        """Write a piece's tokens and count it."""
        source = encoded.piece.source
        for split, part in encoded.splits.items():
            self._writers[split][source].append(part)
            self.documents[split] += len(part.lengths)
            self.counts[source]["tokens"] += len(part.tokens)
        for name in _COUNTS:
            self.counts[source][name] += getattr(encoded, name)
        self.skipped += encoded.skipped_list[: LISTED - len(self.skipped)]
        self.smallest, self.largest = min(self.smallest, encoded.smallest), max(self.largest, encoded.largest)

    def finish(self) -> None:
        """Flush everything to disk."""
        for split, writers in self._writers.items():
            entries = [writer.finish() for writer in writers]
            self.splits[split] = dict(zip(self._names, entries, strict=True))


def build(
    data: DataConfig,
    sources: Sequence[Source],
    pieces: Sequence[Piece],
    tokenizer: Tokenizer,
    folder: Path,
    processes: int,
) -> Totals:
    """Write all shards, and the list of skipped documents, into `folder`, which holds the tokenizer already.

    A document is held out when its hash, as a fraction, is below `data.validation`. In a small corpus that may leave
    one side empty; then the bound moves just so far that each side has a document (the one with the smallest or the
    largest hash), and the work is done once more.

    Raises:
        DataError: a document is malformed, or there is none at all.
        OSError: the disk is full, or the like.
    """

    def one_pass(bound: int) -> Totals:
        totals = Totals(bound, sources, folder, data.shard_tokens)
        skip = data.bad_documents == "skip"
        encoded = encode_all(pieces, folder / "tokenizer", bound, skip, processes)
        with closing(encoded), progress("tokenizing", sum(piece.bytes for piece in pieces), "B") as bar:
            for piece in encoded:
                totals.add(piece)
                bar.advance(piece.piece.bytes)
                fault_point("data.piece")
        totals.finish()
        return totals

    totals = one_pass(int(data.validation * 2**64))
    if totals.largest < 0:
        raise _no_documents(sources, totals)
    bound = _settled_bound(totals, data.validation)
    if bound != totals.bound:
        for split in SPLITS:
            shutil.rmtree(folder / split, ignore_errors=True)
        totals = one_pass(bound)
    if data.validation and not totals.documents["validation"]:
        warning("one document cannot be split (nor can equal ones): nothing is held out for validation")
    _write_skipped(folder / SKIPPED, totals.skipped)
    return totals


def _settled_bound(totals: Totals, validation: float) -> int:
    """The bound that gives each side a document where there are two different ones; training comes first."""
    several = totals.smallest < totals.largest
    if not totals.documents["train"]:
        return totals.largest
    if validation and several and not totals.documents["validation"]:
        return totals.smallest + 1
    return totals.bound


def _no_documents(sources: Sequence[Source], totals: Totals) -> DataError:
    files = [str(file.path) for source in sources for file in source.files]
    where = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    if not totals.skipped:
        return DataError("the input holds no text", where=where, fix="check data.sources")
    count, first = sum(counts["skipped"] for counts in totals.counts), totals.skipped[0]
    return DataError(
        f"the input holds no text: all {count:,} documents are malformed, the first: {first.reason}",
        where=first.where,
        fix="repair the input, or set the source's format or field",
    )


def _write_skipped(path: Path, skipped: Sequence[BadDocument]) -> None:
    if skipped:
        records = [{"where": document.where, "reason": document.reason} for document in skipped]
        path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8")
