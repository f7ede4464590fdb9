"""What answers requests behind the front: Headway's own engine, or a program such as `vllm serve`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

JSON = "application/json"
EVENTS = "text/event-stream"
#: What a client is told whose reply took more than `Call.seconds`.
LATE = "the reply took longer than the server allows"


@dataclass(frozen=True)
class Call:
    """A request that was let in."""

    is_chat: bool
    body: Mapping[str, Any]
    name: str
    """Its identifier, which the reply shows."""
    seconds: float
    """How long it may take."""


@dataclass(frozen=True)
class Answer:
    """What is sent back."""

    status: int
    content_type: str
    chunks: AsyncGenerator[bytes, None]
    """Closing it ends the computation."""


class Backend(Protocol):
    """Answers requests for one version of a model."""

    label: str
    """The version, for people."""

    async def answer(self, call: Call) -> Answer:
        """Answer a request; cancelling ends the computation.

        Raises:
            RefusedRequest: it is not answered.
        """
        ...

    def is_alive(self) -> bool:
        """Return whether it can answer."""
        ...

    def has_chat(self) -> bool:
        """Return whether it answers conversations."""
        ...

    def close(self) -> None:
        """Free what it holds, after the last answer."""
        ...


async def one(content: bytes) -> AsyncGenerator[bytes, None]:
    """Yield a whole body."""
    yield content
