"""A worker and the attempt that it takes part in (`Joined`), and the way into it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property

from headway.checkpoint.store import CheckpointStore
from headway.config import Config, LaneGrid
from headway.core.process.waiting import VISIBILITY_TIMEOUT
from headway.parallel.world import World
from headway.run.directory.ledger import Ledger
from headway.run.directory.run_directory import Attempt, RunDirectory
from headway.run.notices.listening import listening
from headway.run.session.attempt import ATTEMPT_VARIABLE, RunOptions, is_finished, without_done_restart
from headway.training.task import Task


@dataclass(frozen=True)
class Joined:
    """A worker that has joined an attempt, with what it is to train."""

    config: Config
    task: Task
    world: World
    grid: LaneGrid
    attempt: Attempt
    code: Mapping[str, str]
    """By key, the identities of the user's code besides the loss."""
    own_process: bool
    """Whether this process ends with the attempt."""

    @cached_property
    def run(self) -> RunDirectory:
        """The run directory."""
        return RunDirectory(self.config.run_directory)

    @cached_property
    def store(self) -> CheckpointStore:
        """The checkpoints on this machine; only the current attempt may write."""
        return CheckpointStore(self.run.checkpoints, may_write=self.attempt.assert_current)

    @cached_property
    def ledger(self) -> Ledger:
        """The ledger of the run."""
        return Ledger(self.run.ledger_path)

    @property
    def code_with_loss(self) -> dict[str, str]:
        """By key, the identities of all of the user's code."""
        loss = {key: value for key, value in self.task.fingerprints.items() if key == "loss"}
        return {**loss, **self.code}


def nothing_to_do(config: Config, task: Task, world: World, options: RunOptions) -> bool:
    """Return whether the run is finished, equally on every worker; False if another process has begun the attempt."""
    if ATTEMPT_VARIABLE in os.environ or not options.leave_finished:
        return False
    finished = world.is_first and is_finished(config, task.fingerprints, options)
    return bool(world.broadcast_number(int(finished)))


@contextmanager
def join_attempt(
    config: Config, task: Task, world: World, options: RunOptions, own: Callable[..., AbstractContextManager[Attempt]]
) -> Iterator[Attempt]:
    """Join the attempt that this worker takes part in.

    If no other process has begun it, the first worker begins it, and records its outcome.
    """
    given = os.environ.pop(ATTEMPT_VARIABLE, None)  # not for the children of this process
    if given:
        attempt = Attempt.join(config.run_directory, int(given))
        # The agent does not listen: it will be copied, so it can have no threads. On every machine one worker does.
        with listening(attempt.directory, config.preemption) if world.local_rank == 0 else nullcontext():
            yield attempt
        return
    options = without_done_restart(config, options, world.gather)
    if world.is_first:
        with own(config, task.fingerprints, task.facts(), options) as attempt:
            world.gather_json([attempt.number, attempt.owner.token])
            yield attempt
    else:
        number, token = world.gather_json(None)[0]
        attempt = Attempt.join(config.run_directory, number, token, VISIBILITY_TIMEOUT)
        # The attempt's owner listens on its machine, and on every other the first worker there.
        with listening(attempt.directory, config.preemption) if world.local_rank == 0 else nullcontext():
            yield attempt
