"""What is served, by what and how. It loads neither PyTorch nor a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headway.models.versions import is_reference

EngineName = Literal["auto", "headway", "vllm"]


@dataclass(frozen=True)
class Source:
    """Which model is served."""

    model: str
    """A path, or a reference to a registry."""
    step: int | None = None
    registry: str | None = None
    storage: Mapping[str, Any] | None = None
    name: str | None = None
    """The name that clients ask for."""

    @property
    def served_name(self) -> str:
        """The name that clients ask for; that of the model or the folder when not given."""
        if self.name is not None:
            return self.name
        return self.model.partition("@")[0] if is_reference(self.model) else Path(self.model).absolute().name


@dataclass(frozen=True)
class EngineOptions:
    """What computes, and within which limits."""

    engine: EngineName = "auto"
    rows: int = 32
    """The most sequences in a step."""
    exact: bool = True
    max_tokens: int = 4096
    arguments: tuple[str, ...] = ()
    """More arguments of vLLM."""


@dataclass(frozen=True)
class Place:
    """Where the server listens."""

    host: str
    port: int
    tls: tuple[Path, Path] | None = None
    """Certificate and key as PEM files."""


@dataclass(frozen=True)
class Limits:
    """What requests may cost."""

    concurrency: int = 128
    """Requests at once; more are answered with 429."""
    body_bytes: int = 4 * 2**20
    seconds: float = 600.0
    """Time of a reply."""


@dataclass(frozen=True)
class ServerOptions:
    """How it is served."""

    place: Place
    limits: Limits
    drain_seconds: float = 5.0
    follow_seconds: float = 10.0
