"""Messages arrive as they were sent, and nothing else is taken for one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headway.core.coordination.heartbeat import Exchange, Phase, Reading
from headway.core.process.messages import Messages


@dataclass(frozen=True)
class Part:
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WriteJob:
    path: Path
    parts: tuple[Part, ...] = ()
    context: Mapping[str, Any] = field(default_factory=dict)
    readings: Mapping[int, Reading] = field(default_factory=dict)
    seconds: float | None = None


@dataclass(frozen=True)
class End:
    pass


PAIR = Messages[WriteJob | End](WriteJob | End)
READING = Reading(1, Phase.UPDATE, 2, 0.1, 0.2, 3, "sum", 0.3, 0.4, 0, 0.5, Exchange(3, "sum"))


@pytest.mark.parametrize(
    "message",
    [
        End(),
        WriteJob(Path("/runs/caf\udce9"), (Part((2, 3)), Part(())), {"loss": math.inf, "left": [[1, 2]], "none": None}),
        WriteJob(Path("a"), readings={7: READING}, seconds=0.1),
    ],
)
def test_a_message_arrives_as_it_was_sent(message: WriteJob | End) -> None:
    line = PAIR.encode(message)
    assert "\n" not in line and PAIR.decode(line.encode()) == message


def test_a_message_keeps_a_number_that_is_none() -> None:
    found = PAIR.decode(PAIR.encode(WriteJob(Path("a"), context={"loss": math.nan})))
    assert isinstance(found, WriteJob) and math.isnan(found.context["loss"])


def test_a_field_of_another_version_is_ignored() -> None:
    assert PAIR.decode('{"kind": "end", "new": 1}') == End()


@pytest.mark.parametrize(
    "line",
    ["welcome", "7", "{}", "", '{"kind": 7}', '{"kind": "other"}', '{"kind": ["end"]}', '{"kind": "write_job"}',
     '{"kind": "write_job", "path": 3}', '{"kind": "end", "kind": "end"}', "[" * 10_000,
     '{"kind": "write_job", "path": "a", "parts": [{"shape": "ab"}]}'],
)  # fmt: skip
def test_another_line_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        PAIR.decode(line)
