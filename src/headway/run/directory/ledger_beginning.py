"""The line of a ledger that tells of a beginning from another run's checkpoint.

The lines before it are the other run's, and tell of the rows up to that checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

#: The kind of the line.
BEGINNING = "beginning"


@dataclass(frozen=True)
class AttemptSteps:
    """The steps of an attempt of another run."""

    number: int
    first_step: int | None
    last_step: int | None
    """Exclusive."""

    def has_done(self, step: int) -> bool:
        """Return whether the attempt is known to have done a step."""
        return self.first_step is not None and self.first_step < step <= (self.last_step or 0)


@dataclass(frozen=True)
class Beginning:
    """The beginning of a run from a checkpoint of another run (`run.directory.beginning`)."""

    step: int
    """The step of the checkpoint."""
    run: dict[str, Any]
    """Id, name and seed of the other run."""
    place: str
    """Its directory at that time."""
    manifest_sha256: str
    """Hash of the checkpoint's manifest, the file."""
    state_sha256: str
    attempts: tuple[AttemptSteps, ...]
    """The other run's attempts; empty if its ledger did not reach the checkpoint, so that no line of it was copied."""
    lines_sha256: str
    """Fingerprint of all lines before this one."""

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return asdict(self)


def parse_beginning(record: Mapping[str, Any]) -> Beginning:
    """Parse the beginning in a line of the ledger.

    Raises:
        KeyError: A value is missing.
        TypeError: A value is of another kind.
        ValueError: A value is of another kind.
    """
    values = {name: record[name] for name in Beginning.__dataclass_fields__}
    attempts = tuple(AttemptSteps(**one) for one in values.pop("attempts"))
    begun = Beginning(**values, attempts=attempts)
    texts = (begun.place, begun.manifest_sha256, begun.state_sha256, begun.lines_sha256)
    steps = [step for one in attempts for step in (one.first_step, one.last_step) if step is not None]
    if any(type(step) is not int or step < 0 for step in (begun.step, *steps, *(one.number for one in attempts))):
        raise ValueError("no steps")
    if not (all(isinstance(text, str) for text in texts) and isinstance(begun.run, dict)):
        raise ValueError("not a beginning's values")
    return begun
