"""What each cleaning step did, in plain data that adds up over any number of workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

#: Examples that are kept of documents dropped, and as many of documents changed.
EXAMPLES = 5
#: Characters of a text that an example shows.
SHOWN = 200


class Drop(NamedTuple):
    """A document is to be left out."""

    reason: str
    """One of a few words for all documents that fail the same rule: "mean word length"."""
    detail: str
    """The same with this document's figure: "mean word length 12.1 > 10"."""
    text: str | None = None
    """What an example shows of the document; its beginning when None."""


@dataclass(frozen=True)
class Example:
    """A document that a step dropped or changed, or in which it found something without doing either."""

    kind: Literal["dropped", "changed", "found"]
    reason: str
    text: str
    """Up to 200 characters: the beginning of a dropped document, or the place of what was changed or found."""


@dataclass
class StepCounts:
    """One step's part; `documents_in - documents_out` were dropped."""

    name: str
    documents_in: int = 0
    documents_out: int = 0
    bytes_in: int = 0
    """UTF-8."""
    bytes_out: int = 0
    changed: int = 0
    """Documents that came out with another text."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why documents were dropped, and what was found in documents: e-mail addresses, lines of some kind, overlaps."""
    examples: list[Example] = field(default_factory=list)
    """The first ones in input order."""

    def drop(self, drop: Drop, text: str) -> None:
        """Count a document that goes no further."""
        self.reasons[drop.reason] += 1
        self.show("dropped", drop.detail, text if drop.text is None else drop.text)

    def show(self, kind: Literal["dropped", "changed", "found"], reason: str, text: str) -> None:
        """Keep an example, if there is room."""
        if self.wants(kind):
            self.examples.append(Example(kind, reason, text[:SHOWN]))

    def wants(self, kind: str) -> bool:
        """Whether there is room for another example of a kind."""
        return sum(example.kind == kind for example in self.examples) < EXAMPLES

    def add(self, other: StepCounts) -> None:
        """Take in the counts of documents that come after those counted here."""
        for name in ("documents_in", "documents_out", "bytes_in", "bytes_out", "changed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.reasons.update(other.reasons)
        for example in other.examples:
            self.show(example.kind, example.reason, example.text)

    def to_json(self) -> dict[str, Any]:
        """Plain data; reasons from the most frequent on."""
        reasons = dict(sorted(self.reasons.items(), key=lambda item: (-item[1], item[0])))
        return {**asdict(self), "reasons": reasons}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StepCounts:
        """What `to_json` gave."""
        examples = [Example(**example) for example in data["examples"]]
        return cls(**{**data, "reasons": Counter(data["reasons"]), "examples": examples})


@dataclass
class CleanCounts:
    """All steps in their order."""

    steps: list[StepCounts]

    @classmethod
    def of(cls, names: Sequence[str]) -> CleanCounts:
        """Nothing counted yet."""
        return cls([StepCounts(name) for name in names])

    def add(self, other: CleanCounts) -> None:
        """Take in the counts of documents that come after those counted here.

        Adding the counts of parts of the input in input order gives the counts of the whole.

        Raises:
            ValueError: the other counts are of other steps.
        """
        if [step.name for step in self.steps] != [step.name for step in other.steps]:
            raise ValueError(
                f"counts of other steps: {[s.name for s in other.steps]}, not {[s.name for s in self.steps]}"
            )
        for mine, theirs in zip(self.steps, other.steps, strict=True):
            mine.add(theirs)

    def to_json(self) -> dict[str, Any]:
        """Plain data for manifests and reports."""
        return {"steps": [step.to_json() for step in self.steps]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CleanCounts:
        """What `to_json` gave."""
        return cls([StepCounts.from_json(step) for step in data["steps"]])
