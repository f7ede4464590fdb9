"""Scripts that put no spaces between words; each of their characters counts as a word."""

from __future__ import annotations

#: Ranges of code points (first, last): Thai and Lao, Burmese, Khmer, kana, ideographs, and the half-width forms and
#: supplements of the last two.
UNSPACED = (
    (0x0E00, 0x0EFF),
    (0x1000, 0x109F),
    (0x1780, 0x17FF),
    (0x3005, 0x3007),
    (0x3040, 0x30FF),
    (0x31F0, 0x31FF),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0xFF66, 0xFF9F),
    (0x1AFF0, 0x1B16F),
)
#: Range of the ideographs in the supplementary planes.
IDEOGRAPHS = (0x20000, 0x3FFFF)
