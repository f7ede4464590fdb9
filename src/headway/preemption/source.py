"""The protocol behind `preemption.watch`."""

from __future__ import annotations

from typing import Protocol

from headway.core.preemption_board import Notice


class Source(Protocol):
    """Somebody who knows when this machine goes. Each is asked on a thread of its own."""

    @property
    def name(self) -> str:
        """Who it is, for people."""
        ...

    @property
    def pause_seconds(self) -> float:
        """Between an answer and the next question."""
        ...

    def check(self) -> Notice | None:
        """What is announced now; None when nothing is, also when something was and has been called off.

        Raises:
            Unavailable: it could not be asked.
        """
        ...

    def acknowledge(self, notice: Notice) -> None:
        """Everything is saved: what was announced may happen.

        Raises:
            Unavailable: it could not be told.
        """
        ...
