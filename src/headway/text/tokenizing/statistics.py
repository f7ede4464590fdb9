"""Statistics of a vocabulary on a corpus: tokens, unknown and unused ones, speed, and failed round trips."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headway.data.tokenizing.encoders import choose_encoder, open_encoder
from headway.data.tokenizing.tokenizer import Tokenizer

# Characters of each source for which round trips are tried.
_ROUND_TRIP_CHARACTERS = 2**20


@dataclass(frozen=True)
class SourceFigures:
    """Figures of the sample of one source, or of all samples together."""

    documents: int
    text_bytes: int
    words: int
    """Words by `count_words`."""
    tokens: int
    unknown: int
    """Unknown tokens."""

    @property
    def bytes_per_token(self) -> float | None:
        """The mean UTF-8 bytes of text per token."""
        return self.text_bytes / self.tokens if self.tokens else None

    @property
    def fertility(self) -> float | None:
        """Tokens per word (Rust et al. 2021, section 3)."""
        return self.tokens / self.words if self.words else None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON; a figure that cannot be computed is absent."""
        figures = {
            **vars(self),
            "bytes_per_token": self.bytes_per_token,
            "tokens_per_word": self.fertility,
            "unknown_share": self.unknown / self.tokens if self.tokens else None,
        }
        return {name: value for name, value in figures.items() if value is not None}


@dataclass(frozen=True)
class TokenizerFigures:
    """Figures of one vocabulary on the samples of all sources."""

    vocab_size: int
    fingerprint: str
    sources: dict[str, SourceFigures]
    total: SourceFigures
    unused: int
    """Ids below `vocab_size` that no sample has."""
    encoder: str
    tokens_per_second: float
    """Speed of one pass over the samples with that encoder, on all cores."""
    round_trips: int
    """Documents whose tokens decode to exactly their text."""
    round_trips_tried: int
    lost: str | None
    """The beginning of the first document whose tokens do not."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        sources = {name: figures.to_json() for name, figures in self.sources.items()}
        return {**vars(self), "sources": sources, "total": self.total.to_json()}


def count_words(text: str) -> int:
    """Count the parts of a text between white space; Headway's tokens per word always use this count."""
    return len(text.split())


def measure(
    tokenizer: Tokenizer,
    samples: Mapping[str, Sequence[str]],
    encoder: str = "auto",
    special_tokens_in_text: bool = False,
) -> TokenizerFigures:
    """Encode samples with a vocabulary and count.

    Args:
        tokenizer: The vocabulary.
        samples: Texts of each source by its name.
        encoder: As in `encoders.choose_encoder`.
        special_tokens_in_text: As in `encoders.choose_encoder`.

    Raises:
        DataError: The given encoder cannot be used.
    """
    # Take a few texts of each source, since the encoder must be exact for all.
    some = [text for texts in samples.values() for text in texts[: 1 + 16 // len(samples)]]
    name = choose_encoder(tokenizer, encoder, some, special_tokens_in_text)
    opened = open_encoder(name, tokenizer, special_tokens_in_text)
    used = np.zeros(tokenizer.vocab_size, bool)
    sources: dict[str, SourceFigures] = {}
    seconds = 0.0
    trips: list[str | None] = []
    for source, texts in samples.items():
        started = time.perf_counter()
        ids, lengths = opened.encode(texts)
        seconds += time.perf_counter() - started
        used[ids] = True
        unknown = 0 if tokenizer.unknown_id is None else int((ids == tokenizer.unknown_id).sum())
        sizes = sum(len(text.encode()) for text in texts), sum(map(count_words, texts))
        sources[source] = SourceFigures(len(texts), *sizes, len(ids), unknown)
        trips += _round_trips(tokenizer, texts, ids, lengths)
    total = SourceFigures(*(sum(column) for column in zip(*(vars(s).values() for s in sources.values()), strict=True)))
    lost = [text for text in trips if text is not None]
    return TokenizerFigures(
        tokenizer.vocab_size,
        tokenizer.fingerprint,
        sources,
        total,
        unused=int(tokenizer.vocab_size - used.sum()),
        encoder=name,
        tokens_per_second=total.tokens / seconds if seconds else 0.0,
        round_trips=len(trips) - len(lost),
        round_trips_tried=len(trips),
        lost=lost[0][:60] if lost else None,
    )


def _round_trips(tokenizer: Tokenizer, texts: Sequence[str], ids: Any, lengths: Any) -> list[str | None]:
    """Try round trips of the first texts; a result is None if decoding restores the text, else the text."""
    results: list[str | None] = []
    left = _ROUND_TRIP_CHARACTERS
    ends = np.cumsum(lengths)
    for text, end, length in zip(texts, ends, lengths, strict=True):
        if left <= 0:
            break
        left -= len(text)
        same = tokenizer.decode(ids[end - length : end], skip_special_tokens=False) == text
        results.append(None if same else text)
    return results
