"""Where in its file a document stands that was read without a complaint, for the few that are reported later."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any

from headway.data.reading.compression import open_content
from headway.data.reading.pieces import Piece
from headway.data.reading.records import BadRecordError, text_getter

_BOM = b"\xef\xbb\xbf"
_BLOCK = 2**20


def places_of(piece: Piece, numbers: Iterable[int]) -> dict[int, str]:
    """Name the places of documents of a piece.

    Args:
        piece: A piece that was read to its end, or at least so far.
        numbers: Of documents with text, counted from 0, in the order in which they were read.

    Returns:
        By number the file with the line, where lines are documents and the file is local; else with the number itself.
    """
    wanted, file = set(numbers), piece.file
    places = {number: _roughly(piece, number) for number in wanted}
    if piece.texts is None and file.format == "jsonl" and file.local and wanted:
        last = max(wanted)
        for number, line in enumerate(_sound_lines(piece)):
            if number in wanted:
                places[number] = f"{file.location}:{line}"
            if number == last:
                break
    return places


def _roughly(piece: Piece, number: int) -> str:
    if piece.texts is None and piece.file.format == "text":
        return piece.file.location
    part = f" of part {piece.span[0]:,}-{piece.span[1]:,}" if piece.span is not None else ""
    return f"{piece.file.location}: document {number + 1:,}{part}"


def _sound_lines(piece: Piece) -> Iterator[int]:
    """Numbers, from 1, of the lines that begin in a piece and hold a document with text."""
    text_of, (start, end) = text_getter(piece.field, piece.template), piece.span or (0, None)
    position = 0
    with open_content(piece.file) as stream:
        for number in count(1):
            begins, line = position, stream.readline(piece.most + 1)
            if not line or (end is not None and begins >= end):
                return
            position, rest = position + len(line), line
            while not rest.endswith(b"\n") and (rest := stream.readline(_BLOCK)):
                position += len(rest)
            if begins >= start and position - begins <= len(line) and _has_text(line, number, text_of):
                yield number


def _has_text(line: bytes, number: int, text_of: Callable[[Any], str]) -> bool:
    try:
        record = json.loads(line.removeprefix(_BOM) if number == 1 else line)
        return isinstance(record, dict) and bool(text_of(record))
    except (ValueError, RecursionError, BadRecordError):
        return False
