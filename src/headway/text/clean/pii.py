"""Replacement of e-mail addresses, IP addresses and telephone numbers by placeholders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from headway.config.sections.clean import PiiStep
from headway.text.clean.base import Step, around, first_difference
from headway.text.clean.pii_finders import Found, find_emails, find_ips, find_phones


class Pii(Step):
    """Replacement of e-mail addresses, public IP addresses and telephone numbers, counted by kind.

    Similar text is kept: addresses and numbers reserved for examples, version and section numbers, dates, decimals,
    times, code. Ambiguous text, such as ten digits without separators, is kept too.
    """

    version = 2

    def __init__(self, config: PiiStep) -> None:
        super().__init__()
        finders: list[tuple[Callable[[str], Iterator[Found]], str | None]] = [
            (find_emails, config.email),
            (lambda text: find_ips(text, config.private_ips), config.ip),
            (find_phones, config.phone),
        ]
        self._finders = [(find, placeholder) for find, placeholder in finders if placeholder is not None]

    def apply(self, text: str) -> str:
        """Replace matches by placeholders, and count them."""
        return self._replace(text, self.counts.reasons)

    def change(self, text: str) -> str:
        """Replace matches by placeholders."""
        return self._replace(text, Counter())

    def example(self, before: str, after: str) -> str:
        """Return an excerpt of the new text, since the old one contains personal data."""
        return around(after, first_difference(before, after))

    def _replace(self, text: str, counts: Counter[str]) -> str:
        for find, placeholder in self._finders:
            parts = []
            done = 0
            for start, end, kind in find(text):
                counts[kind] += 1
                parts += [text[done:start], placeholder]
                done = end
            if parts:
                text = "".join([*parts, text[done:]])
        return text
