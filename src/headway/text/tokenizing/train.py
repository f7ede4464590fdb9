"""Training of a vocabulary on the sources: byte-level BPE."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from headway.config.template import COMPLETION
from headway.config.units import Amount
from headway.core.console import Progress, notice, show_live
from headway.core.errors import ConfigError
from headway.core.format import format_bytes, format_seconds
from headway.data.feeding.order import permute
from headway.data.tokenizing.completions import joined
from headway.data.tokenizing.patterns import PATTERNS, pattern_of
from headway.data.tokenizing.patterns import pre_tokenizer as pre_tokenizer_of
from headway.data.tokenizing.spec import END_OF_TEXT, at_words_of, parts
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.text.reading.documents import text_size
from headway.text.reading.readers import read_batches
from headway.text.reading.sources import Piece, Source, open_tables, pieces_of

#: The default pattern: GPT-2's words, but with each digit and line break on its own.
DEFAULT_PATTERN = "headway"
# Formats in which no text takes more bytes than its record does.
_PLAIN = ("text", "jsonl", "csv")
# Seconds until the line is first shown; then between updates on a terminal, and elsewhere.
_FIRST = 0.5
_LIVE = 1.0
_LOGGED = 10.0


def train_tokenizer(
    sources: Sequence[Source], vocab_size: int, training_bytes: int, pattern: str | None = None
) -> tuple[Tokenizer, int]:
    """Train a vocabulary on a sample of the sources: `train_on` the texts of `sample_text`.

    Args:
        sources: The sources of the text. Each gives an equal share of `training_bytes`; if one has less, the others
            give more. Nothing beyond a source's limit is read.
        vocab_size: Number of tokens, including `<|endoftext|>` and the 256 bytes; fewer if the text is too short.
        training_bytes: UTF-8 bytes of text to train on.
        pattern: See `train_on`.

    Returns:
        The tokenizer, and the UTF-8 bytes that it was trained on.
    """
    open_tables(sources)  # here, so that its time does not count as reading
    total = None
    if all(source.stream is None for source in sources):  # the size of a stream is unknown
        total = min(training_bytes, sum(source.bytes for source in sources))
    bar = Progress("reading text for the tokenizer", total, "B")
    with ExitStack() as waiting:
        waiting.callback(bar.finish)

        def texts() -> Iterator[str]:
            yield from _counted(sample_text(sources, training_bytes), bar)
            bar.finish()
            # The trainer does not report its progress; merging begins when it has all text.
            size = f"{format_bytes(bar.done)} of text"
            waiting.enter_context(waiting_for(f"merging {size} into a vocabulary of {vocab_size:,} tokens"))

        return train_on(texts(), vocab_size, pattern), int(bar.done)


def train_on(texts: Iterable[str], vocab_size: int, pattern: str | None = None) -> Tokenizer:
    """Train a byte-level BPE (Sennrich et al. 2016; on bytes as in Radford et al. 2019, section 2.2).

    The result depends only on the texts and the arguments, not on the number of threads. It round-trips any text
    exactly: nothing is normalized, and all 256 bytes are in the alphabet.

    The default pattern is GPT-2's with two changes. As in Llama's vocabulary (Touvron et al. 2023, section 2.1), each
    digit stands alone, so that all numbers are encoded in one way. And a line break stands alone, so that indentation
    is encoded in one way wherever it occurs. Training allows no merge across a digit or a line break. So the finished
    tokenizer can split by GPT-2's pattern, which every fast encoder supports, and the merges ensure both properties.
    (Digits of other scripts take two or more bytes, some of which may merge with those of a neighbour.)

    Args:
        texts: The texts to train on.
        vocab_size: Number of tokens, including `<|endoftext|>` and the 256 bytes; fewer if the text is too short.
        pattern: `headway` (the default), a name in `patterns.PATTERNS`, or a regular expression.
    """
    import json

    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = _training_splits(pattern or DEFAULT_PATTERN)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Without this split, merges could lead to the special token, and ordinary text could become it.
    pieces = (piece for text in texts for piece in text.split(END_OF_TEXT))
    splits = pre_tokenizer_of(_final_pattern(pattern))
    how = at_words_of(splits)
    # Long texts are cut, since the trainer needs a hundred times their length in memory.
    backend.train_from_iterator((part for text in pieces for part in parts(text, how)), trainer)
    spec = json.loads(backend.to_str())
    spec["pre_tokenizer"] = splits
    content = json.dumps(spec, indent=2, ensure_ascii=False).encode()
    return Tokenizer(content, "the trained tokenizer")


def _final_pattern(pattern: str | None) -> str:
    return "gpt2" if pattern in (None, DEFAULT_PATTERN) else str(pattern)


def _training_splits(pattern: str) -> Any:
    """Make the pre-tokenizer for training; for the default pattern, it isolates more than the finished tokenizer's."""
    from tokenizers import Regex, pre_tokenizers

    try:
        words = Regex(pattern_of(_final_pattern(pattern), [DEFAULT_PATTERN]))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(
            f"data.tokenizer.pattern is neither a known name nor a regular expression: {error}",
            where=pattern,
            fix=f"one of {', '.join(sorted([DEFAULT_PATTERN, *PATTERNS]))}",
        ) from None
    steps: list[Any] = [pre_tokenizers.Split(words, "isolated")]
    if pattern == DEFAULT_PATTERN:
        steps.append(pre_tokenizers.Split("\n", "isolated"))
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)


def _counted(texts: Iterator[str], bar: Progress) -> Iterator[str]:
    for text in texts:
        bar.advance(text_size(text))
        yield text


def sample_text(sources: Sequence[Source], budget: int) -> Iterator[str]:
    """Yield texts of at most `budget` UTF-8 bytes in total, spread evenly over the sources and within each.

    The sample is deterministic. Malformed documents are ignored here, since preparation reports them.
    """
    smallest_first = sorted(sources, key=lambda source: source.bytes)
    for number, source in enumerate(smallest_first):
        # If a source has less than its share, the larger ones after it get the rest.
        used = 0
        for text, size in _sample_source(source, budget // (len(sources) - number)):
            used += size
            yield text
        budget -= used


def _sample_source(source: Source, budget: int) -> Iterator[tuple[str, int]]:
    """Yield texts of a source within its limit, with their UTF-8 bytes, until the budget is spent."""
    if source.stream is not None or (source.limit is not None and not _limits_file_bytes(source, source.limit)):
        # A stream may be endless, and without reading, the place of the limit is unknown.
        return _sample_beginning(source, budget)
    return _sample_evenly(source, budget)


def _limits_file_bytes(source: Source, limit: Amount) -> bool:
    """Return whether a limit on a source's text is a limit on its file bytes, which hold no more text than that."""
    plain = all(file.format in _PLAIN and not file.compression for file in source.files)
    return plain and source.template is None and limit.unit == "bytes"


def _sample_beginning(source: Source, budget: int) -> Iterator[tuple[str, int]]:
    """Yield the first texts of a source."""
    documents = math.inf
    limit = source.limit
    if limit is not None and limit.unit == "documents":
        documents = limit.amount
    elif limit is not None:
        budget = min(budget, limit.amount)
    for piece in pieces_of([source]):
        for text, size in _beginning(piece, budget):
            yield text, size
            budget = budget - size
            documents = documents - 1
            if documents == 0:
                return
        if budget <= 0:
            return


def _sample_evenly(source: Source, budget: int) -> Iterator[tuple[str, int]]:
    """Yield the beginnings of a source's pieces, an equal amount of each, in a fixed shuffled order."""
    pieces = list(_within(pieces_of([source]), source.limit))
    if not pieces:
        return
    # Small pieces use less than the quota; if the whole source fits, no piece is cut.
    everything = sum(p.bytes for p, _ in pieces) <= budget and not any(p.file.compression for p, _ in pieces)
    quota = budget if everything else max(2**16, math.ceil(budget / len(pieces)))
    for number in permute(np.arange(len(pieces)), len(pieces), key=0):
        piece, within = pieces[number]
        for text, size in _beginning(piece, min(quota, budget, within)):
            yield text, size
            budget -= size
        if budget <= 0:
            return


def _within(pieces: Iterator[Piece], limit: Amount | None) -> Iterator[tuple[Piece, int]]:
    """Yield the first pieces until they reach the limit in bytes, each with the rest of the limit before it."""
    left = sys.maxsize if limit is None else limit.amount
    for piece in pieces:
        yield piece, left
        left -= piece.bytes
        if left <= 0:
            return


def _beginning(piece: Piece, left: int) -> Iterator[tuple[str, int]]:
    """Yield the first texts of a piece with their UTF-8 bytes; the last one is cut to keep the total within `left`."""
    for batch in read_batches(piece):
        for read in batch.texts:
            if left <= 0:
                return
            text = joined(read) if piece.template == COMPLETION else read
            utf8 = text.encode()
            if len(utf8) > left:
                text = utf8[:left].decode(errors="ignore")
                utf8 = text.encode()
                yield text, len(utf8)
                return
            yield text, len(utf8)
            left -= len(utf8)


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Show what is being done, and for how long, for the duration of a block; a short block shows nothing."""
    ended = threading.Event()
    thread = threading.Thread(target=_show_elapsed, args=(what, ended), name="headway-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _show_elapsed(what: str, ended: threading.Event) -> None:
    started = time.monotonic()
    pause = _FIRST
    while not ended.wait(pause):
        live = sys.stderr.isatty()
        show, pause = (show_live, _LIVE) if live else (notice, _LOGGED)
        show(f"{what}: {format_seconds(time.monotonic() - started)} so far")
    show_live("")
