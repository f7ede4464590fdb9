"""Findings of an examination, each with its location and a remedy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "error"]
#: From harmless to harmful.
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "error")


@dataclass(frozen=True)
class Finding:
    """One fact about a machine."""

    level: Level
    """`ok`; `note`: good to know; `warning`: costs speed or safety; `error`: training fails or gives wrong results."""
    what: str
    where: str | None = None
    """File, command or variable that shows it."""
    fix: str | None = None
    """Remedy in words."""
    command: str | None = None
    """Command or setting that applies the remedy."""


@dataclass(frozen=True)
class Examined:
    """A subject and its findings."""

    subject: str
    findings: tuple[Finding, ...]


def worst(examined: Iterable[Examined]) -> Level:
    """Return the highest level of all findings; `ok` if there are none."""
    levels = [finding.level for subject in examined for finding in subject.findings]
    return max(levels, key=LEVELS.index, default="ok")
