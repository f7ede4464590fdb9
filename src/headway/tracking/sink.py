"""The contract between the follower of a run and a tracker: what a sink gets, and what it must do with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from headway.config.sections.track import ModelUpload
from headway.core.errors import HeadwayError

#: How a run stands: `killed` was stopped or killed and may continue, `failed` ended with an error.
Status = Literal["running", "finished", "failed", "killed"]


@dataclass(frozen=True)
class Point:
    """One value of one metric at one step."""

    name: str
    step: int
    value: float
    time: float
    """When it was recorded, Unix seconds."""


@dataclass(frozen=True)
class Batch:
    """Points in the order of their records; no point of a generation is in two batches."""

    points: Sequence[Point]
    highest: Mapping[str, int]
    """The highest step of each metric in earlier batches of the generation."""
    uncertain: bool = False
    """Whether an earlier try to send this very batch may have succeeded in part."""


@dataclass(frozen=True)
class Dataset:
    """One source of a run's data."""

    name: str
    digest: str
    """Fingerprint of the prepared data."""
    source: str
    """Its path or URL."""


@dataclass(frozen=True)
class Description:
    """What a tracker gets about a run in addition to its metrics. Credentials are redacted."""

    name: str
    parameters: Mapping[str, str]
    """Values of the config that differ from its defaults, by dotted key; those of a source by its name."""
    tags: Mapping[str, str]
    """Facts that may change: attempts, rollbacks, segments, the commit, the environment."""
    datasets: Sequence[Dataset] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts of the config, the report and the samples, by file name."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """The other values of the config: a value that was sent may become the default again."""


@dataclass(frozen=True)
class TrackedRun:
    """The run that a sink follows."""

    id: str
    """Unique, and kept for life."""
    name: str
    path: Path
    generation: int = 0
    """Rises when steps that were sent are trained again on purpose, with other values: after `headway checkpoints
    restore`, or a change (`--accept-changes`) that begins before them."""
    first_step: int = 0
    """The step after which this generation begins."""
    started: float | None = None
    """When the run, or the attempt that begins this generation, started, Unix seconds; None if unknown."""

    @property
    def title(self) -> str:
        """The name, with where its generation begins if it is not the first."""
        return f"{self.name} from step {self.first_step}" if self.generation else self.name

    @property
    def suffix(self) -> str:
        """The end of an identifier by which a later generation differs from the first; empty for that."""
        return f"-{self.generation}" if self.generation else ""


class Unreachable(Exception):
    """The tracker does not answer, or asks to wait; the same call may succeed later."""


class Refused(HeadwayError):
    """The tracker refuses, and would again."""


class Sink(Protocol):
    """Sends one run to one tracker.

        open ──> describe ──> send ──> send ──> ... ──> set_status ──> close
                    '── again whenever the description changes

    Every method may raise `Unreachable`; the follower closes the sink then, and opens it again later. What `open`,
    `describe` and `send` return is kept with the place up to which points were sent, in one atomic write, and `open`
    gets it back.
    """

    def open(self, run: TrackedRun, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Find the run at the tracker, or make it, and return the state to keep (JSON).

        Args:
            run: The run.
            state: What was kept last; empty at first, and in a new generation.
        """
        ...

    def describe(self, description: Description) -> Mapping[str, Any]:
        """Send the description, and return the state to keep; the same one may come again."""
        ...

    def send(self, batch: Batch) -> Mapping[str, Any] | None:
        """Send points, and return the state to keep; None if they are not certain to have arrived before `flush`."""
        ...

    def flush(self) -> Mapping[str, Any]:
        """Make certain that everything has arrived, and return the state to keep."""
        ...

    def set_status(self, status: Status, ended: float | None) -> None:
        """Send how the run stands; `ended` is its end or last sign of life, Unix seconds, None while it runs."""
        ...

    def close(self) -> None:
        """Release connections and files; called after an error, too."""
        ...


@dataclass(frozen=True)
class RunModel:
    """The model of a run that has finished."""

    step: int
    card: str
    """Its model card, in Markdown."""
    folder: Path | None
    """Its export, with the card; None if only the card is wanted."""


@runtime_checkable
class ModelSink(Protocol):
    """A sink that may also take the model of a run."""

    upload: ModelUpload
    """What it takes of it."""

    def send_model(self, model: RunModel) -> Mapping[str, Any]:
        """Log a model, unless the tracker has it for this step, and return the state to keep."""
        ...


class LostRun(Exception):
    """The tracker does not know the run any more: everything is sent again."""


@dataclass(frozen=True)
class SinkSpec:
    """Describes a sink without its library. Its functions get a section of the config, and where that stands."""

    place: Callable[[Any, str], str]
    """Returns where it sends, for people and for the cursor; raises `ConfigError` if that is not known."""
    make: Callable[[Any, Path, str], Sink]
    """Makes the sink of a run directory, the second argument."""
    check: Callable[[Any, str], None] = lambda settings, where: None
    """Raises `ConfigError` for what is wrong before the first step, where that is cheap to find."""
    library: tuple[str, str, str] | None = None
    """The module, the package and the extra that it needs."""
