"""How text is split into words before byte pairs are merged: the published patterns, and which of them are the same."""

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

#: Patterns by name, in the spelling of the `tokenizer.json` files that their makers published: fast encoders know these
#: spellings, and take another one that means the same for an unknown pattern.
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

#: White space, as Python has it, and the marks behind which a word mostly ends.
SPACES = "".join(map(chr, [*range(9, 14), *range(28, 33), 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B)])) + (
    "\u2028\u2029\u202f\u205f\u3000"
)
STOPS = ",.;:!?\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f"
#: Other punctuation, but for the apostrophe ("don't").
MARKS = '"#$%&()*+/=@\\^`{}~'
ENDS = frozenset(SPACES + STOPS + MARKS)
#: Of them, what no text of people has, and libraries do not agree on.
ODD_ENDS = frozenset("\x1c\x1d\x1e\x1f\x85")

# tiktoken's own spellings: faster in its regex engine, the same splits but for white space that ends a text.
_OTHER_SPELLINGS = {
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s": "gpt2",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt2",
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
    ): "cl100k",
}


def pattern_of(name_or_regex: str, also: Iterable[str] = ()) -> str:
    """The regular expression of a pattern's name, or of another spelling of it; any other is returned as it is.

    Args:
        also: Names that the caller knows besides, for the message.

    Raises:
        ConfigError: it is a name, but of no pattern. As a regular expression it would split text at that very word.
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


# What stands for one character, or a character itself.
_ATOM = (
    r"\\[pP]\{\^?\w+\}|\\[pP]\w|\\[xu]\{[0-9A-Fa-f]+\}|\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\(?![xupP]\{)."
    r"|\[(?:\\.|[^\]\\])+\]|[^\\\[\](){}|+*?^$]"
)
_UNLIKE = re.compile(rf"(?P<counted>{_ATOM})(?P<times>\{{[0-9]+(?:,[0-9]*)?\}})\+|{_ATOM}|(?P<anchor>[$^])")
_STILL_UNLIKE = re.compile(r"(?<=[)\]])\{[0-9]+(?:,[0-9]*)?\}\+")


def from_tiktoken(pattern: str, ends_in_spaces: bool) -> str:
    """A pattern of tiktoken's engine as `tokenizers` has to have it: a name, or a regular expression.

    To the latter's engine (Oniguruma with Ruby's syntax) `x{1,3}+` means any number of `x{1,3}`, not one that keeps
    what it took, and `$` and `^` are about lines.

    Args:
        pattern: A name, or a regular expression of tiktoken's.
        ends_in_spaces: Some token is white space in which others follow a line break, so that it matters how what ends
            a text is split.

    Raises:
        ConfigError: it is a name, but of no pattern; or what is repeated in the first way is more than a character.
    """
    known = pattern_of(pattern)
    if pattern in PATTERNS or (known != pattern and not ("$" in pattern and ends_in_spaces)):
        return known

    def written(found: re.Match[str]) -> str:
        if found["counted"]:
            return f"(?>{found['counted']}{found['times']})"
        return {"$": r"\z", "^": r"\A"}.get(found[0], found[0])

    regex = _UNLIKE.sub(written, pattern)
    if _STILL_UNLIKE.search(regex):
        raise ConfigError("`tokenizers` reads `(...){m,n}+` otherwise", where=pattern, fix="write (?>(...){m,n})")
    return regex


def ends_usual_words(pre_tokenizer: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer splits by one of these patterns alone, each of which ends a word before any of `ENDS`."""
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
    """The `pre_tokenizer` of a byte-level tokenizer.json that splits by a pattern (a name or a regular expression)."""
    regex = pattern_of(pattern)
    if regex == PATTERNS["gpt2"]:
        # The one that `ByteLevel` has built in.
        return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split, level]}
