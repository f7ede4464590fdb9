"""The documents that models are compared on: held out from a store, or from files of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from headway.core.arrays import Bools, Floats, Ints
from headway.core.console import warning
from headway.core.errors import ConfigError, DataError
from headway.core.files.foreign import parse_json_lines, read_given_bytes
from headway.core.files.hashes import fingerprint, sha256_bytes
from headway.core.format import counted, format_bytes
from headway.data.store import TokenStore
from headway.data.store_manifest import MANIFEST
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.lab.compare.candidates import Tokens
from headway.training.evaluation.document_losses import Document

#: Most bytes of text that are compared on; a store has no limit.
MOST_BYTES = 256 * 2**20
#: Endings of files of text, each file a document, and of JSON lines, each line a document.
_TEXT = (".txt", ".text", ".md")
_LINES = (".jsonl", ".ndjson")
_HELD_OUT = "validation"
_TEXTS_AT_ONCE = 64
#: Training documents of the same length as one of these that are read at most, per source.
_MOST_READ = 5_000_000


@dataclass(frozen=True)
class StoreCorpus:
    """Documents of a store, for models with its tokenizer."""

    name: str
    store: TokenStore
    sources: tuple[str, ...]
    source_of: Ints
    bounds: Ints
    """First token of each document in its source, and the one after its last: (documents, 2)."""

    @classmethod
    def of(cls, store: TokenStore) -> StoreCorpus:
        """List the documents that a store holds out.

        Raises:
            DataError: it holds out none.
        """
        sources = tuple(store.sources(_HELD_OUT))
        if not sources:
            raise DataError(
                "the store holds out no documents", where=str(store.path), fix="--data FILE, or raise data.validation"
            )
        starts = [store.documents(_HELD_OUT, source).astype(np.int64) for source in sources]
        bounds = np.concatenate([np.stack([found[:-1], found[1:]], axis=1) for found in starts])
        source_of = np.repeat(np.arange(len(sources)), [len(found) - 1 for found in starts])
        return cls(f"the validation split of {store.path}", store, sources, source_of, bounds)

    def keep(self, chosen: Ints) -> StoreCorpus:
        """Return the chosen documents."""
        return replace(self, source_of=self.source_of[chosen], bounds=self.bounds[chosen])

    @property
    def digest(self) -> str:
        """Hash of the store and of which of its documents these are."""
        places = np.concatenate([self.source_of[:, None], self.bounds], axis=1)
        return fingerprint([self.store.fingerprint, sha256_bytes(places.astype("<i8").tobytes())])

    def documents(self, tokens: Tokens) -> Iterator[Document]:
        """Yield the documents as they are in the store."""
        for source, (first, end) in zip(self.source_of, self.bounds, strict=True):
            place = (_HELD_OUT, self.sources[source], int(first), int(end - first))
            yield Document(self.store.read(*place).astype(np.int64), self.store.read_mask(*place))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The store's tokenizer."""
        return Tokenizer.load(self.store.tokenizer_folder)

    def as_text(self) -> TextCorpus:
        """Decode the documents, for models with other tokenizers; those that do not survive that are left out.

        Raises:
            DataError: none survives.
        """
        tokenizer = self.tokenizer
        begin = len(self.store.begin_of_text)
        texts = []
        kept = []
        for number, document in enumerate(self.documents(Tokens(tokenizer, self.store.begin_of_text))):
            ids = document.ids[begin:-1]
            text = tokenizer.decode(ids, skip_special_tokens=False)
            if text and np.array_equal(tokenizer.encode_arrays([text])[0], ids):
                texts.append(text)
                kept.append(number)
        if not texts:
            raise DataError(
                "no document of the store can be decoded to the text that it was made of",
                where=str(self.store.path),
                fix="--data FILE, with text",
            )
        return TextCorpus(f"{self.name}, decoded", tuple(texts), self.sources, self.source_of[kept])


@dataclass(frozen=True)
class TextCorpus:
    """Documents of text, for any models."""

    name: str
    texts: tuple[str, ...]
    sources: tuple[str, ...]
    source_of: Ints

    def keep(self, chosen: Ints) -> TextCorpus:
        """Return the chosen documents."""
        texts = tuple(self.texts[number] for number in chosen)
        return replace(self, texts=texts, source_of=self.source_of[chosen])

    @property
    def digest(self) -> str:
        """Hash of the texts."""
        return fingerprint([sha256_bytes(text.encode()) for text in self.texts])

    @property
    def bytes(self) -> Floats:
        """Bytes of each document in UTF-8: (documents,)."""
        return np.array([len(text.encode()) for text in self.texts], dtype=np.float64)

    def documents(self, tokens: Tokens) -> Iterator[Document]:
        """Yield the documents, encoded as `headway data prepare` does."""
        before = np.array(list(tokens.begin.values()), dtype=np.int64)
        end = np.array([tokens.tokenizer.end_of_text_id], dtype=np.int64)
        for first in range(0, len(self.texts), _TEXTS_AT_ONCE):
            for ids in tokens.tokenizer.encode_arrays(self.texts[first : first + _TEXTS_AT_ONCE]):
                yield Document(np.concatenate([before, ids.astype(np.int64), end]))


#: Documents with their sources.
Corpus = StoreCorpus | TextCorpus


def read_corpus(path: Path) -> Corpus:
    """Open `--data`: a store, a file of text or of JSON lines, or a folder of such files.

    Raises:
        ConfigError: there is no such thing, or it is too large.
        DataError: a file has no documents, or cannot be read.
    """
    if (path / MANIFEST).is_file():
        return StoreCorpus.of(TokenStore.open(path))
    files = [path] if path.is_file() else [file for file in sorted(path.rglob("*")) if file.suffix in _TEXT + _LINES]
    if not files:
        known = ", ".join(_TEXT + _LINES)
        what = f"the folder has no files of text ({known})" if path.is_dir() else "there is no such file"
        raise ConfigError(what, where=f"--data {path}", fix="name a file of text or JSON lines, or a token store")
    size = sum(file.stat().st_size for file in files)
    if size > MOST_BYTES:
        raise ConfigError(
            f"{format_bytes(size)} of text are too many: at most {format_bytes(MOST_BYTES)}",
            where=f"--data {path}",
            fix="prepare a store of it, which --data takes at any size: headway data -h",
        )
    texts: list[str] = []
    names: list[str] = []
    for file in files:
        found = _texts_in(file)
        texts += found
        names += [file.stem if file.suffix in _LINES else file.parent.name or file.stem] * len(found)
    if not texts:
        raise DataError("the files have no text", where=f"--data {path}", fix='JSON lines are {"text": "..."}')
    sources = tuple(dict.fromkeys(names))
    return TextCorpus(str(path), tuple(texts), sources, np.array([sources.index(name) for name in names]))


def _texts_in(file: Path) -> list[str]:
    content = read_given_bytes(file, MOST_BYTES)
    if file.suffix in _LINES:
        lines = [line for line in content.split(b"\n") if line.strip()]
        found = [record.get("text") for record in parse_json_lines(lines)]
        texts = [text for text in found if isinstance(text, str) and text]
        if len(texts) < len(lines):
            warning(f"{file}: {counted(len(lines) - len(texts), 'line')} left out: not a JSON object with text")
        return texts
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"not UTF-8 at byte {error.start:,}", where=str(file), fix="convert it: iconv -t utf-8"
        ) from None
    return [text] if text else []


def evenly(corpus_size: int, limit: int) -> Ints:
    """Return the numbers of at most `limit` documents, evenly spaced over all."""
    count = min(corpus_size, limit)
    return np.arange(count, dtype=np.int64) * corpus_size // max(1, count)


def trained_on(store: TokenStore, tokens: Tokens, documents: Sequence[Document]) -> Bools:
    """Return which documents are, token by token, among those that a store has for training.

    Only training documents of the same lengths are read.

    Args:
        store: The store that a run was trained on.
        tokens: How the run reads text.
        documents: As that run reads them.

    Raises:
        DataError: too many documents have these lengths.
    """
    known = [document.ids.astype(store.dtype).tobytes() for document in documents]
    wanted = {content: number for number, content in enumerate(known)}
    lengths = np.unique([len(document.ids) for document in documents])
    seen = set()
    for source in store.sources("train"):
        starts = store.documents("train", source).astype(np.int64)
        same = np.flatnonzero(np.isin(np.diff(starts), lengths))
        if len(same) > _MOST_READ:
            what = f"{counted(len(same), 'training document')} of source '{source}' have the same lengths as these"
            raise DataError(what, where=str(store.path), fix="compare on fewer documents: --documents")
        for number in same:
            first = int(starts[number])
            end = int(starts[number + 1])
            seen.add(wanted.get(store.read("train", source, first, end - first).astype(store.dtype).tobytes()))
    contents = {known[number] for number in seen if number is not None}
    return np.array([content in contents for content in known], dtype=np.bool_)
