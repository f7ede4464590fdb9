"""What is killed when: a campaign of kills, planned from a seed before anything runs.

A trial is one run that is killed again and again until it has all its steps. It has legs, which are commands: within a
leg workers and the processes that write checkpoints are killed, in phases of a step and of a save, and the supervisor
starts them again; at the end of a leg the supervisor itself is killed, and the next leg has another number of workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

#: Phases of a step in which a worker is killed; it tells its supervisor of most (`core.heartbeat`).
STEP_PHASES = ("data", "compute", "backward", "reduce", "update", "record")
#: Phases that only some steps have.
EVALUATION, STAGE = "evaluation", "checkpoint"
#: Moments of a save, in the process that writes.
SAVE_POINTS = ("shard", "manifest", "rename", "prune", "discard")

KILLS_PER_LEG = 4
LEGS = 3


@dataclass(frozen=True)
class Leg:
    """One command."""

    workers: int
    orders: tuple[str, ...]
    """For `HEADWAY_FAULTS`; the number after `#` is that of the start of the workers."""
    supervisor_at: int | None
    """The step after which the supervisor is killed; None where it goes on to the end."""

    @property
    def kills(self) -> int:
        """How many are planned."""
        return len(self.orders) + (self.supervisor_at is not None)


@dataclass(frozen=True)
class Trial:
    """One run."""

    number: int
    legs: tuple[Leg, ...]

    @property
    def kills(self) -> int:
        """How many are planned."""
        return sum(leg.kills for leg in self.legs)


@dataclass(frozen=True)
class Shape:
    """What the planner has to know of the run."""

    steps: int
    save_every: int
    evaluate_every: int
    micro_batches: int
    """Of one worker in one step, at least."""
    worker_counts: Sequence[int]


def plan_campaign(shape: Shape, seed: int) -> Iterator[Trial]:
    """Trials without end, the same for the same arguments."""
    random = Random(seed)
    for number in itertools.count(1):
        yield _trial(number, shape, random)


def _trial(number: int, shape: Shape, random: Random) -> Trial:
    # Rising, so that a run that goes back to its newest checkpoint reaches the next kill; some fall on one step, which
    # are several in a row.
    steps = sorted(random.randrange(1, shape.steps) for _ in range(LEGS * KILLS_PER_LEG))
    counts = list(shape.worker_counts)
    legs: list[Leg] = []
    for leg in range(LEGS):
        mine = steps[leg * KILLS_PER_LEG : (leg + 1) * KILLS_PER_LEG]
        others = [count for count in counts if not legs or count != legs[-1].workers] or counts
        workers = random.choice(others)
        is_last = leg == LEGS - 1
        at_workers = mine if is_last else mine[:-1]
        orders = [_order(step, start, workers, shape, random) for start, step in enumerate(at_workers, 1)]
        # The death of a process that writes ends no attempt, so it comes on top.
        point = random.choice(SAVE_POINTS[:3])
        rank = random.randrange(workers) if point == "shard" else 0  # the first one's process does the rest alone
        extra = f"kill@checkpoint.{point}:1#{len(at_workers) + 1}%{rank}"
        legs.append(Leg(workers, (*orders, *([extra] if is_last else [])), None if is_last else mine[-1]))
    return Trial(number, tuple(legs))


def _order(step: int, start: int, workers: int, shape: Shape, random: Random) -> str:
    """One kill of a worker, at or a little after a number of finished steps."""
    phase = random.choice((*STEP_PHASES, EVALUATION, STAGE, *(f"checkpoint.{point}" for point in SAVE_POINTS)))
    rank = random.randrange(workers)
    if phase in (EVALUATION, STAGE):
        every = shape.evaluate_every if phase == EVALUATION else shape.save_every
        step = min(-(-max(step, 1) // every) * every, (shape.steps - 1) // every * every)
        return f"kill@{phase}={step}#{start}%{rank}"
    if phase.startswith("checkpoint."):
        # The first worker's process publishes and prunes; it takes its worker along.
        return f"kill-group@{phase}:1#{start}%{rank if phase.endswith('shard') else 0}"
    count = random.randint(1, shape.micro_batches) if phase in ("compute", "backward") else 1
    return f"kill@{phase}={step}:{count}#{start}%{rank}"
