"""Patterns that split text into words before byte pairs are merged: the published ones, and their other spellings."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

from headway.core.errors import ConfigError

_NAME = re.compile(r"[\w. -]{2,}")
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"

#: Patterns by name, in the spelling of the `tokenizer.json` files that their authors published. Fast encoders recognize
#: only these spellings, not equivalent ones.
#: gpt2: Radford et al. 2019; cl100k, o200k: OpenAI's tiktoken, and Llama 3's is cl100k's; qwen2: Qwen; tekken: Mistral.
PATTERNS: dict[str, str] = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    "qwen2": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    "o200k": "|".join(
        [
            rf"{_CASED}{_CONTRACTIONS}?",
            rf"{_UPPER}{_CONTRACTIONS}?",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            _SPACES,
        ]
    ),
    "tekken": "|".join([_CASED, _UPPER, r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACES]),
}
PATTERNS["llama3"] = PATTERNS["cl100k"]

#: White space, as Python defines it, and the marks after which a word usually ends.
SPACES = "".join(map(chr, [*range(9, 14), *range(28, 33), 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B)])) + (
    "\u2028\u2029\u202f\u205f\u3000"
)
STOPS = ",.;:!?\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f"
#: Other punctuation, except the apostrophe ("don't").
MARKS = '"#$%&()*+/=@\\^`{}~'
ENDS = frozenset(SPACES + STOPS + MARKS)
#: Those of `ENDS` that do not occur in ordinary text, and that libraries treat differently.
ODD_ENDS = frozenset("\x1c\x1d\x1e\x1f\x85")

# tiktoken's own spellings: faster in its regex engine; the splits differ only in white space at the end of a text.
_OTHER_SPELLINGS = {
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s": "gpt2",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt2",
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
    ): "cl100k",
}


def pattern_of(name_or_regex: str, also: Iterable[str] = ()) -> str:
    """Return the regular expression of a pattern, given its name or another spelling; others are returned unchanged.

    Args:
        name_or_regex: The name or regular expression.
        also: Further names that the caller accepts, for the message.

    Raises:
        ConfigError: It looks like a name, but there is no such pattern. As a regular expression, it would split text at
            that word.
    """
    name = _OTHER_SPELLINGS.get(name_or_regex, name_or_regex)
    if name not in PATTERNS and _NAME.fullmatch(name):
        names = sorted({*PATTERNS, *also})
        near = difflib.get_close_matches(name.lower(), names, 1)
        guess = f"; did you mean '{near[0]}'?" if near else ""
        raise ConfigError(
            f"data.tokenizer.pattern: there is no pattern '{name}'{guess}",
            where="data.tokenizer.pattern",
            fix=f"one of {', '.join(names)}, or a regular expression",
        )
    return PATTERNS.get(name, name_or_regex)


# A syntax element that matches one character, or a literal character.
_ATOM = (
    r"\\[pP]\{\^?\w+\}|\\[pP]\w|\\[xu]\{[0-9A-Fa-f]+\}|\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\(?![xupP]\{)."
    r"|\[(?:\\.|[^\]\\])+\]|[^\\\[\](){}|+*?^$]"
)
_DIFFERENT_SYNTAX = re.compile(rf"(?P<counted>{_ATOM})(?P<times>\{{[0-9]+(?:,[0-9]*)?\}})\+|{_ATOM}|(?P<anchor>[$^])")
_UNSUPPORTED_SYNTAX = re.compile(r"(?<=[)\]])\{[0-9]+(?:,[0-9]*)?\}\+")


def from_tiktoken(pattern: str, ends_in_spaces: bool) -> str:
    """Translate a pattern of tiktoken's engine into one for `tokenizers`: a name, or a regular expression.

    In the engine of `tokenizers` (Oniguruma with Ruby's syntax) `x{1,3}+` means any number of `x{1,3}`, not a
    possessive match, and `$` and `^` match at lines.

    Args:
        pattern: A name, or a regular expression for tiktoken.
        ends_in_spaces: Some token is white space that continues after a line break, so that the split of white space at
            the end of a text matters.

    Raises:
        ConfigError: It looks like a name, but there is no such pattern; or a possessive interval repeats more than one
            character.
    """
    known = pattern_of(pattern)
    if pattern in PATTERNS or (known != pattern and not ("$" in pattern and ends_in_spaces)):
        return known

    def written(found: re.Match[str]) -> str:
        if found["counted"]:
            return f"(?>{found['counted']}{found['times']})"
        return {"$": r"\z", "^": r"\A"}.get(found[0], found[0])

    regex = _DIFFERENT_SYNTAX.sub(written, pattern)
    if _UNSUPPORTED_SYNTAX.search(regex):
        raise ConfigError("`tokenizers` reads `(...){m,n}+` differently", where=pattern, fix="write (?>(...){m,n})")
    return regex


def ends_usual_words(pre_tokenizer: dict[str, Any]) -> bool:
    """Return whether a pre-tokenizer splits by one of `PATTERNS` alone; all of them end a word before any of `ENDS`."""
    if pre_tokenizer.get("type") == "ByteLevel":
        return bool(pre_tokenizer.get("use_regex", True)) and not pre_tokenizer.get("add_prefix_space", True)
    match pre_tokenizer.get("pretokenizers"):
        case [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return regex in PATTERNS.values()
    return False


def pre_tokenizer(pattern: str) -> dict[str, Any]:
    """Make the `pre_tokenizer` of a byte-level tokenizer.json for a pattern (a name or a regular expression)."""
    regex = pattern_of(pattern)
    if regex == PATTERNS["gpt2"]:
        # `ByteLevel` has this pattern built in.
        return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split, level]}
