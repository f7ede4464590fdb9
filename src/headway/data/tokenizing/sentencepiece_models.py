"""SentencePiece models (Kudo and Richardson 2018), BPE and Unigram, as a `tokenizer.json` with identical ids.

The file is a protocol buffer, `ModelProto` of sentencepiece_model.proto. This module reads the few fields that matter,
so neither `sentencepiece` nor `protobuf` is needed.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headway.core.errors import DataError
from headway.data.tokenizing.spec import NEVER

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_KINDS = {1: "Unigram", 2: "BPE", 3: "word", 4: "char"}
_SPACE = "▁"
# Fields of the trainer's and the normalizer's settings that matter, as `_Model` names them.
_TRAINER = {3: "kind", 24: "space_behind", 35: "byte_fallback", 40: "unknown", 42: "end"}
_NORMALIZER = {2: "charsmap", 3: "dummy_prefix", 4: "collapse_spaces", 5: "escape_spaces"}


@dataclass
class _Piece:
    text: str = ""
    score: float = 0.0
    kind: int = _NORMAL


@dataclass
class _Model:
    """The fields that matter, with the defaults of the .proto file."""

    pieces: list[_Piece]
    kind: int = 1
    byte_fallback: bool = False
    space_behind: bool = False
    unknown: int = 0
    end: int = 2
    charsmap: bytes = b""
    dummy_prefix: bool = True
    collapse_spaces: bool = True
    escape_spaces: bool = True


def is_model(data: bytes) -> bool:
    """Return whether a file begins with a piece in SentencePiece's format."""
    try:
        number, value = next(_fields(data[: 2**16]))
        return number == 1 and isinstance(value, bytes) and bool(_piece(value).text)
    except (StopIteration, ValueError, IndexError, struct.error):
        return False


def from_model(data: bytes, where: str) -> tuple[bytes, str | None]:
    """Turn a SentencePiece model into a tokenizer.json.

    Control pieces (`<s>`, `</s>`) become special tokens. User-defined symbols become added tokens, which are matched in
    any text. An unknown character becomes its bytes if the model has byte pieces.

    Returns:
        The JSON, and the end-of-text token if the model has one.

    Raises:
        DataError: The file is damaged, or has a feature that a tokenizer.json cannot express.
    """
    import orjson

    try:
        model = _parse(data)
    except (ValueError, IndexError, struct.error) as error:
        raise DataError(f"not a whole SentencePiece model: {error}", where=where, fix="download it again") from None
    _check(model, where)
    added = [
        {
            "id": number,
            "content": piece.text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": piece.kind == _USER_DEFINED,
            "special": piece.kind != _USER_DEFINED,
        }
        for number, piece in enumerate(model.pieces)
        if piece.kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **_spaces(model),
        "post_processor": None,
        "model": _bpe(model) if model.kind == 2 else _unigram(model),
    }
    end = model.pieces[model.end].text if 0 <= model.end < len(model.pieces) else None
    return orjson.dumps(spec), end


def _check(model: _Model, where: str) -> None:
    unsupported = [
        (model.kind not in (1, 2), f"a {_KINDS.get(model.kind, 'unknown')} model"),
        (model.space_behind, "spaces at the end of pieces (treat_whitespace_as_suffix)"),
        (not model.escape_spaces, "spaces that are not escaped (escape_whitespaces)"),
        (model.kind == 2 and any(piece.kind == _UNUSED for piece in model.pieces), "unused pieces in a BPE model"),
        (model.kind == 1 and not all(p.score > NEVER for p in model.pieces if p.kind == _NORMAL), "boundless scores"),
        (len({piece.text for piece in model.pieces}) < len(model.pieces), "two pieces with the same text"),
    ]
    for is_so, what in unsupported:
        if is_so:
            raise DataError(
                f"the SentencePiece model has {what}, which a tokenizer.json cannot express",
                where=where,
                fix="give a BPE or Unigram model with SentencePiece's usual settings",
            )


def _spaces(model: _Model) -> dict[str, Any]:
    """Make the normalizer, pre-tokenizer and decoder, which handle spaces and normalize characters."""
    steps: list[dict[str, Any]] = []
    if model.charsmap:
        # The library treats "\r\n" as one character, so that the rule for "\r" would swallow the "\n".
        steps.append({"type": "Replace", "pattern": {"String": "\r\n"}, "content": "\n\n"})
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(model.charsmap).decode()})
    if model.collapse_spaces:
        steps.append({"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    symbols = [piece.text for piece in model.pieces if piece.kind == _USER_DEFINED]
    if model.dummy_prefix:
        steps.append(_prefix(symbols))
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    pre: dict[str, Any] | None = None
    if model.kind == 1 and not any(_SPACE in piece.text[1:] for piece in model.pieces):
        # Splitting into words does not change the result, and the library caches each word.
        pre = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "never", "split": True}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if model.dummy_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": pre,
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def _prefix(symbols: list[str]) -> dict[str, Any]:
    """Make the step that puts a space before a text, as SentencePiece does."""
    if not symbols:
        # The spelling of Llama's tokenizer.json, which fast encoders recognize.
        return {"type": "Prepend", "prepend": _SPACE}
    # The library normalizes user-defined symbols too, and matches them in normalized text. So a symbol's normal form
    # must have no space; unlike in SentencePiece, a text that is nothing but a symbol then has none either.
    alone = "|".join(re.escape(symbol) for symbol in symbols)
    return {"type": "Replace", "pattern": {"Regex": rf"\A(?!\z)(?!(?:{alone})\z)"}, "content": _SPACE}


def _bpe(model: _Model) -> dict[str, Any]:
    """Make the BPE model: SentencePiece joins the neighbours with the best score, so merges are in order of scores.

    Of equal scores it takes the leftmost pair, which merges cannot express. In some models, runs of spaces have equal
    scores; for these, the order of ids has the same effect.
    """
    usable = {piece.text: piece.score for piece in model.pieces if piece.kind == _NORMAL}
    ids = {piece.text: number for number, piece in enumerate(model.pieces)}
    merges: list[tuple[float, int, int, int, str, str]] = []
    for text, score in usable.items():
        for cut in range(1, len(text)):
            left = text[:cut]
            right = text[cut:]
            if left in usable and right in usable:
                merges.append((-score, ids[text], ids[left], ids[right], left, right))
    merges.sort()
    unknown = model.pieces[model.unknown].text
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        "ignore_merges": False,
        "vocab": ids,
        "merges": [[left, right] for *_, left, right in merges],
    }


def _unigram(model: _Model) -> dict[str, Any]:
    hidden = (_CONTROL, _UNKNOWN, _UNUSED, _BYTE)
    return {
        "type": "Unigram",
        "unk_id": model.unknown,
        "byte_fallback": model.byte_fallback,
        "vocab": [[p.text, NEVER if p.kind in hidden else p.score] for p in model.pieces],
    }


def _parse(data: bytes) -> _Model:
    model = _Model([])
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            model.pieces.append(_piece(value))
        elif number == 2 and isinstance(value, bytes):
            _read_settings(model, value, _TRAINER)
        elif number == 3 and isinstance(value, bytes):
            _read_settings(model, value, _NORMALIZER)
    if not 0 <= model.unknown < len(model.pieces):
        raise ValueError("it has no unknown piece")
    return model


def _piece(data: bytes) -> _Piece:
    piece = _Piece()
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            piece.text = value.decode()
        elif number == 2 and isinstance(value, bytes):
            (piece.score,) = struct.unpack("<f", value)
        elif number == 3 and isinstance(value, int):
            piece.kind = value
    return piece


def _read_settings(model: _Model, data: bytes, names: dict[int, str]) -> None:
    for number, value in _fields(data):
        name = names.get(number, "")
        kind = type(getattr(model, name, None))
        if kind is bytes and isinstance(value, bytes):
            model.charsmap = value
        elif kind in (int, bool) and isinstance(value, int):
            setattr(model, name, kind(_signed(value)))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield field numbers and values of a protocol buffer message: integers, and anything else as bytes."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        number = key >> 3
        wire = key & 7
        if wire == 0:
            value, place = _varint(data, place)
            yield number, value
            continue
        if wire == 2:
            size, place = _varint(data, place)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"no such wire type: {wire}")
        if place + size > len(data):
            raise ValueError("it ends in the middle of a field")
        yield number, data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 127) << shift
        place = place + 1
        shift = shift + 7
        if byte < 128:
            return value, place
        if shift > 63:
            raise ValueError("a number is too long")


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
