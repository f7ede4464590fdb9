"""The rules of C4 and FineWeb for web pages."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from headway.config.sections.clean import C4Step, FinewebStep
from headway.core.errors import DataError
from headway.core.files.foreign import SETTINGS_BYTES, read_bytes
from headway.core.files.hashes import fingerprint
from headway.text.clean.base import Step, beyond, lines_of
from headway.text.clean.counts import Drop

_POLICIES = re.compile("terms of use|privacy policy|cookie policy|uses cookies|use of cookies|use cookies")
_CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
_SENTENCE = re.compile(r"[.!?]+[\"'”’)\]]*(?:\s|$)")
# "..." marks a truncated sentence; the authors' code removes such lines too.
_LINE_ENDS = (".", "!", "?", '"', "”")
_ELLIPSIS = ("...", "…")
# Sentence terminators of modern scripts, without quotation marks and closing brackets.
_TERMINALS = frozenset(".!?…。！？｡．؟۔।॥։።፧៖។၊။᙮⁇⁈⁉‼⸮")


class C4(Step):
    """The rules of C4, without its deduplication (a separate setting) and language filter (the step `language`).

    They are from Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer", section 2.2. Line rules remove lines, page rules drop the page. As in the paper, and unlike the
    authors' code, "lorem ipsum" and curly brackets are searched in the whole page, not only in the kept lines. A
    sentence ends in `.`, `!` or `?` before white space; every kept line counts as at least one sentence.
    """

    version = 2

    def __init__(self, config: C4Step) -> None:
        super().__init__()
        self._config = config
        self._blocked = _BlockedWords(config.blocked_words) if config.blocked_words else None

    def apply(self, text: str) -> str | Drop:
        """Apply the rules for the whole page, then those for lines, then the limit on sentences."""
        config = self._config
        if config.curly_brackets and "{" in text:
            return Drop("curly bracket", "holds a curly bracket")
        lower = text.lower()
        if config.lorem_ipsum and "lorem ipsum" in lower:
            return Drop("lorem ipsum", "holds 'lorem ipsum'")
        if self._blocked and (word := self._blocked.find(lower)):
            return Drop("blocked word", f"holds '{word}'")
        if config.citations and "[" in text:
            # "privacy[1] policy" matches a policy only after its citation marker is removed.
            lower = _CITATION.sub("", text).lower()
        kept = self._lines(text, self.counts.reasons, "javascript" in lower, bool(_POLICIES.search(lower)))
        if config.min_sentences:
            sentences = sum([len(_SENTENCE.findall(line)) or 1 for line in kept])
            if sentences < config.min_sentences:
                return Drop("few sentences", f"{sentences} sentences < {config.min_sentences}")
        return "\n".join(kept)

    def change(self, text: str) -> str:
        """Return the kept lines."""
        return "\n".join(self._lines(text, Counter(), True, True))

    def _lines(self, text: str, removed: Counter[str], javascript: bool, policies: bool) -> list[str]:
        """Return the lines that no rule removes, and count the removed ones; the flags enable two costly rules."""
        config = self._config
        kept = []
        fewest = config.min_words_per_line
        longest = config.max_word_length
        terminal = config.terminal_punctuation
        javascript = javascript and config.javascript_lines
        policies = policies and config.policy_lines
        for whole in lines_of(text):
            line = whole
            if config.citations and "[" in line:
                line, count = _CITATION.subn("", line)
                removed["citation markers removed"] += count
                line = line.strip()
            if terminal and (not line.endswith(_LINE_ENDS) or line.endswith(_ELLIPSIS)):
                removed["lines without terminal punctuation"] += 1
                continue
            words = line.split()
            if len(words) < fewest:
                removed["lines of few words"] += 1
            elif longest and len(line) > longest and max(map(len, words)) > longest:
                removed["lines with a long word"] += 1
            elif javascript and "javascript" in line.lower():
                removed["lines with Javascript"] += 1
            elif policies and _POLICIES.search(line.lower()):
                removed["lines on policies"] += 1
            elif line:
                kept.append(line)
        # `+=` on a Counter leaves entries of zero, which are not findings.
        if not removed["citation markers removed"]:
            del removed["citation markers removed"]
        return kept

    def describe(self) -> dict[str, Any]:
        """Return the hash of the list of blocked words."""
        return {"blocked_words": fingerprint(self._blocked.words) if self._blocked else None}


class _BlockedWords:
    """Blocked words and phrases from a file, matched at word boundaries.

    Raises:
        DataError: the file cannot be read, or contains no word.
    """

    def __init__(self, path: Path) -> None:
        try:
            lines = read_bytes(path, SETTINGS_BYTES).decode("utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"the list of blocked words cannot be read: {error}", where=str(path), fix="check blocked_words"
            ) from None
        self.words = sorted({" ".join(line.lower().split()) for line in lines if line.strip()})
        if not self.words:
            raise DataError("the list of blocked words is empty", where=str(path), fix="one word a line")
        self._single = {word for word in self.words if re.fullmatch(r"\w+", word)}
        phrases = "|".join(re.escape(word) for word in self.words if word not in self._single)
        self._phrases = re.compile(rf"(?<!\w)(?:{phrases})(?!\w)") if phrases else None
        self._word = re.compile(r"\w+")

    def find(self, lower: str) -> str | None:
        """Return a blocked word of a lower-case text, if any; the choice is deterministic."""
        found = self._single.intersection(self._word.findall(lower))
        if found:
            return min(found)
        match = self._phrases.search(lower) if self._phrases else None
        return match[0] if match else None


class Fineweb(Step):
    """The three heuristic filters of FineWeb.

    They are from Penedo et al. 2024, "The FineWeb Datasets" (arXiv:2406.17557), section 3.6, "Developing additional
    heuristic filters". Lines are stripped of white space, and blank lines do not count.
    """

    def __init__(self, config: FinewebStep) -> None:
        super().__init__()
        self._config = config

    def apply(self, text: str) -> str | Drop:
        """Check punctuation, repeated lines and short lines."""
        config = self._config
        lines = lines_of(text)
        if not lines:
            return Drop("no lines", "holds no line")
        share = sum([line[-1] in _TERMINALS for line in lines]) / len(lines)
        if share <= config.min_punctuated_lines:
            return beyond("lines with terminal punctuation", share, "<=", config.min_punctuated_lines)
        distinct = set(lines)
        if len(distinct) < len(lines):
            total = sum(map(len, lines))
            share = (total - sum(map(len, distinct))) / total
            if share >= config.max_duplicate_line_characters:
                return beyond("duplicate line characters", share, ">=", config.max_duplicate_line_characters)
        limit = config.short_line
        share = sum([len(line) < limit for line in lines]) / len(lines)
        if share >= config.max_short_lines:
            return beyond("short lines", share, ">=", config.max_short_lines)
        return text
