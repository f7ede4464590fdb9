"""Location of a run's documents in a store that has been prepared again with more text.

An unchanged shard keeps its name. A shard changes when its unit of input grew; its documents are then found one by one,
by a hash of their tokens and loss mask. So new data may lie anywhere: before the old data, after it, or in the middle
of a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from headway.core.console import progress
from headway.data.shards import documents_of, reference
from headway.data.store import TokenStore

#: Upper limit of the contiguous stretches of one part, since a segment lists them all.
MOST_STRETCHES = 20_000


class Lost(Exception):
    """Documents are no longer in the store."""

    def __init__(self, source: str, documents: int) -> None:
        super().__init__(f"{documents:,} documents of '{source}'")


def locate(known: Sequence[TokenStore], store: TokenStore, split: str) -> list[dict[str, list[str]]]:
    """Return references to shards of `store` that hold the run's data, in its order (`headway.data.shards.reference`).

    Args:
        known: Data as the run knows it, part by part. Its shards still exist.
        store: Present data.
        split: The split.

    Raises:
        Lost: some documents are no longer in the store.
    """
    finders: dict[str, _Finder] = {}
    parts = []
    for part in known:
        found = {}
        for source in part.sources(split):
            if source not in finders:
                finders[source] = _Finder(store, split, source, known)
            found[source] = finders[source].references(part)
        parts.append(found)
    return parts


class _Finder:
    """Finds the shards of one source."""

    def __init__(self, store: TokenStore, split: str, source: str, known: Sequence[TokenStore]) -> None:
        self._split = split
        self._source = source
        self._there = store.shard_entries(split, source)
        there = {_content(shard) for shard in self._there}
        files = {_content(entry) for part in known for entry in part.shard_entries(split, source)}
        self._same = {file for file, *_ in files & there}
        changed = [number for number, shard in enumerate(self._there) if shard["file"] not in self._same]
        self._documents = _Documents(store, split, source, changed) if files - there else None

    def references(self, part: TokenStore) -> list[str]:
        """Return references to the shards of a part, in order."""
        stretches: list[str] = []
        lost = 0
        for number, shard in enumerate(part.shard_entries(self._split, self._source)):
            if shard["file"] in self._same:
                stretches.append(reference(shard))
                continue
            assert self._documents is not None, "a shard has changed"
            places = [self._documents.take(d) for d in _digests(part, self._split, self._source, number)]
            lost += places.count(None)
            stretches += _stretches([place for place in places if place is not None], self._there)
        if lost or len(stretches) > MOST_STRETCHES:
            raise Lost(self._source, lost or len(stretches))
        return stretches


def _content(shard: Mapping[str, Any]) -> tuple[str, str, str | None]:
    return shard["file"], shard["sha256"], shard.get("mask_sha256")


class _Documents:
    """Documents of some shards, indexed by a digest. Each is found once."""

    def __init__(self, store: TokenStore, split: str, source: str, shards: Sequence[int]) -> None:
        self._places: dict[bytes, list[tuple[int, int]]] = {}
        self._digests: dict[tuple[int, int], bytes] = {}
        self._taken: set[tuple[int, int]] = set()
        self._next: tuple[int, int] | None = None
        entries = store.shard_entries(split, source)
        with progress(f"finding {source}", sum(entries[number]["documents"] for number in shards), "documents") as bar:
            for shard in shards:
                for document, digest in enumerate(_digests(store, split, source, shard)):
                    self._places.setdefault(digest, []).append((shard, document))
                    self._digests[shard, document] = digest
                bar.advance(entries[shard]["documents"])

    def take(self, digest: bytes) -> tuple[int, int] | None:
        """Return an unused document with this digest as (shard, document), or None if there is none left.

        The document after the last one found comes first, so that stretches stay contiguous.
        """
        place = self._next
        if place is None or place in self._taken or self._digests.get(place) != digest:
            place = next((p for p in self._places.get(digest, ()) if p not in self._taken), None)
        if place is None:
            return None
        self._taken.add(place)
        self._next = place[0], place[1] + 1
        return place


def _digests(store: TokenStore, split: str, source: str, shard: int) -> Iterator[bytes]:
    """Yield the digest of each document of a shard, in order."""
    bounds = store.shard_documents(split, source, shard).astype(np.int64)
    first = int(bounds[0])
    tokens = np.asarray(store.read(split, source, first, int(bounds[-1]) - first))
    trained = store.read_mask(split, source, first, len(tokens))
    for start, end in zip((bounds[:-1] - first).tolist(), (bounds[1:] - first).tolist(), strict=True):
        mask = b"" if trained is None else trained[start:end].tobytes()
        yield hashlib.blake2b(tokens[start:end].tobytes() + mask, digest_size=16).digest()


def _stretches(places: Sequence[tuple[int, int]], shards: Sequence[Mapping[str, int]]) -> Iterator[str]:
    """Yield one reference for each run of consecutive documents of a shard."""
    for _, group in groupby(enumerate(places), key=lambda item: (item[1][0], item[1][1] - item[0])):
        stretch = [place for _, place in group]
        yield documents_of(shards[stretch[0][0]], stretch[0][1], stretch[-1][1] + 1)
