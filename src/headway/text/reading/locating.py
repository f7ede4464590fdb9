"""Places of sound documents in their files, found afterwards for the few documents that are reported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import count

from headway.text.reading.compression import open_content
from headway.text.reading.documents import BadRecordError
from headway.text.reading.json_arrays import holds_array
from headway.text.reading.json_lines import BOM, keys_of_text, load_record
from headway.text.reading.pieces import Piece
from headway.text.reading.records import text_getter

_BLOCK = 2**20


def places_of(piece: Piece, numbers: Iterable[int]) -> dict[int, str]:
    """Find the places of documents of a piece.

    Args:
        piece: A piece that was read to its end, or at least past these documents.
        numbers: Indices of documents with text, from 0, in reading order.

    Returns:
        Places by number: file and line if the file is local JSON Lines, else file and number of the document.
    """
    wanted = set(numbers)
    file = piece.file
    places = {number: _approximate_place(piece, number) for number in wanted}
    if piece.texts is None and file.format == "jsonl" and file.local and wanted:
        last = max(wanted)
        for number, line in enumerate(_sound_lines(piece)):
            if number in wanted:
                places[number] = f"{file.location}:{line}"
            if number == last:
                break
    return places


def _approximate_place(piece: Piece, number: int) -> str:
    if piece.texts is None and piece.file.format == "text":
        return piece.file.location
    part = f" of part {piece.span[0]:,}-{piece.span[1]:,}" if piece.span is not None else ""
    return f"{piece.file.location}: document {number + 1:,}{part}"


def _sound_lines(piece: Piece) -> Iterator[int]:
    """Yield the numbers, from 1, of the lines that begin in a piece and hold a document with text."""
    text_of = text_getter(piece.field, piece.template)
    keys = keys_of_text(piece.field, piece.template)
    start, end = piece.span or (0, None)
    position = 0
    with open_content(piece.file) as stream:
        if holds_array(piece.file, stream):
            return
        for number in count(1):
            begins = position
            line = stream.readline(piece.most + 1)
            if not line or (end is not None and begins >= end):
                return
            position = position + len(line)
            rest = line
            while not rest.endswith(b"\n") and (rest := stream.readline(_BLOCK)):
                position += len(rest)
            if begins < start or position - begins > len(line):
                continue
            with suppress(BadRecordError):
                if text_of(load_record(line.removeprefix(BOM) if number == 1 else line, keys)):
                    yield number
