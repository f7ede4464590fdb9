"""The quality filter of Gopher."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headway.config.sections.clean import GopherQualityStep
from headway.text.clean.base import Step, beyond, lines_of
from headway.text.clean.counts import Drop


class GopherQuality(Step):
    """Rae et al. 2021, "Scaling Language Models: Methods, Analysis & Insights from Training Gopher", appendix A.1.1.

    Words are separated by white space and include adjacent punctuation. Blank lines do not count. The rules run in the
    paper's order.
    """

    def __init__(self, config: GopherQualityStep) -> None:
        super().__init__()
        self._config = config
        self._bullets = tuple(config.bullets)
        words = [word.lower() for word in config.stop_words]
        # Spellings for a fast set lookup. The pattern finds the remaining cases, such as "(the".
        self._spellings = {form for word in words for form in (word, word.capitalize(), word.upper())}
        self._stop_word = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, words))})(?!\w)", re.IGNORECASE)

    def apply(self, text: str) -> str | Drop:
        """Apply all rules, the cheap ones first if the paper leaves the order open."""
        words = text.split()
        return self._by_words(text, words) or self._by_lines(text) or self._by_meaning(text, words) or text

    def _by_words(self, text: str, words: Sequence[str]) -> Drop | None:
        """Check the number of words, their mean length and the symbols per word."""
        config = self._config
        count = len(words)
        if count < config.min_words or not count:
            return Drop("few words", f"{count:,} words < {config.min_words:,}")
        if count > config.max_words:
            return Drop("many words", f"{count:,} words > {config.max_words:,}")
        mean = sum(map(len, words)) / count
        if mean < config.min_mean_word_length:
            return beyond("mean word length", mean, "<", config.min_mean_word_length)
        if mean > config.max_mean_word_length:
            return beyond("mean word length", mean, ">", config.max_mean_word_length)
        limit = config.max_symbol_to_word_ratio
        if (ratio := text.count("#") / count) > limit:
            return beyond("hash symbols", ratio, ">", limit)
        if (ratio := (text.count("...") + text.count("…")) / count) > limit:
            return beyond("ellipses", ratio, ">", limit)
        return None

    def _by_lines(self, text: str) -> Drop | None:
        """Check the shares of lines that are bullet points or end in an ellipsis."""
        lines = lines_of(text)
        bullets = self._bullets
        limit = self._config.max_bullet_lines
        if (share := sum([line.startswith(bullets) for line in lines]) / len(lines)) > limit:
            return beyond("bullet lines", share, ">", limit)
        limit = self._config.max_ellipsis_lines
        if "..." not in text and "…" not in text:
            return None
        if (share := sum([line.endswith(("...", "…")) for line in lines]) / len(lines)) > limit:
            return beyond("ellipsis lines", share, ">", limit)
        return None

    def _by_meaning(self, text: str, words: Sequence[str]) -> Drop | None:
        """Check the share of words with an alphabetic character, and the number of stop words."""
        limit = self._config.min_alphabetic_words
        count = len(words)
        # Purely alphabetic words are fast to count, and often there are enough of them.
        alphabetic = sum(map(str.isalpha, words))
        if alphabetic < limit * count:
            alphabetic += sum([any(map(str.isalpha, word)) for word in words if not word.isalpha()])
        if alphabetic < limit * count:
            return beyond("alphabetic words", alphabetic / count, "<", limit)
        wanted = self._config.min_stop_words
        if wanted and len({word.lower() for word in self._spellings.intersection(words)}) < wanted:
            found = len({word.lower() for word in self._stop_word.findall(text)})
            if found < wanted:
                return beyond("stop words", found, "<", wanted)
        return None
