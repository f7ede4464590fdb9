"""The examination of a run before its first step.

`headway train --dry-run`, the first process of an attempt and every worker of torchrun make the same one, and hand its
result on. Workers that an agent starts adopt the config that the agent has examined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from headway.config import Config, LaneGrid, MeshShape, resolve_lanes, resolve_mesh
from headway.core.coordination.launched import world_size_from_environment
from headway.models.facts import count_parameters
from headway.run.directory.fetch_records import fetch_records
from headway.run.directory.ledger import Ledger
from headway.run.directory.run_directory import RunDirectory
from headway.run.session.attempt import RunOptions
from headway.run.session.changes import DatasetData, StoreData, settle_segments
from headway.run.session.checks import check_keys_present
from headway.run.session.completed import completed
from headway.run.session.parts import check_parts
from headway.run.session.spending import check_cost
from headway.training.own_task import (
    Task,
    build_task,
    named_code,
    own_run_task,
    rows_fingerprint,
    task_facts,
    task_fingerprints,
)
from headway.training.task import language_model_fingerprints, language_model_task

if TYPE_CHECKING:
    from headway.data.store import TokenStore
    from headway.training.task import Task as RunTask


@dataclass(frozen=True)
class RunPlan:
    """What a run is about to do, complete and checked."""

    config: Config
    """Resolved, with every size of the model and the segments of the run."""
    options: RunOptions
    mesh: MeshShape
    grid: LaneGrid
    store: TokenStore | None = None
    """The data of a language model in this process; None in a worker that adopts the plan, and for other data."""
    own: Task | None = None
    """The task that `task` names, if this process has made it already."""

    @classmethod
    def of(
        cls, config: Config, options: RunOptions, store: TokenStore | None = None, own: Task | None = None
    ) -> RunPlan:
        """Arrange the workers of a config that is complete: those that a launcher started, or those of
        `parallel.workers` and `parallel.machines`.

        Raises:
            ConfigError: the degrees or the lanes do not fit the workers, or a key for the checkpoints is missing here.
        """
        check_keys_present(config.checkpoint)
        mesh = resolve_mesh(config, world_size_from_environment() or config.parallel.all_workers)
        return cls(config, options, mesh, resolve_lanes(config, mesh.data), store, own)

    @cached_property
    def fingerprints(self) -> Mapping[str, str]:
        """Fingerprints of the data, the tokenizer, pretrained models (whose weights are read for that) and the loss."""
        if self.own is not None:
            return task_fingerprints(self.own)
        assert self.store is not None, "the examination opened it"
        return language_model_fingerprints(self.config, self.store)

    def facts(self) -> dict[str, int]:
        """Return the facts about the model for the run's record."""
        if self.own is not None:
            return task_facts(self.own)
        assert self.store is not None, "the examination opened it"
        return {"parameters": count_parameters(self.config.model).total, "vocab_size": self.store.vocab_size}

    def make_task(self, config: Config, grid: LaneGrid, mesh: MeshShape, rank: int) -> RunTask:
        """Make one worker's part of the run: of a language model, or of the task that the config names.

        Args:
            config: That of the plan, perhaps with the segments of a checkpoint.
        """
        if config.task is None:
            return language_model_task(config, grid, mesh, rank)
        return own_run_task(config, self.own or build_task(config), grid, mesh, rank)


def examine(config: Config, options: RunOptions | None = None, *, begins: bool = False) -> RunPlan:
    """Examine a run: its config, data, earlier steps and this machine.

    Nothing is written, but that a run that begins takes up its records from its remote tier.

    Args:
        config: Resolved.
        options: What to do about the run directory; None if no run is intended there.
        begins: Whether this process is about to begin an attempt, alone.

    Raises:
        HeadwayError: the error that would have stopped the run.
    """
    if config.task is not None:
        return _examine_task(config, options, begins=begins)
    config, store = completed(config, options)
    if options is not None:
        if begins and not options.restart:
            fetch_records(config, store.fingerprint)
        config = settle_segments(config, StoreData(config, store), options, store.tokenizer_fingerprint)
        check_cost(config, options)
    plan = RunPlan.of(config, options or RunOptions(), store)
    makes_its_own = world_size_from_environment() is not None or (begins and plan.mesh.size == 1)
    check_parts(config, makes_callbacks=not makes_its_own)
    return plan


def _examine_task(config: Config, options: RunOptions | None, *, begins: bool) -> RunPlan:
    """Examine the run of a task of the user's own."""
    named_code(config.task)
    own = build_task(config)
    if options is not None:
        rows = len(own.dataset)
        if begins and not options.restart:
            fetch_records(config, rows_fingerprint(rows))
        ledger = Ledger(RunDirectory(config.run_directory).ledger_path)
        config = settle_segments(config, DatasetData(rows, rows_fingerprint(rows), rows_fingerprint, ledger), options)
        check_cost(config, options)
    plan = RunPlan.of(config, options or RunOptions(), own=own)
    makes_its_own = world_size_from_environment() is not None or (begins and plan.mesh.size == 1)
    check_parts(config, makes_callbacks=not makes_its_own)
    return plan
