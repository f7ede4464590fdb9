"""Population based training (Jaderberg et al. 2017, Population Based Training of Neural Networks).

The steps of a run are cut into generations. In each one, every member of the population is a trial: a run that begins
where a trial of the generation before had come to. The worst members exploit, by truncation selection: each takes the
state and the values of one of the best, drawn at random. Then it explores: each value is multiplied by one of two
factors, or drawn anew. The other members continue their own state with the same values.

    generation 0   trial 0 ----> step N     1 ----> N     2 ----> N     3 ----> N (worst)
                       |              \\          |             |
    generation 1   trial 4 ----> 2N    7 -> 2N   5 ----> 2N    6 ----> 2N

What each trial begins from follows from the values of the generation before and the study's seed alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.checkpoint.format.manifest import MANIFEST, step_name
from headway.core.errors import ConfigError
from headway.lab.tune.journal import Journal, TrialRecord, Verdict, seed_of
from headway.lab.tune.scheduler import BEGINS
from headway.lab.tune.settings import StoppingSettings
from headway.lab.tune.space import Range, Space
from headway.lab.tune.study import Study
from headway.lab.tune.trial_run import LOCAL

POPULATION = "pbt"
#: Generations of a run when `every_steps` does not say.
_GENERATIONS = 8
#: Draws until new values keep the constraints; then those of the trial that is exploited stay.
_MOST_DRAWS = 100
#: Keys that a checkpoint fixes, and keys below them that it does not.
_FIXED = ("model", "optimizer.name", "data", "task", "train.steps", "train.tokens", "train.epochs", "train.precision")
_FREE = ("model.dropout", "model.neftune_alpha", "model.router_aux_weight", "model.router_z_loss")


@dataclass(frozen=True)
class Member:
    """What a trial begins with."""

    begins: int
    """Number of the trial whose state it takes."""
    kept: Mapping[str, Any]
    """Its values, as a journal keeps them."""


@dataclass(frozen=True)
class PopulationRule:
    """What members of a population begin their next generation with."""

    space: Space
    base: Mapping[str, Any]
    """Values of the config by dotted key, for conditions and constraints."""
    stopping: StoppingSettings
    """The share of members that exploit, and how they explore."""
    sign: float
    """1 if the objective is to be small, -1 if it is to be large."""

    def next_member(self, before: Sequence[TrialRecord], member: int, seed: int) -> Member | None:
        """Return what a member begins its next generation with.

        Args:
            before: The trials of the generation before, one for each member; all have ended.
            member: The member's place.
            seed: The seed of the trial.

        Returns:
            None if no trial of the generation before has a value.
        """
        ranked = sorted(before, key=lambda record: (self._rank(record), record.number))
        alive = [record for record in ranked if self._rank(record) < math.inf]
        if not alive:
            return None
        count = max(1, round(self.stopping.quantile * len(before)))
        own = before[member]
        best = alive[:count]
        is_worst = own in ranked[-count:] and own not in best
        if own in alive and not is_worst:
            return Member(own.number, self.space.kept(own.values))
        draw = random.Random(seed)
        parent = draw.choice(best)
        return Member(parent.number, self.explored(parent.values, draw))

    def explored(self, values: Mapping[str, Any], draw: random.Random) -> dict[str, Any]:
        """Return values near those of a trial, as a journal keeps them."""
        known = self.space.kept(values)
        for _ in range(_MOST_DRAWS):
            kept: dict[str, Any] = {}

            def near(one: Range, kept: dict[str, Any] = kept) -> Any:
                is_new = one.key not in known or draw.random() < self.stopping.resample
                moved = _drawn(one, draw) if is_new else _moved(one, known[one.key], self.stopping.factors, draw)
                kept[one.key] = moved
                return moved

            if self.space.broken(self.space.drawn(near, self.base), self.base) is None:
                return kept
        return known

    def _rank(self, record: TrialRecord) -> float:
        """Return the objective, smaller for better; infinity if there is none."""
        if record.state != "complete" or not record.objectives:
            return math.inf
        value = self.sign * record.objectives[0]
        return value if math.isfinite(value) else math.inf


def _moved(one: Range, value: Any, factors: Sequence[float], draw: random.Random) -> Any:
    """Return a neighbour of a value: the next choice, or the value times a factor."""
    if one.kind == "choice":
        place = one.names.index(value) + draw.choice((-1, 1))
        return one.names[min(max(place, 0), len(one.names) - 1)]
    factor = draw.choice(factors)
    moved = value * factor
    least = one.step or (1 if one.is_whole else 0)
    if abs(moved - value) < least:
        moved = value + math.copysign(least, factor - 1)
    return _within(one, moved)


def _drawn(one: Range, draw: random.Random) -> Any:
    """Return any value of a range."""
    if one.kind == "choice":
        return draw.choice(one.names)
    if one.kind in ("log", "log_int"):
        return _within(one, math.exp(draw.uniform(math.log(one.low), math.log(one.high))))
    return _within(one, draw.uniform(one.low, one.high))


def _within(one: Range, value: float) -> Any:
    """Return the nearest value of a range."""
    if one.step is not None:
        value = one.low + round((value - one.low) / one.step) * one.step
    value = min(max(value, one.low), one.high)
    return round(value) if one.is_whole else float(value)


class PopulationScheduler:
    """A `Scheduler` of population based training.

    Raises:
        ConfigError: the study asks for what cannot change within a run, or for other machines.
    """

    def __init__(self, study: Study, journal: Journal) -> None:
        self._study = study
        self._journal = journal
        self._stopping = study.settings.stopping
        steps = study.base.train.steps
        if steps is None:
            raise _refused("generations are counted in steps", "train.steps", "train.steps=1000")
        if study.settings.launcher != LOCAL:
            raise _refused("members of a population begin from each other on one machine", "launcher", "--on local")
        for key in study.settings.space:
            is_fixed = any(key == one or key.startswith(f"{one}.") for one in _FIXED)
            if is_fixed and key not in _FREE:
                what = f"a run cannot continue from a checkpoint of another {key}"
                raise _refused(what, f"space: {key}", "leave it out, or another stopping rule")
        self._every = self._stopping.every_steps or max(1, steps // _GENERATIONS)
        self._generations = math.ceil(steps / self._every)
        sign = -1.0 if study.settings.objective[0].direction == "maximize" else 1.0
        self._rule = PopulationRule(study.space, study.base_values, self._stopping, sign)

    @property
    def total(self) -> int:
        """How many trials there will be."""
        whole = self._stopping.population * self._generations
        return min(self._study.settings.trials or whole, whole)

    def propose(self) -> TrialRecord | None:
        """Draw a member of the first generation, or add one of the next when the one before has ended."""
        records = self._journal.records
        size = self._stopping.population
        number = len(records)
        settings = self._study.settings
        if number >= self.total:
            return None
        if number < size:
            return self._journal.draw(settings.sampler, settings.seed, self._study.base_values, settings.at_a_time > 1)
        generation, place = divmod(number, size)
        before = records[(generation - 1) * size : generation * size]
        if not all(record.has_ended for record in before):
            return None
        member = self._rule.next_member(before, place, seed_of(settings.seed, number))
        if member is None:
            return None
        return self._journal.add(member.kept, {BEGINS: [member.begins, generation * self._every]})

    def thresholds(self, steps: int) -> list[int]:
        """Return the ends of all generations but the last."""
        return list(range(self._every, steps, self._every))

    def judge(self, number: int, step: int, value: float) -> Verdict:
        """Add the objective; a trial has finished at the end of its generation, once others can begin from there."""
        end = (number // self._stopping.population + 1) * self._every
        if step < end:
            return "continue"
        if not (self._study.run_of(number) / "checkpoints" / step_name(end) / MANIFEST).is_file():
            return "continue"  # it is judged again, by the same value
        return self._journal.report(number, step, value, lambda study, trial: "finish")

    def words(self, record: TrialRecord) -> list[str]:
        """Return what a trial begins from, and the keys that keep the checkpoint at the end of its generation."""
        every = [f"checkpoint.{key}='{self._every} steps'" for key in ("every", "keep_every")]
        if BEGINS not in record.notes:
            return every
        number, step = record.notes[BEGINS]
        parent = str(self._study.run_of(number).absolute())
        return [*every, "--from", parent, "--step", str(step), "--accept-changes"]

    def kept(self) -> set[int]:
        """Return the best trials, and those that trials may still begin from."""
        records = self._journal.records
        best = {one.number for one in self._journal.best()[: self._study.settings.keep]}
        if len(records) >= self.total and all(record.has_ended for record in records):
            return best
        size = self._stopping.population
        newest = (len(records) - 1) // size
        return best | set(range(max(0, newest - 1) * size, len(records)))


def _refused(what: str, where: str, fix: str) -> ConfigError:
    return ConfigError(f"population based training: {what}", where=where, fix=fix)
