"""The processing of a piece of input by a worker: read, clean, fingerprint and encode its documents."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headway.config.template import CHAT, COMPLETION
from headway.config.units import Amount
from headway.core.errors import DataError
from headway.core.process.faults import fault_point
from headway.data.tokenizing.chat import ChatEncoder
from headway.data.tokenizing.completions import CompletionEncoder
from headway.data.tokenizing.library import UnencodableTextError
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.text.clean import Cleaner
from headway.text.clean.base import named
from headway.text.dedup import drop_paragraphs, fingerprint_documents, join_prints
from headway.text.preparing.pieces import LISTED, SPLITS, Bits, PieceResult, Recipe, SplitPart, Verdict, Work
from headway.text.reading.documents import BadDocument, text_size
from headway.text.reading.locating import places_of
from headway.text.reading.readers import read_batches
from headway.text.reading.sources import Piece

if TYPE_CHECKING:
    from headway.data.tokenizing.encoders import TextEncoder
    from headway.text.dedup import DocumentPrints

    _AnyEncoder = TextEncoder | ChatEncoder | CompletionEncoder


class PieceWorker:
    """Processes pieces by one recipe; each thread or process has its own.

    Args:
        recipe: The settings that all pieces share.
        encoder: Turns texts into ids; None if documents are only surveyed.
        end_of_text: Id that ends each document.

    """

    def __init__(self, recipe: Recipe, encoder: TextEncoder | None = None, end_of_text: int = 0) -> None:
        self.recipe = recipe
        self._encoder = encoder
        self._end = end_of_text
        self._chat: ChatEncoder | None = None
        self._cleaners: dict[int, Cleaner] = {}
        self._cleaner: Cleaner | None = None

    def process(self, work: Work) -> PieceResult:
        """Read, clean, survey and encode one piece.

        An error in its data is part of the result, not raised: only the caller knows whether the piece lies behind a
        source's limit.
        """
        try:
            self._cleaner = self._cleaner_of(work.piece.source)
            return self._process(work)
        except DataError as error:
            if self._cleaner is not None:
                self._cleaner.take_counts()  # so that the next piece does not get this piece's counts
            return PieceResult(error=error)

    def _cleaner_of(self, source: int) -> Cleaner | None:
        """Return the cleaner of a source; None if it has no steps."""
        steps = self.recipe.clean[source] if self.recipe.clean else ()
        if steps and source not in self._cleaners:
            self._cleaners[source] = Cleaner(steps)
        return self._cleaners.get(source)

    def _process(self, work: Work) -> PieceResult:
        fault_point("data.encode")
        result = PieceResult()
        parts: dict[str, list[SplitPart]] = {split: [] for split in SPLITS}
        prints: list[DocumentPrints] = []
        choose = self._verdict_filter(work.verdict) if work.verdict is not None else self._clean
        encoding = _Encoding(work.piece, result)
        for texts in self._read(work, result):
            chosen, numbers = choose(texts, result)
            if self.recipe.fingerprints is not None:
                prints.append(fingerprint_documents(chosen, self.recipe.fingerprints))
            if self._encoder is not None and chosen:
                encoding.first = result.read - len(texts)
                for split, part in self._encode(self._encoder_of(work.piece), chosen, numbers, encoding):
                    parts[split].append(part)
        encoding.locate_problems()
        if self.recipe.fingerprints is not None:
            result.prints = join_prints(prints, self.recipe.fingerprints)
        if self._cleaner is not None:
            result.clean = self._cleaner.take_counts()
        result.splits = {split: _joined(found) for split, found in parts.items() if found}
        return result

    def _read(self, work: Work, result: PieceResult) -> Iterator[list[str]]:
        """Yield and count the texts of the piece within the budget; list malformed documents, or stop at the first."""
        left = work.budget
        for batch in read_batches(work.piece):
            count = len(batch.texts)
            bad = batch.bad
            empty = batch.empty.total()
            ended = False
            if left is not None:
                sizes = [text_size(text) for text in batch.texts]
                count = _affordable(sizes, left, result)
                used_up = _is_used_up(left, result, sizes[:count])
                result.ended = ended = used_up or count < len(sizes)
                # Count malformed and empty documents only if they come before the text that ends the piece.
                texts_before = count - used_up
                bad = [document for document in bad if document.after <= texts_before]
                empty = sum(number for after, number in batch.empty.items() if after <= texts_before)
            if bad and not self.recipe.skip_bad:
                result.failed, *result.also_failed = bad
                count = result.failed.after
                bad = []
                ended = True
            result.skipped += len(bad)
            result.cut += sum(document.rest for document in bad)
            result.too_large += sum(document.too_large for document in bad)
            result.skipped_list += bad[: LISTED - len(result.skipped_list)]
            result.empty += empty
            result.read += count
            texts = batch.texts[:count]
            yield texts
            # Count bytes only after the texts are encoded: Python then has their UTF-8 cached.
            result.read_bytes += sum(map(text_size, texts))
            if ended:
                return

    def _clean(self, texts: list[str], result: PieceResult) -> tuple[list[str], Sequence[int]]:
        """Clean texts; return those that remain, with their indices in `texts`."""
        if not any(self.recipe.clean):
            return texts, range(len(texts))
        cleaned = texts if self._cleaner is None else [self._cleaner.clean(text) for text in texts]
        kept = np.array([text is not None for text in cleaned], dtype=bool)
        result.kept = kept if result.kept is None else np.concatenate([result.kept, kept])
        return [text for text in cleaned if text is not None], np.flatnonzero(kept).tolist()

    def _verdict_filter(self, verdict: Verdict) -> Callable[[list[str], PieceResult], tuple[list[str], Sequence[int]]]:
        """Return a function that selects texts by a verdict, which counts documents over the whole piece."""
        masks: Iterator[Bits] | None = None
        if verdict.paragraphs is not None:
            assert verdict.paragraph_counts is not None
            masks = iter(np.split(verdict.paragraphs, np.cumsum(verdict.paragraph_counts)[:-1]))
        read = 0

        def choose(texts: list[str], result: PieceResult) -> tuple[list[str], Sequence[int]]:
            nonlocal read
            keep = verdict.keep[read : read + len(texts)]
            read += len(texts)
            numbers = np.flatnonzero(keep).tolist()
            chosen = [texts[number] for number in numbers]
            if self._cleaner is not None:
                chosen = [self._cleaner.clean_kept(text) or "" for text in chosen]
            if masks is not None:
                chosen = [_without_paragraphs(text, mask) for text, mask in zip(chosen, masks, strict=False)]
            left = [place for place, text in enumerate(chosen) if text]
            return [chosen[place] for place in left], [numbers[place] for place in left]

        return choose

    def _split(self, texts: list[str], result: PieceResult) -> tuple[list[str], list[str]]:
        """Split texts into those for training and those held out; record the smallest and largest hash."""
        if not self.recipe.holds_out:
            result.smallest = 0
            result.largest = 2**64 - 1
            return texts, []
        hashes = document_hashes(texts, result)
        held_out = hashes < self.recipe.bound if self.recipe.bound < 2**64 else np.ones(len(texts), dtype=bool)
        train = [text for text, out in zip(texts, held_out, strict=True) if not out]
        return train, [text for text, out in zip(texts, held_out, strict=True) if out]

    def _encoder_of(self, piece: Piece) -> _AnyEncoder:
        assert self._encoder is not None
        if piece.template == COMPLETION:
            return CompletionEncoder(self._encoder, self.recipe.begin, self._end)
        if piece.template != CHAT:
            return self._encoder
        if self._chat is None:
            self._chat = open_chat_encoder(self.recipe)
        return self._chat

    def _encode(
        self, encoder: _AnyEncoder, texts: list[str], numbers: Sequence[int], encoding: _Encoding
    ) -> list[tuple[str, SplitPart]]:
        """Encode texts, those for training first, so that one call encodes all and no id is copied twice.

        Args:
            encoder: The encoder.
            texts: At least one text.
            numbers: Numbers of the texts, counted from `encoding.first`.
            encoding: Collects the texts that cannot be encoded or give no token.

        Raises:
            DataError: A text cannot be encoded, and malformed documents are not skipped.
        """
        result = encoding.result
        problem = None
        before = result.text_bytes, result.smallest, result.largest
        train, validation = self._split(texts, result)
        try:
            part = self._part(encoder, train + validation)
        except UnencodableTextError as error:
            part = None
            problem = error
        if part is None:
            result.text_bytes, result.smallest, result.largest = before
            problems = dict(self._problems(encoder, texts, 0))
            if problem is not None and not problems:
                raise problem  # each text can be encoded, but not all together
            for place, reason in problems.items():
                encoding.skip(numbers[place], reason, self.recipe.skip_bad)
            left = [place for place in range(len(texts)) if place not in problems]
            texts = [texts[place] for place in left]
            numbers = [numbers[place] for place in left]
            return self._encode(encoder, texts, numbers, encoding) if texts else []
        if (part.lengths == 1 + len(self.recipe.begin)).any() and part.trained is None:
            lengths = part.lengths - (1 + len(self.recipe.begin))
            empty = {id(text) for text, length in zip(train + validation, lengths, strict=True) if not length}
            encoding.without += [encoding.first + n for t, n in zip(texts, numbers, strict=True) if id(t) in empty]
        if not self.recipe.holds_out:  # otherwise `document_hashes` has counted the bytes
            result.text_bytes += sum(map(text_size, texts))
        result.documents += len(texts)
        result.characters += sum(map(len, texts))
        if part.trained is not None:
            result.trained_tokens += int(np.count_nonzero(part.trained))
        return [*zip(SPLITS, part.split(len(train)), strict=True)]

    def _part(self, encoder: _AnyEncoder, texts: list[str]) -> SplitPart | None:
        """Encode texts; return None if a special token is in them."""
        if isinstance(encoder, ChatEncoder):
            return SplitPart(*encoder.encode_masked(texts))
        ids, lengths = encoder.encode(texts)
        if self.recipe.unavoidable and np.isin(ids, list(self.recipe.unavoidable)).any():
            return None
        if isinstance(encoder, CompletionEncoder):
            return SplitPart(*encoder.encode_masked(texts))
        tokens = framed(ids, lengths, self._end, self.recipe.begin)
        return SplitPart(tokens, lengths + (1 + len(self.recipe.begin)))

    def _problems(self, encoder: _AnyEncoder, texts: list[str], first: int) -> Iterator[tuple[int, str]]:
        """Find the texts that cannot be encoded by bisection; yield their numbers, counted from `first`, and why."""
        try:
            ids, lengths = encoder.encode(texts)
            special = np.isin(ids, [] if encoder is self._chat else list(self.recipe.unavoidable))
        except UnencodableTextError as error:
            if len(texts) == 1:
                yield first, error.what
                return
            middle = len(texts) // 2
            yield from self._problems(encoder, texts[:middle], first)
            yield from self._problems(encoder, texts[middle:], first + middle)
            return
        for place in np.flatnonzero(special).tolist():
            number = int(np.searchsorted(np.cumsum(lengths), place, side="right"))
            token = self.recipe.unavoidable[int(ids[place])]
            yield first + number, f"it has the special token {token!r}, which the vocabulary makes of ordinary text"


def open_chat_encoder(recipe: Recipe, tokenizer: Tokenizer | None = None) -> ChatEncoder:
    """Open the encoder of a recipe's conversations.

    Args:
        recipe: The settings that all pieces share.
        tokenizer: The recipe's tokenizer, if it is loaded already.

    Raises:
        ConfigError: transformers is not installed, or the tokenizer has no chat template.
        DataError: The tokenizer cannot be read.
    """
    assert recipe.tokenizer is not None and recipe.chat is not None
    tokenizer = tokenizer or Tokenizer.load(recipe.tokenizer)
    return ChatEncoder(recipe.tokenizer, tokenizer, recipe.chat, recipe.special_tokens_in_text)


class _Encoding:
    """The documents of a piece that cannot be encoded, or for which the tokenizer gives no token."""

    def __init__(self, piece: Piece, result: PieceResult) -> None:
        self.piece = piece
        self.result = result
        self.first = 0
        """Number of the piece's documents before the current batch."""
        self.without: list[int] = []
        """Documents without a token."""
        self._unencodable: dict[int, str] = {}

    def skip(self, number: int, reason: str, skip_bad: bool) -> None:
        """Count a document that cannot be encoded.

        Args:
            number: Number of the document, counted from `first`.
            reason: Why it cannot be encoded.
            skip_bad: Skip the document instead of raising an error.

        Raises:
            DataError: `skip_bad` is false.
        """
        number += self.first
        if not skip_bad:
            raise BadDocument(places_of(self.piece, [number])[number], reason).error()
        self.result.unencodable += 1
        if len(self._unencodable) < LISTED:
            self._unencodable[number] = reason

    def locate_problems(self) -> None:
        """Add the places of these documents to the piece's result."""
        if not self.without and not self._unencodable:
            return
        places = places_of(self.piece, [*self._unencodable, *self.without[:1]])
        self.result.unencodable_list = [BadDocument(places[n], reason) for n, reason in self._unencodable.items()]
        self.result.without_tokens = len(self.without)
        self.result.first_without = places[self.without[0]] if self.without else None


def document_hashes(texts: Sequence[str], result: PieceResult) -> NDArray[np.uint64]:
    """Hash each text to the first 64 bits of its SHA-256, which decide its split.

    The smallest and largest hash and the bytes are added to `result`.
    """
    digests = []
    for text in texts:
        utf8 = text.encode()
        result.text_bytes += len(utf8)
        digests.append(hashlib.sha256(utf8).digest()[:8])
    hashes = np.frombuffer(b"".join(digests), dtype=">u8").astype(np.uint64)
    result.smallest = min(result.smallest, int(hashes.min()))
    result.largest = max(result.largest, int(hashes.max()))
    return hashes


def framed(ids: NDArray[Any], lengths: NDArray[np.int64], end: int, begin: Sequence[int]) -> NDArray[Any]:
    """Insert `begin` before and `end` after each document's ids."""
    more = 1 + len(begin)
    ends = np.cumsum(lengths) + (np.arange(len(lengths)) * more + len(begin))
    tokens = np.empty(len(ids) + len(lengths) * more, dtype=ids.dtype)
    inside = np.ones(len(tokens), dtype=bool)
    inside[ends] = False
    tokens[ends] = end
    for place, token in enumerate(begin):
        starts = ends - lengths - (len(begin) - place)
        inside[starts] = False
        tokens[starts] = token
    tokens[inside] = ids
    return tokens


def _joined(parts: Sequence[SplitPart]) -> SplitPart:
    if len(parts) == 1:
        return parts[0]
    masks = [part.trained for part in parts if part.trained is not None]
    return SplitPart(
        np.concatenate([p.tokens for p in parts]),
        np.concatenate([p.lengths for p in parts]),
        np.concatenate(masks) if masks else None,
    )


def _affordable(sizes: Sequence[int], budget: Amount, result: PieceResult) -> int:
    """Return how many of the next documents, given their bytes, are within the budget."""
    if budget.unit == "documents":
        return min(len(sizes), budget.amount - result.read)
    return int(np.searchsorted(np.cumsum(sizes), budget.amount - result.read_bytes, side="right"))


def _is_used_up(budget: Amount, result: PieceResult, sizes: Sequence[int]) -> bool:
    """Return whether the next documents, given their bytes, use up the budget exactly."""
    return budget.amount == (result.read + len(sizes) if budget.unit == "documents" else result.read_bytes + sum(sizes))


def _without_paragraphs(text: str, keep: Bits) -> str:
    try:
        return drop_paragraphs(text, keep)
    except ValueError as error:
        raise DataError(
            f"the cleaning gives a different text for a document than it did for the search for duplicates: {error}",
            where=named(text),
            fix="repair the functions in data.clean: what they return must depend on the text alone",
        ) from None
