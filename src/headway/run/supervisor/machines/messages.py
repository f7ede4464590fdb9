"""The messages between the lead (`lead`) and the other machines of a run (`node`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headway.core.coordination.heartbeat import Reading
from headway.core.coordination.launched import MachinePart
from headway.core.coordination.owner import Owner
from headway.core.errors import HeadwayError, exit_code_of
from headway.core.process.messages import Messages
from headway.core.process.table import ProcessState
from headway.run.supervisor.error_report import ErrorReport
from headway.run.supervisor.messages import SentConfig


@dataclass(frozen=True)
class Alive:
    """This side is there, and has nothing else to say."""


@dataclass(frozen=True)
class Hello:
    """What the lead has to know of a machine that wants to join; one of another version may not send all of it."""

    node: int
    """Number of the machine."""
    process: str = ""
    """A random name of its node process."""
    host: str = ""
    workers: int = 0
    version: str = ""
    identity: str = ""
    """Fingerprint of `computes`."""
    computes: Mapping[str, Any] = field(default_factory=dict)
    """What its config says about the mathematics of the run."""
    machine: Mapping[str, str] = field(default_factory=dict)
    """Libraries, processor and GPUs (`describe_machine`)."""


@dataclass(frozen=True)
class Welcome:
    """The machine has joined."""


@dataclass(frozen=True)
class Refused:
    """The machine may not join."""

    what: str
    fix: str
    machine: int | None = None
    """Its number; None if it has none that can be one."""


@dataclass(frozen=True)
class Spare:
    """The run has as many machines as it can use."""


@dataclass(frozen=True)
class LookForFile:
    """Look for a file that the lead has just made, and for the data."""

    path: str
    store: str
    """Path of the token store."""


@dataclass(frozen=True)
class FileSeen:
    """Whether the machine sees the file, and has the data to train on."""

    path: str
    file: bool
    data: bool


@dataclass(frozen=True)
class BeginAttempt:
    """Start the workers of an attempt that has begun."""

    attempt: int
    owner: Owner
    part: MachinePart
    config: SentConfig
    """Complete and checked."""
    restarts: int
    """Earlier attempts of the lead's command."""


@dataclass(frozen=True)
class SignalWorkers:
    """Send a signal to all workers."""

    attempt: int
    number: int


@dataclass(frozen=True)
class WriteStacks:
    """Have workers write their stacks."""

    attempt: int
    ranks: tuple[int, ...]
    wake: bool
    """Whether to continue workers that are stopped."""


@dataclass(frozen=True)
class EndAttempt:
    """End all processes of an attempt."""

    attempt: int


@dataclass(frozen=True)
class WorkerReadings:
    """The last heartbeats and the states of a machine's workers, by rank."""

    attempt: int
    now: float
    """The sender's clock."""
    readings: Mapping[int, Reading]
    states: Mapping[int, ProcessState | None]

    def with_times_of_here(self, offset_seconds: float) -> WorkerReadings:
        """Return the same with times of this machine's clock; 0 stays 0, which is "never".

        Args:
            offset_seconds: What is added to the sender's times.
        """
        moved = {}
        for rank, reading in self.readings.items():
            times = (reading.beat_seconds, reading.phase_seconds, reading.steps_seconds)
            beat, phase, steps = (time and time + offset_seconds for time in times)
            moved[rank] = replace(reading, beat_seconds=beat, phase_seconds=phase, steps_seconds=steps)
        return replace(self, readings=moved)


@dataclass(frozen=True)
class SignalReceived:
    """The machine was asked to stop."""

    number: int


@dataclass(frozen=True)
class WorkersEnded:
    """The workers of the machine have ended by themselves, or could not be started."""

    attempt: int
    code: int
    """Exit code of the attempt process, negative for a signal."""
    is_done: bool = False
    reported: ErrorReport | None = None
    killed: tuple[int, ...] = ()
    """Ranks of the workers that were killed because the lead said so."""


@dataclass(frozen=True)
class AttemptEnded:
    """No process of the attempt is left on the machine."""

    attempt: int


@dataclass(frozen=True)
class RunEnd:
    """How the run has ended, so that all commands end alike."""

    exit_code: int
    what: str = "finished"
    where: str | None = None
    fix: str | None = None

    @classmethod
    def of(cls, error: BaseException | None) -> RunEnd:
        """Return the end by an error of the lead; None for none."""
        if error is None:
            return cls(0)
        if isinstance(error, HeadwayError):
            return cls(exit_code_of(error), error.what, error.where, error.fix)
        return cls(exit_code_of(error), f"the lead ended with {type(error).__name__}")


@dataclass(frozen=True)
class OtherMessage:
    """What machines that do something else than a run say to each other: the base of these messages."""


FromLead = (
    Alive | Welcome | Refused | Spare | LookForFile | BeginAttempt | SignalWorkers | WriteStacks | EndAttempt | RunEnd
)
FromNode = Alive | Hello | FileSeen | WorkerReadings | SignalReceived | WorkersEnded | AttemptEnded
MachineMessage = FromLead | FromNode | OtherMessage

MACHINE = Messages[MachineMessage](FromLead | FromNode)
