"""Texts on which encoders are known to differ, and the sample of a corpus on which they are compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

# Size of the sample, which consists of the beginnings of documents: the reference takes about 0.2 s for it.
_SAMPLE_CHARACTERS = 2**18
_DOCUMENT_CHARACTERS = 2**14

# Limit on the special tokens that are spelled out in many contexts; some vocabularies have a thousand.
_AROUND = 64

# Letters, digits and marks of Unicode 14 (Vithkuqi), 15 (Kawi, Nag Mundari), 15.1 (Han), 16 (Garay, Latin) and 17
# (Latin, Sidetic, Beria Erfe, Han): libraries differ in which of them their tables have.
_NEW_CHARACTERS = [
    0x10570,
    0x11F04,
    0x11F50,
    0x1E4F0,
    0x2EBF0,
    0x10D4A,
    0x10D41,
    0xA7DA,
    0xA7CE,
    0x10940,
    0x16EA0,
    0x323B0,
]

_EDGE_CASES = [
    "",
    " ",
    "\n\n \t\r\n",
    "\r\n\r\n\n\r \u00a0\u2003\u3000\u2028\u0085x",
    "\x00\x01\x1c\x1f\x7f",
    "naïve café — “quotes” … ﬁ ǆ Ⅷ ² ½ ٣٤ १२ ⑩ 12345 1,234.5e-6 0x1F",
    "e\u0301 vs é, \u1100\u1161\u11a8 각, ﷺ \u0958 Å Å",
    "👩‍👩‍👧‍👦🏳️‍🌈 👍🏽 ☃️",
    "العربية עִבְרִית हिन्दी 日本語ひらがなカタカナ 한국어 ภาษาไทย ελληνικά русский",
    "\ufeff\u200b\u2028\u202e\ufffd\uffff\U0010ffff\ue000",
    "I'm we'RE you'LL he'D it'S they'Ve don't 'tis ‘S ’ll 'ſ 'ſt K'K",
    "if x:\n    return 1\n\n\n\tpass  \n \n  7   8\t\t9\n",
    "a_b.c(d)[e]{f}=='g'//h/*i*/\n#!&&||->=>::;\n///\n/\r/",
    "HTTPServer camelCaseWord ALLCAPS aB Ab ABc ǅ",
    "  leading and trailing  ",
    "▁a ▁▁ b▁",
    "<s> </s> <unk> <0x41> <|endoftext|> [CLS] [MASK] <pad>",
    "x" * 3000 + " " * 3000 + "7" * 3000 + "\n" * 3000 + "!" * 3000,
    "zq" * 2000 + "é" * 2000 + "漢" * 2000,
    *(
        # A contraction or a line break after the character reveals whether the library takes it for a letter.
        f"a{new}b 1{new}2 .{new}! {new}'s {new}\n{new}{new}"
        for new in map(chr, _NEW_CHARACTERS)
    ),
]


def edge_case_texts(added: Iterable[str] = ()) -> list[str]:
    """Return texts with all kinds of white space, digits, scripts and marks, long runs, and spelled-out special tokens.

    Args:
        added: Texts of special and other added tokens.
    """
    tokens = list(dict.fromkeys(added))
    around = [f"{token}{token} a{token}b {token} \n{token}.{token[1:]}{token[:-1]}" for token in tokens[:_AROUND]]
    return _EDGE_CASES + around + [f"{token} a{token}b" for token in tokens[_AROUND:]]


def shortened(sample: Iterable[str]) -> Iterator[str]:
    """Yield the beginnings of the first texts of a sample, up to the size that is compared."""
    left = _SAMPLE_CHARACTERS
    for text in sample:
        if left <= 0:
            return
        yield text[: min(left, _DOCUMENT_CHARACTERS)]
        left -= min(len(text), _DOCUMENT_CHARACTERS)
