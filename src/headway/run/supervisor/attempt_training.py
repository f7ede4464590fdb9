"""What the first process of an attempt does once PyTorch is loaded: check the run, train or start the workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from headway.config import Config
from headway.core.errors import Preempted
from headway.core.process.signals import defer_signals
from headway.run.directory.run_directory import Attempt
from headway.run.session.attempt import RunOptions, describe, is_finished, preempted_by_notices
from headway.run.session.preflight import RunPlan, examine
from headway.run.session.session import run_in_this_process
from headway.run.session.spending import check_cost
from headway.run.supervisor.agent import run_agent
from headway.run.supervisor.messages import AttemptChannel, Begun, Examined, settled
from headway.run.supervisor.worker import report_to


def run_again(config: Config, options: RunOptions, attempt: Attempt) -> None:
    """Run a further attempt without repeating the checks of the one before: the time to the next step counts."""
    if config.budget.usd is not None:
        check_cost(config, options)
    if config.parallel.all_workers == 1:
        plan = RunPlan.of(config, options)
        run_in_this_process(plan, plan.make_task, own=lambda *_: _reporting(config, attempt), own_process=True)
    else:
        run_agent(config, attempt)


def run_first(channel: AttemptChannel, config: Config, options: RunOptions) -> None:
    """Check the run, and begin and run its attempt."""
    plan = examine(config, options, begins=True)
    if plan.mesh.size == 1:
        run_in_this_process(plan, plan.make_task, own=partial(_only_worker, channel), own_process=True)
    elif not (options.leave_finished and is_finished(plan.config, plan.fingerprints, options)):
        run_agent(plan.config, _begin(channel, plan.config, plan.fingerprints, plan.facts()))


def _begin(
    channel: AttemptChannel, config: Config, fingerprints: Mapping[str, str], facts: Mapping[str, Any]
) -> Attempt:
    """Ask the supervisor to begin the attempt, and return it."""
    channel.send(Examined(settled(config)))
    answer = channel.receive()
    if not isinstance(answer, Begun):
        raise Preempted("the supervisor is gone", where=str(config.run_directory), fix="run the same command again")
    attempt = Attempt.join(config.run_directory, answer.number)
    with defer_signals():  # pydantic would take a signal's error for a value that it cannot serialise
        describe(attempt, config, fingerprints, facts)
    return attempt


@contextmanager
def _only_worker(
    channel: AttemptChannel,
    config: Config,
    fingerprints: Mapping[str, str],
    facts: Mapping[str, Any],
    options: RunOptions,
) -> Iterator[Attempt]:
    with _reporting(config, _begin(channel, config, fingerprints, facts)) as attempt:
        yield attempt


@contextmanager
def _reporting(config: Config, attempt: Attempt) -> Iterator[Attempt]:
    """Surround an attempt's only worker with what it needs: reports of errors, and reading of notices."""
    report_to(attempt.directory, 0)
    with preempted_by_notices(attempt.directory, config.preemption):
        yield attempt
