"""Versions that answer: one for each arm, which a newer one can replace while requests run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from headway.core.console import notice, warning
from headway.core.errors import HeadwayError
from headway.serve.backend import Backend


@dataclass(frozen=True)
class Found:
    """The version that a name stands for at present."""

    identity: str
    """Changes when the name stands for another version."""
    label: str
    """The version, for people."""
    load: Callable[[], Backend]
    """Loads it, and returns when it can answer; takes long."""


#: Finds the version of a name; takes as long as a look into the registry.
Find = Callable[[], Found]


@dataclass
class _Version:
    identity: str
    backend: Backend
    uses: int = 0
    is_replaced: bool = False


class Arm:
    """A name whose present version answers requests.

    Args:
        name: The name, as `prod`.
        find: Finds its version.
    """

    def __init__(self, name: str, find: Find) -> None:
        self.name = name
        self._find = find
        self._version: _Version | None = None

    @property
    def backend(self) -> Backend:
        """What answers at present."""
        assert self._version is not None, "it is loaded before the server starts"
        return self._version.backend

    def load(self) -> None:
        """Load the first version.

        Raises:
            HeadwayError: there is none, or it cannot be loaded.
        """
        found = self._find()
        self._version = _Version(found.identity, found.load())

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Backend]:
        """Give the present version, which is not closed meanwhile."""
        version = self._version
        assert version is not None, "it is loaded before the server starts"
        version.uses += 1
        try:
            yield version.backend
        finally:
            version.uses -= 1
            if version.is_replaced and not version.uses:
                await asyncio.to_thread(version.backend.close)

    async def follow(self) -> bool:
        """Load another version beside the present one if the name has changed, and let it answer; return whether.

        Requests that have begun end with the version that they began with, which is closed after the last of them.

        Raises:
            HeadwayError: the new version cannot be loaded; the present one continues.
        """
        old = self._version
        found = await asyncio.to_thread(self._find)
        if old is not None and found.identity == old.identity:
            return False
        notice(f"{self.name}: loading {found.label}")
        backend = await asyncio.to_thread(found.load)
        self._version = _Version(found.identity, backend)
        notice(f"{self.name}: {found.label} answers")
        if old is not None:
            old.is_replaced = True
            if not old.uses:
                await asyncio.to_thread(old.backend.close)
        return True

    def close(self) -> None:
        """Close the present version."""
        if self._version is not None:
            self._version.backend.close()


async def _nothing(arm: Arm) -> None:
    """Do nothing after a change."""


async def follow_all(
    arms: list[Arm],
    seconds: float,
    switched: Callable[[str], None],
    changed: Callable[[Arm], Awaitable[None]] = _nothing,
) -> None:
    """Look every so many seconds whether names stand for other versions, for ever; an error is said, and tried again.

    Args:
        arms: The names.
        seconds: Time between two looks.
        switched: Is called with `done` or `failed`.
        changed: Is called with an alias whose other version has begun to answer.
    """
    while True:
        await asyncio.sleep(seconds)
        for arm in arms:
            await _look(arm, switched, changed)


async def _look(arm: Arm, switched: Callable[[str], None], changed: Callable[[Arm], Awaitable[None]]) -> None:
    """Look once whether a name stands for another version."""
    try:
        if await arm.follow():
            switched("done")
            await changed(arm)
    except (HeadwayError, OSError, RuntimeError, ValueError) as error:
        switched("failed")
        warning(f"{arm.name}: the present version continues to answer: {error}")
