"""The report of a preparation: what was read, kept, left out and written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.core.files.hashes import fingerprint
from headway.core.format import UNKNOWN, format_bytes, format_count, format_seconds, plural
from headway.data.store import SKIPPED
from headway.text.preparing.build import Builder, Outcome
from headway.text.preparing.records import recorded_encoder
from headway.text.reading.endings import describe_left_out
from headway.text.reading.sources import Source


@dataclass(frozen=True)
class PrepareReport:
    """The report of a preparation."""

    store: str
    fingerprint: str
    up_to_date: bool
    """Nothing had changed, so nothing was done."""
    documents: int
    validation_documents: int
    tokens: int
    text_bytes: int
    """UTF-8 bytes of the documents in the store."""
    files: int
    input_bytes: int
    """Bytes of the input."""
    processed_bytes: int
    """Bytes of the input that was new or changed."""
    removed: int
    """Documents that cleaning and the search for duplicates removed."""
    skipped: int
    """Malformed documents that were skipped (`bad_documents: skip`)."""
    too_large: int
    """Skipped documents that are larger than `max_document_bytes`."""
    unencodable: int
    """Documents that the tokenizer cannot encode; they are skipped (`bad_documents: skip`)."""
    trained_tokens: int | None
    """Tokens that are trained, of all sources; None if there are no conversations."""
    without_tokens: int
    """Encoded documents for which the tokenizer gives no token; units of older versions do not count them."""
    empty_documents: int
    """Documents without any text; they are omitted."""
    empty_files: int
    ignored_files: int
    """Files in folders that were ignored because of their suffix."""
    left_out: dict[str, int]
    """The same by kind: `.pdf`, ..."""
    encoder: str | None
    """The encoder of the preparation that made the store in its present state, this or an earlier one; None if
    unknown."""
    workers: int
    seconds: float

    def describe(self) -> str:
        """Return the report as one line for people."""
        parts = [
            f"{_many(self.documents, 'document')} ({format_count(self.validation_documents)} for validation)",
            _many(self.tokens, "token"),
            f"{self.text_bytes / max(1, self.tokens):.2f} bytes per token",
            f"encoded by {self.encoder or UNKNOWN}",
        ]
        if self.trained_tokens is not None:
            parts.insert(2, f"{self.trained_tokens / max(1, self.tokens):.1%} of them trained")
        if not self.up_to_date:
            rate = self.processed_bytes / 1e6 / self.seconds
            parts.append(f"{format_bytes(self.processed_bytes)} in {format_seconds(self.seconds)} ({rate:.1f} MB/s)")
        kept = self.input_bytes - self.processed_bytes
        if kept and not self.up_to_date:
            parts.append(f"{format_bytes(kept)} unchanged")
        large = f" ({format_count(self.too_large)} of them larger than data.max_document_bytes)" * bool(self.too_large)
        omitted = (
            (self.removed, "document", "removed by cleaning and deduplication"),
            (self.skipped, "malformed document", f"skipped{large}, listed in {SKIPPED}"),
            (self.unencodable, "document", f"that the tokenizer cannot encode skipped, listed in {SKIPPED}"),
            (self.without_tokens, "document", "without a token"),
            (self.empty_documents, "document", "without text"),
        )
        parts += [f"{_many(count, what)} {why}" for count, what, why in omitted if count]
        if self.left_out:
            parts.append(describe_left_out(self.left_out))
        return f"{self.store}: " + " · ".join(parts)


def _many(count: int, word: str) -> str:
    return f"{format_count(count)} {plural(count, word)}"


def _trained_tokens(sources: Sequence[Mapping[str, int]]) -> int | None:
    if all("trained_tokens" not in source for source in sources):
        return None
    return sum(source.get("trained_tokens", source["tokens"]) for source in sources)


def report_of(
    path: Path,
    manifest: dict[str, Any],
    sources: Sequence[Source],
    builder: Builder,
    outcomes: Sequence[Outcome],
    *,
    up_to_date: bool,
    workers: int,
    seconds: float,
) -> PrepareReport:
    """Return the report of a preparation.

    Args:
        path: The store.
        manifest: Its manifest.
        sources: What it was made from.
        builder: What has built it.
        outcomes: Those of all units.
        up_to_date: Nothing had changed, so nothing was done.
        workers: Number of workers.
        seconds: How long it took.
    """

    def total(key: str) -> int:
        return sum(source[key] for source in manifest["sources"])

    unencodable = sum(outcome.shards.unencodable for outcome in outcomes)

    return PrepareReport(
        store=str(path),
        fingerprint=fingerprint(manifest),
        up_to_date=up_to_date,
        documents=total("documents"),
        validation_documents=sum(part["documents"] for part in manifest["splits"]["validation"].values()),
        tokens=total("tokens"),
        text_bytes=total("text_bytes"),
        files=total("files"),
        input_bytes=total("input_bytes"),
        processed_bytes=sum(builder.processed.values()),
        removed=total("read") - total("documents") - unencodable,
        unencodable=unencodable,
        trained_tokens=_trained_tokens(manifest["sources"]),
        without_tokens=sum(outcome.shards.without_tokens for outcome in outcomes),
        skipped=total("skipped"),
        too_large=sum(outcome.survey.too_large for outcome in outcomes),
        empty_documents=total("empty"),
        empty_files=sum(not file.bytes for source in sources for file in source.files),
        ignored_files=sum(source.ignored for source in sources),
        left_out=dict(sum((Counter(source.left_out) for source in sources), Counter[str]())),
        encoder=recorded_encoder(path),
        workers=workers,
        seconds=seconds,
    )
