"""What keeps a process from writing to a run that another has taken over."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.core.errors import CheckpointError


class Fenced(CheckpointError):
    """The run belongs to another process now, so this one has nothing to save any more."""


@dataclass(frozen=True)
class Fence:
    """A file that names the owner of a run, and the owner on whose behalf this process writes."""

    path: Path
    owner: Mapping[str, Any]
    name: str
    """Of the owner, for people."""

    def assert_held(self) -> None:
        """Make sure that the run still has this owner.

        Raises:
            Fenced: it has another one, or was moved away.
        """
        try:
            found = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            found = None
        if found != dict(self.owner):
            raise Fenced(
                f"{self.name} no longer owns this run; it is now with {describe_owner(found)}",
                where=str(self.path.parent),
                fix="stop this process; the other one goes on with the run",
            )


def describe_owner(record: Any) -> str:
    """The owner in a record, in words."""
    if not isinstance(record, dict):
        return "nobody"
    return f"attempt {record.get('attempt')}, process {record.get('pid')} on {record.get('host')}"
