"""A node process does what the lead says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from headway.config import load_config
from headway.supervisor.machines.line import Line
from headway.supervisor.machines.node import _Node
from headway.supervisor.machines.place import Place, Seat


class Heard:
    """Stands for the lead, and for an attempt."""

    number = 3

    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []
        self.has_ended = False

    def send(self, kind: str, *, attempt: int) -> None:
        self.said.append((kind, attempt))

    def look(self, line: object, now: bool = False) -> None:
        pass

    def end(self) -> None:
        self.has_ended = True


def test_a_machine_that_becomes_a_spare_has_no_workers_left(tiny: Callable[..., Path]) -> None:
    """Its connection may have been made again before it noticed that it was lost."""
    node = _Node(load_config(tiny()), Seat(Place(1, "head", 7000, b"x" * 16), "identity"), own_process=False)
    attempt = Heard()
    node._attempt = cast(Any, attempt)
    node._handle({"kind": "spare"}, cast(Line, attempt))
    assert attempt.has_ended and node._attempt is None and attempt.said == [("ended", 3)]
