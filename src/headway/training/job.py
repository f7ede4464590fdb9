"""One worker's view of an attempt (`Job`), and the hooks for whatever is not fetch, step, checkpoint or stop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Protocol

from headway.checkpoint.save.outcomes import Outcome, Upload
from headway.config import Config
from headway.core.errors import ConfigError
from headway.core.functions import load_function
from headway.training.assembled import Assembled
from headway.training.state_writer import NoWriter

if TYPE_CHECKING:
    from headway.checkpoint.save.writer import CheckpointWriter
    from headway.parallel.world import World
    from headway.training.evaluation.early_stopping import EvaluationHistory
    from headway.training.evaluation.evaluate import Evaluation
    from headway.training.health.decisions import Decision
    from headway.training.state import TrainState
    from headway.training.task import Task


@dataclass(frozen=True)
class Job:
    """One worker's view of one attempt at a run."""

    assembled: Assembled
    """What is trained."""
    writer: CheckpointWriter | NoWriter
    """Where checkpoints go."""
    checkpoint_context: dict[str, Any] = field(default_factory=dict)
    callbacks: Sequence[Callback] = ()
    rewinder: Rewinder | None = None
    """Returns the run to an earlier checkpoint when health decides so."""
    evaluations: EvaluationHistory | None = None
    """The losses on held-out text by which the run may end early; None without `train.early_stopping`."""
    own_process: bool = False
    """Whether this process ends with the attempt."""

    @property
    def config(self) -> Config:
        """The config of the run, resolved."""
        return self.assembled.config

    @property
    def task(self) -> Task:
        """The model, its data and its loss."""
        return self.assembled.task

    @property
    def state(self) -> TrainState:
        """The weights, moments and cursor."""
        return self.assembled.state

    @property
    def world(self) -> World:
        """The workers."""
        return self.assembled.world

    @property
    def total_steps(self) -> int:
        """The number of steps of the run."""
        return self.assembled.total_steps

    def ends_at(self, step: int) -> bool:
        """Return whether the run ends with the state of a step: its last one, or one at which it stops early."""
        early = self.evaluations is not None and self.evaluations.reason_to_stop(step) is not None
        return early or step >= self.total_steps

    def due(self, interval: Any) -> bool:
        """Return whether something that happens every so many steps (or tokens) happens after the current step."""
        return interval != "auto" and self.config.train.batches.is_due(interval, self.state.cursor.step)


class Callback:
    """Subclass and override what you need. Hooks run on every worker, in the order of the list, between steps.

    Steps are counted as finished ones: after the first update `step` is 1.
    """

    def on_start(self, job: Job) -> None:
        """Act before the first step of an attempt; `job.state.cursor.step` is where it starts."""

    def on_step(self, job: Job, step: int, metrics: dict[str, float]) -> None:
        """Act after every step, with the metrics of the run directory's `metrics.jsonl`; more can be added here.

        A step without a target, or one that a rollback left out, has no `train/loss`.
        """

    def on_evaluation(self, job: Job, step: int, result: Evaluation) -> None:
        """Act after an evaluation."""

    def before_save(self, job: Job) -> None:
        """Act before the state is handed over to be saved, or copied into memory."""

    def on_checkpoint(self, job: Job, step: int, stall_seconds: float) -> None:
        """Act after the state has been handed over to be saved; training continues meanwhile."""

    def on_hold(self, job: Job, step: int, stall_seconds: float) -> None:
        """Act after the state has been copied into memory (`checkpoint.memory_every`)."""

    def on_saved(self, job: Job, outcome: Outcome) -> None:
        """Act after a checkpoint has become visible, or could not be made: between steps, some steps after its own.

        The first worker gets the outcome of the checkpoint, the others that of their part.
        """

    def on_uploaded(self, job: Job, upload: Upload) -> None:
        """Act after a checkpoint has arrived at the remote tier, or could not be sent; on the first worker only."""

    def on_decision(self, job: Job, decision: Decision) -> None:
        """Act after an unhealthy step, or one whose update was skipped, before the decision on it is carried out."""

    def on_end(self, job: Job) -> None:
        """Act after the last step of an attempt, also when an error ends it."""


#: Hooks of other trainers that have one here.
_HOOKS_ELSEWHERE = {
    "on_log": "on_step",
    "on_step_end": "on_step",
    "on_train_batch_end": "on_step",
    "on_train_begin": "on_start",
    "on_train_start": "on_start",
    "on_train_end": "on_end",
    "on_evaluate": "on_evaluation",
    "on_validation_end": "on_evaluation",
    "on_save": "on_checkpoint",
    "on_save_checkpoint": "before_save",
}


def unknown_hooks(callback: Callback) -> Iterator[str]:
    """Yield a sentence about each method that looks like a hook and that nothing calls."""
    hooks = [name for name in vars(Callback) if not name.startswith("_")]
    for name in dir(callback):
        if not name.startswith(("on_", "before_", "after_")) or name in hooks or not callable(getattr(callback, name)):
            continue
        meant = _HOOKS_ELSEWHERE.get(name) or next(iter(get_close_matches(name, hooks, 1)), None)
        advice = f"the hooks are {', '.join(hooks)}" if meant is None else f"did you mean {meant}?"
        yield f"nothing calls {type(callback).__name__}.{name}: {advice}"


class Rewinder(Protocol):
    """Returns a run to an earlier checkpoint."""

    def target(self, step: int, skipped_ranges: Sequence[tuple[int, int]]) -> int | None:
        """Return the newest checkpoint of `step` or before, equal on every worker; None if none is left.

        Args:
            skipped_ranges: The steps left out so far; the checkpoint must have the same ones.
        """
        ...

    def rewind(self, job: Job, to_step: int) -> None:
        """Load the checkpoint, cursor included, and delete checkpoints of steps that are now left out."""
        ...


def load_callbacks(names: Sequence[str]) -> list[Callback]:
    """Make the callbacks that a config names (`callbacks`), each without arguments.

    Args:
        names: `package.module:Class` each; a function that returns a callback will do too.

    Raises:
        ConfigError: one cannot be imported or made, or is no `Callback`.
    """
    made = []
    for number, name in enumerate(names):
        where = f"callbacks.{number}"
        _, factory = load_function(name, where, "class")
        try:
            callback = factory()
        except Exception as error:
            raise ConfigError(
                f"the callback {name} cannot be made: {type(error).__name__}: {error}",
                where=where,
                fix="give it a constructor without arguments",
            ) from error
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"{name} makes {type(callback).__name__}, which is no callback",
                where=where,
                fix="derive its class from headway.Callback",
            )
        made.append(callback)
    return made
