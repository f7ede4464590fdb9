"""The messages between the machines that measure a suite (`machines`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.core.coordination.launched import MachinePart
from headway.core.process.messages import Messages
from headway.lab.bench.results import CellResult
from headway.run.supervisor.machines.messages import (
    Alive,
    Hello,
    MachineMessage,
    OtherMessage,
    Refused,
    RunEnd,
    Welcome,
)


@dataclass(frozen=True)
class KeepResult(OtherMessage):
    """Keep a result, which replaces an earlier one of its cell: from the lead, and to a new one."""

    result: CellResult


@dataclass(frozen=True)
class Ready(OtherMessage):
    """The machine has sent all results that it has kept, and can measure."""


@dataclass(frozen=True)
class Measure(OtherMessage):
    """Start the workers of a measurement."""

    number: int
    part: MachinePart
    spec: Mapping[str, Any]
    """The cell, and how it is measured (`Spec.dump`)."""
    variables: Mapping[str, str]
    """Variables of the workers on all machines."""


@dataclass(frozen=True)
class EndMeasurement(OtherMessage):
    """End all processes of the measurement."""


@dataclass(frozen=True)
class Measured(OtherMessage):
    """No process of a measurement is left on the machine."""

    number: int
    code: int
    """Exit code, negative for a signal."""
    log: str
    """What its processes have printed last."""


_Common = Alive | Hello | Welcome | Refused | RunEnd
SUITE = Messages[MachineMessage](_Common | KeepResult | Ready | Measure | EndMeasurement | Measured)
