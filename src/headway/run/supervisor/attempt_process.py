"""The first process of an attempt: the only worker, or the agent that starts several.

It checks config, data and machine, asks the supervisor to begin the attempt, and reports why it ended. It is a copy of
the supervisor's process (`fork`), which saves a third of a second. Where that is not safe, it is started as `python -m
headway.run.supervisor.attempt_process CHANNEL`.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from headway.config import Config
from headway.core.console import say
from headway.core.errors import INTERRUPTED, CheckpointError, HeadwayError, Preempted, explain_refusal
from headway.core.process.exit import exit_process
from headway.core.process.signals import defer_signals
from headway.run.directory.run_directory import Attempt
from headway.run.notices import watching_for
from headway.run.session.attempt import RunOptions, describe, is_finished, preemptible, record_preemption
from headway.run.session.completed import settled
from headway.run.session.preflight import RunPlan, examine
from headway.run.session.spending import check_cost
from headway.run.supervisor.agent import run_agent
from headway.run.supervisor.error_report import ErrorReport
from headway.run.supervisor.local_workers import ONE_THREAD
from headway.run.supervisor.messages import AttemptChannel, Begun, Done, Examined, Order
from headway.run.supervisor.worker import begin_process, report_to


def run_attempt(channel: AttemptChannel, config: Config, options: RunOptions, number: int | None = None) -> int:
    """Run an attempt and return the exit code.

    Args:
        number: Number of the attempt, if the supervisor has begun it already: then the config is complete and checked.
    """
    if config.parallel.all_workers > 1:
        for variable, value in ONE_THREAD.items():  # checking the data loads NumPy
            os.environ.setdefault(variable, value)
    try:
        with preemptible():
            if number is None:
                _run_first(channel, config, options)
            else:
                _run_again(config, options, Attempt.join(config.run_directory, number))
    except HeadwayError as error:
        channel.send(ErrorReport.of(error, 0))
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseException as error:
        explained = explain_refusal(error, CheckpointError, str(config.run_directory))
        if explained is not None:
            channel.send(ErrorReport.of(explained, 0))
            return explained.exit_code
        say(traceback.format_exc().rstrip())
        channel.send(ErrorReport.of(error, 0, traceback.format_exc()))
        return 1
    channel.send(Done())
    return 0


def _run_again(config: Config, options: RunOptions, attempt: Attempt) -> None:
    """Run a further attempt without repeating the checks of the one before: the time to the next step counts."""
    if config.budget.usd is not None:
        check_cost(config, options)
    if config.parallel.all_workers == 1:
        from headway.run.session.session import run_in_this_process

        plan = RunPlan.of(config, options)
        run_in_this_process(plan, plan.make_task, own=lambda *_: _reporting(config, attempt), own_process=True)
    else:
        run_agent(config, attempt)


def _run_first(channel: AttemptChannel, config: Config, options: RunOptions) -> None:
    plan = examine(config, options, begins=True)
    if plan.mesh.size == 1:
        from headway.run.session.session import run_in_this_process

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
    with watching_for(attempt.directory, config.preemption), record_preemption():
        yield attempt


def main() -> None:
    """Receive the order from the channel, and run the attempt."""
    begin_process()
    channel = AttemptChannel(socket.socket(fileno=int(sys.argv[1])))
    order = channel.receive()
    if not isinstance(order, Order):
        sys.exit(1)
    sys.argv = list(order.argv)
    exit_process(run_attempt(channel, order.config.config(), order.options, order.number))


if __name__ == "__main__":
    main()
