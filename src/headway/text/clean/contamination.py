"""Overlap of documents with evaluation sets."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from headway.config.sections.clean import DecontaminateStep, EvaluationSet
from headway.config.sections.data import SourceConfig, source_name
from headway.core.errors import DataError
from headway.data.scripts import IDEOGRAPHS, UNSPACED
from headway.text.clean.base import Step, around
from headway.text.clean.counts import Drop
from headway.text.clean.ngrams import Hashes, longer
from headway.text.reading.readers import read_batches
from headway.text.reading.sources import find_sources, pieces_of

_ALONE = "".join(f"{chr(first)}-{chr(last)}" for first, last in (*UNSPACED, IDEOGRAPHS))
_WORD = re.compile(rf"[^\W{_ALONE}]+|\w")
# A faster pattern with the same matches in ASCII text.
_ASCII_WORD = re.compile(r"\w+")
_CACHED_WORDS = 2**18


class _WordHashes(dict[str, int]):
    """Cache of 64-bit hashes of recent words; the hashes are the same on every machine."""

    def __missing__(self, word: str) -> int:
        if len(self) >= _CACHED_WORDS:
            self.clear()
        value = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
        self[word] = value
        return value


@dataclass(frozen=True)
class Overlap:
    """The overlap of a document with an evaluation set."""

    name: str
    count: int
    """Number of n-grams of the document that occur in the set."""
    ngram: str
    """The first of them."""
    context: str
    """The text around its beginning."""


class Decontaminate(Step):
    """Removal of documents that share an n-gram of 13 words with an evaluation set.

    The method is from Brown et al. 2020, "Language Models are Few-Shot Learners", appendix C. An example of fewer
    words, but at least 8, is matched as a whole. Words are runs of letters, digits and underscores in normal form KC
    and lower case, so punctuation, white space and the normal form of a text do not matter. In scripts without spaces
    between words, each character is a word. The paper removes 200 characters around an overlap; this step removes the
    whole document. Memory is 8 bytes for each distinct n-gram of the sets.

    Raises:
        DataError: an evaluation set cannot be read, or has no example that is long enough.
    """

    version = 2

    def __init__(self, config: DecontaminateStep) -> None:
        super().__init__()
        self._config = config
        self._shortest = min(config.min_ngram, config.ngram)
        self._word_hashes = _WordHashes()
        self._names = _names(config.sets)
        self._digests: list[str] = []
        self._remarks: list[str] = []
        grams = [self._read(item, name) for item, name in zip(config.sets, self._names, strict=True)]
        self._lengths = sorted({length for by_length in grams for length in by_length})
        # Per n-gram length: a filter over all sets, and each set's sorted hashes.
        self._filters = {n: _Filter(np.concatenate([g[n] for g in grams if n in g])) for n in self._lengths}
        self._sets = grams

    def apply(self, text: str) -> str | Drop:
        """Count the overlaps with each set under the set's name, and remove the document if so configured."""
        overlaps = self.overlaps(text)
        if not overlaps:
            return text
        for overlap in overlaps:
            self.counts.reasons[overlap.name] += 1
        reason = "; ".join(f"{o.name}: {o.count} n-grams, the first: {o.ngram}" for o in overlaps)
        if self._config.action == "remove":
            return Drop("removed", reason, overlaps[0].context)
        self.counts.show("found", reason, overlaps[0].context)
        return text

    def overlaps(self, text: str) -> list[Overlap]:
        """Return the overlaps of a text with the sets, in the order of the config."""
        text = _normal(text)
        words = _words(text)
        hits: dict[str, list[tuple[int, int]]] = {}
        for length, grams in _all_grams(self._hashes(words), self._lengths):
            places = self._filters[length].candidates(grams)
            for name, by_length in zip(self._names, self._sets, strict=True):
                if len(places) and length in by_length:
                    ordered = by_length[length]
                    nearest = np.minimum(np.searchsorted(ordered, grams[places]), len(ordered) - 1)
                    found = places[ordered[nearest] == grams[places]].tolist()
                    hits.setdefault(name, []).extend((place, length) for place in found)
        overlaps = []
        for name in self._names:
            of_set = hits.get(name, [])
            # One match of a short example is enough, since it is matched as a whole.
            has_short = any(length < self._config.ngram for _, length in of_set)
            if has_short or len(of_set) >= self._config.min_matches:
                overlaps.append(self._overlap(text, words, name, of_set))
        return overlaps

    def _overlap(self, text: str, words: Sequence[str], name: str, hits: list[tuple[int, int]]) -> Overlap:
        place, length = min(hits)
        match = next(islice(_pattern(text).finditer(text), place, None), None)
        ngram = " ".join(words[place : place + length])
        return Overlap(name, len(hits), ngram, around(text, match.start() if match else 0))

    def _hashes(self, words: Sequence[str]) -> Hashes:
        return np.fromiter(map(self._word_hashes.__getitem__, words), np.uint64, len(words))

    def _read(self, item: EvaluationSet, name: str) -> dict[int, Hashes]:
        """Read a set, and return its distinct n-gram hashes, sorted, by n-gram length."""
        grams: dict[int, list[Hashes]] = {}
        digest = hashlib.sha256()
        examples = short = 0
        for text in _texts(item):
            digest.update(hashlib.sha256(text.encode()).digest())
            words = self._hashes(_words(_normal(text)))
            examples += 1
            length = min(self._config.ngram, len(words))
            if length < self._shortest:
                short += 1
                continue
            grams.setdefault(length, []).extend(value for _, value in _all_grams(words, [length]))
        if not grams:
            raise DataError(
                f"the evaluation set '{name}' holds no text of {self._shortest} words or more",
                where=item.path,
                fix="check its field or template, or lower min_ngram",
            )
        if short:
            self._remarks.append(
                f"evaluation set '{name}': {short:,} of {examples:,} examples are too short to be matched"
            )
        self._digests.append(digest.hexdigest())
        return {length: np.unique(np.concatenate(values)) for length, values in grams.items()}

    def remarks(self) -> list[str]:
        """Report how many examples are too short."""
        return self._remarks

    def describe(self) -> dict[str, Any]:
        """Return names and hashes of the evaluation sets."""
        return {"sets": [list(pair) for pair in zip(self._names, self._digests, strict=True)]}


def _normal(text: str) -> str:
    """Normalize a text, so that the normal form chosen by an earlier step or a set's author does not matter."""
    if text.isascii() or unicodedata.is_normalized("NFKC", text):
        return text
    return unicodedata.normalize("NFKC", text)


def _words(text: str) -> list[str]:
    """Return the words of a normalized text."""
    return _pattern(text).findall(text.lower())


def _pattern(text: str) -> re.Pattern[str]:
    return _ASCII_WORD if text.isascii() else _WORD


class _Filter:
    """A table of bits that excludes nearly all n-grams that are in no set, with one lookup each."""

    def __init__(self, hashes: Hashes) -> None:
        bits = min(26, max(12, len(hashes).bit_length() + 4))
        self._shift = np.uint64(64 - bits)
        self._table = np.zeros(1 << bits, np.bool_)
        self._table[hashes >> self._shift] = True

    def candidates(self, hashes: Hashes) -> Any:
        """Return the places of hashes that may be in a set."""
        return np.flatnonzero(self._table[hashes >> self._shift])


def _all_grams(words: Hashes, lengths: Sequence[int]) -> Iterator[tuple[int, Hashes]]:
    """Yield the hashes of a document's n-grams for each of the given lengths, ascending."""
    grams = words
    wanted = set(lengths)
    for length in range(1, min(max(lengths), len(words)) + 1):
        grams = longer(grams, words, length) if length > 1 else words
        if length in wanted:
            yield length, grams


def _texts(item: EvaluationSet) -> Iterator[str]:
    values = item.model_dump(exclude={"name"}, exclude_unset=True)
    # A field that is only likely to be the question would leave a contamination unseen.
    sources = [replace(source, strict=True) for source in find_sources([SourceConfig(**values)])]
    for piece in pieces_of(sources):
        for batch in read_batches(piece):
            if batch.bad:
                raise batch.bad[0].error()
            yield from batch.texts


def _names(sets: Sequence[EvaluationSet]) -> list[str]:
    """Return a unique name for every set, derived from its path if none is given."""
    taken = {item.name for item in sets if item.name}
    names = []
    for item in sets:
        name = item.name
        if name is None:
            name = base = source_name(item.path)
            number = 1
            while name in taken:
                number += 1
                name = f"{base}-{number}"
            taken.add(name)
        names.append(name)
    return names
