"""The plan of a campaign: which process is killed at which point, determined by a seed before anything runs.

A trial is one run that is killed again and again until it has all its steps. It consists of legs, which are commands.
Within a leg, workers and checkpoint writers are killed at phases of a step and of a save, and the supervisor restarts
them. At the end of a leg the supervisor itself is killed, and the next leg has another number of workers. If a run
changes on the way it has stages, each with its own legs and with another config or other data than the previous one.
With a remote tier uploads are killed too, and local checkpoints are lost before some legs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

#: Phases of a step in which a worker is killed; most are reported to the supervisor (`core.coordination.heartbeat`).
STEP_PHASES = ("data", "compute", "backward", "reduce", "update", "record")
#: Phases that occur only in some steps.
EVALUATION = "evaluation"
STAGE = "checkpoint"
#: Right after a worker has copied its state for the writer process, and before the writer is notified.
STAGED = "checkpoint.stage"
#: Points of a save, in the writer process.
SAVE_POINTS = ("shard", "manifest", "rename", "prune", "discard")
#: Points of an upload, in the writer process, and of a download, in the first worker before its first step.
UPLOAD_POINTS = ("file", "manifest")
BRING_POINTS = ("part", "rename")

#: With fewer steps some phase occurs only in the last one.
FEWEST_STEPS = 4
KILLS_PER_LEG = 4
LEGS = 3


@dataclass(frozen=True)
class Leg:
    """One command."""

    workers: int
    orders: tuple[str, ...]
    """Faults for `HEADWAY_FAULTS`; the number after `#` counts the starts of the workers."""
    supervisor_at: int | None
    """The step after which the supervisor is killed; None if it runs to the end."""
    disk_lost: bool = False
    """Whether local checkpoints are removed before this command."""
    stage: int = 0
    """Index of its stage."""

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
    """Steps between snapshots in host memory, which outlive a worker; None without snapshots."""

    @property
    def kills(self) -> int:
        """How many are planned."""
        return sum(leg.kills for leg in self.legs)


@dataclass(frozen=True)
class Stage:
    """A part of a run with constant config and data."""

    first: int
    last: int
    """Step at which the stage ends."""
    micro_batches: Mapping[int, int]
    """Micro-batches of one worker in one step, over all its lanes, by the number of workers."""
    overrides: tuple[str, ...] = ()
    """Overrides of the config."""


@dataclass(frozen=True)
class Shape:
    """The properties of the run that the planner needs."""

    stages: Sequence[Stage]
    save_every: int
    evaluate_every: int
    worker_counts: Sequence[int]
    remote: bool = False
    """Whether there is a remote tier."""


def plan_campaign(shape: Shape, seed: int) -> Iterator[Trial]:
    """Yield trials without end, the same ones for the same arguments."""
    random = Random(seed)
    for number in itertools.count(1):
        legs: list[Leg] = []
        for place in range(len(shape.stages)):
            legs += _legs_of_stage(place, shape, random, legs[-1].workers if legs else None)
        # Only in every other trial: with snapshots in memory a run rarely resumes from an older checkpoint.
        memory_every = None if number % 2 else max(1, shape.save_every // 2)
        yield Trial(number, tuple(legs), memory_every)


def _legs_of_stage(place: int, shape: Shape, random: Random, before: int | None) -> list[Leg]:
    """Plan the commands of one stage; `before` is the number of workers of the previous command."""
    stage = shape.stages[place]
    several = len(shape.stages) > 1
    count, kills = (2, 3) if several else (LEGS, KILLS_PER_LEG)
    # Ascending, so that a run that resumes from its newest checkpoint reaches the next kill; equal steps give several
    # kills in a row.
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
            _worker_kill(step, start, random, workers=workers, shape=shape, stage=stage)
            for start, step in enumerate(at_workers, 1 + lost)
        ]
        # The death of a writer process does not end an attempt, so this kill is an extra one.
        point = random.choice(SAVE_POINTS)
        rank = random.randrange(workers) if point == "shard" else 0  # the first worker's writer does the rest alone
        extra = f"kill@checkpoint.{point}:1#{len(orders) + 1}%{rank}"
        at = None if is_last else mine[-1]
        legs.append(Leg(workers, (*orders, *([extra] if is_last else [])), at, lost, place))
    return legs


def _worker_kill(step: int, start: int, random: Random, *, workers: int, shape: Shape, stage: Stage) -> str:
    """Plan one kill of a worker, at or shortly after a number of finished steps."""
    uploads = [f"upload.{point}" for point in UPLOAD_POINTS] if shape.remote else []
    saves = [f"checkpoint.{point}" for point in SAVE_POINTS]
    phase = random.choice((*STEP_PHASES, EVALUATION, STAGE, STAGED, *saves, *uploads))
    rank = random.randrange(workers)
    if phase in (EVALUATION, STAGE):
        every = shape.evaluate_every if phase == EVALUATION else shape.save_every
        due = min(-(-max(step, 1) // every) * every, (stage.last - 1) // every * every)
        if due > stage.first:
            return f"kill@{phase}={due}#{start}%{rank}"
        phase = "update"  # none is due in such a short stage
    if phase == STAGED:
        return f"kill@{phase}:1#{start}%{rank}"
    if phase.startswith(("checkpoint.", "upload.")):
        # The first worker's writer publishes and prunes; kill its worker with it.
        return f"kill-group@{phase}:1#{start}%{rank if phase.endswith('shard') else 0}"
    count = 1
    if phase in ("compute", "backward"):  # at any micro-batch of the step, or before the first
        count = random.randint(1, stage.micro_batches[workers] + (phase == "compute"))
    return f"kill@{phase}={step}:{count}#{start}%{rank}"
