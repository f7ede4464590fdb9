"""The messages between the supervisor (`attempt_client`) and the first process of an attempt (`attempt_process`)."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from headway.config import Config, ModelConfig
from headway.config.sections.segments import Segment
from headway.core.process.messages import Messages
from headway.run.session.attempt import RunOptions
from headway.run.supervisor.error_report import ErrorReport


@dataclass(frozen=True)
class SentConfig:
    """A resolved config on its way to another process."""

    values: Mapping[str, Any]
    asked: Mapping[str, Any] | None
    """What was given in tokens (`TrainConfig.asked`)."""

    @classmethod
    def of(cls, config: Config) -> SentConfig:
        """Return the form of a config that can be sent."""
        return cls(config.model_dump(mode="json"), config.train.asked())

    def config(self) -> Config:
        """Return the config."""
        config = Config.model_validate(self.values)
        return config.model_copy(update={"train": config.train.asking(self.asked)})


@dataclass(frozen=True)
class Order:
    """What a process that is no copy of the supervisor has to know."""

    config: SentConfig
    options: RunOptions
    number: int | None
    """Number of the attempt, if it has begun."""
    argv: tuple[str, ...]


@dataclass(frozen=True)
class Examined:
    """Config, data and machine are as they should be: the attempt may begin."""

    settled: Mapping[str, Any]
    """What the examination has filled in (`settled`)."""


@dataclass(frozen=True)
class Begun:
    """The attempt owns the run directory."""

    number: int


@dataclass(frozen=True)
class Done:
    """The workers have done all steps."""


def settled(config: Config) -> dict[str, Any]:
    """Return as JSON what examining a run has filled in, for another process that has the config as it was given."""
    return {
        "model": config.model.model_dump(mode="json"),
        "distill": None if config.distill is None else config.distill.model_dump(mode="json"),
        "segments": [segment.model_dump(mode="json") for segment in config.segments],
    }


def with_settled(config: Config, values: Mapping[str, Any]) -> Config:
    """Return the config with what `settled` returned for it in another process."""
    sections: dict[str, Any] = {"model": ModelConfig.model_validate(values["model"])}
    if config.distill is not None:
        sections["distill"] = type(config.distill).model_validate(values["distill"])
    segments = [Segment.model_validate(segment) for segment in values["segments"]]
    return config.model_copy(update=sections).with_segments(segments)


AttemptMessage = Order | Examined | Begun | Done | ErrorReport
ATTEMPT = Messages[AttemptMessage](AttemptMessage)


class AttemptChannel:
    """One end of the connection between the supervisor and an attempt process."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._buffer = b""

    def send(self, message: AttemptMessage) -> None:
        """Send a message. The other side may be gone."""
        with suppress(OSError):
            self.end.sendall(ATTEMPT.encode(message).encode() + b"\n")

    def receive(self) -> AttemptMessage | None:
        """Wait for the next message and return it; None when the other side is gone."""
        while not self.pending:
            try:
                more = self.end.recv(65536)
            except ConnectionResetError:  # it ended with messages unread
                return None
            if not more:
                return None
            self._buffer += more
        line, self._buffer = self._buffer.split(b"\n", 1)
        return ATTEMPT.decode(line)

    @property
    def pending(self) -> bool:
        """Whether a complete message is in the buffer."""
        return b"\n" in self._buffer
