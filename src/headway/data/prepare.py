"""Text files to a token store, on many processes, with bytes that do not depend on their number.

Workers read, split and tokenize pieces; this process writes what they hand back, in input order, into a folder beside
the store, which takes the store's place when it is whole.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.config.schema import DataConfig
from headway.core.console import progress, warning
from headway.core.errors import DataError
from headway.core.files import fingerprint, sha256_file, write_json
from headway.core.format import format_bytes, format_count, format_seconds
from headway.data.build import SKIPPED, Totals, build
from headway.data.sources import Piece, Source, SourceFile, find_sources, pieces_of
from headway.data.store import FORMAT, MANIFEST, VERSION, TokenStore
from headway.data.tokenizer import Tokenizer, train_tokenizer
from headway.data.writer import building, publish, refuse_foreign

# Starting a worker takes about as long as tokenizing this much.
_BYTES_PER_WORKER = 2 * 2**20
_DISK_FIX = "free space there or set data.store to another disk; a store that was there before is untouched"


@dataclass(frozen=True)
class PrepareReport:
    """What a preparation did."""

    store: str
    fingerprint: str
    up_to_date: bool
    """Nothing had changed, so nothing was done."""
    documents: int
    validation_documents: int
    tokens: int
    text_bytes: int
    """UTF-8 bytes of the documents."""
    files: int
    input_bytes: int
    """Bytes of the input files."""
    skipped: int
    """Malformed documents that were left out (`bad_documents: skip`)."""
    empty_documents: int
    """Documents without any text; they are left out."""
    empty_files: int
    ignored_files: int
    """Files in folders that were passed over for their ending."""
    workers: int
    seconds: float

    def describe(self) -> str:
        """The report in one line for people."""
        parts = [
            f"{format_count(self.documents)} documents ({format_count(self.validation_documents)} for validation)",
            f"{format_count(self.tokens)} tokens",
            f"{self.text_bytes / self.tokens:.2f} bytes per token",
        ]
        if not self.up_to_date:
            rate = self.input_bytes / 1e6 / self.seconds
            parts.append(f"{format_bytes(self.input_bytes)} in {format_seconds(self.seconds)} ({rate:.1f} MB/s)")
        left_out = {
            f"malformed documents skipped, listed in {SKIPPED}": self.skipped,
            "documents without text": self.empty_documents,
            "files of unknown format ignored": self.ignored_files,
        }
        parts += [f"{format_count(count)} {what}" for what, count in left_out.items() if count]
        return f"{self.store}: " + " · ".join(parts)


def prepare(data: DataConfig, *, workers: int | None = None, force: bool = False) -> PrepareReport:
    """Make the token store that `data` describes, unless it is there and up to date.

    An error or a kill leaves an existing store as it was.

    Args:
        data: Sources, tokenizer, split and place.
        workers: Processes; `data.workers` when not given. The store's bytes do not depend on it. With more than one,
            a script that calls this needs the usual `if __name__ == "__main__":` guard.
        force: Make it anew even when nothing has changed.

    Raises:
        ConfigError: an optional package is missing.
        DataError: text, tokenizer or disk is not as it should be.
    """
    started = time.monotonic()
    # Renaming must happen beside the folder itself, not beside a link to it.
    path = data.store.resolve() if data.store.is_symlink() else data.store
    refuse_foreign(path)
    sources = find_sources(data.sources)
    pieces = list(pieces_of(sources))
    processes = _processes(workers or data.workers, pieces)
    _warn_of_empty_files(sources)
    with building(path) as folder:
        given = Tokenizer.load(data.tokenizer.path) if data.tokenizer.path else None
        stamps = _stamps(sources)
        settings, inputs = _settings(data, given), _inputs(sources)
        manifest = _current_manifest(path)
        up_to_date = not force and manifest is not None and _made_from(manifest) == (settings, inputs)
        if not up_to_date:
            with _os_errors("the token store cannot be written", path, _DISK_FIX):
                tokenizer = given or train_tokenizer(sources, data.tokenizer.vocab_size, data.tokenizer.training_bytes)
                tokenizer.save(folder / "tokenizer")
                totals = build(data, sources, pieces, tokenizer, folder, processes)
                if _stamps(sources) != stamps:
                    raise DataError("an input file changed while it was read", fix="prepare again when it is at rest")
                manifest = _manifest(settings, inputs, tokenizer, totals)
                write_json(folder / MANIFEST, manifest)
                publish(folder, path)
    assert manifest is not None
    return _report(path, manifest, sources, up_to_date, processes, time.monotonic() - started)


def _processes(wanted: int | str, pieces: Sequence[Piece]) -> int:
    """Processes that have something to do."""
    if wanted == "auto":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        wanted = min(cores, sum(piece.bytes for piece in pieces) // _BYTES_PER_WORKER)
    return max(1, min(int(wanted), len(pieces)))


def _warn_of_empty_files(sources: Sequence[Source]) -> None:
    empty = [str(file.path) for source in sources for file in source.files if not file.bytes]
    if empty:
        count = "an input file is" if len(empty) == 1 else f"{len(empty)} input files are"
        warning(f"{count} empty: {', '.join(empty[:3])}{' ...' if len(empty) > 3 else ''}")


def _stamps(sources: Sequence[Source]) -> list[tuple[int, int]]:
    """Length and time of change of every file, to notice a file that is written while it is read."""
    stamps = []
    for path in (file.path for source in sources for file in source.files):
        with _os_errors("an input file cannot be read", path, "check data.sources"):
            stat = path.stat()
        stamps.append((stat.st_size, stat.st_mtime_ns))
    return stamps


def _settings(data: DataConfig, given: Tokenizer | None) -> dict[str, Any]:
    """What in the config the store's bytes depend on, besides the input."""
    trained = {"vocab_size": data.tokenizer.vocab_size, "training_bytes": data.tokenizer.training_bytes}
    return {
        "validation": data.validation,
        "shard_tokens": data.shard_tokens,
        "bad_documents": data.bad_documents,
        "tokenizer": {"fingerprint": given.fingerprint} if given else trained,
    }


def _inputs(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """What goes in: per source its files with their hashes, read once here."""
    files = [file for source in sources for file in source.files]
    with (
        progress("hashing input", sum(file.bytes for file in files), "B") as bar,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        hashes = {}
        for file, digest in zip(files, pool.map(_hash, files), strict=True):
            hashes[file.path] = digest
            bar.advance(file.bytes)
    return [
        {
            "name": source.name,
            "field": source.field,
            "files": [
                {"path": file.name, "format": file.format, "bytes": file.bytes, "sha256": hashes[file.path]}
                for file in source.files
            ],
        }
        for source in sources
    ]


def _hash(file: SourceFile) -> str:
    with _os_errors("an input file cannot be read", file.path, "check data.sources"):
        return sha256_file(file.path)


def _current_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of the store that is there, when it is one that can be used."""
    try:
        return TokenStore.open(path).manifest
    except DataError:
        return None


def _made_from(manifest: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Settings and inputs of a finished store, for comparison with those at hand."""
    return manifest["settings"], [
        {key: source[key] for key in ("name", "field", "files")} for source in manifest["sources"]
    ]


@contextmanager
def _os_errors(what: str, where: Path, fix: str) -> Iterator[None]:
    """Turn the system's errors in a block into one that a person can act on."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{what}: {error.strerror or error}", where=str(where), fix=fix) from error


def _manifest(
    settings: dict[str, Any], inputs: list[dict[str, Any]], tokenizer: Tokenizer, totals: Totals
) -> dict[str, Any]:
    """Everything about the store, and nothing about where and when it was made: equal text, equal manifest."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "dtype": tokenizer.dtype.name,
        "tokenizer": {
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "end_of_text": tokenizer.end_of_text,
            "end_of_text_id": tokenizer.end_of_text_id,
        },
        "settings": settings,
        "split": {"rule": "the first 64 bits of SHA-256(text) < bound: validation", "bound": str(totals.bound)},
        "sources": [source | counts for source, counts in zip(inputs, totals.counts, strict=True)],
        "splits": totals.splits,
    }


def _report(
    path: Path,
    manifest: dict[str, Any],
    sources: Sequence[Source],
    up_to_date: bool,
    workers: int,
    seconds: float,
) -> PrepareReport:
    def total(key: str) -> int:
        return sum(source[key] for source in manifest["sources"])

    files = [file for source in sources for file in source.files]
    return PrepareReport(
        store=str(path),
        fingerprint=fingerprint(manifest),
        up_to_date=up_to_date,
        documents=total("documents"),
        validation_documents=sum(part["documents"] for part in manifest["splits"]["validation"].values()),
        tokens=total("tokens"),
        text_bytes=total("text_bytes"),
        files=len(files),
        input_bytes=sum(file.bytes for file in files),
        skipped=total("skipped"),
        empty_documents=total("empty"),
        empty_files=sum(not file.bytes for file in files),
        ignored_files=sum(source.ignored for source in sources),
        workers=workers,
        seconds=seconds,
    )
