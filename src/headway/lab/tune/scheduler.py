"""What is tried next, and what becomes of a trial at a step: decisions of a study, each a function of its journal.

`Scheduler` is the seam: what else a study may do, as population based training does, is another class with these verbs.
Nothing but the journal, the study's settings and the values that are passed in may count, or a study that was killed
would decide otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from headway.core.errors import ConfigError
from headway.lab.tune.journal import GRID, STOPPED, Journal, TrialRecord, Verdict, make_pruner, make_sampler, seed_of
from headway.lab.tune.study import Study

if TYPE_CHECKING:
    from optuna.study import Study as OptunaStudy
    from optuna.trial import FrozenTrial

#: A note of a trial: `[number, step]` of the trial whose checkpoint it begins from.
BEGINS = "begins"
#: Trials of a study when nothing else is said.
_TRIALS = 20


class Scheduler(Protocol):
    """The decisions of a study."""

    def propose(self) -> TrialRecord | None:
        """Add the next trial to the journal; None if there is none, or none before another trial has ended."""
        ...

    def thresholds(self, steps: int) -> Sequence[int]:
        """Return the steps, rising, at which a trial of so many steps is judged: by its first value from there on."""
        ...

    def judge(self, number: int, step: int, value: float) -> Verdict:
        """Add the objective of a trial at a step to the journal, and return what becomes of the trial."""
        ...

    def words(self, record: TrialRecord) -> Sequence[str]:
        """Return what the command of a trial has besides the trial's values."""
        ...

    def kept(self) -> set[int]:
        """Return the trials that have ended whose checkpoints stay."""
        ...

    @property
    def total(self) -> int | None:
        """How many trials there will be; None if that is unknown."""
        ...


class OptunaScheduler:
    """A sampler and a pruner of Optuna, both fresh for each decision.

    Raises:
        ConfigError: they cannot be made.
    """

    def __init__(self, study: Study, journal: Journal) -> None:
        self._study = study
        self._journal = journal
        settings = study.settings
        self._grid = None
        if settings.sampler.name == GRID:
            points = list(study.space.grid(study.base_values))
            # In the order of a hash: where values rise, each trial may be the best one so far, and none is stopped.
            places = sorted(range(len(points)), key=lambda place: seed_of(settings.seed, place))
            self._grid = [points[place] for place in places]
            if not self._grid:
                raise ConfigError(
                    "no point of the grid keeps the constraints", where="constraints", fix="remove one of them"
                )
        else:
            make_sampler(settings.sampler, 0)
        make_pruner(settings.stopping, 1, 1)

    @property
    def total(self) -> int:
        """How many trials there will be."""
        wanted = self._study.settings.trials
        if self._grid is None:
            return wanted or _TRIALS
        return min(wanted or len(self._grid), len(self._grid))

    def propose(self) -> TrialRecord | None:
        """Add the next point of the grid, or one that a sampler draws."""
        number = len(self._journal.records)
        if number >= self.total:
            return None
        if self._grid is not None:
            return self._journal.add(self._grid[number])
        settings = self._study.settings
        liar = settings.at_a_time > 1
        return self._journal.draw(settings.sampler, settings.seed, self._study.base_values, liar)

    def thresholds(self, steps: int) -> list[int]:
        """Return the rungs of ASHA and HyperBand, or the steps of the median rule; the last step is no such one."""
        stopping = self._study.settings.stopping
        first = self._first(steps)
        if stopping.name == "none":
            return []
        if stopping.name == "median":
            return list(range(first, steps, stopping.every_steps or first))
        rungs = (first * stopping.factor**rung for rung in itertools.count())
        return list(itertools.takewhile(lambda step: step < steps, rungs))

    def judge(self, number: int, step: int, value: float) -> Verdict:
        """Add the objective, and let the pruner decide."""
        steps = self._study.base.train.steps or step
        pruner = make_pruner(self._study.settings.stopping, self._first(steps), steps)

        def decide(study: OptunaStudy, trial: FrozenTrial) -> Verdict:
            return "prune" if pruner.prune(study, trial) else "continue"

        return self._journal.report(number, step, value, decide)

    def words(self, record: TrialRecord) -> list[str]:
        """Return nothing: the values say all."""
        return []

    def kept(self) -> set[int]:
        """Return the best trials."""
        return {one.number for one in self._journal.best()[: self._study.settings.keep]}

    def _first(self, steps: int) -> int:
        """Return the step of the first comparison, which is the same for all trials."""
        usual = self._study.base.train.steps or steps
        return self._study.settings.stopping.first_steps or max(1, usual // 9)


def verdict_of(record: TrialRecord) -> tuple[Verdict, int] | None:
    """Return by which verdict a trial was stopped, and at which step; None if it was not."""
    stopped = record.notes.get(STOPPED)
    return None if stopped is None else (stopped["verdict"], int(stopped["step"]))
