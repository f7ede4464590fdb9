"""The plan of a campaign with several machines: what happens to which of them when, determined by a seed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal

from headway.lab.chaos.machines import Cut

FAULTS_PER_TRIAL = 8
#: The part of the steps in which faults are begun: what is lost must come back before the end.
_LAST = 0.75
#: Faults that are undone before a machine counts as lost.
_SHORT = 0.25


@dataclass(frozen=True)
class MachineFault:
    """Something that happens to a machine, or to all of them."""

    step: int
    """It happens once the run has finished this step."""
    kind: Literal["kill", "freeze", "stop"] | Cut
    machines: tuple[int, ...]
    seconds: float = 0.0
    """After which it is undone: a killed command is started again."""

    @property
    def order(self) -> str:
        """Its name in records."""
        return f"{self.kind}@{'machine' if len(self.machines) == 1 else 'machines'}"


@dataclass(frozen=True)
class MachineTrial:
    """One run."""

    number: int
    faults: tuple[MachineFault, ...]


def plan_machine_campaign(
    machines: int, steps: int, lost_seconds: float, *, can_cut: bool, seed: int
) -> Iterator[MachineTrial]:
    """Yield trials without end, the same ones for the same arguments.

    Args:
        machines: Number of machines.
        steps: Steps of the run.
        lost_seconds: How long a machine may be silent.
        can_cut: Whether machines have cables.
        seed: Seed of the plan.
    """
    random = Random(seed)
    cuts: tuple[Cut, ...] = ("cut", "cut-out", "cut-in") if can_cut else ()
    each = [(kind, (number,)) for number in range(machines) for kind in ("kill", "freeze", "stop", *cuts)]
    everything = [*each, ("kill", tuple(range(machines)))]
    deck: list[tuple[str, tuple[int, ...]]] = []
    for number in itertools.count(1):
        faults = []
        for step in sorted(random.randrange(1, max(2, int(steps * _LAST))) for _ in range(FAULTS_PER_TRIAL)):
            if not deck:  # so that all kinds come equally often
                deck = random.sample(everything, len(everything))
            kind, struck = deck.pop()
            seconds = {"kill": random.uniform(0.0, lost_seconds), "stop": 0.0}.get(kind)
            if seconds is None and random.random() < _SHORT:
                seconds = lost_seconds * random.uniform(0.1, 0.6)
            elif seconds is None:
                seconds = lost_seconds + random.uniform(1.0, 4.0)
            faults.append(MachineFault(step, kind, struck, seconds))  # type: ignore[arg-type]
        yield MachineTrial(number, tuple(faults))
