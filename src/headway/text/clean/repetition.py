"""The repetition filter of Gopher."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.config.sections.clean import GopherRepetitionStep
from headway.core.arrays import Ints
from headway.text.clean.base import Step, beyond, lines_of, with_line_feeds
from headway.text.clean.counts import Drop
from headway.text.clean.ngrams import Hashes, longer, mixed

_PARAGRAPH = re.compile(r"\n\s*\n")


class GopherRepetition(Step):
    """Rae et al. 2021, appendix A.1.1 and table A1.

    A duplicate repeats an earlier line, paragraph or n-gram of the document; the first occurrence does not count. Lines
    and paragraphs are stripped of white space, and blank ones are ignored. Shares of characters refer to the characters
    of all lines, all paragraphs, or all words, without white space between them. A character in several n-grams counts
    once.
    """

    def __init__(self, config: GopherRepetitionStep) -> None:
        super().__init__()
        self._config = config
        self._top = sorted(config.max_top_ngram_characters.items())
        self._duplicate = sorted(config.max_duplicate_ngram_characters.items())
        self._longest = max([n for n, _ in self._top + self._duplicate], default=0)

    def apply(self, text: str) -> str | Drop:
        """Check lines and paragraphs, then n-grams."""
        return self._by_parts(text) or self._by_ngrams(text.split()) or text

    def _by_parts(self, text: str) -> Drop | None:
        config = self._config
        lines = lines_of(text)
        drop = _repeated(lines, "line", config.max_duplicate_lines, config.max_duplicate_line_characters)
        # Without a repeated line, no paragraph can be repeated.
        if drop or len(set(lines)) == len(lines):
            return drop
        paragraphs = [part for part in map(str.strip, _PARAGRAPH.split(with_line_feeds(text))) if part]
        limits = config.max_duplicate_paragraphs, config.max_duplicate_paragraph_characters
        return _repeated(paragraphs, "paragraph", *limits)

    def _by_ngrams(self, words: Sequence[str]) -> Drop | None:
        if not words or not self._longest:
            return None
        # Numbers in order of appearance identify words within the document; mixing turns them into good hashes.
        numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
        hashes = mixed(np.fromiter(map(numbers.__getitem__, words), np.uint64, len(words)))
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        total = int(lengths.sum())
        top = dict(self._top)
        duplicate = dict(self._duplicate)
        undecided = set(duplicate)
        grams = hashes
        for n in range(1, min(self._longest, len(words)) + 1):
            grams = longer(grams, hashes, n) if n > 1 else hashes
            if n in top and (share := _top_characters(grams, lengths, n, top[n] * total) / total) > top[n]:
                return beyond(f"top {n}-gram", share, ">", top[n])
            if n in undecided:
                share = _duplicate_characters(grams, lengths, n) / total
                if share > duplicate[n]:
                    return beyond(f"duplicate {n}-grams", share, ">", duplicate[n])
                # A repeated n-gram is made of repeated shorter ones, so the share only falls as n grows.
                undecided = {m for m in undecided if m > n and duplicate[m] < share}
            if not undecided and n >= max(top, default=0):
                break
        return None


def _repeated(parts: Sequence[str], kind: str, max_parts: float, max_characters: float) -> Drop | None:
    """Return a drop if too many lines or paragraphs repeat earlier ones."""
    distinct = set(parts)
    repeats = len(parts) - len(distinct)
    if not repeats:
        return None
    if (share := repeats / len(parts)) > max_parts:
        return beyond(f"duplicate {kind}s", share, ">", max_parts)
    total = sum(map(len, parts))
    if (share := (total - sum(map(len, distinct))) / total) > max_characters:
        return beyond(f"duplicate {kind} characters", share, ">", max_characters)
    return None


def _top_characters(grams: Hashes, lengths: Ints, n: int, limit: float) -> int:
    """Count the characters covered by the most frequent n-gram; of equally frequent ones, by the longest.

    An n-gram that occurs once is not a repetition. The result is 0 if the count cannot exceed `limit`.
    """
    ordered = np.sort(grams)
    ends = np.append(np.flatnonzero(ordered[1:] != ordered[:-1]), len(ordered) - 1)
    counts = np.diff(ends, prepend=-1)
    most = int(counts.max())
    sums = np.concatenate(([0], np.cumsum(lengths)))
    sizes = sums[n:] - sums[:-n]
    if most < 2 or most * int(sizes.max()) <= limit:
        return 0
    candidates = np.flatnonzero(np.isin(grams, ordered[ends[counts == most]]))
    top = grams[candidates[np.argmax(sizes[candidates])]]
    return _covered(np.flatnonzero(grams == top), lengths, n)


def _duplicate_characters(grams: Hashes, lengths: Ints, n: int) -> int:
    """Count the characters covered by n-grams that repeat an earlier one."""
    ordered = np.sort(grams)
    if not (ordered[1:] == ordered[:-1]).any():
        return 0
    order = np.argsort(grams, kind="stable")
    ordered = grams[order]
    return _covered(order[1:][ordered[1:] == ordered[:-1]], lengths, n)


def _covered(starts: NDArray[Any], lengths: Ints, n: int) -> int:
    """Count the characters of the words that lie within `n` words from any of the starts."""
    edges = np.zeros(len(lengths) + 1, np.int64)
    edges[starts] += 1
    edges[starts + n] -= 1
    return int(lengths[np.cumsum(edges[:-1]) > 0].sum())
