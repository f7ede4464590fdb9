"""What an examination comes to: findings, each with its place and what to do about it."""

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
    """`ok`; `note`: good to know; `warning`: costs speed or safety; `error`: training here fails or is not what it
    seems."""
    what: str
    where: str | None = None
    """The file, command or variable in which it was seen."""
    fix: str | None = None
    """What to do, in words."""
    command: str | None = None
    """The command or setting that does it."""


@dataclass(frozen=True)
class Examined:
    """A subject and what was found."""

    subject: str
    findings: tuple[Finding, ...]


def worst(examined: Iterable[Examined]) -> Level:
    """The highest level of all findings; `ok` when there is none."""
    levels = [finding.level for subject in examined for finding in subject.findings]
    return max(levels, key=LEVELS.index, default="ok")
