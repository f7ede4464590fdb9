"""The journal of a study: Optuna's, in a file that one process writes; and what Optuna samples, prunes and weighs.

Decisions are made on a copy in memory and then appended, each in an order in which a kill between two lines loses
nothing: a resumed study reads the journal, and decides again what is missing, to the same result.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headway.core.errors import CheckpointError, ConfigError, missing_extra, needing
from headway.lab.tune.settings import SamplerSettings, StoppingSettings
from headway.lab.tune.space import Draw, Range, Space

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

FILE_NAME = "journal.log"
State = Literal["running", "complete", "pruned", "failed", "infeasible"]
#: `finish` ends a trial as a complete one that has the value of this step; `prune` ends it as one that was given up.
Verdict = Literal["continue", "prune", "finish"]
#: What decides about a trial at its newest report.
Judge = Callable[["Study", "FrozenTrial"], Verdict]
#: Notes of a trial: why it is infeasible or has failed, and the step and verdict by which it was stopped.
INFEASIBLE = "infeasible"
REASON = "reason"
STOPPED = "stopped"
#: A note of a trial that was asked to save and stop, to go on later: its job may be recorded as cancelled.
PAUSED = "paused"
#: Samplers by name, each with the packages that it needs besides.
_SAMPLERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "random": ("RandomSampler", ()),
    "tpe": ("TPESampler", ()),
    "nsgaii": ("NSGAIISampler", ()),
    "nsgaiii": ("NSGAIIISampler", ()),
    "gp": ("GPSampler", ("scipy", "torch")),
    "qmc": ("QMCSampler", ("scipy",)),
    "bruteforce": ("BruteForceSampler", ()),
}
#: Names of `sampler`: a grid is counted through, and drawn by nothing.
GRID = "grid"
SAMPLERS = (GRID, *_SAMPLERS)
#: Draws until a point keeps the constraints; then the space hardly has one.
_MOST_DRAWS = 200


@dataclass(frozen=True)
class TrialRecord:
    """One trial, as the journal has it."""

    number: int
    """From 0."""
    state: State
    values: Mapping[str, Any]
    """What it gives keys of the config."""
    reports: Mapping[int, float] = field(default_factory=dict)
    """The objective at the steps at which it was judged."""
    objectives: tuple[float, ...] | None = None
    """The values of the objectives; None unless it is complete, or was pruned after a report."""
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more becomes of it."""
        return self.state != "running"


def seed_of(seed: int, number: int, *more: int) -> int:
    """Return the seed of a trial's sampler: 32 bits of SHA-256 over the study's seed and the trial's number."""
    text = " ".join(map(str, (seed, number, *more)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


class Journal:
    """A study's journal.

    Args:
        folder: The study's folder.
        directions: `minimize` or `maximize` for each objective; needed to begin a journal.
        space: The space, whose ranges say what the journal's values stand for.

    Raises:
        ConfigError: Optuna is not installed.
        CheckpointError: the journal cannot be read.
    """

    def __init__(self, folder: Path, directions: Sequence[str], space: Space) -> None:
        optuna = _optuna()
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        path = folder / FILE_NAME
        self._space = space
        self._ranges = {one.key: one for one in space.ranges}
        self._name = folder.resolve().name
        self._directions = list(directions)
        try:
            self._disk = JournalStorage(JournalFileBackend(str(path)))
            names = [one.study_name for one in self._disk.get_all_studies()]
            if self._name not in names:
                # A folder that was renamed keeps the name that it had: brackets of HyperBand depend on it.
                self._name = names[0] if names else self._name
            if not names:
                optuna.create_study(storage=self._disk, study_name=self._name, directions=self._directions)
        except Exception as error:  # whatever Optuna makes of a file that is no journal
            raise CheckpointError(
                f"the journal cannot be read: {type(error).__name__}: {error}",
                where=str(path),
                fix="restore it from a copy",
            ) from None
        self._study_id = self._disk.get_study_id_from_name(self._name)
        self._kept: Study = optuna.load_study(study_name=self._name, storage=self._disk)
        self._read()

    def _read(self) -> None:
        """Copy the journal into memory."""
        from optuna.storages import InMemoryStorage

        self._memory: Any = InMemoryStorage()
        self.study: Study = _optuna().create_study(
            storage=self._memory, study_name=self._name, directions=self._directions
        )
        for trial in self._kept.get_trials(deepcopy=False):
            self.study.add_trial(trial)
        self._memory_id = self._memory.get_study_id_from_name(self._name)

    # Reading ----------------------------------------------------------------------------------------------------------

    @property
    def records(self) -> list[TrialRecord]:
        """All trials by number."""
        return [self._record(trial) for trial in self.study.get_trials(deepcopy=False)]

    def record(self, number: int) -> TrialRecord:
        """Return a trial."""
        return self._record(self._memory.get_trial(self._id(number)))

    def best(self) -> list[TrialRecord]:
        """Return the complete trials from the best on; with several objectives those that no other one dominates."""
        if len(self._directions) > 1:
            return [self._record(trial) for trial in self.study.best_trials]
        sign = -1.0 if self._directions[0] == "maximize" else 1.0
        done = [one for one in self.records if one.state == "complete" and one.objectives is not None]
        return sorted(done, key=lambda one: (sign * (one.objectives or (math.inf,))[0], one.number))

    def winners(self) -> list[TrialRecord]:
        """Return the best trial, or with several objectives those that no other one dominates; none if none is
        complete."""
        found = self.best()
        return found if len(self._directions) > 1 else found[:1]

    def importances(self) -> dict[str, float]:
        """Return how much each key matters for the first objective, by PED-ANOVA (Watanabe et al. 2023), most first;
        empty where too few trials are complete."""
        from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

        target = (lambda trial: trial.values[0]) if len(self._directions) > 1 else None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = get_param_importances(self.study, evaluator=PedAnovaImportanceEvaluator(), target=target)
        except (ValueError, RuntimeError, ZeroDivisionError):
            return {}
        return {key: value for key, value in found.items() if math.isfinite(value)}

    def _record(self, trial: FrozenTrial) -> TrialRecord:
        state: State = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}.get(trial.state.name, "running")  # type: ignore[assignment]
        if INFEASIBLE in trial.user_attrs:
            state = "infeasible"
        values = {key: self._ranges[key].value_of(value) for key, value in trial.params.items()}
        objectives = None if trial.values is None else tuple(trial.values)
        return TrialRecord(trial.number, state, values, trial.intermediate_values, objectives, trial.user_attrs)

    def _id(self, number: int) -> int:
        return int(self._memory.get_trial_id_from_study_id_trial_number(self._memory_id, number))

    def _disk_id(self, number: int) -> int:
        return int(self._disk.get_trial_id_from_study_id_trial_number(self._study_id, number))

    # Writing ----------------------------------------------------------------------------------------------------------

    def draw(self, sampler: SamplerSettings, seed: int, base: Mapping[str, Any], liar: bool = False) -> TrialRecord:
        """Add a trial that a fresh sampler proposes, seeded by the study's seed and the trial's number.

        Args:
            sampler: Which sampler.
            seed: The study's seed.
            base: Values of the config by dotted key, for conditions and constraints.
            liar: Trials run together, and TPE counts those that run as bad ones (constant liar).

        Raises:
            ConfigError: no point that was drawn keeps the constraints.
        """
        for draw in range(_MOST_DRAWS):
            self._read()  # a point that was refused is forgotten, and nothing but the journal counts
            number = len(self.study.get_trials(deepcopy=False))
            self.study.sampler = make_sampler(sampler, seed_of(seed, number, draw), liar)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # experimental classes, ends that no step reaches
                trial = self.study.ask()
                values = self._space.drawn(_suggesting(trial), base)
            if self._space.broken(values, base) is None:
                self._kept.add_trial(self._memory.get_trial(self._id(number)))
                return self.record(number)
        self._read()
        raise ConfigError(
            f"none of {_MOST_DRAWS} points keeps the constraints",
            where="constraints",
            fix="narrow the ranges, or use a grid, which leaves such points out",
        )

    def add(self, kept: Mapping[str, Any], notes: Mapping[str, Any] | None = None) -> TrialRecord:
        """Add a trial with these values, as a journal keeps them."""
        from optuna.trial import TrialState, create_trial

        distributions = {key: _distribution(self._ranges[key]) for key in kept}
        trial = create_trial(
            state=TrialState.RUNNING, params=dict(kept), distributions=distributions, user_attrs=dict(notes or {})
        )
        self._kept.add_trial(trial)
        self.study.add_trial(trial)
        return self.records[-1]

    def report(self, number: int, step: int, value: float, judge: Judge) -> Verdict:
        """Add the objective of a trial at a step, and return what becomes of the trial there.

        A verdict that ends the trial is noted before the value, and the value last: after a kill in between, the step
        is judged again, or `recover` completes it.

        Args:
            number: The trial.
            step: The step.
            value: The objective there.
            judge: Decides about Optuna's trial in its study; it may leave notes of the system in both.
        """
        memory = self._memory
        trial = self._id(number)
        before = dict(memory.get_trial(trial).system_attrs)
        memory.set_trial_intermediate_value(trial, step, value)
        verdict = judge(self.study, memory.get_trial(trial))
        noted = self._noted_since(number, before)
        if verdict != "continue":
            self.note(number, STOPPED, {"step": step, "verdict": verdict, "value": value, "noted": noted})
        self._keep(number, noted)
        self._disk.set_trial_intermediate_value(self._disk_id(number), step, value)
        return verdict

    def recover(self) -> None:
        """Complete the reports by which trials were stopped, if a kill came in between."""
        for record in self.records:
            stopped = record.notes.get(STOPPED)
            if not record.has_ended and stopped is not None and stopped["step"] not in record.reports:
                self._keep(record.number, stopped["noted"])
                self._disk.set_trial_intermediate_value(self._disk_id(record.number), stopped["step"], stopped["value"])
        self._read()

    def note(self, number: int, name: str, value: Any) -> None:
        """Note something about a trial that has not ended, as JSON."""
        self._memory.set_trial_user_attr(self._id(number), name, value)
        self._disk.set_trial_user_attr(self._disk_id(number), name, value)

    def end(self, number: int, state: State, objectives: Sequence[float] | None = None) -> TrialRecord:
        """End a trial; one that is pruned or infeasible has the value of its last report, if there is one."""
        from optuna.trial import TrialState

        states = {"complete": TrialState.COMPLETE, "failed": TrialState.FAIL}
        before = dict(self._memory.get_trial(self._id(number)).system_attrs)
        self.study.tell(number, objectives, states.get(state, TrialState.PRUNED))
        self._keep(number, self._noted_since(number, before))
        ended = self._memory.get_trial(self._id(number))
        self._disk.set_trial_state_values(self._disk_id(number), ended.state, ended.values)
        return self._record(ended)

    def _noted_since(self, number: int, before: Mapping[str, Any]) -> dict[str, Any]:
        """Return what samplers and pruners have noted in memory."""
        now = self._memory.get_trial(self._id(number)).system_attrs
        return {key: value for key, value in now.items() if key not in before or before[key] != value}

    def _keep(self, number: int, noted: Mapping[str, Any]) -> None:
        for key, value in noted.items():
            self._disk.set_trial_system_attr(self._disk_id(number), key, value)


def repair(folder: Path) -> None:
    """Remove what a killed process has left at the journal's end: half a line, and its lock. Only the study's owner
    may."""
    path = folder / FILE_NAME
    Path(f"{path}.lock").unlink(missing_ok=True)
    with suppress(FileNotFoundError), path.open("r+b") as file:
        text = file.read()
        file.truncate(text.rfind(b"\n") + 1)


def make_sampler(settings: SamplerSettings, seed: int, liar: bool = False) -> BaseSampler:
    """Return a fresh sampler.

    Raises:
        ConfigError: there is none of that name, a package is missing, or an option is wrong.
    """
    optuna = _optuna()
    if settings.name not in _SAMPLERS:
        what = f"there is no sampler '{settings.name}'"
        fix = f"one of {', '.join(SAMPLERS)}"
        if settings.name == "cmaes":
            what = "Optuna keeps the state of CMA-ES in its journal as a pickle, and Headway reads none"
        raise ConfigError(what, where="sampler", fix=fix)
    name, packages = _SAMPLERS[settings.name]
    for package in packages:
        if find_spec(package) is None:
            raise missing_extra(package, package, f"The sampler {settings.name}")
    options = {"seed": seed, **settings.options}
    if settings.name == "tpe":
        options.setdefault("constant_liar", liar)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _made(getattr(optuna.samplers, name), options, "sampler.options")


def make_pruner(stopping: StoppingSettings, first: int, steps: int) -> BasePruner:
    """Return a fresh pruner.

    Args:
        stopping: The rule.
        first: Step of the first comparison.
        steps: Steps of a whole trial.

    Raises:
        ConfigError: an option is wrong.
    """
    pruners = _optuna().pruners
    rungs = {"min_resource": first, "reduction_factor": stopping.factor}
    # The step of the last report counts, and `thresholds` says when there is one.
    made = {
        "none": (pruners.NopPruner, {}),
        "median": (pruners.MedianPruner, {"n_startup_trials": 5}),
        "asha": (pruners.SuccessiveHalvingPruner, rungs),
        "hyperband": (pruners.HyperbandPruner, {**rungs, "max_resource": steps}),
    }
    kind, options = made[stopping.name]
    return _made(kind, {**options, **stopping.options}, "stopping.options")


def _made(kind: Callable[..., Any], options: Mapping[str, Any], where: str) -> Any:
    try:
        return kind(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error), where=where, fix="Optuna's documentation lists them") from None


def _suggesting(trial: Trial) -> Draw:
    """Return what draws values with a trial of Optuna."""

    def draw(one: Range) -> Any:
        if one.kind == "choice":
            return trial.suggest_categorical(one.key, one.names)
        if one.is_whole:
            step = int(one.step or 1)
            return trial.suggest_int(one.key, int(one.low), int(one.high), step=step, log=one.kind == "log_int")
        return trial.suggest_float(one.key, one.low, one.high, step=one.step, log=one.kind == "log")

    return draw


def _distribution(one: Range) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if one.kind == "choice":
        return CategoricalDistribution(one.names)
    if one.is_whole:
        return IntDistribution(int(one.low), int(one.high), log=one.kind == "log_int", step=int(one.step or 1))
    return FloatDistribution(one.low, one.high, log=one.kind == "log", step=one.step)


def _optuna() -> Any:
    with needing("optuna", "tune", "A study"):
        import optuna
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
