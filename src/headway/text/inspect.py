"""Statistics and samples of a token store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.arrays import Ints
from headway.data.store import TokenStore
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.text.preparing.records import recorded_encoder
from headway.text.tokenizing.statistics import count_words

PERCENTILES = (5, 25, 50, 75, 95, 100)
_SAMPLE_TOKENS = 100
# Documents shorter than this are counted in an array indexed by length; the few longer ones are listed.
_COUNTED = 2**20
# Tokens per source for the fertility estimate, from documents spread evenly over its shards.
_FERTILITY_TOKENS = 100_000


def describe_store(store: TokenStore) -> dict[str, Any]:
    """Describe the contents of a store as plain data.

    Per source: documents read, kept and skipped, tokens, bytes per token, effects of the cleaning steps. Per split and
    source: documents, documents without text tokens, tokens, shards, percentiles and a histogram of document length in
    tokens.
    """
    inputs = store.inputs()
    cleaned = {source["name"]: source.get("clean") for source in inputs.get("sources", [])}
    sources = [
        {
            **source,
            # An imported store does not know how long its texts were.
            "bytes_per_token": source["text_bytes"] / source["tokens"] if source.get("text_bytes") else None,
            "clean": cleaned.get(source["name"]),
        }
        for source in store.manifest["sources"]
    ]
    return {
        "store": str(store.path),
        "fingerprint": store.fingerprint,
        "tokenizer": store.manifest["tokenizer"],
        "encoder": recorded_encoder(store.path),
        "dtype": store.manifest["dtype"],
        "sources": sources,
        "splits": [_split(store, split, source) for split in store.splits for source in store.sources(split)],
        "duplicates": inputs.get("duplicates"),
    }


def _split(store: TokenStore, split: str, source: str) -> dict[str, Any]:
    counts, long = _lengths(store, split, source)
    values = np.concatenate([np.flatnonzero(counts), np.unique(long)])
    times = np.concatenate([counts[counts > 0], np.unique(long, return_counts=True)[1]])
    return {
        "split": split,
        "source": source,
        "documents": int(times.sum()),
        "tokens": store.tokens(split, source),
        "without_tokens": int(counts[: 2 + len(store.begin_of_text)].sum()),
        "shards": len(store.shards(split, source)),
        "length_percentiles": _percentiles(values, times),
        "length_histogram": _histogram(values, times),
    }


def _lengths(store: TokenStore, split: str, source: str) -> tuple[Ints, Ints]:
    """Return the number of documents of each length below `_COUNTED`, and the lengths of the others."""
    counts = np.zeros(_COUNTED, dtype=np.int64)
    long = [np.empty(0, dtype=np.int64)]
    for number in range(len(store.shards(split, source))):
        lengths = np.diff(store.shard_documents(split, source, number)).astype(np.int64)
        short = lengths[lengths < _COUNTED]
        found = np.bincount(short)
        counts[: len(found)] += found
        long.append(lengths[lengths >= _COUNTED])
    return counts, np.concatenate(long)


def _percentiles(values: Ints, times: Ints) -> dict[str, int]:
    """Return percentiles of document length in tokens, end-of-text included. Each is a length that occurs."""
    below = np.cumsum(times)
    ranks = [max(1, -(-int(below[-1]) * percentile // 100)) for percentile in PERCENTILES]
    return {str(p): int(values[np.searchsorted(below, rank)]) for p, rank in zip(PERCENTILES, ranks, strict=True)}


def _histogram(values: Ints, times: Ints) -> list[list[int]]:
    """Return a histogram of lengths in half octaves: [lower end, upper end (exclusive), documents]; no empty bins."""
    edges = np.unique(np.round(2.0 ** np.arange(0, int(values.max()).bit_length() + 1, 0.5)).astype(np.int64))
    found = np.bincount(np.searchsorted(edges, values, side="right") - 1, weights=times, minlength=len(edges))
    return [[int(edges[i]), int(edges[i + 1]), int(count)] for i, count in enumerate(found) if count]


def fertility(store: TokenStore, split: str, source: str) -> float | None:
    """Estimate the tokens per word on a sample of a source; None if it has no words."""
    tokenizer = Tokenizer.load(store.tokenizer_folder)
    tokens = words = 0
    for ids in _sample_documents(store, split, source):
        tokens += len(ids)
        words += count_words(tokenizer.decode(ids, skip_special_tokens=False))
    return tokens / words if words else None


def _sample_documents(store: TokenStore, split: str, source: str) -> Iterator[NDArray[np.integer[Any]]]:
    """Yield the beginnings of documents spread evenly over the shards, without begin-of-text and end-of-text."""
    shards = store.shards(split, source)
    begin = len(store.begin_of_text)
    quota = max(1, _FERTILITY_TOKENS // min(len(shards), 50))
    for number in np.unique(np.linspace(0, len(shards) - 1, 50).astype(int)).tolist():
        bounds = store.shard_documents(split, source, number).astype(np.int64)
        left = quota
        for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            if left <= 0:
                break
            start += begin
            count = max(0, min(end - start - 1, left))
            left -= count
            yield store.read(split, source, start, count)


def sample_text(store: TokenStore, number: int = 0) -> str:
    """Return the beginning of document `number` of the first training source, special tokens included."""
    source = store.sources("train")[0]
    bounds = store.shard_documents("train", source, 0)
    start = int(bounds[number])
    end = int(bounds[number + 1])
    ids = store.read("train", source, start, min(end - start - 1, _SAMPLE_TOKENS))
    return Tokenizer.load(store.tokenizer_folder).decode(ids, skip_special_tokens=False)
