"""The messages of the process that follows a run into trackers (`tracking.process`) to the supervisor."""

from __future__ import annotations

from dataclasses import dataclass

from headway.core.process.messages import Messages


@dataclass(frozen=True)
class FollowerSaid:
    """A line for people."""

    text: str


@dataclass(frozen=True)
class FollowerDone:
    """The follower has done what it could."""


FollowerMessage = FollowerSaid | FollowerDone
FOLLOWER = Messages[FollowerMessage](FollowerMessage)
