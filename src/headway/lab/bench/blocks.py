"""Results inside logs: lines that can be found again whatever a log has put before, between or after them.

    =====HEADWAY-BENCH-RESULT BEGIN 3f2a9c41d07b=====
    HEADWAY-BENCH-RESULT 3f2a9c41d07b 1/2 {"schema_version":1,...|
    HEADWAY-BENCH-RESULT 3f2a9c41d07b 2/2 ...}|
    =====HEADWAY-BENCH-RESULT END 3f2a9c41d07b=====

The JSON is ASCII and cut into lines that are short enough for container runtimes, which split long ones. Every line
names its block, by the first half of the block's SHA-256, and its position in it. So several workers may write into one
log at a time, and incomplete blocks are recognised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from headway.core.files.foreign import parse_json
from headway.core.files.hashes import sha256_bytes

MARKER = "HEADWAY-BENCH-RESULT"
_ID_LENGTH = 32
#: Container runtimes cut lines at 16 KiB, some services at 4 KiB including what they add.
_LINE_CHARACTERS = 3000

_LINE = re.compile(rf"{MARKER} ([0-9a-f]{{{_ID_LENGTH}}}) ([0-9]{{1,9}})/([0-9]{{1,9}}) (.*\|)")
_BEGIN = re.compile(rf"=====+{MARKER} BEGIN ([0-9a-f]{{{_ID_LENGTH}}})")


@dataclass
class Found:
    """The blocks in a log."""

    values: list[dict[str, Any]] = field(default_factory=list)
    """Values in the order of the blocks' last lines, each block once."""
    broken: list[str] = field(default_factory=list)
    """Blocks that are incomplete."""


def block(value: dict[str, Any]) -> str:
    """Return the lines for a JSON value, without a line break at the end."""
    text = json.dumps(value, separators=(",", ":"))
    name = sha256_bytes(text.encode())[:_ID_LENGTH]
    parts = [text[start : start + _LINE_CHARACTERS] for start in range(0, len(text), _LINE_CHARACTERS)]
    lines = [f"{MARKER} {name} {number}/{len(parts)} {part}|" for number, part in enumerate(parts, 1)]
    return "\n".join([f"====={MARKER} BEGIN {name}=====", *lines, f"====={MARKER} END {name}====="])


def find_blocks(lines: Iterable[str]) -> Found:
    """Find the values of all complete blocks among the lines of a log."""
    found = Found()
    parts = dict[str, dict[int, str]]()
    done = set[str]()
    for line in lines:
        text = _unwrapped(line)
        if (begun := _BEGIN.search(text)) is not None:
            parts.setdefault(begun[1], {})
        if (match := _LINE.search(text)) is None or match[1] in done:
            continue
        name = match[1]
        count = int(match[3])
        mine = parts.setdefault(name, {})
        mine[int(match[2])] = match[4]  # up to the last bar, which a log may have added
        if len(mine) == count and (value := _whole(mine, name)) is not None:
            found.values.append(value)
            done.add(name)
    found.broken = [name for name in parts if name not in done]
    return found


def _whole(parts: dict[int, str], name: str) -> dict[str, Any] | None:
    *whole, last = (parts[number] for number in sorted(parts))
    before = "".join(map(_without_rest, whole))
    # Only the hash of the whole shows how long the last part is; mostly it extends to the last bar.
    for cut in (match.start() for match in reversed(list(re.finditer(r"\|", last[: _LINE_CHARACTERS + 1])))):
        text = before + last[:cut]
        if sha256_bytes(text.encode())[:_ID_LENGTH] == name:
            try:
                value = parse_json(text)
            except ValueError:
                return None
            return value if isinstance(value, dict) else None
    return None


def _without_rest(part: str) -> str:
    """Return a part, which is not the last, without what follows it in the line."""
    if part[_LINE_CHARACTERS : _LINE_CHARACTERS + 1] == "|":
        return part[:_LINE_CHARACTERS]
    return part.rpartition("|")[0]


def _unwrapped(line: str) -> str:
    """Return a line as it was printed, if a log keeps lines inside JSON objects (Docker's files, cloud services)."""
    line = line.rstrip("\r\n")
    for brace in re.finditer("{", line[: max(0, line.find(MARKER))]):  # a time or a name may precede the object
        try:
            record, _ = json.JSONDecoder().raw_decode(line, brace.start())
            text = next(_texts(record), None)
        except (ValueError, RecursionError):
            continue
        if text is not None:
            return text
    return line


def _texts(value: Any) -> Iterator[str]:
    """Yield strings that contain the marker, under any key; a record may be nested."""
    if isinstance(value, str):
        if MARKER in value:
            yield _unwrapped(value)
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)
