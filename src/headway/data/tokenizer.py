"""Text to token ids and back: any `tokenizer.json`, or a byte-level BPE trained on the sources."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.console import Progress
from headway.core.errors import DataError
from headway.core.files import sha256_bytes
from headway.data.order import permute
from headway.data.readers import Document, read_documents
from headway.data.sources import Source, pieces_of

END_OF_TEXT = "<|endoftext|>"
_END_NAMES = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<EOS>",
    "<|endofdocument|>",
    "<|end▁of▁sentence|>",
    "<|im_end|>",
)
# Text is encoded in parts of about this many characters, since the library keeps some 200 bytes per token meanwhile.
_PART_CHARACTERS = 2**16
# A longer word is cut: no text that people wrote has one, and there would be no bound on memory.
_WORD_CHARACTERS = 2**16
# Every byte-level pre-tokenizer in use ends a word between a letter or digit and white space or these marks, so cutting
# there changes nothing.
_CUT = re.compile(r"[^\W_](?=[\s,.;:!?\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])")


class Tokenizer:
    """A vocabulary, from `Tokenizer.load`.

    Attributes:
        vocab_size: Number of token ids: every id is below it.
        end_of_text_id: The token that ends a document.
        end_of_text: Its text.
        fingerprint: Hex SHA-256 of `tokenizer.json`.
        content: The bytes of `tokenizer.json`.
    """

    def __init__(self, content: bytes, where: str, end_of_text: str | None = None) -> None:
        from tokenizers import Tokenizer as Backend

        try:
            self._backend = Backend.from_str(content.decode())
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"not a tokenizer: {error}", where=where, fix="give a tokenizer.json") from None
        self.content = content
        self.fingerprint = sha256_bytes(content)
        # A file may carry the settings of the batch it was last used for.
        self._backend.no_padding()
        self._backend.no_truncation()
        # "<|endoftext|>" spelled out in a document is ordinary text, never the end of it.
        self._backend.encode_special_tokens = True
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.end_of_text = _end_of_text(vocabulary, end_of_text, where)
        self.end_of_text_id = int(vocabulary[self.end_of_text])
        self._may_cut = _is_byte_level(json.loads(content))

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """Load a `tokenizer.json`, or the one in a folder (a Hugging Face checkpoint, a token store).

        Raises:
            DataError: there is none, it is no tokenizer, or it has no token that ends a text.
        """
        path = Path(path)
        if path.is_dir():
            folder = path / "tokenizer"
            path = (folder if folder.is_dir() else path) / "tokenizer.json"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(
                f"no tokenizer can be read: {error.strerror}",
                where=str(path),
                fix="give a tokenizer.json or a folder with one; headway tokenizer train makes one",
            ) from None
        return cls(content, str(path), _configured_end(path.with_name("tokenizer_config.json")))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of ids in the token store: little-endian uint16 when every id fits, else uint32."""
        return np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")

    @property
    def special_tokens(self) -> dict[str, int]:
        """Special tokens with their ids."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: number for number, token in sorted(added.items()) if token.special}

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text. Special tokens spelled out in a text are encoded as ordinary text; none is added."""
        return [ids.tolist() for ids in self.encode_arrays(texts)]

    def encode_arrays(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """The same ids as `encode_batch` as arrays of `dtype`.

        A byte-level vocabulary takes bounded memory for texts of any length: a longer one is encoded in parts, which
        gives the same ids, unless a single word has many ten thousand characters.
        """
        results: list[NDArray[Any]] = []
        batch: list[str] = []
        size = 0
        for text in texts:
            if len(text) > 2 * _PART_CHARACTERS and self._may_cut:
                results += self._encode(batch)
                parts = [self._encode([part])[0] for part in _parts(text)]
                results.append(np.concatenate(parts))
                batch, size = [], 0
                continue
            batch.append(text)
            size += len(text)
            if size >= _PART_CHARACTERS:
                results += self._encode(batch)
                batch, size = [], 0
        return results + self._encode(batch)

    def _encode(self, texts: list[str]) -> list[NDArray[Any]]:
        if not texts:
            return []
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]

    def decode(self, ids: Sequence[int] | NDArray[Any], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return str(self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens))

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and the `tokenizer_config.json` with which transformers' AutoTokenizer loads it."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_bytes(self.content)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.end_of_text,
            "clean_up_tokenization_spaces": False,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _configured_end(config: Path) -> str | None:
    """The end-of-text token that a Hugging Face `tokenizer_config.json` names, if there is such a file."""
    try:
        token = json.loads(config.read_bytes()).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _end_of_text(vocabulary: dict[str, int], configured: str | None, where: str) -> str:
    for name in (configured, *_END_NAMES):
        if name in vocabulary:
            return str(name)
    raise DataError(
        f"the tokenizer has no end-of-text token: none of {', '.join(_END_NAMES)}",
        where=where,
        fix="name it as eos_token in a tokenizer_config.json beside it",
    )


def _is_byte_level(spec: dict[str, Any]) -> bool:
    """Whether the vocabulary is byte-level and splits words by the usual patterns, so that `_CUT` is a word's end."""
    outer = spec.get("pre_tokenizer") or {}
    steps = outer.get("pretokenizers", [outer])
    levels = [step for step in steps if step.get("type") == "ByteLevel"]
    patterns = [str(step["pattern"]) for step in steps if step.get("type") == "Split"]
    splits = any(level.get("use_regex", True) for level in levels) or any("\\p{L" in pattern for pattern in patterns)
    prefix = any(step.get("add_prefix_space") for step in levels)
    return spec.get("normalizer") is None and bool(levels) and splits and not prefix


def _parts(text: str) -> Iterator[str]:
    """Cut a long text where a word ends anyway, and within words that are too long."""
    start = 0
    while len(text) - start > 2 * _PART_CHARACTERS:
        end = start + _PART_CHARACTERS
        cut = _CUT.search(text, end, end + _WORD_CHARACTERS)
        end = cut.end() if cut else end + _WORD_CHARACTERS
        yield text[start:end]
        start = end
    yield text[start:]


def train_tokenizer(sources: Sequence[Source], vocab_size: int, training_bytes: int) -> Tokenizer:
    """Train a byte-level BPE (Sennrich et al. 2016; on bytes as in Radford et al. 2019, section 2.2).

    The result depends on the texts and the arguments only, not on the number of threads. It round-trips any text
    exactly: nothing is normalised, and all 256 bytes are in the alphabet. As in Llama's vocabulary (Touvron et al.
    2023, section 2.1) numbers are split into digits, so that all are spelled alike, and a line break stands alone, so
    that indentation is one thing wherever it occurs.

    Args:
        sources: Where the text comes from; at most an equal share of `training_bytes` from each, and more from the
            others when one has less.
        vocab_size: Number of tokens, `<|endoftext|>` and the 256 bytes included; fewer when the text is too short.
        training_bytes: UTF-8 bytes of text to look at.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    total = min(training_bytes, sum(file.bytes for source in sources for file in source.files))
    bar = Progress("reading text for the tokenizer", total, "B")
    backend.train_from_iterator(_counted(sample_text(sources, training_bytes), bar), trainer)
    bar.finish()
    return Tokenizer(backend.to_str(pretty=True).encode(), "the trained tokenizer")


def _counted(texts: Iterator[str], bar: Progress) -> Iterator[str]:
    for text in texts:
        bar.advance(len(text))
        yield from _parts(text)  # the trainer, too, needs a hundred times a text's length


def sample_text(sources: Sequence[Source], budget: int) -> Iterator[str]:
    """Texts of at most `budget` UTF-8 bytes together, spread evenly over sources and within each; always the same.

    Malformed documents are passed over here: preparation reads everything and reports them.
    """
    smallest_first = sorted(sources, key=lambda source: sum(file.bytes for file in source.files))
    for number, source in enumerate(smallest_first):
        # A source that has less than its share leaves the rest to the larger ones after it.
        used = 0
        for document in _sample_source(source, budget // (len(sources) - number)):
            used += len(document.utf8)
            yield document.text
        budget -= used


def _sample_source(source: Source, budget: int) -> Iterator[Document]:
    """The beginnings of a source's pieces, as much of each, in a fixed mixed order until the budget is spent."""
    pieces = list(pieces_of([source]))
    if not pieces:
        return
    # Small pieces use less than the quota; when all of the source fits, no piece is cut.
    everything = sum(piece.bytes for piece in pieces) <= budget and not any(p.file.compression for p in pieces)
    quota = budget if everything else max(2**16, math.ceil(budget / len(pieces)))
    for number in permute(np.arange(len(pieces)), len(pieces), key=0):
        left = min(quota, budget)
        for document in read_documents(pieces[number]):
            if left <= 0:
                break
            if isinstance(document, Document):
                taken = document if len(document.utf8) <= left else _shortened(document, left)
                yield taken
                left -= len(taken.utf8)
                budget -= len(taken.utf8)
        if budget <= 0:
            return


def _shortened(document: Document, size: int) -> Document:
    """The beginning of a document, at most `size` bytes long."""
    text = document.utf8[:size].decode(errors="ignore")
    return Document(text, text.encode())
