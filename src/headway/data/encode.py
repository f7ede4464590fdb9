"""Pieces to tokens, on worker processes: read, choose each document's split, tokenize."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError
from headway.core.faults import fault_point
from headway.data.readers import BadDocument, Document, read_documents
from headway.data.sources import Piece
from headway.data.tokenizer import Tokenizer

SPLITS = ("train", "validation")
#: Skipped documents that are listed; all are counted.
LISTED = 1000
_BATCH_BYTES = 2**20


@dataclass
class SplitPart:
    """What a piece gives to one split."""

    tokens: NDArray[Any]
    """Ids of all its documents, each ended by the end-of-text token, in the store's dtype."""
    lengths: NDArray[np.int64]
    """Tokens of each document, the end-of-text token included."""


@dataclass
class EncodedPiece:
    """What a worker hands back."""

    piece: Piece
    splits: dict[str, SplitPart]
    documents: int = 0
    characters: int = 0
    text_bytes: int = 0
    empty: int = 0
    skipped: int = 0
    skipped_list: list[BadDocument] = field(default_factory=list)
    smallest: int = 2**64
    """Smallest and largest document hash."""
    largest: int = -1


def document_hash(utf8: bytes) -> int:
    """First 64 bits of a text's SHA-256: they decide its split."""
    return int.from_bytes(hashlib.sha256(utf8).digest()[:8], "big")


class Encoder:
    """Turns pieces into tokens.

    Args:
        tokenizer: The vocabulary.
        bound: Documents whose hash is below it are held out for validation.
        skip_bad: Count and list malformed documents instead of failing on the first.
    """

    def __init__(self, tokenizer: Tokenizer, bound: int, skip_bad: bool) -> None:
        self.tokenizer, self.bound, self.skip_bad = tokenizer, bound, skip_bad

    def encode(self, piece: Piece) -> EncodedPiece:
        """Read, split and tokenize one piece.

        Raises:
            DataError: the piece holds a malformed document, and these are not to be skipped; or see `read_documents`.
        """
        result = EncodedPiece(piece, {})
        arrays: dict[str, list[NDArray[Any]]] = {split: [] for split in SPLITS}
        for documents in _batches(self._sound(piece, result)):
            encoded = self.tokenizer.encode_arrays([document.text for document in documents])
            for document, ids in zip(documents, encoded, strict=True):
                arrays[self._split(document, result)].append(ids)
        for split, ids_list in arrays.items():
            result.splits[split] = _joined(ids_list, self.tokenizer)
        return result

    def _sound(self, piece: Piece, result: EncodedPiece) -> Iterator[Document]:
        """Documents of the piece that have text, counted; bad ones are listed or raised."""
        for document in read_documents(piece):
            if isinstance(document, BadDocument):
                if not self.skip_bad:
                    raise document.error()
                result.skipped += 1
                if len(result.skipped_list) < LISTED:
                    result.skipped_list.append(document)
            elif not document.text:
                result.empty += 1
            else:
                result.documents += 1
                result.characters += len(document.text)
                result.text_bytes += len(document.utf8)
                yield document

    def _split(self, document: Document, result: EncodedPiece) -> str:
        value = document_hash(document.utf8)
        result.smallest, result.largest = min(result.smallest, value), max(result.largest, value)
        return "validation" if value < self.bound else "train"


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Groups of documents of about `_BATCH_BYTES`: enough for the library, little enough for memory."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.utf8)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _joined(documents: list[NDArray[Any]], tokenizer: Tokenizer) -> SplitPart:
    end = np.array([tokenizer.end_of_text_id], dtype=tokenizer.dtype)
    parts = [part for document in documents for part in (document, end)]
    tokens = np.concatenate(parts) if parts else np.empty(0, dtype=tokenizer.dtype)
    return SplitPart(tokens, np.array([len(document) + 1 for document in documents], dtype=np.int64))


def encode_all(
    pieces: Sequence[Piece], tokenizer: Path, bound: int, skip_bad: bool, processes: int
) -> Generator[EncodedPiece, None, None]:
    """Encode pieces on worker processes (in this one when `processes` is 1) and hand them back in input order.

    Raises:
        DataError: that of the first piece in input order that has one; or a worker died.
    """
    if processes == 1:
        encoder = Encoder(Tokenizer.load(tokenizer), bound, skip_bad)
        with _one_thread():
            yield from map(encoder.encode, pieces)
        return
    pool = ProcessPoolExecutor(
        processes, get_context("spawn"), initializer=_start_worker, initargs=(tokenizer, bound, skip_bad)
    )
    try:
        # Few enough results wait for an earlier, slower piece that memory is bounded.
        waiting: deque[Future[EncodedPiece]] = deque()
        for piece in pieces:
            waiting.append(pool.submit(_encode_piece, piece))
            if len(waiting) > 4 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise DataError(
            "a worker process died: killed, for example for want of memory, or it could not start",
            fix="use fewer workers; a script that calls `prepare` needs an `if __name__ == '__main__':` guard",
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep the tokenizers library to the calling thread for the length of a block."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


_encoder: Encoder


def _start_worker(tokenizer: Path, bound: int, skip_bad: bool) -> None:
    """First thing a worker process does."""
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Ctrl-C reaches the whole process group; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = Encoder(Tokenizer.load(tokenizer), bound, skip_bad)


def _end_with_parent() -> None:
    """Workers of a parent that was killed would wait for work forever."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _encode_piece(piece: Piece) -> EncodedPiece:
    """`Encoder.encode` in a worker process."""
    fault_point("data.encode")
    return _encoder.encode(piece)
