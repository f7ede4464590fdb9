"""The cleaning steps of a config, applied to one document after the other."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from headway.config.sections.clean import CleanStep, step_settings
from headway.core.console import warning
from headway.text.clean.base import Step, utf8_size
from headway.text.clean.contamination import Decontaminate
from headway.text.clean.counts import CleanCounts, Drop
from headway.text.clean.function import PythonFunction, Score
from headway.text.clean.gopher import GopherQuality
from headway.text.clean.language import Language
from headway.text.clean.pii import Pii
from headway.text.clean.repetition import GopherRepetition
from headway.text.clean.simple import Length, Unicode
from headway.text.clean.web import C4, Fineweb

_STEPS: dict[str, Callable[[Any], Step]] = {
    "unicode": Unicode,
    "length": Length,
    "gopher_quality": GopherQuality,
    "gopher_repetition": GopherRepetition,
    "c4": C4,
    "fineweb": Fineweb,
    "language": Language,
    "pii": Pii,
    "python": PythonFunction,
    "score": Score,
    "decontaminate": Decontaminate,
}
_NOTHING_LEFT = Drop("nothing left", "nothing left of the text")


class Cleaner:
    """Applies all steps in order to documents, and counts what each step does.

    The result depends only on the text and the steps, not on earlier documents.

    Raises:
        ConfigError: a step needs a package that is not installed, or a function that does not exist.
        DataError: an evaluation set or word list cannot be read.
    """

    def __init__(self, steps: Sequence[CleanStep]) -> None:
        self._steps = _opened(steps)
        self._names = _names(steps)
        self._counts = CleanCounts.of(self._names)
        self.take_counts()

    def clean(self, text: str) -> str | None:
        """Return the cleaned document, or None if a step drops it, and update the counts.

        Raises:
            DataError: a function of the user failed.
        """
        size = utf8_size(text)
        for step, counts in zip(self._steps, self._counts.steps, strict=True):
            counts.documents_in += 1
            counts.bytes_in += size
            result = step.apply(text)
            if isinstance(result, Drop) or not result:
                counts.drop(result if isinstance(result, Drop) else _NOTHING_LEFT, text)
                return None
            if result is not text and result != text:
                counts.changed += 1
                if counts.wants("changed"):
                    counts.show("changed", "changed", step.example(text, result))
                text = result
                size = utf8_size(result)
            counts.documents_out += 1
            counts.bytes_out += size
        return text

    def clean_kept(self, text: str) -> str | None:
        """Return the result of `clean` for a document that it keeps, without filters and counts.

        Raises:
            DataError: a function of the user failed, or now drops the document.
        """
        for step in self._steps:
            text = step.change(text)
            if not text:
                return None
        return text

    def take_counts(self) -> CleanCounts:
        """Return the counts since the last call."""
        taken = self._counts
        self._counts = CleanCounts.of(self._names)
        for step, counts in zip(self._steps, self._counts.steps, strict=True):
            step.counts = counts
        return taken


def describe_steps(steps: Sequence[CleanStep]) -> dict[str, Any]:
    """Return everything that the outcome of the steps depends on, for fingerprints, as plain JSON without paths.

    Besides the settings, this covers the versions of the rules, the Unicode tables and the libraries, and the hashes of
    the source of user functions, of word lists and of evaluation sets. Remarks of steps are shown as warnings.

    Raises:
        ConfigError: as in `Cleaner`.
        DataError: as in `Cleaner`.
    """
    described = []
    for config, step in zip(steps, _opened(steps), strict=True):
        described.append({**step_settings(config), "version": step.version, **step.describe()})
        for remark in step.remarks():
            warning(remark)
    return {"steps": described, "unicode": unicodedata.unidata_version} if described else {"steps": []}


def _opened(steps: Sequence[CleanStep]) -> list[Step]:
    return [_STEPS[step.step](step) for step in steps]


def _names(steps: Sequence[CleanStep]) -> list[str]:
    """Return unique names of the steps; a second `length` becomes "length-2"."""
    seen: Counter[str] = Counter()
    names = []
    for step in steps:
        seen[step.step] += 1
        names.append(step.step if seen[step.step] == 1 else f"{step.step}-{seen[step.step]}")
    return names
