"""The protocol of notice sources (`preemption.watch`)."""

from __future__ import annotations

from typing import Protocol

from headway.core.coordination.preemption_board import Notice


class Source(Protocol):
    """A source of notices that this machine will go away. Each source is queried on a thread of its own."""

    @property
    def name(self) -> str:
        """Name of the source, for messages."""
        ...

    @property
    def pause_seconds(self) -> float:
        """Pause between an answer and the next query."""
        ...

    def check(self) -> Notice | None:
        """Return the current notice; None if there is none, or it was called off.

        Raises:
            Unavailable: The source gave no answer.
        """
        ...

    def acknowledge(self, notice: Notice) -> None:
        """Report that everything is saved, so that the announced event may begin.

        Raises:
            Unavailable: The source gave no answer.
        """
        ...
