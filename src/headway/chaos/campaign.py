"""What is killed when: a campaign of kills, planned from a seed before anything runs.

A trial is one run that is killed again and again until it has all its steps. It has legs, which are commands: within a
leg workers and the processes that write checkpoints are killed, in phases of a step and of a save, and the supervisor
starts them again; at the end of a leg the supervisor itself is killed, and the next leg has another number of workers.
Where a run is to change its mind on the way, it has stages, each with legs of its own and with another config or other
data than the one before. With a remote tier uploads are killed too, and before some legs the checkpoints here are lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

#: Phases of a step in which a worker is killed; it tells its supervisor of most (`core.heartbeat`).
STEP_PHASES = ("data", "compute", "backward", "reduce", "update", "record")
#: Phases that only some steps have.
EVALUATION, STAGE = "evaluation", "checkpoint"
#: Right after a worker has copied its state for the process that writes it, which nobody has told of it yet.
STAGED = "checkpoint.stage"
#: Moments of a save, in the process that writes.
SAVE_POINTS = ("shard", "manifest", "rename", "prune", "discard")
#: Moments of an upload, in the same process, and of a download, in the first worker before its first step.
UPLOAD_POINTS, BRING_POINTS = ("file", "manifest"), ("part", "rename")

#: With fewer there is a phase that no step before the last one has.
FEWEST_STEPS = 4
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
    disk_lost: bool = False
    """Before it, the checkpoints here are removed."""
    stage: int = 0
    """Number of its stage."""

    @property
    def kills(self) -> int:
        """How many are planned."""
        return len(self.orders) + (self.supervisor_at is not None)


@dataclass(frozen=True)
class Trial:
    """One run."""

    number: int
    legs: tuple[Leg, ...]
    memory_every: int | None = None
    """Steps between copies into host memory, which outlive a worker; None where there are none."""

    @property
    def kills(self) -> int:
        """How many are planned."""
        return sum(leg.kills for leg in self.legs)


@dataclass(frozen=True)
class Stage:
    """A part of a run in which its config and its data stay what they are."""

    first: int
    last: int
    """Steps when it is over."""
    micro_batches: Mapping[int, int]
    """Of one worker in one step, of all its lanes together, by the number of workers."""
    overrides: tuple[str, ...] = ()
    """What is not as in the config."""


@dataclass(frozen=True)
class Shape:
    """What the planner has to know of the run."""

    stages: Sequence[Stage]
    save_every: int
    evaluate_every: int
    worker_counts: Sequence[int]
    remote: bool = False
    """There is a remote tier."""


def plan_campaign(shape: Shape, seed: int) -> Iterator[Trial]:
    """Trials without end, the same for the same arguments."""
    random = Random(seed)
    for number in itertools.count(1):
        yield _trial(number, shape, random)


def _trial(number: int, shape: Shape, random: Random) -> Trial:
    legs: list[Leg] = []
    for place in range(len(shape.stages)):
        legs += _legs_of_stage(place, shape, random, legs[-1].workers if legs else None)
    # Every other one, for with copies in memory a run seldom goes on from an older checkpoint.
    return Trial(number, tuple(legs), None if number % 2 else max(1, shape.save_every // 2))


def _legs_of_stage(place: int, shape: Shape, random: Random, before: int | None) -> list[Leg]:
    """The commands of one stage; `before` is the number of workers of the one before them."""
    stage = shape.stages[place]
    several = len(shape.stages) > 1
    count, kills = (2, 3) if several else (LEGS, KILLS_PER_LEG)
    # Rising, so that a run that goes back to its newest checkpoint reaches the next kill; some fall on one step, which
    # are several in a row.
    steps = sorted(random.randrange(stage.first + 1, stage.last) for _ in range(count * kills))
    legs: list[Leg] = []
    for leg in range(count):
        mine = steps[leg * kills : (leg + 1) * kills]
        last_workers = legs[-1].workers if legs else before
        others = [n for n in shape.worker_counts if n != last_workers] or list(shape.worker_counts)
        workers = random.choice(others)
        is_last = leg == count - 1
        at_workers = mine if is_last else mine[:-1]
        lost = shape.remote and (leg > 0 or place > 0) and random.random() < 0.5
        orders = [f"kill@bring.{random.choice(BRING_POINTS)}:1#1%0"] if lost else []
        orders += [
            _order(step, start, workers, shape, stage, random) for start, step in enumerate(at_workers, 1 + lost)
        ]
        # The death of a process that writes ends no attempt, so it comes on top.
        point = random.choice(SAVE_POINTS)
        rank = random.randrange(workers) if point == "shard" else 0  # the first one's process does the rest alone
        extra = f"kill@checkpoint.{point}:1#{len(orders) + 1}%{rank}"
        at = None if is_last else mine[-1]
        legs.append(Leg(workers, (*orders, *([extra] if is_last else [])), at, lost, place))
    return legs


def _order(step: int, start: int, workers: int, shape: Shape, stage: Stage, random: Random) -> str:
    """One kill of a worker, at or a little after a number of finished steps."""
    uploads = [f"upload.{point}" for point in UPLOAD_POINTS] if shape.remote else []
    saves = [f"checkpoint.{point}" for point in SAVE_POINTS]
    phase = random.choice((*STEP_PHASES, EVALUATION, STAGE, STAGED, *saves, *uploads))
    rank = random.randrange(workers)
    if phase in (EVALUATION, STAGE):
        every = shape.evaluate_every if phase == EVALUATION else shape.save_every
        due = min(-(-max(step, 1) // every) * every, (stage.last - 1) // every * every)
        if due > stage.first:
            return f"kill@{phase}={due}#{start}%{rank}"
        phase = "update"  # in so short a stage none is due
    if phase == STAGED:
        return f"kill@{phase}:1#{start}%{rank}"
    if phase.startswith(("checkpoint.", "upload.")):
        # The first worker's process publishes and prunes; it takes its worker along.
        return f"kill-group@{phase}:1#{start}%{rank if phase.endswith('shard') else 0}"
    count = 1
    if phase in ("compute", "backward"):  # with any of its micro-batches, or before the first
        count = random.randint(1, stage.micro_batches[workers] + (phase == "compute"))
    return f"kill@{phase}={step}:{count}#{start}%{rank}"
