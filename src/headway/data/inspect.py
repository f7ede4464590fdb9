"""What is in a token store, in numbers and in a sample."""

from __future__ import annotations

from typing import Any

import numpy as np

from headway.data.store import TokenStore
from headway.data.tokenizer import Tokenizer

PERCENTILES = (5, 25, 50, 75, 95, 100)
_SAMPLE_TOKENS = 100


def describe_store(store: TokenStore) -> dict[str, Any]:
    """Counts of a store as plain data.

    Per source: documents, tokens, characters, bytes per token, what was left out. Per split and source: documents,
    tokens, percentiles of document length in tokens.
    """
    sources = [
        {
            "name": source["name"],
            "files": len(source["files"]),
            "input_bytes": sum(file["bytes"] for file in source["files"]),
            **{key: source[key] for key in ("documents", "tokens", "characters", "text_bytes", "skipped", "empty")},
            "bytes_per_token": source["text_bytes"] / source["tokens"] if source["tokens"] else None,
        }
        for source in store.manifest["sources"]
    ]
    splits = [
        {
            "split": split,
            "source": source,
            "documents": len(store.documents(split, source)) - 1,
            "tokens": store.tokens(split, source),
            "length_percentiles": _length_percentiles(store, split, source),
        }
        for split in store.splits
        for source in store.sources(split)
    ]
    return {
        "store": str(store.path),
        "fingerprint": store.fingerprint,
        "tokenizer": store.manifest["tokenizer"],
        "dtype": store.manifest["dtype"],
        "sources": sources,
        "splits": splits,
    }


def _length_percentiles(store: TokenStore, split: str, source: str) -> dict[str, int]:
    """Document lengths in tokens, the end-of-text token included: the p-th percentile is one that occurs."""
    lengths = np.diff(store.documents(split, source))
    values = np.percentile(lengths, PERCENTILES, method="inverted_cdf")
    return {str(percentile): int(value) for percentile, value in zip(PERCENTILES, values, strict=True)}


def sample_text(store: TokenStore, number: int = 0) -> str:
    """The beginning of document `number` of the first training source, decoded."""
    source = store.sources("train")[0]
    bounds = store.documents("train", source)
    start, end = (int(bounds[number]), int(bounds[number + 1]))
    ids = store.read("train", source, start, min(end - start, _SAMPLE_TOKENS))
    return Tokenizer.load(store.tokenizer_folder).decode(ids)
