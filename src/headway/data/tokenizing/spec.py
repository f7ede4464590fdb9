"""The content of a `tokenizer.json`, read without the library that runs it."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from headway.core.errors import DataError
from headway.core.files.foreign import check_depth
from headway.data.tokenizing.patterns import ENDS, MARKS, ODD_ENDS, SPACES, STOPS, ends_usual_words
from headway.data.tokenizing.preload import take_parsed
from headway.data.tokenizing.word_ends import word_ends

_IDS_FIX = "give each token its own id, in the tokenizer's file and in added_tokens_decoder next to it"

END_OF_TEXT = "<|endoftext|>"
END_NAMES = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<EOS>",
    "<|endofdocument|>",
    "<|end▁of▁sentence|>",
    "<｜end▁of▁sentence｜>",
    "<EOT>",
    "<|im_end|>",
)

#: Text is encoded in parts of about this many characters, since `tokenizers` uses about 200 bytes per token meanwhile.
PART_CHARACTERS = 2**16
#: A longer word is cut, since memory would have no bound otherwise; ordinary text has no such words.
WORD_CHARACTERS = 2**16
# For a SentencePiece vocabulary whose pieces have spaces only at their beginning: a single space begins a new piece.
_SPACE = re.compile(r"[^\s▁] (?=\w)")


class Cutting(NamedTuple):
    """The rules for cutting a long text."""

    places: tuple[re.Pattern[str], ...]
    """Patterns that match the text before a cut, in order of preference."""
    words: bool
    """A word that is too long is cut, too."""
    space: bool = False
    """The space between two parts is omitted, since the vocabulary puts one before every part."""


def parse(content: bytes, where: str) -> dict[str, Any]:
    """Parse a tokenizer.json.

    Raises:
        DataError: The content is not a tokenizer.json.
    """
    import orjson

    try:
        spec = take_parsed(content) or orjson.loads(content)
        vocab = spec["model"]["vocab"]
        if not isinstance(vocab, dict | list):
            raise TypeError("its model has no vocabulary")
        # Other readers and writers fail on deep nesting. Vocabulary and merges, which are long, are checked in use.
        model = {key: value for key, value in spec["model"].items() if key not in ("vocab", "merges")}
        check_depth({**spec, "model": model})
    except (ValueError, KeyError, TypeError) as error:
        reason = "it has no model with a vocabulary" if isinstance(error, KeyError) else str(error)
        raise DataError(f"not a tokenizer: {reason}", where=where, fix="give a tokenizer.json") from None
    return spec  # type: ignore[no-any-return]


def vocabulary(spec: dict[str, Any]) -> dict[str, int]:
    """Return the id of every token, including added ones."""
    vocab = spec["model"]["vocab"]
    ids = dict(vocab) if isinstance(vocab, dict) else {entry[0]: number for number, entry in enumerate(vocab)}
    return ids | {token["content"]: token["id"] for token in added_tokens(spec)}


def first_conflict(ours: Mapping[str, int], theirs: Mapping[str, int]) -> tuple[int, str, str] | None:
    """Return an id that means different tokens in two vocabularies, with the token of each; None if there is none.

    Ids that only one of them has are no conflict.
    """
    meant = {number: token for token, number in theirs.items()}
    found = ((number, token, meant[number]) for token, number in ours.items() if meant.get(number, token) != token)
    return next(found, None)


def check_unique_ids(ids: Mapping[str, int], where: str) -> None:
    """Check that every token has its own id.

    If a special token shared its id with ordinary text, a document could end, or a chat begin, in the middle of a text.

    Raises:
        DataError: Two tokens have one id, or a token has no valid id.
    """
    if not set(map(type, ids.values())) <= {int} or min(ids.values(), default=0) < 0:
        raise DataError("a token's id is not a non-negative integer", where=where, fix=_IDS_FIX)
    if len(set(ids.values())) == len(ids):
        return
    token_of: dict[int, str] = {}
    for token, number in ids.items():
        other = token_of.setdefault(number, token)
        if other != token:
            raise DataError(f"two tokens have the id {number:,}: {other!r} and {token!r}", where=where, fix=_IDS_FIX)


def added_tokens(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of `added_tokens`, in the order of their ids."""
    return sorted(spec.get("added_tokens") or [], key=lambda token: int(token["id"]))


def unknown_id(spec: dict[str, Any], ids: dict[str, int]) -> int | None:
    """Return the id of the unknown token, if the vocabulary has one."""
    model = spec["model"]
    number = model.get("unk_id")
    token = model.get("unk_token")
    return number if isinstance(number, int) else ids.get(token) if isinstance(token, str) else None


def end_of_text(ids: Mapping[str, int], configured: str | None, where: str) -> str:
    """Return the end-of-text token: the configured one, or else the first common name in the vocabulary.

    Raises:
        DataError: There is none.
    """
    if configured is not None and configured not in ids:
        near = difflib.get_close_matches(configured, [name for name in END_NAMES if name in ids], 1, 0.5)
        raise DataError(
            f"the end-of-text token {configured!r} is not in the vocabulary"
            + (f"; did you mean {near[0]!r}?" if near else ""),
            where=where,
            fix="repair eos_token in the tokenizer_config.json or special_tokens_map.json next to the tokenizer",
        )
    for name in END_NAMES if configured is None else (configured,):
        if name in ids:
            return name
    raise DataError(
        f"the tokenizer has no end-of-text token: none of {', '.join(END_NAMES)}",
        where=where,
        fix="name it as eos_token in a tokenizer_config.json next to it",
    )


def cutting(spec: dict[str, Any]) -> Cutting | None:
    """Return how to cut a long text without a change of its tokens; None if no way is known."""
    how: Cutting | None = None
    if _is_byte_level(spec):
        how = at_words_of(spec["pre_tokenizer"])
    elif _is_metaspace(spec) and "▁" in vocabulary(spec):
        how = Cutting((_SPACE,), words=False, space=True)
    return None if how is None or any(_may_meet_cut(token, how) for token in added_tokens(spec)) else how


def was_cut_otherwise(spec: dict[str, Any]) -> bool:
    """Return whether earlier versions cut long texts at places that may change their tokens."""
    if _is_byte_level(spec):
        how = at_words_of(spec["pre_tokenizer"])
        return how is None or not how.words
    return _is_metaspace(spec) and "▁" not in vocabulary(spec)


def at_words_of(pre_tokenizer: dict[str, Any]) -> Cutting | None:
    """Return the rules for cutting where a pre-tokenizer certainly ends words; None if there is no such place."""
    if ends_usual_words(pre_tokenizer):
        return AT_WORDS

    return at_words(word_ends(pre_tokenizer))


def at_words(ends: frozenset[str]) -> Cutting | None:
    """Return the rules for cutting after a letter or digit that one of these characters follows.

    If the characters are all of `ENDS`, white space and stops are preferred to other punctuation, which serves for text
    that is mostly quotes and brackets.

    Args:
        ends: Characters before which a pre-tokenizer ends a word.
    """
    words = ends >= ENDS - ODD_ENDS
    found = ["".join(sorted(ends.intersection(some))) for some in ((SPACES + STOPS, MARKS) if words else (ENDS,))]
    places = tuple(re.compile(rf"[^\W_](?=[{re.escape(some)}])") for some in found if some)
    return Cutting(places, words) if places else None


def _may_meet_cut(token: dict[str, Any], how: Cutting) -> bool:
    """Return whether an added token, which is matched in the whole text, can cross a cut or absorb text after it."""
    text = str(token["content"])
    across = any(place.search(text) for place in (*_EVERYWHERE, _SPACE))
    behind = bool(token.get("rstrip")) and text[-1:].isalnum()
    return across or behind or (how.space and text[:1].isalnum())


def _is_byte_level(spec: dict[str, Any]) -> bool:
    """Return whether the vocabulary is byte-level and splits words by patterns."""
    outer = spec.get("pre_tokenizer") or {}
    steps = outer.get("pretokenizers", [outer])
    levels = [step for step in steps if step.get("type") == "ByteLevel"]
    patterns = [str(step["pattern"]) for step in steps if step.get("type") == "Split"]
    splits = any(level.get("use_regex", True) for level in levels) or any("\\p{L" in pattern for pattern in patterns)
    prefix = any(step.get("add_prefix_space") for step in levels)
    return spec.get("normalizer") in (None, {"type": "NFC"}) and bool(levels) and splits and not prefix


def _is_metaspace(spec: dict[str, Any]) -> bool:
    """Return whether spaces become "▁", one precedes each text, and no token has one after another character."""
    steps = (spec.get("normalizer") or {}).get("normalizers") or [{}]
    split = spec.get("pre_tokenizer") or {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"}
    to_space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    first = steps[0].get("prepend") or steps[0].get("content")
    by_normalizer = len(steps) == 2 and first == "▁" and steps[1] == to_space
    schemes = ("never",) if by_normalizer else ("always", "first")
    if not by_normalizer and spec.get("normalizer"):
        return False
    if (
        split.get("type") != "Metaspace"
        or split.get("replacement") != "▁"
        or split.get("prepend_scheme") not in schemes
    ):
        return False
    return not any("▁" in token.lstrip("▁") for token in vocabulary(spec))


def parts(text: str, how: Cutting | None) -> Iterator[str]:
    """Cut a long text where a word ends, and within words that are too long."""
    start = 0
    while how is not None and len(text) - start > 2 * PART_CHARACTERS:
        end = start + PART_CHARACTERS
        stop = _place(text, end, how, end + WORD_CHARACTERS if how.words else len(text))
        if stop is None and not how.words:
            break  # a cut inside a word would change the tokens
        stop = end + WORD_CHARACTERS if stop is None else stop
        yield text[start : stop - how.space]
        start = stop
    yield text[start:]


def _place(text: str, start: int, how: Cutting, limit: int) -> int | None:
    """Find the first place after `start` where a text may be cut; return None if there is none before `limit`.

    In a vocabulary that normalizes to NFC, the white space or mark after the cut never joins the text before it. But a
    letter that NFC decomposes may end in a mark, which is reordered with the marks after it.
    """
    for place in how.places:
        for found in place.finditer(text, start, limit):
            if how.space or unicodedata.is_normalized("NFC", found[0]):
                return found.end()
    return None


#: The rules for byte-level vocabularies with one of the usual patterns.
AT_WORDS = at_words(ENDS)
_EVERYWHERE = AT_WORDS.places if AT_WORDS else ()

#: Score that marks Unigram pieces which are not for text, in files converted from SentencePiece models. It does not ban
#: them; see `special`.
NEVER = -1e5
