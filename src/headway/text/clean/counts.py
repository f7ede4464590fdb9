"""Counts of what each cleaning step did; the counts of several workers can be added."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from headway.core.statistics import add_counts

#: Examples kept of each kind: dropped, changed and found.
EXAMPLES = 5
#: Characters of a text shown in an example.
SHOWN = 200


class Drop(NamedTuple):
    """The result of a step that drops a document."""

    reason: str
    """Name of the rule, equal for all documents that fail it: "mean word length"."""
    detail: str
    """The reason with this document's value: "mean word length 12.1 > 10"."""
    text: str | None = None
    """Excerpt for an example; the beginning of the document if None."""


@dataclass(frozen=True)
class Example:
    """A document that a step dropped or changed, or in which it found something without a change."""

    kind: Literal["dropped", "changed", "found"]
    reason: str
    text: str
    """Up to 200 characters: the beginning of a dropped document, or the text around the change or finding."""


@dataclass
class StepCounts:
    """Counts of one step; `documents_in - documents_out` were dropped."""

    name: str
    documents_in: int = 0
    documents_out: int = 0
    bytes_in: int = 0
    """Bytes in UTF-8."""
    bytes_out: int = 0
    changed: int = 0
    """Documents kept with a different text."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Counts of the reasons for drops, and of findings inside documents: e-mail addresses, certain lines, overlaps."""
    examples: list[Example] = field(default_factory=list)
    """The first ones in input order."""

    def drop(self, drop: Drop, text: str) -> None:
        """Count a dropped document."""
        self.reasons[drop.reason] += 1
        self.show("dropped", drop.detail, text if drop.text is None else drop.text)

    def show(self, kind: Literal["dropped", "changed", "found"], reason: str, text: str) -> None:
        """Keep an example, if there is room."""
        if self.wants(kind):
            self.examples.append(Example(kind, reason, text[:SHOWN]))

    def wants(self, kind: str) -> bool:
        """Return whether there is room for another example of a kind."""
        return sum(example.kind == kind for example in self.examples) < EXAMPLES

    def add(self, other: StepCounts) -> None:
        """Add the counts of later documents."""
        add_counts(self, other, ("documents_in", "documents_out", "bytes_in", "bytes_out", "changed"))
        self.reasons.update(other.reasons)
        for example in other.examples:
            self.show(example.kind, example.reason, example.text)

    def to_json(self) -> dict[str, Any]:
        """Return plain data, with the most frequent reasons first."""
        reasons = dict(sorted(self.reasons.items(), key=lambda item: (-item[1], item[0])))
        return {**asdict(self), "reasons": reasons}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StepCounts:
        """Restore the counts from the result of `to_json`."""
        examples = [Example(**example) for example in data["examples"]]
        return cls(**{**data, "reasons": Counter(data["reasons"]), "examples": examples})


@dataclass
class CleanCounts:
    """Counts of all steps, in order."""

    steps: list[StepCounts]

    @classmethod
    def of(cls, names: Sequence[str]) -> CleanCounts:
        """Return zero counts for steps with these names."""
        return cls([StepCounts(name) for name in names])

    def add(self, other: CleanCounts) -> None:
        """Add the counts of later documents.

        The sum over parts of the input, in input order, equals the counts of the whole input.

        Raises:
            ValueError: the other counts belong to different steps.
        """
        if [step.name for step in self.steps] != [step.name for step in other.steps]:
            raise ValueError(
                f"counts of other steps: {[s.name for s in other.steps]}, not {[s.name for s in self.steps]}"
            )
        for mine, theirs in zip(self.steps, other.steps, strict=True):
            mine.add(theirs)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for manifests and reports."""
        return {"steps": [step.to_json() for step in self.steps]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CleanCounts:
        """Restore the counts from the result of `to_json`."""
        return cls([StepCounts.from_json(step) for step in data["steps"]])
