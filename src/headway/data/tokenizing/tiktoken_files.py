"""Vocabularies of byte strings with ranks, tiktoken's and Mistral's Tekken, as byte-level BPE in a `tokenizer.json`.

Such a vocabulary has no list of merges. Within a word, the two neighbours whose concatenation has the lowest rank are
joined, repeatedly; and a word that is in the vocabulary is a single token (tiktoken, `src/lib.rs`). The equivalent
merges are those of each token's parts, in the order of ranks.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from headway.core.errors import DataError
from headway.core.files.foreign import parse_json
from headway.core.files.hashes import sha256_bytes
from headway.data.tokenizing.patterns import PATTERNS, from_tiktoken, pre_tokenizer
from headway.data.tokenizing.settings_files import TokenizerSettings
from headway.data.tokenizing.spec import END_OF_TEXT, check_unique_ids

_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
_SPACES_BEHIND_BREAK = re.compile(rb"\s*[\r\n]\s*[^\S\r\n]")


@dataclass(frozen=True)
class _Encoding:
    """The facts about a published vocabulary that its file does not contain."""

    sha256: str
    pattern: str
    special: dict[str, int]


_FIM = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
# tiktoken_ext/openai_public.py
_PUBLISHED = {
    "r50k_base": _Encoding(
        "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930", "gpt2", {END_OF_TEXT: 50256}
    ),
    "p50k_base": _Encoding(
        "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069", "gpt2", {END_OF_TEXT: 50256}
    ),
    "cl100k_base": _Encoding(
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
        "cl100k",
        {END_OF_TEXT: 100257} | dict(zip(_FIM, range(100258, 100261), strict=True)) | {"<|endofprompt|>": 100276},
    ),
    "o200k_base": _Encoding(
        "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
        "o200k",
        {END_OF_TEXT: 199999, "<|endofprompt|>": 200018},
    ),
}
# The special tokens of a tekken.json that lists none (mistral-common, `Tekkenizer.DEPRECATED_SPECIAL_TOKENS`).
_TEKKEN_SPECIAL = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
]


def is_rank_file(data: bytes) -> bool:
    """Return whether a file's first line is a token in base64 and its rank."""
    return _LINE.match(data) is not None


def from_rank_file(
    data: bytes, path: Path, settings: TokenizerSettings, pattern: str | None
) -> tuple[bytes, str | None]:
    """Turn a `.tiktoken` file into a tokenizer.json.

    The file contains neither the pattern that splits text nor the special tokens. OpenAI's files are known by their
    SHA-256. For others, the `tokenizer_config.json` next to the file gives both: the pattern as `pattern` or `pat_str`,
    and the special tokens in `added_tokens_decoder`. Without such a pattern, the given one is used.

    Args:
        data: The file's bytes.
        path: The file, for messages.
        settings: The settings in the files next to it.
        pattern: A name or a regular expression, for a file whose pattern is not known otherwise.

    Returns:
        The JSON, and the end-of-text token if it is known.

    Raises:
        DataError: The file is damaged, or its pattern or special tokens are unknown.
    """
    hashed = sha256_bytes(data)
    known = next((encoding for encoding in _PUBLISHED.values() if encoding.sha256 == hashed), None)
    configured = settings.values.get("pattern") or settings.values.get("pat_str")
    pattern = (known.pattern if known else None) or configured or pattern
    if not isinstance(pattern, str):
        raise DataError(
            "a .tiktoken file does not say how it splits text into words, and this one is not a published one",
            where=str(path),
            fix=f"set data.tokenizer.pattern (or pat_str in a tokenizer_config.json next to it) to one of"
            f" {', '.join(sorted(PATTERNS))}, or to its regular expression",
        )
    special = _special(settings) or (dict(known.special) if known else {})
    if not special:
        raise DataError(
            "a .tiktoken file does not name its special tokens, and this one is not a published one",
            where=str(path),
            fix='add {"added_tokens_decoder": {"<id>": {"content": "<token>", "special": true}}, "eos_token": '
            '"<token>"} as tokenizer_config.json next to it',
        )
    content = _tokenizer_json(_ranks(data, str(path)), pattern, special, str(path))
    return content, END_OF_TEXT if END_OF_TEXT in special else None


def _special(settings: TokenizerSettings) -> dict[str, int]:
    special = {token.content: number for number, token in settings.added.items()}
    for number, token in settings.added.items():
        if special[token.content] != number:
            raise _two_ids(token.content, number, special[token.content], str(settings.folder / token.file))
    return special


def _two_ids(token: str, first: int, second: int, where: str) -> DataError:
    return DataError(f"{token!r} has two ids: {first:,} and {second:,}", where=where, fix="remove one of them")


def from_tekken(data: bytes, where: str) -> tuple[bytes, str | None]:
    """Turn Mistral's `tekken.json` into a tokenizer.json; special tokens have the lowest ids.

    Raises:
        DataError: The file is damaged.
    """
    try:
        spec = parse_json(data)
        config = spec["config"]
        reserved = int(config["default_num_special_tokens"])
        count = int(config["default_vocab_size"]) - reserved
        ranks: dict[bytes, int] = {}
        for entry in spec["vocab"][:count]:
            _add_rank(ranks, base64.b64decode(entry["token_bytes"]), int(entry["rank"]), where)
        listed = {entry["token_str"]: int(entry["rank"]) for entry in spec.get("special_tokens") or []}
        pattern = str(config["pattern"])
    except (ValueError, KeyError, TypeError, binascii.Error) as error:
        raise DataError(f"not a tekken.json: {error!r}", where=where, fix="download it again") from None
    special = listed or {token: number for number, token in enumerate(_TEKKEN_SPECIAL)}
    named = set(special.values())
    special |= {f"<SPECIAL_{number}>": number for number in range(reserved) if number not in named}
    return _tokenizer_json(ranks, pattern, special, where, first=reserved), "</s>" if "</s>" in special else None


def _ranks(data: bytes, where: str) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            _add_rank(ranks, base64.b64decode(token, validate=True), int(rank), f"{where}:{number}")
        except (ValueError, binascii.Error):
            raise DataError(
                "not a token in base64 and its rank", where=f"{where}:{number}", fix="download it again"
            ) from None
    return ranks


def _add_rank(ranks: dict[bytes, int], token: bytes, rank: int, where: str) -> None:
    if ranks.setdefault(token, rank) != rank:
        raise _two_ids(str(token), ranks[token], rank, where)


def _tokenizer_json(
    ranks: dict[bytes, int], pattern: str, special: dict[str, int], where: str, first: int = 0
) -> bytes:
    """Make the JSON; the id of a token is its rank plus `first`."""
    import orjson

    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(f"the vocabulary lacks {len(missing)} of the 256 bytes", where=where, fix="download it again")
    letters = byte_letters()
    spelled = {token: "".join([letters[byte] for byte in token]) for token in ranks}
    ordered = sorted(ranks, key=ranks.__getitem__)
    ids = {spelled[token]: first + ranks[token] for token in ordered}
    for token in special.keys() & ids.keys():
        # The special token would replace the id of a word of ordinary text.
        raise _two_ids(token, ids[token], special[token], where)
    ids |= special
    check_unique_ids(ids, where)
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(token, number) for token, number in sorted(special.items(), key=lambda item: item[1])],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer(from_tiktoken(pattern, any(map(_SPACES_BEHIND_BREAK.fullmatch, ranks)))),
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            # A word that is a token becomes that token, even if merges do not lead to it.
            "ignore_merges": True,
            "vocab": _vocabulary(ids),
            "merges": [[spelled[left], spelled[right]] for left, right in _merges(ranks, ordered)],
        },
    }
    return orjson.dumps(spec)


def _vocabulary(ids: dict[str, int]) -> dict[str, int]:
    """Fill the gaps between ids: with a gap, libraries give added tokens other ids, or reject the file.

    The tokens that fill gaps contain a space, which no word of a byte-level vocabulary does, so no text becomes one.
    """
    unused = set(range(max(ids.values()))) - set(ids.values())
    return dict(sorted((ids | {f"unused {number}": number for number in unused}).items(), key=lambda item: item[1]))


def _added(token: str, number: int) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": token, **flags}


def byte_letters() -> list[str]:
    """Return the printable character for each byte in byte-level vocabularies (GPT-2's `bytes_to_unicode`)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def _merges(ranks: dict[bytes, int], ordered: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Yield, for each token in the order of ranks, the pairs of tokens that make it."""
    halves: dict[bytes, tuple[bytes, bytes]] = {}
    for token in ordered:
        cuts = [cut for cut in range(1, len(token)) if token[:cut] in ranks and token[cut:] in ranks]
        if len(cuts) > 1:
            # The pieces of a token join in the order of ranks, until one pair is left.
            last = [cut for cut in cuts if _stay_apart(token[:cut], token[cut:], ranks, halves, ranks[token])]
            if len(last) != 1:
                # If several pairs are possible, simulate the merges; if these do not end in one pair, keep all.
                pieces = _joined(token, ranks, ranks[token])
                last = [len(pieces[0])] if len(pieces) == 2 else cuts
            cuts = last
        if len(cuts) == 1:
            halves[token] = token[: cuts[0]], token[cuts[0] :]
        for cut in cuts:
            yield token[:cut], token[cut:]


def _stay_apart(
    left: bytes, right: bytes, ranks: dict[bytes, int], halves: dict[bytes, tuple[bytes, bytes]], limit: int
) -> bool:
    """Return whether two tokens form from their pieces without a merge across their border at a rank below `limit`.

    It undoes merges in reverse order: it splits the token that was joined later, and the two pieces that then meet at
    the border must not be a token that would have been joined earlier. Of equal ranks, the leftmost pair joins first.
    """
    while True:
        if ranks.get(left + right, limit) < limit:
            return False
        if len(left) == len(right) == 1:
            return True
        left_rank = ranks[left] if len(left) > 1 else -1
        right_rank = ranks[right] if len(right) > 1 else -1
        if left_rank > right_rank:
            if left not in halves:
                return False
            limit = left_rank
            left = halves[left][1]
        else:
            if right not in halves:
                return False
            limit = right_rank + 1
            right = halves[right][0]


def _joined(token: bytes, ranks: dict[bytes, int], limit: int) -> list[bytes]:
    """Return the pieces of a token after all merges of a rank below `limit`, lowest rank first."""
    pieces = [token[i : i + 1] for i in range(len(token))]
    while len(pieces) > 1:
        pairs = (ranks.get(left + right, limit) for left, right in pairwise(pieces))
        rank, place = min((rank, place) for place, rank in enumerate(pairs))
        if rank >= limit:
            break
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    return pieces
