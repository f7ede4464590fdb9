"""Reader of texts from a `.json` file that holds one array of records. No more than one record is held in memory."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, BinaryIO, cast

from headway.text.reading.compression import BlockReader, is_damage
from headway.text.reading.documents import BadDocument, BadRecordError, ContentError, too_large
from headway.text.reading.pieces import Piece
from headway.text.reading.places import SourceFile
from headway.text.reading.records import text_getter

_BLOCK = 2**20
_SPACE = " \t\r\n"


class ItemTooLongError(Exception):
    """An item is larger than the limit, so where it ends is unknown."""


def holds_array(file: SourceFile, stream: BinaryIO) -> bool:
    """Return whether a file is named `.json` and its content, from the beginning, is an array instead of lines."""
    if ".json" not in (ending.lower() for ending in PurePosixPath(file.name).suffixes[-2:]):
        return False
    head = cast(Any, stream).peek(2**12).removeprefix(b"\xef\xbb\xbf")
    return bool(head.lstrip()[:1] == b"[")


def read_array(stream: BinaryIO, piece: Piece) -> Iterator[str | BadDocument]:
    """Yield the texts of the records of an array, or records of what is wrong with them.

    An item of more than about `piece.most` bytes is malformed, and so is what follows it.
    """
    text_of = text_getter(piece.field, piece.template)
    number = 1
    try:
        for number, item in enumerate(array_items(stream, piece.most), 1):
            try:
                document: str | BadDocument = text_of(item)
            except BadRecordError as error:
                document = BadDocument(f"{piece.file.location}:item {number}", str(error))
            yield document
    except ItemTooLongError:
        where = f"{piece.file.location}:item {number + 1}"
        yield too_large(where, "item", piece.most, piece.most, more=True, rest=True)
    except Exception as error:
        if not is_damage(error):
            raise
        what = f"the file cannot be read from here on: {error}"
        yield BadDocument(f"{piece.file.location}:item {number + 1}", what, rest=True)


def array_items(stream: BinaryIO, most: int) -> Iterator[Any]:
    """Yield the items of an array, parsed.

    Raises:
        ContentError: the rest is not JSON.
        ItemTooLongError: an item has more than `most` characters.
    """
    text = _Text(stream, most)
    text.expect("[")
    if text.sign() == "]":
        text.expect("]")
    else:
        yield text.value()
        while text.sign() == ",":
            text.expect(",")
            yield text.value()
        text.expect("]")
    if text.sign():
        raise ContentError("not valid JSON: there is more after the array")


class _Text:
    """The text of a stream as far as it is needed, and the place in it."""

    def __init__(self, stream: BinaryIO, most: int) -> None:
        self._reader = BlockReader(stream)
        self._most = most
        # Bytes that are not UTF-8 become surrogates, which are found in the texts that matter.
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self._decode = json.JSONDecoder().raw_decode
        self._text = ""
        self._place = 0
        self._ended = False

    def sign(self) -> str:
        """Return the next character that is not white space; an empty text at the end."""
        while True:
            while self._place < len(self._text):
                sign = self._text[self._place]
                if sign not in _SPACE:
                    return sign
                self._place += 1
            if not self._more():
                return ""

    def expect(self, wanted: str) -> None:
        """Pass over a character.

        Raises:
            ContentError: there is another one.
        """
        found = self.sign()
        if found != wanted:
            there = f"there is {found!r}" if found else "the file ends"
            raise ContentError(f"not valid JSON: {there} where {wanted!r} is expected")
        self._place += 1

    def value(self) -> Any:
        """Parse a value and pass over it; what has no end yet is tried again with twice as much text."""
        self.sign()
        while True:
            problem: Exception | None = None
            try:
                value, end = self._decode(self._text, self._place)
                # A number at the end of the text may go on.
                if end < len(self._text) or self._ended:
                    if end - self._place > self._most:
                        raise ItemTooLongError
                    self._place = end
                    return value
            except (ValueError, RecursionError) as error:
                problem = error
            if len(self._text) - self._place > self._most:
                raise ItemTooLongError
            if not self._more() and problem is not None:
                reason = getattr(problem, "msg", None) or str(problem)
                raise ContentError(f"not valid JSON: {reason}")

    def _more(self) -> bool:
        """Read more, at least as much as there is; return whether there was more."""
        if self._ended:
            return False
        block = self._reader.read(max(_BLOCK, len(self._text) - self._place))
        self._ended = not block
        self._text = self._text[self._place :] + self._utf8.decode(block, final=not block)
        self._place = 0
        return True
